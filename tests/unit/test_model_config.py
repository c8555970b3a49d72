"""What is read off a configuration before any weights are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import MambaConfig

from ssd_workers.engine.loading import load_model
from ssd_workers.engine.model_config import context_length
from ssd_workers.engine.rollback import refusal_of_config, refusal_of_layers
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.architectures import CONTEXT, LONGROPE, config_of, make_model


def test_longrope_ends_where_its_factors_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(
        resolve_model(str(make_model(tmp_path, "phi3"))), "float32", "cpu", no_progress
    )
    assert model.context_length == LONGROPE["original_max_position_embeddings"] == CONTEXT // 2
    assert f"limited to {CONTEXT // 2} of {CONTEXT} tokens" in caplog.text


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_neox"])
def test_other_contexts_are_whole(arch: str) -> None:
    assert context_length(config_of(arch)) == CONTEXT


@pytest.mark.parametrize("kind", ["conv", "chunked_attention", "indexed_attention", "moe"])
def test_kinds_of_layers_are_refused_with_a_reason(kind: str) -> None:
    config = config_of("gemma3_text")
    config.layer_types = ["full_attention", kind]
    reason = refusal_of_config(config)
    assert reason is not None
    assert f"kind {kind!r}" in reason
    assert "not known" not in reason


def test_without_heads_there_is_nothing_to_roll_back() -> None:
    assert refusal_of_config(config_of("llama")) is None
    reason = refusal_of_config(MambaConfig(num_hidden_layers=1, hidden_size=16))
    assert reason is not None
    assert "recurrent state" in reason


@pytest.mark.parametrize(
    ("writes", "reads", "reason"),
    [
        ([0, 1, 2], [0, 1, 2], None),
        ([], [], "outside of the key-value cache"),
        ([0, 1, 2], [], "computes attention itself"),
        ([0, 1, 2], [0, 1, 2, 2], "more than once for a token"),
        ([0, 1], [0, 1], "only 2 of its 3 layers"),
    ],
)
def test_what_layers_used_tells_the_mechanism(
    writes: list[int], reads: list[int], reason: str | None
) -> None:
    found = refusal_of_layers(3, Counter(writes), Counter(reads))
    assert (found is None) == (reason is None)
    if found and reason:
        assert reason in found
