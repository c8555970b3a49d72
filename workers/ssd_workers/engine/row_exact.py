"""Activation functions whose result for a row does not depend on the rows beside it.

PyTorch computes an elementwise function in vectors and what is left at the end of a thread's
share one by one; for SiLU, GELU and sigmoid the two may differ in the last bit, and GELU has a
kernel of its own for contiguous tensors. How a tensor is shared out depends on its size, so a
value could come out differently in another batch. Here every tensor is contiguous and every share
a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2CLS

#: A multiple of the values that the elementwise loops of any processor take at a time.
_VECTOR = 32
#: A tensor of at most this many values is computed by one thread.
_ALONE = 16_384
#: Beyond, GELU is shared out over all threads, the others over one for each so many values.
_GRAIN = 32_768


class RowExactActivation(nn.Module):
    """``inner``, an elementwise function of ``[..., width]`` tensors, with row-exact results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return elementwise(self.inner, x)


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function`` of every value of ``x [..., width]``, with row-exact results."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    if width % _VECTOR:
        rows = nn.functional.pad(rows, (0, -width % _VECTOR))
    if _shares_are_whole(rows.numel()):
        result = function(rows)
    else:
        alone = max(1, _ALONE // rows.shape[1])
        result = torch.cat([function(part) for part in torch.split(rows, alone)])
    return result[:, :width].view(x.shape)


def make_activations_exact(model: nn.Module) -> None:
    """Wrap every activation function of ``model``."""
    kinds = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kinds)
    ]
    for parent, name, child in found:
        setattr(parent, name, RowExactActivation(child))


def activations(model: nn.Module) -> set[nn.Module]:
    """The activation functions of ``model`` that are wrapped."""
    return {module.inner for module in model.modules() if isinstance(module, RowExactActivation)}


def _shares_are_whole(count: int) -> bool:
    """Whether every thread gets a multiple of ``_VECTOR`` of ``count`` values."""
    if count <= _ALONE:
        return True
    threads = torch.get_num_threads()
    few = min(threads, -(-count // _GRAIN))
    return all(-(-count // shares) % _VECTOR == 0 for shares in (few, threads) if shares > 1)
