"""How much later a worker's first token arrives than the in-process engine's.

Starts an embedded Valkey and a worker with the same model as an engine in this process, sends
the same prompt to both in turn, and compares the time to the first piece of text::

    python benchmarks/worker_latency.py --model demo
    python benchmarks/worker_latency.py --model ./my-model --dtype float32 --rounds 50
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from ssd_integrations.backends import Backend, open_backend
from ssd_integrations.protocol import DeltaEvent, build_request, build_sampling

_PROMPT = "Explain in two sentences how to restart a router."


def main() -> None:
    """Measure, and print one JSON line."""
    arguments = _arguments()
    with _worker(arguments) as broker_url:
        local = open_backend(model=arguments.model, dtype=arguments.dtype, max_num_seqs=4)
        remote = open_backend(model=arguments.model, broker_url=broker_url)
        for backend in (local, remote):
            for _ in range(3):
                first_text_s(backend, arguments)
        pairs = [
            (first_text_s(local, arguments), first_text_s(remote, arguments))
            for _ in range(arguments.rounds)
        ]
        local.close()
        remote.close()
    print(json.dumps(summary(arguments.model, pairs)))


def first_text_s(backend: Backend, arguments: argparse.Namespace) -> float:
    """Seconds from the call to the first text of one request, read to its end."""
    request = build_request(
        model=arguments.model,
        prompt=_PROMPT,
        sampling=build_sampling(max_tokens=arguments.max_tokens),
    )
    started = time.perf_counter()
    first: float | None = None
    for event in backend.generate(request):
        if first is None and isinstance(event, DeltaEvent) and event.text:
            first = time.perf_counter() - started
    if first is None:
        raise SystemExit("The model wrote no text: choose a larger --max-tokens.")
    return first


def summary(model: str, pairs: list[tuple[float, float]]) -> dict[str, object]:
    """Medians in milliseconds, and the 95th percentile of the pairwise difference."""
    differences = sorted(remote - local for local, remote in pairs)
    return {
        "model": model,
        "rounds": len(pairs),
        "local_ms": round(statistics.median(local for local, _ in pairs) * 1000, 2),
        "worker_ms": round(statistics.median(remote for _, remote in pairs) * 1000, 2),
        "difference_ms": round(statistics.median(differences) * 1000, 2),
        "difference_p95_ms": round(differences[int(len(differences) * 0.95)] * 1000, 2),
    }


@contextlib.contextmanager
def _worker(arguments: argparse.Namespace) -> Iterator[str]:
    command = [sys.executable, "-m", "ssd_integrations.cli", "up", "--json"]
    command += ["--model", arguments.model, "--max-num-seqs", "4", "--port", "0"]
    if arguments.dtype is not None:
        command += ["--dtype", arguments.dtype]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--data-dir", folder]
        with _running(command) as broker_url:
            yield broker_url


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("`ssd up` did not start; its message is above.")
        yield json.loads(line)["broker_url"]
    finally:
        process.terminate()
        process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
