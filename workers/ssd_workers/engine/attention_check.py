"""Whether this machine's float32 products give a row the same bits in any group of rows."""

from __future__ import annotations

from functools import lru_cache

import torch

from ssd_workers.engine.attention import MIN_ROWS, head_scale
from ssd_workers.engine.kv_cache import BLOCK


@lru_cache(maxsize=64)
def rows_are_exact(kv_heads: int, per_kv: int, head_dim: int) -> bool:
    """Compares grouped attention products with smaller ones, bit for bit, over the shapes in use.

    Like :meth:`PackedStep.attend_packed`, a group of few rows is filled up with those behind it.
    """
    generator = torch.Generator().manual_seed(0)
    for num_keys in (BLOCK, 3 * BLOCK, 8 * BLOCK, 33 * BLOCK):
        keys = torch.randn(kv_heads, num_keys, head_dim, generator=generator)
        values = torch.randn(kv_heads, num_keys, head_dim, generator=generator)
        count = BLOCK * per_kv
        queries = torch.randn(kv_heads, count + MIN_ROWS, head_dim, generator=generator)
        whole = _products(queries[:, :count], keys, values)
        for rows in (1, 2, 3, 5, 8, 9, 16, 17):
            for row in (0, 1, 11, BLOCK - rows):
                first, taken = row * per_kv, rows * per_kv
                group = queries[:, first : first + max(taken, MIN_ROWS)]
                alone = _products(group, keys, values)[:, :taken]
                if not torch.equal(alone, whole[:, first : first + taken]):
                    return False
    return True


def _products(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = torch.bmm(queries, keys.transpose(1, 2)) * head_scale(keys)
    return torch.bmm(torch.softmax(scores, dim=-1), values)
