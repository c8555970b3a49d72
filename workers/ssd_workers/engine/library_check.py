"""Whether this engine computes what transformers computes, tried on the model at hand.

Names of architectures and settings are not trusted: the model's own forward, with the library's
own attention and experts and without any cache, is the reference. Against it stands the engine's:
two sequences of different lengths in one packed step, one of them with rejected tokens behind it.
Windows are made smaller than the sequences for the time of the check.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd_workers.engine.attention import ATTENTION_NAME, PackedStep
from ssd_workers.engine.experts import is_experts
from ssd_workers.engine.kv_cache import SequenceCache
from ssd_workers.engine.rollback import refuse_shared_keys

Forward = Callable[[list[tuple[SequenceCache, list[int]]]], torch.Tensor]
"""Appends tokens to caches and returns the logits of all of them."""

# Tokens of both sequences, of the longer one's first step, and rejected ones behind them.
_LONG, _SHORT, _FIRST, _REJECTED = 10, 6, 5, 2
_WINDOW = 4
# Settings that say how many keys a query sees.
_WINDOW_SETTING = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")


class StepRecord(PackedStep):
    """A step that counts how often each layer wrote keys and values and attended to them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes: Counter[int] = Counter()
        self.reads: Counter[int] = Counter()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class."""
        self.writes[layer_idx] += 1
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def attend(self, layer: int, query: torch.Tensor, **how: Any) -> torch.Tensor:
        """As the base class.

        Raises:
          UnsupportedModelError: the layer did not write what it attends to.
        """
        if layer not in self.writes:
            refuse_shared_keys(layer)
        self.reads[layer] += 1
        return super().attend(layer, query, **how)


@dataclass(frozen=True)
class Comparison:
    """What a check found.

    ``difference``: how far the engine's logits are from the library's, relative to their size,
    for each row. ``rows_are_alike``: whether a row has the same bits alone as beside others.
    """

    difference: torch.Tensor
    rows_are_alike: bool


def compare(
    model: PreTrainedModel,
    forward: Forward,
    new_cache: Callable[[], SequenceCache],
    attempt: int = 0,
) -> Comparison:
    """Compare the engine with the library, and a row alone with the same row beside others.

    Parameters:
      model: whose forward ``forward`` is, with this engine's attention.
      forward: one step of the engine.
      new_cache: makes an empty cache.
      attempt: another one tries other tokens.
    """
    long, short = _tokens(model, attempt)
    cache, other = new_cache(), new_cache()
    with _small_windows(model):
        first = forward([(cache, [*long[:_FIRST], *short[:_REJECTED]])])[:_FIRST]
        cache.truncate(_FIRST)
        both = forward([(other, short), (cache, long[_FIRST:])])
        cache.truncate(_FIRST)
        alone = forward([(cache, long[_FIRST : _FIRST + 1])])
        reference = _reference(model, long, short)
    ours = torch.cat([first, both[_SHORT:], both[:_SHORT]]).float()
    reference = reference.to(ours.device, torch.float32)
    apart = torch.linalg.vector_norm(ours - reference, dim=1)
    size = torch.linalg.vector_norm(reference, dim=1)
    return Comparison(
        torch.nan_to_num(apart / size.clamp_min(1e-30), nan=torch.inf),
        torch.equal(alone[0], both[_SHORT]),
    )


def _tokens(model: PreTrainedModel, attempt: int) -> tuple[list[int], list[int]]:
    """Two prompts of ordinary tokens: what means something stands at the ends of vocabularies."""
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(attempt)
    low, high = min(3, vocab_size - 1), min(vocab_size, 1000)
    tokens = torch.randint(low, high, (_LONG + _SHORT,), generator=generator).tolist()
    return tokens[:_LONG], tokens[_LONG:]


def _reference(model: PreTrainedModel, long: list[int], short: list[int]) -> torch.Tensor:
    # Tokens behind the shorter one fill it up; what stands behind a token does not change it.
    ids = torch.tensor([long, [*short, *long[_SHORT:]]], device=model.device)
    with _of_the_library(model):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.cat([logits[0], logits[1, :_SHORT]])


@contextmanager
def _of_the_library(model: PreTrainedModel) -> Iterator[None]:
    """Attention and experts as transformers computes them, inside the block.

    Quantised experts stay: there is nothing else to compute them.
    """
    before = model.get_experts_implementation()
    has_experts = any(is_experts(module) for module in model.modules())
    model.set_attn_implementation("eager")
    if has_experts:
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        if has_experts:
            model.set_experts_implementation(before)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside the block every module computes with float32 copies of its weights.

    Each module has its copies while it runs, so no more memory is taken than for the largest.
    Logits of 16 bits are too coarse to compare: rounding moves them by a tenth in a deep model.
    """
    originals: list[dict[str, nn.Parameter | None]] = []

    def enter(module: nn.Module, args: Any) -> None:
        del args
        originals.append(dict(module._parameters))
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                copy = nn.Parameter(parameter.to(torch.float32), requires_grad=False)
                module._parameters[name] = copy

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        module._parameters.update(originals.pop())

    hooks = []
    for module in model.modules():
        if module._parameters:
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _small_windows(model: nn.Module) -> Iterator[None]:
    """No window is wider than a few keys inside the block."""
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            text = config.get_text_config(decoder=True)
            owners.update({id(config): config, id(text): text})
    changed = []
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                if _WINDOW_SETTING.search(name) and type(value) is int and value > _WINDOW:
                    changed.append((owner, name, value))
                    setattr(owner, name, _WINDOW)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
