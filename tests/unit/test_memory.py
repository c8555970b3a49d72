"""Memory for keys and values: what never fits is refused, what fits later waits, nobody dies."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_integrations import ChatSSD
from ssd_integrations.cli.worker_options import WorkerOptions
from ssd_integrations.errors import ContextLengthError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine import free_memory
from ssd_workers.engine import memory as memory_module
from ssd_workers.engine.config import EngineConfig, build_engine_config
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.engine import Engine
from ssd_workers.engine.free_memory import container_memory, default_budget
from ssd_workers.engine.kv_cache import BLOCK
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.service import EngineService
from tests.engine_support import (
    Job,
    assert_same_tokens,
    load_tiny,
    make_engine,
    make_sequence,
    run_batch,
)
from tests.fixed_support import static
from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.unit.service_support import finish, request

MIB = 2**20
# Layers, keys and values, heads, their size, bytes of float32.
TOKEN = 2 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(make_tiny_model(tmp_path_factory.mktemp("memory")))


def job(seed: int, prompt: int, new: int, *, sure: bool = True) -> Job:
    rng = random.Random(seed)
    tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
    return Job(tokens, new, SamplingParams(max_tokens=new if sure else None))


def blocks(count: int) -> int:
    return count * BLOCK * TOKEN


class Watch:
    """An engine whose most sequences at once, bytes held and sequences put back are noted."""

    def __init__(self, engine: Engine, memory: CacheMemory) -> None:
        self.most_running = self.most_bytes = self.put_back = 0
        scheduler: Any = engine._scheduler
        step, put_back = engine.step, scheduler.put_back

        def watched_step() -> None:
            step()
            held = sum(s.cache.nbytes for s in scheduler.running if s.cache is not None)
            prefixes = 0 if memory.prefixes is None else memory.prefixes.nbytes
            self.most_running = max(self.most_running, len(scheduler.running))
            self.most_bytes = max(self.most_bytes, held + prefixes)

        def watched_put_back(sequence: object) -> None:
            self.put_back += 1
            put_back(sequence)

        engine.step = watched_step  # type: ignore[method-assign]
        scheduler.put_back = watched_put_back


def test_the_bytes_of_a_token_are_known_after_loading(target: LoadedModel) -> None:
    assert target.runner.bytes_per_token == TOKEN
    assert target.runner.cache_bytes([1, 64, 65]) == blocks(4)
    assert target.runner.cache_bytes([]) == 0


def test_what_does_not_fit_beside_the_others_waits_and_then_runs(target: LoadedModel) -> None:
    jobs = [job(i, 70, 40) for i in range(4)]  # two blocks each
    plain = [run_batch(target, [one])[0] for one in jobs]
    memory = CacheMemory(target.runner, budget=blocks(5))
    engine = make_engine(target, memory)
    watch = Watch(engine, memory)
    got = run_batch(target, jobs, engine=engine)
    for one, expected, event in zip(jobs, plain, got, strict=True):
        assert_same_tokens(target, one, expected, event)
    assert watch.most_running == 2
    assert watch.put_back == 0
    assert watch.most_bytes <= blocks(5)


def test_prefixes_give_way_to_requests(target: LoadedModel) -> None:
    memory = CacheMemory(target.runner, budget=blocks(6), prefixes=blocks(6))
    engine = make_engine(target, memory)
    watch = Watch(engine, memory)
    for seed in range(3):
        run_batch(target, [job(seed, 100, 30)], engine=engine)
    assert memory.prefixes is not None
    # Two blocks were left of each, beside the three that the last one might have needed.
    assert len(memory.prefixes) >= 3
    large = job(7, 300, 50)
    (expected,) = run_batch(target, [large])
    (got,) = run_batch(target, [large], engine=engine)
    assert_same_tokens(target, large, expected, got)
    assert len(memory.prefixes) == 0
    assert watch.most_bytes <= blocks(6)


@pytest.mark.parametrize("drafter", ["off", "ngram", "suffix", "model"])
def test_a_sequence_without_a_limit_is_put_back_and_goes_on(
    target: LoadedModel, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "OPEN_ENDED", BLOCK)
    jobs = [job(seed, 10, 300, sure=False) for seed in range(3)]
    plain = [run_batch(target, [one])[0] for one in jobs]
    makers: dict[str, Any] = {
        "off": lambda: None,
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "model": lambda: ModelDrafter(target.runner, target.context_length, VOCAB_SIZE),
    }
    helper: Drafter | None = makers[drafter]()
    draft = target.runner if drafter == "model" else None
    budget = blocks(9) if draft is None else int(2.5 * blocks(9))
    memory = CacheMemory(target.runner, draft, budget=budget, prefixes=budget)
    engine = make_engine(target, memory)
    watch = Watch(engine, memory)
    got = run_batch(target, jobs, helper, engine=engine)
    for one, expected, event in zip(jobs, plain, got, strict=True):
        assert_same_tokens(target, one, expected, event)
        assert event.usage.completion_tokens == expected.usage.completion_tokens
    assert watch.put_back > 0
    assert watch.most_running > 1
    assert watch.most_bytes <= budget


def test_one_that_leaves_makes_room(target: LoadedModel) -> None:
    memory = CacheMemory(target.runner, budget=blocks(2))
    engine = make_engine(target, memory)
    events: list[Any] = []
    first = make_sequence(target, job(1, 70, 40), events.append, "first")
    second = make_sequence(target, job(2, 70, 40), events.append, "second")
    engine.add(first)
    engine.add(second)
    for _ in range(3):
        engine.step()
    assert first.cache is not None
    assert second.cache is None
    first.cancelled = True
    engine.step()
    assert first.cache is None
    assert second.cache is not None
    while engine.has_work:
        engine.step()
    assert [e.request_id for e in events if e.type == "finished"] == ["first", "second"]


def test_a_request_that_can_never_fit_is_refused(roomy_model: Path) -> None:
    config = EngineConfig(model=str(roomy_model), kv_cache_mib=1, prefix_cache_mib=0)
    with EngineService(config) as small:
        longest = MIB // TOKEN
        prompt = small.count_tokens(request(small))
        with pytest.raises(ContextLengthError) as caught:
            small.submit(request(small, max_tokens=3000), lambda event: None)
        message = str(caught.value)
        for figure in (f"{prompt} tokens", "max_tokens=3000", str(TOKEN), "1 MiB", str(longest)):
            assert figure in message
        assert "kv_cache_mib" in message
        word = "router " * 100
        long = word * (3000 // small.count_tokens(request(small, prompt=word)))
        with pytest.raises(ContextLengthError, match=r"has \d{4} tokens, whose"):
            small.submit(request(small, prompt=long, max_tokens=None), print)
        assert finish(small, request(small, max_tokens=5)).usage.completion_tokens == 5
        assert small._builder is not None
        unlimited = small._builder.build(request(small, max_tokens=None), lambda event: None)
        assert unlimited.max_length == longest


def test_the_draft_models_caches_count(target: LoadedModel) -> None:
    alone = CacheMemory(target.runner, budget=blocks(10))
    paired = CacheMemory(target.runner, target.runner, budget=blocks(10))
    assert alone.longest == 10 * BLOCK
    assert paired.longest == 4 * BLOCK  # its own, and once and a half the same


def test_slots_are_counted_as_long_as_the_longest(target: LoadedModel) -> None:
    runner = static(target).runner
    one = runner.cache_bytes([1])
    assert one == runner.cache_bytes([256, 7, 7]) == 8 * 256 * TOKEN
    assert runner.cache_bytes([257]) == runner.cache_bytes([512] * 8) == 2 * one
    assert runner.cache_bytes([1] * 9) == 2 * one
    assert CacheMemory(runner, budget=3 * one).longest == 512
    # Whatever fits alone fits beside any others.
    fixed = static(target)
    engine = make_engine(fixed, CacheMemory(fixed.runner, budget=one), max_num_seqs=2)
    run_batch(fixed, [job(i, 30, 30) for i in range(3)], engine=engine)


def test_options_reach_the_engine() -> None:
    options = {"kv_cache_mib": 5, "prefix_cache_mib": 0}
    settings = WorkerOptions(**options).settings()  # type: ignore[arg-type]
    assert (settings.engine.kv_cache_mib, settings.engine.prefix_cache_mib) == (5, 0)
    assert set(options.items()) <= set(ChatSSD(**options)._backend_options())


def test_options_are_bounded() -> None:
    assert build_engine_config(model="m", prefix_cache_mib=0).prefix_cache_mib == 0
    for wrong in ({"prefix_cache_mib": -1}, {"kv_cache_mib": 0}, {"kv_cache_mib": "much"}):
        name = next(iter(wrong))
        with pytest.raises(ValueError, match=name):
            build_engine_config(model="m", **wrong)


def test_the_default_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = [torch.device("cpu")]
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    for available, total, expected in ((8.0, 16.0, 6.4), (6.0, 8.0, 5.0), (1.0, 8.0, 0.5)):
        machine = SimpleNamespace(available=int(available * 2**30), total=int(total * 2**30))
        monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda m=machine: m)
        assert default_budget(cpu) == pytest.approx(expected * 2**30, rel=1e-6)
    assert container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    assert container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    assert container_memory(tmp_path) == 2 * 2**30
    machine = SimpleNamespace(available=8 * 2**30, total=8 * 2**30)
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: machine)
    assert default_budget(cpu) == 2**30
