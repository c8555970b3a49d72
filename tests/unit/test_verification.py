"""Acceptance of drafts: which tokens stand, and that the text never depends on the draft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.sampling import choose_tokens
from ssd_workers.engine.verification import accept_drafts


@pytest.mark.parametrize(
    ("draft", "chosen", "accepted", "emitted"),
    [
        ([], [7], 0, [7]),
        ([1], [1, 2], 1, [1, 2]),
        ([1], [3, 2], 0, [3]),
        ([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 4], 1, [1, 5]),
        ([1, 2, 3], [5, 2, 3, 4], 0, [5]),
        ([1, 2], [1, -1, 4], 1, [1, -1]),
        ([1, 2], [1, 2, -1], 2, [1, 2, -1]),
    ],
)
def test_accepts_the_common_prefix_and_one_more(
    draft: list[int], chosen: list[int], accepted: int, emitted: list[int]
) -> None:
    assert accept_drafts(draft, chosen) == (accepted, emitted)
    assert accept_drafts(tuple(draft), tuple(chosen)) == (accepted, emitted)


@pytest.mark.parametrize(("draft", "chosen"), [([], []), ([1, 2], [1, 2]), ([1], [1, 2, 3])])
def test_lengths_that_do_not_fit_are_an_error(draft: list[int], chosen: list[int]) -> None:
    with pytest.raises(EngineError, match=f"A draft of {len(draft)} tokens"):
        accept_drafts(draft, chosen)


TOKENS = st.lists(st.integers(0, 3), max_size=8)


@given(TOKENS, TOKENS, st.integers(0, 3))
def test_what_is_emitted_is_always_what_the_target_chose(
    draft: list[int], chosen: list[int], last: int
) -> None:
    rows = min(len(draft), len(chosen))
    draft, chosen = draft[:rows], [*chosen[:rows], last]
    accepted, emitted = accept_drafts(draft, chosen)
    assert emitted == chosen[: accepted + 1]
    assert emitted[:-1] == draft[:accepted]
    assert accepted == rows or draft[accepted] != chosen[accepted]


VOCAB = 6
LENGTH = 24


class Chain:
    """A target whose next-token logits depend on the last two tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 2

    def rows(self, tokens: list[int], draft: list[int]) -> torch.Tensor:
        """``[draft + 1, VOCAB]``: one target forward over the last token and the draft."""
        whole = [*tokens, *draft]
        ends = range(len(tokens), len(whole) + 1)
        return torch.stack([self.table[whole[end - 2], whole[end - 1]] for end in ends])


def decode(chain: Chain, params: SamplingParams, seed: int, drafts: list[list[int]]) -> list[int]:
    """LENGTH new tokens, with the given drafts in turn (and none when they are used up)."""
    tokens = [0, 1]
    turn = iter(drafts)
    while len(tokens) < LENGTH + 2:
        draft = next(turn, [])
        logits = chain.rows(tokens, draft)
        count = len(draft) + 1
        positions = range(len(tokens), len(tokens) + count)
        chosen = choose_tokens(logits, [params] * count, [seed] * count, positions)
        tokens += accept_drafts(draft, chosen)[1]
    return tokens[2 : LENGTH + 2]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(0, 2**63 - 1),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=LENGTH),
    st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(temperature=0.8),
            SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.02),
        ]
    ),
)
def test_the_text_is_the_same_for_every_draft(
    chain_seed: int, seed: int, drafts: list[list[int]], params: SamplingParams
) -> None:
    chain = Chain(chain_seed)
    plain = decode(chain, params, seed, [])
    assert decode(chain, params, seed, drafts) == plain
    # Drafts that are right, in blocks of four (each step adds a bonus token).
    right = [plain[start : start + 4] for start in range(0, LENGTH, 5)]
    assert decode(chain, params, seed, right) == plain


def test_seeds_give_different_texts() -> None:
    texts = {tuple(decode(Chain(0), SamplingParams(temperature=1.0), s, [])) for s in range(20)}
    assert len(texts) == 20
