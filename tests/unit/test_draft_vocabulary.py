"""A draft model with other tokens, more logits or a shorter context than its target."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from ssd_integrations.errors import DraftModelMismatchError
from ssd_integrations.protocol import SamplingParams, SpeculationParams
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.selection import DrafterSelection
from ssd_workers.engine.loading import LoadedModel, load_engine_models
from ssd_workers.progress import no_progress
from tests.engine_support import FIXED_LENGTH, Job, assert_same_tokens, output_ids, run_batch
from tests.tiny import make_tiny_model

REJECTION = SpeculationParams(adaptive=False, acceptance="rejection")


def load_pair(target: Path, draft: Path) -> tuple[LoadedModel, LoadedModel]:
    models = load_engine_models(
        EngineConfig(model=str(target), draft_model=str(draft), dtype="float32"), no_progress
    )
    assert models[1] is not None
    return models[0], models[1]


def drafter(target: LoadedModel, draft: LoadedModel) -> Drafter:
    picked = DrafterSelection(target, draft, None).pick("model")
    assert picked is not None
    return picked


def change_tokenizer(path: Path, added: dict[str, int], removed: int = 0) -> None:
    """Give the saved tokenizer special tokens of its own, or take its last ones away."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for token in sorted(vocab, key=vocab.__getitem__)[len(vocab) - removed :]:
        del vocab[token]
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) != token]
    like = tokenizer["added_tokens"][0]
    for token, index in added.items():
        tokenizer["added_tokens"].append({**like, "id": index, "content": token})
    file.write_text(json.dumps(tokenizer))


def favour(model: LoadedModel, token: int) -> None:
    """Let ``model`` nearly always choose ``token``."""
    head = model.runner.model.lm_head
    with torch.no_grad():
        bias = torch.zeros(head.out_features)
        bias[token] = 1e4
    head.bias = torch.nn.Parameter(bias)


@pytest.mark.parametrize(("target_size", "draft_size"), [(400, 448), (448, 400), (416, 400)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_of_different_sizes(
    target_size: int, draft_size: int, temperature: float, tmp_path: Path
) -> None:
    target, draft = load_pair(
        make_tiny_model(tmp_path / "target", vocab_size=target_size),
        make_tiny_model(tmp_path / "draft", vocab_size=draft_size),
    )
    sampling = SamplingParams(temperature=temperature)
    jobs = [Job([5 + i, 6, 7, 8] * (i + 1), 20, sampling, seed=i) for i in range(4)]
    got = run_batch(target, jobs, drafter(target, draft))
    for job, event in zip(jobs, got, strict=True):
        assert_same_tokens(target, job, run_batch(target, [job])[0], event)
        assert event.speculation.num_draft_tokens > 0
    texts = [
        [
            output_ids(e)
            for e in run_batch(target, jobs, drafter(target, draft), speculation=REJECTION)
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    if not temperature:
        assert texts[0] == [output_ids(event) for event in got]


@pytest.mark.parametrize("speculation", [FIXED_LENGTH, REJECTION], ids=["coupled", "rejection"])
def test_tokens_that_only_the_draft_model_has_are_never_drafted(
    speculation: SpeculationParams, tmp_path: Path
) -> None:
    target_path = make_tiny_model(tmp_path / "target", vocab_size=448)
    draft_path = make_tiny_model(tmp_path / "draft", vocab_size=448)
    change_tokenizer(draft_path, {"<|extra|>": 400})
    target, draft = load_pair(target_path, draft_path)
    known = set(target.tokenizer.get_vocab().values())
    assert 400 in draft.tokenizer.get_vocab().values()
    assert 400 not in known
    favour(draft, 400)
    drafts: list[int] = []
    drafting = drafter(target, draft)
    propose = drafting.propose

    def watched(sequences, max_tokens):  # type: ignore[no-untyped-def]
        proposed = propose(sequences, max_tokens)
        drafts.extend(token for draft in proposed for token in draft)
        return proposed

    drafting.propose = watched  # type: ignore[method-assign]
    job = Job([5, 6, 7, 8], 20)
    event = run_batch(target, [job], drafting, speculation=speculation)[0]
    assert_same_tokens(target, job, run_batch(target, [job])[0], event)
    assert drafts
    assert set(drafts) <= known


def test_a_token_between_those_that_the_target_has_is_never_drafted(tmp_path: Path) -> None:
    target, draft = load_pair(
        make_tiny_model(tmp_path / "target"), make_tiny_model(tmp_path / "draft")
    )
    favour(draft, 200)
    known = set(range(400)) - {200}
    job = Job([5, 6, 7, 8], 12)
    expected = run_batch(target, [job])[0]
    for ids, drafted in ((set(range(400)), True), (known, False)):
        drafting = ModelDrafter(draft.runner, draft.context_length, target.vocab_size, ids)
        seen: set[int] = set()
        propose = drafting.propose

        def watched(sequences, max_tokens, propose=propose, seen=seen):  # type: ignore[no-untyped-def]
            proposed = propose(sequences, max_tokens)
            seen.update(token for draft in proposed for token in draft)
            return proposed

        drafting.propose = watched  # type: ignore[method-assign]
        assert_same_tokens(target, job, expected, run_batch(target, [job], drafting)[0])
        assert seen
        assert (200 in seen) == drafted


def test_tokens_that_only_the_target_has_end_the_drafts(tmp_path: Path) -> None:
    target_path = make_tiny_model(tmp_path / "target", vocab_size=448)
    change_tokenizer(target_path, {"<|more|>": 400})
    target, draft = load_pair(target_path, make_tiny_model(tmp_path / "draft"))
    plain, odd = Job([5, 6, 7, 8], 20), Job([5, 400, 7, 8], 20)
    got = run_batch(target, [plain, odd], drafter(target, draft))
    for job, event in zip((plain, odd), got, strict=True):
        assert_same_tokens(target, job, run_batch(target, [job])[0], event)
    assert got[0].speculation.num_draft_tokens > 0
    assert got[1].speculation.num_draft_tokens == 0


def test_a_draft_model_that_lacks_a_tenth_of_the_tokens_is_refused(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    draft = make_tiny_model(tmp_path / "draft")
    change_tokenizer(draft, {}, removed=60)
    with pytest.raises(DraftModelMismatchError, match="60 of the latter are missing"):
        load_pair(target, draft)


def test_an_id_with_another_token_is_refused(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", vocab_size=448)
    draft = make_tiny_model(tmp_path / "draft", vocab_size=448)
    change_tokenizer(target, {"<|ours|>": 400})
    change_tokenizer(draft, {"<|theirs|>": 400})
    with pytest.raises(DraftModelMismatchError, match=r"1 of them differ, first at '<\|ours\|>'"):
        load_pair(target, draft)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_beyond_the_drafts_context_are_decoded_without_drafts(
    arch: str, temperature: float, tmp_path: Path
) -> None:
    length = {"gpt2": "n_positions", "llama": "max_position_embeddings"}[arch]
    target, draft = load_pair(
        make_tiny_model(tmp_path / "target", arch),
        make_tiny_model(tmp_path / "draft", arch, **{length: 48}),
    )
    assert (target.context_length, draft.context_length) == (512, 48)
    rng = random.Random(0)
    sampling = SamplingParams(temperature=temperature)
    # Within, crossing in the middle of the answer, at the border, and beyond from the start.
    lengths = (10, 40, 47, 48, 60, 130)
    jobs = [Job([rng.randrange(3, 390) for _ in range(n)], 16, sampling, seed=n) for n in lengths]
    drafting = drafter(target, draft)
    got = run_batch(target, jobs, drafting)
    for job, event in zip(jobs, got, strict=True):
        assert_same_tokens(target, job, run_batch(target, [job])[0], event)
    drafted = [event.speculation.num_draft_tokens for event in got]
    assert drafted[0] > drafted[1] > 0
    assert drafted[2] <= 1
    assert drafted[3:] == [0, 0, 0]
