"""Mixtures of experts whose result for a row does not depend on the rows beside it.

transformers multiplies the rows of each expert together, sorted by expert: how many rows share a
product, and thereby a row's last bits, changes with the batch. Here a row's product with an expert
has the same bits alone and beside others, in float and in int8, and what its experts return is
added up in the order in which the router named them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from ssd_workers.engine.int8 import Int8Linear
from ssd_workers.engine.row_exact_functions import row_exact_linear

EXPERTS_NAME = "ssd_row_exact"

# Where a module of experts has its quantised weights, once it has some.
_QUANTISED = "ssd_quantised"


@dataclass(frozen=True)
class QuantisedExperts:
    """For each expert the int8 product into its hidden layer and the one out of it."""

    up: Sequence[Int8Linear]
    down: Sequence[Int8Linear]


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds the weights of several experts, and calls them by this interface."""
    down = getattr(module, "down_proj", None)
    return (
        isinstance(getattr(module, "is_transposed", None), bool)
        and isinstance(down, nn.Parameter)
        and down.ndim == 3
    )


def expert_weights(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and weights ``[experts, out, in]`` of a module of experts."""
    for name in (_up_name(module), "down_proj"):
        weight = getattr(module, name).detach()
        yield name, weight.transpose(1, 2) if module.is_transposed else weight


def put_quantised(module: Any, weights: Mapping[str, Sequence[Int8Linear]]) -> None:
    """Replace the float weights of a module of experts; ``weights`` as in :func:`expert_weights`.

    The quantised products take the biases with them.
    """
    up = _up_name(module)
    for name in (up, "down_proj", f"{up}_bias", "down_proj_bias"):
        module._parameters.pop(name, None)
    setattr(module, _QUANTISED, QuantisedExperts(weights[up], weights["down_proj"]))


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The function that modules of experts call under ``EXPERTS_NAME``.

    Parameters:
      module: with the weights and the activation of its experts.
      hidden_states: ``[rows, hidden]``.
      top_k_index: ``[rows, k]``, the experts of each row.
      top_k_weights: ``[rows, k]``, what each of them counts.

    Returns: ``[rows, hidden]``.
    """
    apart = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
    for expert in sorted(set(top_k_index.flatten().tolist())):
        row, slot = torch.where(top_k_index == expert)
        apart[row, slot] = _one_expert(module, expert, hidden_states[row])
    weights = top_k_weights[..., None].to(apart.dtype)
    # One after the other: a sum over a dimension may be cut up differently for other shapes.
    total = apart[:, 0] * weights[:, 0]
    for place in range(1, apart.shape[1]):
        total = total + apart[:, place] * weights[:, place]
    return total


def _one_expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    hidden = _product(module, _up_name(module), expert, rows)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = _product(module, "down_proj", expert, hidden)
    if not module.has_post_expert_norm:
        return out
    normalised: torch.Tensor = module.post_expert_norm(out)
    return normalised


def _product(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    quantised: QuantisedExperts | None = getattr(module, _QUANTISED, None)
    if quantised is not None:
        linear = (quantised.down if name == "down_proj" else quantised.up)[expert]
        return linear.forward(rows)
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return row_exact_linear(rows, weight.T if module.is_transposed else weight, bias)


ExpertsInterface.register(EXPERTS_NAME, _experts)
