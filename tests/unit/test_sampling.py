"""Noise, the processed distribution and the choice of a token, without statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine import noise, sampling
from ssd_workers.engine.noise import (
    fresh_seed,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_noise_rows,
)
from ssd_workers.engine.sampling import choose_tokens, process_logits

INF = float("inf")
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(),
    SamplingParams(temperature=1e-9),
]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


class TestNoise:
    def test_a_prefix_does_not_depend_on_the_vocabulary_size(self) -> None:
        whole = gumbel_noise(7, 11, 60_000, "cpu")
        for size in (1, 7, 31, 1001, 24_577, 49_153):
            assert bits(gumbel_noise(7, 11, size, "cpu")) == bits(whole[:size])

    @pytest.mark.parametrize("vocab_size", [5, 1000, 30_000])
    def test_rows_equal_the_single_form(self, vocab_size: int) -> None:
        seeds = [0, 1, 2**63 - 1, 1, 99]
        positions = [0, 5, 10**6, 6, 3]
        rows = gumbel_noise_rows(seeds, positions, vocab_size, "cpu")
        assert rows.shape == (5, vocab_size)
        assert rows.dtype == torch.float32
        for row, seed, position in zip(rows, seeds, positions, strict=True):
            assert bits(row) == bits(gumbel_noise(seed, position, vocab_size, "cpu"))

    def test_chosen_ids_equal_the_whole(self) -> None:
        ids = torch.randperm(60_000, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        whole = gumbel_noise(3, 4, 60_000, "cpu")
        for count in (1, 13, 60_000):
            assert bits(gumbel_noise_at(3, 4, ids[:count])) == bits(whole[ids[:count].long()])

    def test_no_rows(self) -> None:
        assert gumbel_noise_rows([], [], 10, "cpu").shape == (0, 10)

    def test_the_mapping_is_accurate_over_the_whole_range(self) -> None:
        ends = torch.tensor([0, 1, 2, 1000, 2**31 - 1, -1, -2, -(2**31), -(2**31) + 1])
        some = torch.randint(
            -(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1)
        )
        h = torch.cat([ends, some])
        exact = h.double().numpy()
        lower = np.log1p(-(np.maximum(exact, 0) + 0.5) / 2**32)
        upper = np.log((np.maximum(-exact, 0.75) - 0.5) / 2**32)
        expected = -np.log(-np.where(exact >= 0, lower, upper))
        got = noise._gumbel(h.to(torch.int32)).double().numpy()
        assert np.abs(got - expected).max() < 3e-6
        assert got.min() > noise.NOISE_MIN
        assert got.max() < noise.NOISE_MAX

    def test_the_hash_repeats_no_value_within_a_row(self) -> None:
        ids = torch.arange(151_936, dtype=torch.int32)
        assert len(set(noise._hash(ids, 12345, -6789).tolist())) == len(ids)

    def test_both_halves_of_the_key_matter(self) -> None:
        # Were the first only added to the id, nearby keys would give shifted copies of a row.
        ids = torch.arange(10_000, dtype=torch.int32)
        base = noise._hash(ids, 5, 1)
        assert not torch.any(base == noise._hash(ids, 5, 2))
        assert not torch.any(base == noise._hash(ids, 6, 1))

    def test_seed_position_and_token_all_matter(self) -> None:
        base = gumbel_noise(1, 1, 50, "cpu")
        assert not torch.any(base == gumbel_noise(1, 2, 50, "cpu"))
        assert not torch.any(base == gumbel_noise(2, 1, 50, "cpu"))
        assert len(set(base.tolist())) == 50

    def test_fresh_seeds_are_valid_and_differ(self) -> None:
        seeds = {fresh_seed() for _ in range(50)}
        assert len(seeds) == 50
        assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


def reference(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The ids that survive, the plain way, in float64. Logits must be distinct."""
    if params.temperature == 0:
        return {int(np.argmax(logits))}
    scaled = logits / params.temperature
    p = np.exp(scaled - scaled.max())
    order = list(np.argsort(-p, kind="stable"))
    if params.top_k:
        order = order[: params.top_k]
    p = p / p[order].sum()
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p:
            break
        kept.append(token)
        mass += p[token]
    return {int(token) for token in kept if p[token] >= params.min_p * p[order[0]]}


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.913, 0.5021, 0.0107]),
    min_p=st.sampled_from([0.0, 0.0103, 0.2007, 1.0]),
)


class TestProcessLogits:
    @settings(max_examples=150, deadline=None)
    @given(
        PARAMS,
        st.lists(st.integers(-4000, 4000), min_size=1, max_size=12, unique=True),
    )
    def test_against_the_plain_way(self, params: SamplingParams, raw: list[int]) -> None:
        logits = np.array(raw) / 256.0 + np.arange(len(raw)) * 1e-4
        got = process_logits(torch.tensor(logits[None], dtype=torch.float32), [params])[0]
        kept = {i for i, value in enumerate(got.tolist()) if value != -INF}
        assert kept == reference(logits, params)
        if params.temperature > 0:
            for token in kept:
                expected = (logits[token] - logits.max()) / params.temperature
                assert float(got[token]) == pytest.approx(expected, rel=1e-5, abs=1e-4)

    @pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.999999])
    @pytest.mark.parametrize("top_k", [0, 500])
    def test_a_large_nucleus_against_the_plain_way(self, top_p: float, top_k: int) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(4000, generator=generator, dtype=torch.float64) * 4
        params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
        got = process_logits(logits[None].float(), [params])[0]
        kept = set((got != -INF).nonzero().squeeze(1).tolist())
        assert kept == reference(logits.float().double().numpy(), params)

    def test_tokens_of_equal_logit_stay_or_go_together(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
        for params in (
            SamplingParams(temperature=1.0, top_k=1),
            SamplingParams(temperature=1.0, top_p=0.01),
            SamplingParams(temperature=1.0, min_p=1.0),
        ):
            assert process_logits(logits, [params]).tolist() == [[-INF, 0.0, 0.0, -INF, 0.0]]

    def test_greedy_is_all_mass_on_the_first_maximum(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 3.0]])
        assert process_logits(logits, [SamplingParams()]).tolist() == [[-INF, 0.0, -INF]]

    def test_padding_and_masked_tokens_stay_excluded(self) -> None:
        logits = torch.tensor([[1.0, -INF, 0.5, 9.0]])
        got = process_logits(logits, [SamplingParams(temperature=1.0, top_p=0.99)], valid_vocab=3)
        assert got.tolist() == [[0.0, -INF, -0.5, -INF]]

    def test_input_is_not_changed(self) -> None:
        logits = torch.randn(len(MIXED), 50)
        before = logits.clone()
        process_logits(logits, MIXED)
        choose_tokens(logits, MIXED, [1] * len(MIXED), [1] * len(MIXED))
        assert torch.equal(logits, before)

    def test_a_row_that_is_not_a_number_spoils_no_other(self) -> None:
        logits = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])
        got = process_logits(logits, [SamplingParams(temperature=1.0)] * 2)
        assert got[0].tolist() == [0.0, -1.0]
        assert got[1].isnan().all()


class TestChooseTokens:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_greedy_takes_the_lowest_id_on_a_tie(self, threads: int, dtype: torch.dtype) -> None:
        logits = torch.zeros(3, 151_936, dtype=dtype)
        logits[0, [50_001, 100_000, 151_935]] = 4.0
        logits[2, [151_935, 151_934]] = 4.0
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert choose_tokens(logits, [SamplingParams()] * 3, [0] * 3, [0] * 3) == [
                50_001,
                0,
                151_934,
            ]
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("vocab", [300, 20_011])
    def test_is_argmax_of_processed_logits_plus_noise(self, vocab: int) -> None:
        logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(2)) * 3
        seeds, positions = list(range(8)), list(range(50, 58))
        expected = process_logits(logits, MIXED) + gumbel_noise_rows(seeds, positions, vocab, "cpu")
        assert choose_tokens(logits, MIXED, seeds, positions) == expected.argmax(-1).tolist()

    @pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
    def test_both_ways_of_drawing_agree(self, scale: float) -> None:
        logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * scale
        params = [MIXED[1 + i % 5] for i in range(40)]
        arguments = (logits, logits.amax(-1), params, list(range(40)), list(range(40)))
        by_row = sampling._draw_by_row(*arguments)
        assert by_row == sampling._draw_together(*arguments)
        assert len(set(by_row)) > 3

    @pytest.mark.parametrize("vocab", [97, 4099])
    def test_a_row_does_not_depend_on_the_others(self, vocab: int) -> None:
        # 97 and 4099 are odd, so rows start at every alignment of the vector units.
        logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(4)) * 3
        together = process_logits(logits, MIXED)
        chosen = choose_tokens(logits, MIXED, [9] * 8, list(range(8)))
        for row, params in enumerate(MIXED):
            alone = logits[row : row + 1].clone()
            assert bits(process_logits(alone, [params])) == bits(together[row])
            assert choose_tokens(alone, [params], [9], [row]) == chosen[row : row + 1]
        reverse = choose_tokens(logits.flip(0), MIXED[::-1], [9] * 8, list(range(8))[::-1])
        assert reverse == chosen[::-1]

    def test_padding_is_never_chosen_and_changes_nothing(self) -> None:
        logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(6))
        padded = torch.cat([logits, torch.full((8, 64), 50.0)], dim=1)
        arguments = (MIXED, [3] * 8, list(range(8)))
        assert choose_tokens(padded, *arguments, valid_vocab=5000) == choose_tokens(
            logits, *arguments
        )

    @pytest.mark.parametrize("bad", [float("nan"), INF])
    @pytest.mark.parametrize("vocab", [6, 5000])
    def test_a_broken_row_gets_minus_one_and_the_others_their_token(
        self, bad: float, vocab: int
    ) -> None:
        logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(7))
        arguments = (MIXED, [3] * 8, list(range(8)))
        expected = choose_tokens(logits, *arguments)
        for row in range(8):
            broken = logits.clone()
            broken[row, vocab // 2] = bad
            want = [*expected[:row], -1, *expected[row + 1 :]]
            assert choose_tokens(broken, *arguments) == want

    def test_a_row_with_everything_masked_gets_minus_one(self) -> None:
        logits = torch.full((2, 5), -INF)
        params = [SamplingParams(), SamplingParams(temperature=1.0)]
        assert choose_tokens(logits, params, [0, 0], [0, 0]) == [-1, -1]

    @pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-9])
    def test_a_tiny_temperature_is_greedy(self, temperature: float) -> None:
        logits = torch.tensor([[1.0, 30.0, 29.999, -80.0]])
        params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
        for position in range(20):
            assert choose_tokens(logits, [params], [1], [position]) == [1]

    def test_top_k_one_and_huge_knobs(self) -> None:
        logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(8))
        best = int(logits.argmax())
        one = SamplingParams(temperature=10.0, top_k=1)
        assert choose_tokens(logits, [one], [0], [0]) == [best]
        free = SamplingParams(temperature=1.0)
        large = SamplingParams(temperature=1.0, top_k=10_000_000)
        for position in range(30):
            assert choose_tokens(logits, [free], [0], [position]) == choose_tokens(
                logits, [large], [0], [position]
            )

    def test_no_rows(self) -> None:
        assert choose_tokens(torch.empty(0, 10), [], [], []) == []

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        logits = torch.zeros(2, 10)
        greedy = SamplingParams()
        with pytest.raises(EngineError, match=r"\[2, 10\] came with 1 rows"):
            choose_tokens(logits, [greedy], [0], [0])
        with pytest.raises(EngineError, match="2 rows came with 1 seeds"):
            choose_tokens(logits, [greedy] * 2, [0], [0, 0])
        with pytest.raises(EngineError, match="11 valid tokens"):
            choose_tokens(logits, [greedy] * 2, [0] * 2, [0] * 2, valid_vocab=11)
