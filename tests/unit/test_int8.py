"""int8 on a CPU: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.int8 import (
    Int8Linear,
    PackedWeight,
    cpu_is_exact,
    quantize_rows,
    quantize_weight,
)
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import Job, NoisyOracle, output_ids, run_batch
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.skipif(
    not cpu_is_exact(), reason="this processor has no exact int8 products (VNNI or AMX)"
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        path = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
        return load_model(resolve_model(str(path)), "int8", "cpu", no_progress)


def test_product_equals_integer_arithmetic() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 160)
    quantised, scale = quantize_weight(weight)
    rows, row_scale = quantize_rows(torch.randn(9, 160) * 3)
    got = PackedWeight(quantised, scale).product(rows)
    exact = ((rows.long() - 128) @ quantised.long().T).double() * scale.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)
    assert row_scale.shape == (9,)


def test_linear_is_close_to_float_and_handles_zero_rows() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(64, 256), torch.randn(64)
    layer = Int8Linear(PackedWeight(*quantize_weight(weight)), bias)
    x = torch.randn(1, 7, 256)
    x[0, 3] = 0
    expected = torch.nn.functional.linear(x, weight, bias)
    error = (layer(x) - expected).norm() / expected.norm()
    assert error < 0.02
    assert torch.equal(layer(x)[0, 3], bias)


def test_rows_are_bit_identical_alone_and_in_any_batch(target: LoadedModel) -> None:
    rng = random.Random(0)
    runner = target.runner
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (5, 70, 150)]
    alone = []
    for prompt in prompts:
        cache = runner.new_cache()
        alone.append(torch.cat([runner.forward([RowBlock(cache, [t], 1)]) for t in prompt]))
    caches = [runner.new_cache() for _ in prompts]
    together: list[list[torch.Tensor]] = [[] for _ in prompts]
    at = [0] * len(prompts)
    while any(a < len(p) for a, p in zip(at, prompts, strict=True)):
        sizes = [min(rng.randint(0, 9), len(p) - a) for a, p in zip(at, prompts, strict=True)]
        live = [i for i, size in enumerate(sizes) if size > 0]
        if not live:
            continue
        blocks = [RowBlock(caches[i], prompts[i][at[i] : at[i] + sizes[i]], sizes[i]) for i in live]
        logits = runner.forward(blocks)
        for i, piece in zip(live, logits.split([sizes[i] for i in live]), strict=True):
            together[i].append(piece)
            at[i] += sizes[i]
    for expected, pieces in zip(alone, together, strict=True):
        assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_equals_autoregressive_without_exception(
    target: LoadedModel, temperature: float
) -> None:
    from ssd_integrations.protocol import SamplingParams

    rng = random.Random(1)
    sampling = SamplingParams(temperature=temperature)
    phrases = [[rng.randrange(3, VOCAB_SIZE) for _ in range(8)] for _ in range(6)]
    jobs = [Job(p * rng.randint(1, 9), 40, sampling, seed=i) for i, p in enumerate(phrases)]
    plain = [output_ids(run_batch(target, [job])[0]) for job in jobs]
    answers = {f"r{i}": [*j.prompt, *plain[i]] for i, j in enumerate(jobs)}
    oracle = NoisyOracle(answers, error_rate=0.2, vocab_size=VOCAB_SIZE)
    assert [output_ids(e) for e in run_batch(target, jobs, oracle)] == plain
    assert [output_ids(e) for e in run_batch(target, jobs, NgramDrafter())] == plain


def test_the_weights_are_made_once_and_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    source = resolve_model(str(make_tiny_model(tmp_path / "model")))
    stages: list[str] = []

    def progress(stage: str, done: float, total: float, unit: str) -> None:
        stages.append(stage)

    load_model(source, "int8", "cpu", progress)
    assert "quantise to int8" in stages
    stages.clear()
    load_model(source, "int8", "cpu", progress)
    assert "quantise to int8" not in stages
    assert "pack int8 weights" in stages


def test_interrupted_quantisation_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    source = resolve_model(str(make_tiny_model(tmp_path / "model")))
    stale = tmp_path / "cache" / "models" / f".tmp-int8-{source.fingerprint}-dead"
    stale.mkdir(parents=True)
    (stale / "int8.safetensors").write_bytes(b"half")
    half = tmp_path / "cache" / "int8" / source.fingerprint
    half.mkdir(parents=True)
    (half / "int8.safetensors").write_bytes(b"half")
    assert load_model(source, "int8", "cpu", no_progress).dtype == "int8"
    assert not stale.exists()


def test_weights_of_earlier_contents_and_of_lost_models_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))

    def quantise(name: str, seed: int) -> None:
        path = make_tiny_model(tmp_path / name, seed=seed)
        load_model(resolve_model(str(path)), "int8", "cpu", no_progress)

    def made_from() -> list[str]:
        records = (tmp_path / "cache" / "int8").glob("*/complete.json")
        return sorted(Path(json.loads(file.read_text())["path"]).name for file in records)

    quantise("kept", 0)
    quantise("lost", 0)
    quantise("changed", 0)
    shutil.rmtree(tmp_path / "lost")
    quantise("changed", 1)
    assert made_from() == ["changed", "kept"]


def test_a_processor_without_vnni_is_found_out() -> None:
    """The self-test sees saturation where the instruction set is held down."""
    code = "from ssd_workers.engine.int8 import cpu_is_exact; print(cpu_is_exact())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert result.stdout.strip() == "False"
