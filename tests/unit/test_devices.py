"""Devices and kernels: what can be known without a GPU, and what is refused before loading."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import (
    InvalidRequestError,
    MissingExtraError,
    UnsupportedModelError,
)
from ssd_integrations.protocol import FinishedEvent, build_request, build_sampling
from ssd_workers.engine.attention import ATTENTION_NAME, Grouping
from ssd_workers.engine.config import AttnImplementation, EngineConfig, build_engine_config
from ssd_workers.engine.loading import LoadedModel, load_engine_models, load_model
from ssd_workers.engine.prompt_pace import PromptPace
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.engine.step_cost import StepCost
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import (
    Job,
    NoisyOracle,
    assert_same_tokens,
    load_tiny,
    output_ids,
    run_batch,
)
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model, make_tokenizer, tiny_config

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(path, request.param, num_hidden_layers=3)


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return load_model(resolve_model(str(folder)), "float32", "cpu", no_progress, **options)


def ragged_logits(
    model: LoadedModel, attention: AttnImplementation, grouping: Grouping
) -> torch.Tensor:
    """Logits of three forwards: ragged prompts, a draft behind them, single rows."""
    runner = ModelRunner(model.runner.model, torch.device("cpu"), attention)
    runner.grouping = grouping
    generator = torch.Generator().manual_seed(3)
    # Across a block of 64 keys, beyond the window of 16, and a prompt of one token.
    caches = [runner.new_cache() for _ in range(3)]
    found = []
    for sizes in ([150, 60, 1], [9, 9, 3], [1, 1, 1], [1, 40, 70]):
        blocks = [
            RowBlock(cache, torch.randint(0, 390, (size,), generator=generator).tolist(), size)
            for cache, size in zip(caches, sizes, strict=True)
        ]
        found.append(runner.forward(blocks))
    return torch.cat(found)


@pytest.mark.parametrize(("attention", "grouping"), [("packed", "span"), ("sdpa", "span")])
def test_kernels_agree_with_the_row_exact_one(
    folder: Path, attention: AttnImplementation, grouping: Grouping
) -> None:
    model = load_tiny(folder)
    expected = ragged_logits(model, "packed", "row")
    got = ragged_logits(model, attention, grouping)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_sdpa_speculation_writes_what_plain_decoding_writes(folder: Path, batch: int) -> None:
    model = loaded(folder, attention="sdpa")
    jobs = [Job([7 + i] * (1 + 61 * i), 24) for i in range(batch)]
    plain = [run_batch(model, [job])[0] for job in jobs]
    answers = {f"r{i}": [*jobs[i].prompt, *output_ids(plain[i])] for i in range(batch)}
    oracle = NoisyOracle(answers, 0.3, model.vocab_size)
    for job, expected, got in zip(jobs, plain, run_batch(model, jobs, oracle), strict=True):
        assert_same_tokens(model, job, expected, got)


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_forward_stays_on_its_device_and_waits_for_nothing(
    arch: str, attention: AttnImplementation
) -> None:
    """On the meta device a tensor left on the CPU, or read by the CPU, is an error."""
    # With a padding token GPT-2's own code looks for it in the input, a wait of its own.
    config = tiny_config(arch, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    device = torch.device("meta")
    runner = ModelRunner(model.to(device).eval(), device, attention)
    caches = [runner.new_cache(), runner.new_cache()]
    for sizes in ([100, 20], [9, 1], [1, 9]):
        blocks = [RowBlock(c, [1] * n, n) for c, n in zip(caches, sizes, strict=True)]
        logits = runner.forward(blocks)
        assert logits.shape == (sum(sizes), VOCAB_SIZE)
        assert logits.device == device


def test_a_step_is_timed_after_the_device_is_done(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the clock would see how long launching takes, and drafts would be budgeted by that."""
    model = load_tiny(tiny_model)
    calls: list[str] = []

    def observing(kind: Any) -> None:
        observe = kind.observe

        def observed(self: Any, *args: Any) -> None:
            calls.append("observe")
            observe(self, *args)

        monkeypatch.setattr(kind, "observe", observed)

    monkeypatch.setattr(model.runner, "synchronize", lambda: calls.append("synchronize"))
    observing(StepCost)
    observing(PromptPace)
    run_batch(model, [Job([5, 6, 7], 4)])
    assert calls == ["synchronize", "observe"] * (len(calls) // 2)
    assert calls


def test_meta_device_catches_a_wait() -> None:
    """The check above would notice."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device="meta").item()
    with pytest.raises(RuntimeError):
        torch.zeros(3, device="meta") + torch.zeros(3)


def test_sdpa_refuses_capped_scores(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded(tmp_path)
    with pytest.raises(UnsupportedModelError, match="softcap=50") as caught:
        loaded(tmp_path, attention="sdpa")
    assert "attn_implementation='packed'" in caught.value.remedy


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_attention_sinks_are_refused_rather_than_left_out(tmp_path: Path, attention: str) -> None:
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="s_aux"):
        loaded(tmp_path, attention=attention)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, '{"": "cpu"}'])
def test_device_map_decodes(tiny_model: Path, device_map: object) -> None:
    def text(**options: Any) -> str:
        backend = LocalBackend(model=str(tiny_model), dtype="float32", **options)
        sampling = build_sampling(max_tokens=24)
        request = build_request(model=str(tiny_model), prompt="The router", sampling=sampling)
        try:
            *_, last = backend.generate(request)
        finally:
            backend.close()
        assert isinstance(last, FinishedEvent)
        return last.text

    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("float32 differs between a GPU and a CPU")
    assert text(device_map=device_map) == text()


def test_spread_weights_keep_the_cache(tiny_model: Path) -> None:
    """The hooks that move inputs between devices pass the cache on as it is."""
    from accelerate import cpu_offload

    model = load_tiny(tiny_model)
    expected = ragged_logits(model, "packed", "block")
    cpu_offload(model.runner.model, execution_device=torch.device("cpu"))
    assert torch.equal(ragged_logits(model, "packed", "block"), expected)


def test_a_draft_model_follows_a_spread_target(tiny_model: Path) -> None:
    config = build_engine_config(
        model=str(tiny_model), draft_model=str(tiny_model), device_map={"": "cpu"}
    )
    target, draft = load_engine_models(config, no_progress)
    assert draft is not None
    assert (target.device, draft.device) == (torch.device("cpu"), torch.device("cpu"))


def test_options_are_one_key_however_they_are_written() -> None:
    written = [
        build_engine_config(model="m", device_map={"b": 0, "a": "cpu"}, quantization=BNB),
        build_engine_config(
            model="m",
            device_map='{"a": "cpu", "b": 0}',
            quantization='{"load_in_4bit": true, "quant_method": "bitsandbytes"}',
        ),
    ]
    assert len(set(written)) == 1
    assert EngineConfig.model_validate_json(written[0].model_dump_json()) == written[0]
    assert written[0].device_map_for_loading() == {"a": "cpu", "b": 0}
    assert written[0].quantization_for_loading() == BNB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_implementation": "flash_attention_9"}, "flash_attention_9"),
        ({"device_map": "everywhere"}, "everywhere"),
        ({"device_map": {}}, "at least one entry"),
        ({"device_map": {"model": "disk"}}, "disk"),
        ({"device_map": {"model": [0]}}, r"\[0\]"),
        ({"device_map": "auto", "device": "cuda:0"}, "give one of them"),
        ({"quantization": "bitsandbytes"}, "must be a JSON object"),
        ({"quantization": [1]}, "must be a JSON object"),
        ({"quantization": BNB, "dtype": "int8"}, "int8"),
        ({"device_map": "auto", "dtype": "int8"}, "int8"),
    ],
)
def test_options_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LocalBackend(model="m", **options)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "magic"}, "magic"),
        ({"bits": 4}, "quant_method"),
        ({**BNB, "bnb_4bit_quant_typ": "nf4"}, "bnb_4bit_quant_typ"),
        ({**BNB, "bnb_4bit_compute_dtype": "float7"}, "float7"),
    ],
)
def test_quantization_that_means_nothing(
    tiny_model: Path, quantization: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        loaded(tiny_model, quantization=quantization)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_quantization_without_its_package(tiny_model: Path) -> None:
    with pytest.raises(MissingExtraError, match="bitsandbytes"):
        loaded(tiny_model, quantization=BNB)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_quantized_weights_decode(tiny_model: Path) -> None:
    model = loaded(tiny_model, quantization=BNB)
    kinds = {type(module).__name__ for module in model.runner.model.modules()}
    assert "Linear4bit" in kinds
    assert len(output_ids(run_batch(model, [Job([5, 6, 7], 8)])[0])) >= 1


@pytest.mark.parametrize("place", ["cuda:93", 93, "nonsense"])
def test_a_device_that_is_not_there(tiny_model: Path, place: int | str) -> None:
    with pytest.raises(InvalidRequestError, match=r"93|nonsense"):
        loaded(tiny_model, device_map={"": place})
