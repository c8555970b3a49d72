"""The demo model itself: bit equality of int8 rows, exact speculation, memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from ssd_integrations import ChatSSD
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.protocol import (
    FinishedEvent,
    Message,
    build_request,
    build_sampling,
    build_speculation,
)
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.runner import RowBlock

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not cpu_is_exact(), reason="this processor has no exact int8 products"),
]

FACTS = (
    "Facts for March, EUR: revenue 482,310 (February 455,120, +6.0 %); North 201,450 (+11.8 %); "
    "South 154,900 (-3.4 %); West 125,960 (+9.9 %); orders 3,214 (+4.4 %); returns 142 (-15.5 %)."
)
PROMPTS = [
    f"Write the section 'Revenue by region' of a sales report from these facts only. {FACTS}",
    "Antworte einem Kunden in drei Sätzen: Der Router blinkt rot, er soll ihn neu starten.",
]


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(model="demo")
    yield made
    made.close()


@pytest.fixture(scope="module")
def target(backend: LocalBackend) -> LoadedModel:
    engine = backend._service()._engine
    assert engine is not None
    return engine._target


def generate(backend: LocalBackend, prompt: str, mode: str, **sampling: object) -> FinishedEvent:
    request = build_request(
        model="demo",
        messages=[Message(role="user", content=prompt)],
        sampling=build_sampling(**{"max_tokens": 64, **sampling}),
        # Adaptive lengths follow measured times, and what is accepted follows them.
        speculation=build_speculation(mode=mode, adaptive=False),
    )
    *_, last = backend.generate(request)
    assert isinstance(last, FinishedEvent)
    return last


def test_it_is_served_in_int8_with_its_end_tokens(target: LoadedModel) -> None:
    assert target.dtype == "int8"
    assert target.eos_token_ids == {151645, 151643}


def test_rows_are_bit_identical_alone_and_in_any_batch(
    backend: LocalBackend, target: LoadedModel
) -> None:
    """Rows of three sequences in random chunks against each sequence token by token."""
    rng = random.Random(0)
    runner = target.runner
    texts = [
        target.tokenizer(p)["input_ids"][:n]
        for p, n in zip(PROMPTS * 2, (30, 20, 24), strict=False)
    ]
    alone = []
    for ids in texts:
        cache = runner.new_cache()
        alone.append(torch.cat([runner.forward([RowBlock(cache, [i], 1)]) for i in ids]))
    caches, at = [runner.new_cache() for _ in texts], [0] * len(texts)
    seen: list[list[torch.Tensor]] = [[] for _ in texts]
    while live := [i for i, ids in enumerate(texts) if at[i] < len(ids)]:
        pieces = [texts[i][at[i] : at[i] + rng.choice((1, 2, 3, 5, 8))] for i in live]
        blocks = [RowBlock(caches[i], p, len(p)) for i, p in zip(live, pieces, strict=True)]
        for i, rows in zip(
            live, runner.forward(blocks).split([len(p) for p in pieces]), strict=True
        ):
            seen[i].append(rows)
            at[i] += len(rows)
    for expected, pieces_seen in zip(alone, seen, strict=True):
        assert torch.equal(torch.cat(pieces_seen), expected)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["report", "support"])
def test_speculation_never_changes_the_text(
    backend: LocalBackend, prompt: str, sampling: dict[str, object]
) -> None:
    plain = generate(backend, prompt, "off", **sampling)
    speculative = generate(backend, prompt, "ngram", **sampling)
    assert speculative.text == plain.text
    assert speculative.usage.completion_tokens == plain.usage.completion_tokens
    assert plain.speculation.num_draft_tokens == 0


def test_a_report_section_is_accepted_in_runs(backend: LocalBackend) -> None:
    assert generate(backend, PROMPTS[0], "ngram").speculation.mean_acceptance_length > 1.3


def test_a_chain_answers_and_stops_by_itself(backend: LocalBackend) -> None:
    answer = ChatSSD(model="demo", max_tokens=60).invoke(
        "What is 2 + 2? Answer with the number only."
    )
    assert "4" in str(answer.content)
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "<|im_end|>" not in str(answer.content)


def test_memory_of_a_fresh_process() -> None:
    """At most 2.3 GB of private memory once the weights are cached."""
    code = (
        "import psutil\n"
        "from ssd_integrations.backends.local import LocalBackend\n"
        "from ssd_integrations.protocol import build_request, build_sampling\n"
        "b = LocalBackend(model='demo')\n"
        "r = build_request(model='demo', prompt='Hello', sampling=build_sampling(max_tokens=8))\n"
        "list(b.generate(r))\n"
        "print(psutil.Process().memory_full_info().uss)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=os.environ
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.split()[-1]) <= 2.3e9
