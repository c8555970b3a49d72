"""The rejection rule follows the target's law, for drafts that are drawn and that are copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.rejection import stream_seed, verify_by_rejection
from ssd_workers.engine.sampling import choose_tokens
from tests.unit.test_sampling_law import ALARM, p_value

DRAWS = [3_000, pytest.param(20_000, marks=pytest.mark.slow)]
VOCAB = 4
K = 2
# Row t holds the probabilities of the token after t: the target's, and a draft's that errs.
TARGET = np.array(
    [[0.50, 0.30, 0.15, 0.05], [0.10, 0.45, 0.40, 0.05], [0.35, 0.05, 0.50, 0.10], [0.25] * 4]
)
DRAFT = np.array(
    [[0.20, 0.60, 0.10, 0.10], [0.30, 0.30, 0.30, 0.10], [0.10, 0.10, 0.70, 0.10],
     [0.7, 0.1, 0.1, 0.1]]
)  # fmt: skip
LOG_P = torch.tensor(np.log(TARGET), dtype=torch.float32)
LOG_Q = torch.tensor(np.log(DRAFT), dtype=torch.float32)
SAMPLED = SamplingParams(temperature=1.0)

Make = Callable[[list[int], int], tuple[list[int], torch.Tensor | None]]
Verify = Callable[[list[int], list[int], torch.Tensor | None, int], list[int]]


def right(tokens: list[int], draft: list[int], log_q: torch.Tensor | None, seed: int) -> list[int]:
    log_p = LOG_P[[tokens[-1], *draft]]
    accepted, emitted = verify_by_rejection(log_p, draft, log_q, seed, len(tokens))
    assert emitted[:accepted] == draft[:accepted]
    return emitted


def greedy_when_q_is_unknown(
    tokens: list[int], draft: list[int], log_q: torch.Tensor | None, seed: int
) -> list[int]:
    """A known fault: accept the most probable token, sample p itself where it was not drafted."""
    del log_q
    emitted = []
    for token in draft:
        last = emitted[-1] if emitted else tokens[-1]
        if token != int(TARGET[last].argmax()):
            break
        emitted.append(token)
    last = emitted[-1] if emitted else tokens[-1]
    position = len(tokens) + len(emitted)
    return [*emitted, *choose_tokens(LOG_P[[last]], [SAMPLED], [seed], [position])]


def drawn(tokens: list[int], seed: int) -> tuple[list[int], torch.Tensor]:
    """A draft as the draft model makes it: drawn from q with noise of its own."""
    draft: list[int] = []
    rows = []
    for _ in range(K):
        rows.append((draft or tokens)[-1])
        position = len(tokens) + len(draft)
        row = LOG_Q[[rows[-1]]]
        draft += choose_tokens(row, [SAMPLED], [stream_seed(seed, "draft")], [position])
    return draft, LOG_Q[rows]


def copied(tokens: list[int], seed: int) -> tuple[list[int], None]:
    """A draft that is not drawn: some rule's tokens, sometimes fewer."""
    draft = [(tokens[-1] * 3 + len(tokens)) % VOCAB, (tokens[0] + seed) % VOCAB]
    return draft[: 1 + seed % 2], None


def outcomes(make: Make, verify: Verify, draws: int) -> np.ndarray:
    """Counts of the ``VOCAB ** (K + 2)`` sequences of K + 2 tokens after token 0."""
    index = {o: i for i, o in enumerate(itertools.product(range(VOCAB), repeat=K + 2))}
    counts = np.zeros(len(index), dtype=int)
    for seed in range(draws):
        tokens = [0]
        while len(tokens) < K + 3:
            draft, log_q = make(tokens, seed)
            tokens += verify(tokens, draft, log_q, seed)
        counts[index[tuple(tokens[1 : K + 3])]] += 1
    return counts


def joint_law() -> np.ndarray:
    return np.array(
        [
            np.prod([TARGET[a, b] for a, b in itertools.pairwise((0, *outcome))])
            for outcome in itertools.product(range(VOCAB), repeat=K + 2)
        ]
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("make", [drawn, copied])
def test_consecutive_tokens_follow_the_joint_law(make: Make, draws: int) -> None:
    assert p_value(outcomes(make, right, draws), joint_law()) > ALARM


@pytest.mark.timeout(900)
@pytest.mark.parametrize("draws", DRAWS)
def test_a_biased_verifier_is_found_out(draws: int) -> None:
    assert p_value(outcomes(copied, greedy_when_q_is_unknown, draws), joint_law()) < 1e-10


def test_equal_distributions_accept_everything() -> None:
    for seed in range(200):
        draft, _ = [1, 2], None
        accepted, emitted = verify_by_rejection(LOG_P[[0, 1, 2]], draft, LOG_P[[0, 1]], seed, 5)
        assert accepted == 2
        assert emitted[:2] == draft


def test_an_impossible_draft_is_never_emitted() -> None:
    log_p = LOG_P[[0, 1]].clone()
    log_p[0, 3] = -torch.inf
    for seed in range(200):
        accepted, emitted = verify_by_rejection(log_p, [3], None, seed, 1)
        assert accepted == 0
        assert emitted[0] != 3


def test_rows_that_are_not_numbers_end_the_emission() -> None:
    broken = LOG_P[[0, 1]].clone()
    broken[0] = torch.nan
    assert verify_by_rejection(broken, [2], None, 0, 1) == (0, [-1])
    broken = LOG_P[[0, 1]].clone()
    broken[1] = torch.nan
    broken[0] = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf])
    assert verify_by_rejection(broken, [2], None, 0, 1) == (1, [2, -1])


def test_a_draft_vocabulary_smaller_or_larger_than_the_targets() -> None:
    narrow = LOG_Q[[0]][:, :3]
    wide = torch.cat([LOG_Q[[0]], torch.full((1, 2), -torch.inf)], dim=1)
    for log_q in (narrow, wide):
        accepted, emitted = verify_by_rejection(LOG_P[[0, 1]], [1], log_q, 3, 1)
        assert len(emitted) == accepted + 1
        assert all(0 <= token < VOCAB for token in emitted)


def test_lengths_must_fit() -> None:
    with pytest.raises(EngineError, match="2 are needed"):
        verify_by_rejection(LOG_P[[0]], [1], None, 0, 1)
