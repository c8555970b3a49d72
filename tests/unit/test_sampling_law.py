"""Chi-square tests: what is drawn follows the law it should, with and without drafts.

The noise is a function of seed and position, so every run draws the same samples: these tests
cannot fail by bad luck once they have passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.noise import gumbel_noise_rows
from ssd_workers.engine.sampling import choose_tokens
from ssd_workers.engine.verification import accept_drafts

DRAWS = 20_000
# A right sampler gives a smaller p-value once in 10,000 tries; the wrong ones below give far less.
ALARM = 1e-4


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square p-value; any draw of an impossible outcome gives 0."""
    if counts[law == 0].sum() > 0:
        return 0.0
    possible = law > 0
    # Outcomes expected fewer than five times are counted together.
    expected = law[possible] * counts.sum()
    observed = counts[possible]
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def law_of(logits: list[float], temperature: float, kept: int) -> np.ndarray:
    """Softmax over the ``kept`` most probable tokens."""
    p: np.ndarray = np.exp(np.array(logits) / temperature)
    p[np.argsort(-p)[kept:]] = 0.0
    p /= p.sum()
    return p


# Probabilities at temperature 1: .42 .26 .16 .094 .042 .017 .0086 .0003
LOGITS = [2.0, 1.5, 1.0, 0.5, -0.3, -1.2, -1.9, -5.3]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0), 8),
        (SamplingParams(temperature=0.6), 8),
        (SamplingParams(temperature=1.0, top_k=3), 3),
        (SamplingParams(temperature=1.0, top_p=0.8), 3),
        (SamplingParams(temperature=2.0, top_k=6, top_p=0.75, min_p=0.5), 3),
        (SamplingParams(temperature=1.0, min_p=0.08), 5),
    ],
    ids=["plain", "sharp", "top-k", "top-p", "all", "min-p"],
)
def test_choose_tokens_follows_the_processed_law(params: SamplingParams, kept: int) -> None:
    # One request at many positions, and many requests at one position.
    fixed, varied = [42] * (DRAWS // 2), list(range(DRAWS // 2))
    seeds, positions = fixed + varied, varied + fixed
    logits = torch.tensor(LOGITS).expand(DRAWS, -1)
    tokens = choose_tokens(logits, [params] * DRAWS, seeds, positions)
    counts = np.bincount(tokens, minlength=8)
    assert p_value(counts, law_of(LOGITS, params.temperature, kept)) > ALARM
    # The test can fail: the same draws do not fit a temperature that is 30 % off.
    assert p_value(counts, law_of(LOGITS, params.temperature * 1.3, kept)) < 1e-6


def test_consecutive_positions_and_seeds_are_independent() -> None:
    noise = gumbel_noise_rows([1] * DRAWS + [2] * DRAWS, [*range(DRAWS)] * 2, 4, "cpu")
    tokens = noise.argmax(-1).numpy().reshape(2, DRAWS)
    pairs = {
        "positions": tokens[0, :-1] * 4 + tokens[0, 1:],
        "seeds": tokens[0] * 4 + tokens[1],
    }
    for name, pair in pairs.items():
        assert p_value(np.bincount(pair, minlength=16), np.full(16, 1 / 16)) > ALARM, name


def test_the_winner_among_a_large_vocabulary_is_uniform() -> None:
    # The winner of 20,000 equal tokens is decided in the tail of the noise.
    winners = [
        int(i)
        for start in range(0, 2000, 100)
        for i in gumbel_noise_rows([start] * 100, list(range(100)), 20_000, "cpu").argmax(-1)
    ]
    counts = np.bincount(np.array(winners) * 20 // 20_000, minlength=20)
    assert p_value(counts, np.full(20, 1 / 20)) > ALARM


# A target over three tokens: row t holds the probabilities of the token after t.
CHAIN = np.array([[0.55, 0.30, 0.15], [0.10, 0.50, 0.40], [0.35, 0.05, 0.60]])
K = 2
Verify = Callable[[int, list[int], list[int], np.random.Generator], list[int]]


def exact(start: int, draft: list[int], chosen: list[int], _: np.random.Generator) -> list[int]:
    return accept_drafts(draft, chosen)[1]


def biased(start: int, draft: list[int], chosen: list[int], rng: np.random.Generator) -> list[int]:
    """Accept a draft token if it is the most probable one, else sample: a known fault."""
    emitted = []
    last = start
    for token in draft:
        if token != int(CHAIN[last].argmax()):
            break
        emitted.append(token)
        last = token
    emitted.append(int(rng.choice(3, p=CHAIN[last])))
    return emitted


def speculate(verify: Verify, runs: int, seed: int) -> np.ndarray:
    """``runs`` sequences of K + 2 tokens after token 0, decoded with drafts of all qualities.

    Returns the counts of the ``3 ** (K + 2)`` outcomes.
    """
    rng = np.random.default_rng(seed)
    logits = torch.tensor(np.log(CHAIN), dtype=torch.float32)
    params = [SamplingParams(temperature=1.0)] * (runs * (K + 1))
    sequences = [[0] for _ in range(runs)]
    while min(map(len, sequences)) < K + 3:
        rows: list[int] = []
        seeds: list[int] = []
        positions: list[int] = []
        drafts: list[list[int]] = []
        for run, tokens in enumerate(sequences):
            # The most probable continuation, random tokens, or one token only.
            kind = rng.integers(3)
            draft = [] if len(tokens) >= K + 3 else [int(t) for t in rng.integers(0, 3, K)]
            if kind == 0 and draft:
                draft = [int(CHAIN[tokens[-1]].argmax())]
                draft.append(int(CHAIN[draft[-1]].argmax()))
            draft = draft[:1] if kind == 1 else draft
            drafts.append(draft)
            rows += [tokens[-1], *draft]
            seeds += [run + 7_000_000 * seed] * (len(draft) + 1)
            positions += range(len(tokens), len(tokens) + len(draft) + 1)
        chosen = choose_tokens(logits[rows], params[: len(rows)], seeds, positions)
        place = 0
        for tokens, draft in zip(sequences, drafts, strict=True):
            choice = chosen[place : place + len(draft) + 1]
            place += len(draft) + 1
            tokens += verify(tokens[-1], draft, choice, rng)
    outcomes = [tuple(tokens[1 : K + 3]) for tokens in sequences]
    index = {o: i for i, o in enumerate(itertools.product(range(3), repeat=K + 2))}
    return np.bincount([index[outcome] for outcome in outcomes], minlength=len(index))


def joint_law() -> np.ndarray:
    return np.array(
        [
            np.prod([CHAIN[a, b] for a, b in itertools.pairwise((0, *outcome))])
            for outcome in itertools.product(range(3), repeat=K + 2)
        ]
    )


def test_speculative_decoding_follows_the_autoregressive_law() -> None:
    assert p_value(speculate(exact, 12_000, seed=1), joint_law()) > ALARM


def test_a_biased_verifier_is_found_out() -> None:
    assert p_value(speculate(biased, 12_000, seed=1), joint_law()) < 1e-10
