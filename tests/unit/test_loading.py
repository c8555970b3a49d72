"""What is refused at load, before anything is decoded, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, T5Config, T5ForConditionalGeneration

from ssd_integrations.errors import (
    DraftModelMismatchError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedModelError,
)
from ssd_workers.engine import int8, loading
from ssd_workers.engine.config import EngineConfig, build_engine_config
from ssd_workers.engine.loading import load_engine_models, load_model
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import Job, assert_same_tokens, run_batch
from tests.tiny import VOCAB_SIZE, make_tiny_model, make_tokenizer


def load(path: Path, dtype: str = "float32", device: str = "cpu") -> loading.LoadedModel:
    return load_model(resolve_model(str(path)), dtype, device, no_progress)  # type: ignore[arg-type]


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load(tmp_path)


def test_recurrent_state_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"[Mm]amba"):
        load(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load(tmp_path)


def test_draft_of_another_tokenizer(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    draft = make_tiny_model(tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[300], list(vocab)[301]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DraftModelMismatchError, match="2 of them differ"):
        load_engine_models(EngineConfig(model=str(target), draft_model=str(draft)), no_progress)


@pytest.mark.parametrize(("target_size", "draft_size"), [(400, 448), (448, 400)])
def test_vocabularies_padded_to_different_sizes(
    tmp_path: Path, target_size: int, draft_size: int
) -> None:
    from ssd_workers.engine.drafters.model import ModelDrafter

    target_path = make_tiny_model(tmp_path / "target", vocab_size=target_size)
    draft_path = make_tiny_model(tmp_path / "draft", seed=0, vocab_size=draft_size)
    target, draft = load_engine_models(
        EngineConfig(model=str(target_path), draft_model=str(draft_path)), no_progress
    )
    assert draft is not None
    job = Job([5, 6, 7, 8], 30)
    drafter = ModelDrafter(draft.runner, draft.context_length, target.vocab_size)
    expected, got = run_batch(target, [job])[0], run_batch(target, [job], drafter)[0]
    assert_same_tokens(target, job, expected, got)
    assert got.speculation.num_draft_tokens > 0


def test_unknown_device_and_options() -> None:
    with pytest.raises(InvalidRequestError, match="'nonsense'"):
        loading._choose_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequestError, match="'cuda'"):
            loading._choose_device("cuda")
    with pytest.raises(InvalidRequestError, match="max_num_seqs=0"):
        build_engine_config(model="demo", max_num_seqs=0)
    with pytest.raises(InvalidRequestError, match="colour"):
        build_engine_config(model="demo", colour="red")


def test_without_exact_int8_float32_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model(tmp_path)
    monkeypatch.setattr(int8, "cpu_is_exact", lambda: False)
    assert load(tmp_path, dtype="int8").dtype == "float32"
    assert "float32 instead" in caplog.text


def test_end_tokens_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    file = tmp_path / "generation_config.json"
    generation = json.loads(file.read_text())
    generation["eos_token_id"] = [0, 7]
    file.write_text(json.dumps(generation))
    assert load(tmp_path).eos_token_ids == {0, 7, 2}
