"""Attention in compiled loops: what it computes, and that a row has its bits wherever it stands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ssd_workers.engine import row_attention
from ssd_workers.engine.attention_loops import KEYS
from ssd_workers.engine.kv_cache import GrowingCache, Span
from ssd_workers.engine.row_attention import RowAttention

Case = tuple[int, int, int, torch.dtype]
DTYPES = (torch.float32, torch.float16)


def make_cache(length: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> GrowingCache:
    """A cache of one layer whose first ``length`` positions are random; the rest is 1e4."""
    generator = torch.Generator().manual_seed(seed)
    cache = GrowingCache(1, 64)
    for buffer in cache.room(0, length, torch.empty(kv_heads, 0, dim, dtype=dtype)):
        buffer.fill_(1e4)
        buffer[:, :length] = torch.randn(kv_heads, length, dim, generator=generator).to(dtype)
    return cache


def expected(
    queries: NDArray[np.float64],
    cache: GrowingCache,
    start: int,
    per_kv: int,
    window: int,
    cap: float,
) -> NDArray[np.float64]:
    """The textbook's attention in float64, query by query."""
    keys, values = (
        t.double().numpy() for t in cache.read(0, 0, start + queries.shape[1] // per_kv)
    )
    out = np.empty_like(queries)
    for head, number in np.ndindex(queries.shape[:2]):
        end = start + number // per_kv + 1
        begin = max(0, end - window) if window else 0
        scores = keys[head, begin:end] @ queries[head, number]
        if cap:
            scores = np.tanh(scores / cap) * cap
        weights = np.exp(scores - scores.max())
        out[head, number] = weights @ values[head, begin:end] / weights.sum()
    return out


def make_queries(kv_heads: int, count: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * dim**-0.5 * torch.randn(kv_heads, count, dim, generator=generator)


# Before, at and behind the border of a block of keys; rows that fill several tiles.
SPANS = ((0, 1), (0, 37), (KEYS - 3, 1), (KEYS - 1, 1), (KEYS - 3, 20), (2 * KEYS + 70, 9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dim", "per_kv", "kv_heads"), [(16, 1, 3), (48, 2, 2), (128, 6, 2), (80, 4, 1)]
)
def test_is_attention_and_a_row_is_the_same_alone(
    dim: int, per_kv: int, kv_heads: int, dtype: torch.dtype
) -> None:
    for (start, rows), window, cap in itertools.product(SPANS, (None, 16, 300), (None, 5.0)):
        cache = make_cache(start + rows, kv_heads, dim, dtype, seed=start + rows)
        queries = make_queries(kv_heads, rows * per_kv, dim)
        got = RowAttention([Span(cache, start, rows)]).attend(0, queries, per_kv, window, cap)
        right = expected(queries.double().numpy(), cache, start, per_kv, window or 0, cap or 0)
        assert np.abs(got.numpy() - right).max() < 2e-5, (start, rows, window, cap)
        for row in {0, 1, rows // 2, rows - 1} & set(range(rows)):
            part = slice(row * per_kv, (row + 1) * per_kv)
            span = Span(cache, start + row, 1)
            one = queries[:, part].contiguous()
            alone = RowAttention([span]).attend(0, one, per_kv, window, cap)
            assert torch.equal(alone, got[:, part]), (start, rows, row, window, cap)


def test_rows_beside_it_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_heads, per_kv, dim = 2, 3, 32
    sizes = [(5, 1), (300, 40), (0, 17), (513, 8), (64, 1)]
    caches = [make_cache(s + r, kv_heads, dim, torch.float16, i) for i, (s, r) in enumerate(sizes)]
    spans = [Span(c, s, r) for c, (s, r) in zip(caches, sizes, strict=True)]
    queries = make_queries(kv_heads, sum(r for _, r in sizes) * per_kv, dim)
    got = []
    for threads, least in ((1, 1e9), (2, 1), (5, 1)):
        monkeypatch.setattr(row_attention, "_WORTH_SHARING", least)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        got.append(RowAttention(spans).attend(0, queries, per_kv, None, None))
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    at = 0
    for span in spans:
        count = span.rows * per_kv
        part = queries[:, at : at + count].contiguous()
        assert torch.equal(
            RowAttention([span]).attend(0, part, per_kv, None, None), got[0][:, at : at + count]
        )
        at += count


def test_nan_and_infinity_are_not_hidden() -> None:
    """An engine must notice them: a wrong number would be taken for a choice of the model."""
    cache = make_cache(300, 1, 16, torch.float32, 0)
    queries = make_queries(1, 2, 16)
    keys, _ = cache.read(0, 0, 300)
    keys[0, 270, 3] = torch.nan
    got = RowAttention([Span(cache, 269, 2)]).attend(0, queries, 1, None, None)
    assert torch.isfinite(got[0, 0]).all()  # does not see position 270
    assert torch.isnan(got[0, 1]).all()
    queries[0, 0, 0] = torch.inf
    got = RowAttention([Span(cache, 269, 2)]).attend(0, queries, 1, None, None)
    assert torch.isnan(got[0, 0]).all()


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    cache = make_cache(600, 1, 16, torch.float32, 1)
    keys, values = cache.read(0, 0, 600)
    keys.zero_()
    keys[0, 5, 0], keys[0, 400, 0] = 1e4, 2e4  # the largest score comes in a later block
    queries = torch.zeros(1, 1, 16)
    queries[0, 0, 0] = 1.0
    got = RowAttention([Span(cache, 599, 1)]).attend(0, queries, 1, None, None)
    assert torch.equal(got[0, 0], values[0, 400])


@pytest.mark.parametrize(
    ("queries", "keys", "dim", "taken"),
    [
        (torch.float32, torch.float32, 64, True),
        (torch.float32, torch.float16, 64, True),
        (torch.bfloat16, torch.bfloat16, 64, False),
        (torch.float32, torch.float32, 24, False),
    ],
)
def test_what_is_taken(queries: torch.dtype, keys: torch.dtype, dim: int, taken: bool) -> None:
    cached = torch.empty(1, 1, dim, dtype=keys)
    assert RowAttention.takes(torch.empty(1, 1, dim, dtype=queries), cached, cached) is taken
