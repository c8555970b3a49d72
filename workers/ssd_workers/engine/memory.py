"""Who may hold keys and values: running sequences within a budget, and what earlier ones left."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from functools import cached_property

from ssd_integrations.errors import ContextLengthError
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.free_memory import default_budget
from ssd_workers.engine.kv_cache import BLOCK, GrowingCache, round_up
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.prefix_cache import PrefixCache
from ssd_workers.engine.runner import ModelRunner
from ssd_workers.engine.sequence import Sequence

OPEN_ENDED = 512
"""Positions for output that a request without ``max_tokens`` is given at first."""

UNLIMITED = sys.maxsize

_MIB = 2**20
# Prefixes at most, where nobody has said how much: on the CPU and elsewhere.
_CPU_PREFIXES, _DEVICE_PREFIXES = 256 * _MIB, 1024 * _MIB
# A draft model does not know how long a sequence can become, so its caches grow by half.
_DRAFT_SLACK = 3 / 2


class CacheMemory:
    """Gives sequences their caches. Used by the engine thread alone, but for :attr:`longest`.

    A request with ``max_tokens`` is given room for all that it can write when it starts, so it
    never waits in the middle. One without is given ``OPEN_ENDED`` positions, and more as it writes;
    if there is no more, the sequence that started last is put back into the queue and computed
    again later. What earlier sequences left gives way first.

    Parameters:
      runner: the target model's.
      draft: the draft model's; a cache of its own is counted for every sequence.
      budget: bytes of keys and values, on all devices together.
      prefixes: bytes of them that earlier sequences' may take; 0 keeps nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        draft: ModelRunner | None = None,
        *,
        budget: int = UNLIMITED,
        prefixes: int = 0,
    ) -> None:
        self._runner = runner
        self._draft = draft
        self.budget = budget
        reuse = prefixes > 0 and runner.reuses_prefixes
        self.prefixes = PrefixCache(min(prefixes, budget)) if reuse else None
        self._claimed = 0

    @classmethod
    def from_config(
        cls, config: EngineConfig, target: LoadedModel, draft: LoadedModel | None
    ) -> CacheMemory:
        """What ``config`` says; where it says nothing, what the machine has to give."""
        if config.kv_cache_mib is not None:
            budget = config.kv_cache_mib * _MIB
        else:
            budget = default_budget(p.device for p in target.runner.model.parameters())
        if config.prefix_cache_mib is not None:
            prefixes = config.prefix_cache_mib * _MIB
        else:
            prefixes = _CPU_PREFIXES if target.device.type == "cpu" else _DEVICE_PREFIXES
        runner = draft.runner if draft else None
        return cls(target.runner, runner, budget=budget, prefixes=prefixes)

    @cached_property
    def longest(self) -> int:
        """Positions of the longest sequence that the budget holds, in whole blocks."""
        low, high = 0, 2**31 // BLOCK  # in blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self._bytes([middle * BLOCK]) <= self.budget:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK

    def max_new_tokens(self, prompt_length: int, asked: int | None, room: int) -> int:
        """How long the output may become.

        Parameters:
          prompt_length: tokens of the prompt.
          asked: the request's ``max_tokens``.
          room: what the context leaves; not less than ``asked``.

        Raises:
          ContextLengthError: prompt and output can never be held.
        """
        wanted = prompt_length + (1 if asked is None else asked)
        if wanted > self.longest:
            need = self._bytes([wanted])
            asks = "" if asked is None else f" and max_tokens={asked}"
            raise ContextLengthError(
                f"The prompt has {prompt_length} tokens{asks}, whose keys and values take "
                f"{_mib(need)} MiB ({need // round_up(wanted)} bytes a token); the engine has "
                f"{self.budget // _MIB} MiB for them, enough for {self.longest} tokens.",
                remedy="Shorten the prompt or lower max_tokens, or start the engine with a larger "
                "kv_cache_mib.",
            )
        return min(room, self.longest - prompt_length) if asked is None else asked

    def has_room(self, sequence: Sequence, running: Seq[Sequence]) -> bool:
        """Whether ``sequence`` may start beside those ``running``; prefixes give way to it."""
        return self._fit([*running, sequence]) or not running

    def outgrown(self, running: Seq[Sequence]) -> list[Sequence]:
        """Those of ``running``, oldest first, that must go back for the others to go on."""
        staying = list(running)
        while not self._fit(staying) and len(staying) > 1:
            staying.pop()
        return list(running[len(staying) :])

    def open(self, sequence: Sequence) -> None:
        """Give a sequence that starts its cache."""
        sequence.reserved_length = _reservation(sequence)
        # Beyond what is reserved a cache grows by single blocks, since each must be asked for.
        sequence.cache = self._runner.new_cache(sequence.prefill_length, sequence.reserved_length)

    def reuse(self, sequence: Sequence) -> None:
        """Fill the cache of a sequence whose prompt is being read with what is known already."""
        cache = sequence.cache
        if self.prefixes is None or not isinstance(cache, GrowingCache):
            return
        found = self.prefixes.fill(sequence.token_ids, cache)
        if sequence.num_output_tokens == 0:
            sequence.cached_tokens += found

    def keep(self, sequence: Sequence) -> None:
        """Let later sequences have what this one has computed."""
        cache = sequence.cache
        if self.prefixes is not None and isinstance(cache, GrowingCache):
            self.prefixes.store(sequence.token_ids, cache, self.budget - self._claimed)

    def forget_prefixes(self) -> None:
        """Let nobody have what was computed so far."""
        if self.prefixes is not None:
            self.prefixes.shrink(0)

    def _fit(self, sequences: Seq[Sequence]) -> bool:
        """Whether all of them fit at once, after prefixes have made room."""
        claimed = self._bytes([_claim(sequence) for sequence in sequences])
        if claimed > self.budget:
            return False
        self._claimed = claimed
        if self.prefixes is not None:
            self.prefixes.shrink(self.budget - claimed)
        return True

    def _bytes(self, lengths: Seq[int]) -> int:
        draft = 0 if self._draft is None else self._draft.cache_bytes(lengths)
        return self._runner.cache_bytes(lengths) + int(_DRAFT_SLACK * draft)


def _reservation(sequence: Sequence) -> int:
    """The length that a sequence is sure to have room for when it starts."""
    if sequence.sampling.max_tokens is not None:
        return sequence.max_length
    return min(sequence.max_length, len(sequence.token_ids) + OPEN_ENDED)


def _claim(sequence: Sequence) -> int:
    """The length that a sequence has room for, or will have after the next step."""
    if sequence.cache is None:
        return _reservation(sequence)
    next_length = len(sequence.token_ids) + sequence.num_draft_tokens + 1
    return min(sequence.max_length, max(sequence.reserved_length, next_length))


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.0f}" if nbytes >= 10 * _MIB else f"{nbytes / _MIB:.2f}"
