"""One forward of a model over the packed rows of many sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine.attention import Grouping, PackedStep
from ssd_workers.engine.config import AttnImplementation
from ssd_workers.engine.fusion import Recorder, fuse_layers
from ssd_workers.engine.int8 import Int8Linear, Int8Slice
from ssd_workers.engine.kv_cache import GrowingCache, SequenceCache, Span, round_up
from ssd_workers.engine.library_check import StepRecord, compare, in_float32
from ssd_workers.engine.rollback import refusal_of_error, refusal_of_layers
from ssd_workers.engine.row_exact import activations
from ssd_workers.engine.row_exact_functions import FunctionWatch, make_functions_exact
from ssd_workers.engine.step_cost import StepCost

# How far logits may be from the library's, relative to their size. In float32 both differ by
# rounding only, every row of them. Quantised layers round values that differ in their last bits to
# different levels, which moves a deep model's logits by a tenth.
_FLOAT32_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.5

# How a forward fails that a model cannot do.
_FAILURES = (TypeError, AttributeError, ValueError, LookupError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class RowBlock:
    """New tokens of one sequence, to be put at the end of its cache.

    ``keep`` is the number of last rows whose logits are wanted.
    """

    cache: SequenceCache
    token_ids: Sequence[int]
    keep: int


class ModelRunner:
    """Runs a decoder-only transformers model on packed rows; owns no sequence.

    Parameters:
      model: loaded with this engine's attention.
      device: where token ids go in and logits come out.
      attention: how rows attend to their keys.
      cache_dtype: the type that keys and values are kept in, if it is not the model's.

    ``bytes_per_token`` of keys and values is known once :meth:`check_supported` has run.
    """

    #: Whether prompts are read in the same forward as decoding rows.
    joins_prompts = True

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        attention: AttnImplementation = "packed",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self._attention = attention
        self._cache_dtype = cache_dtype
        self.bytes_per_token = 0
        self.is_int8 = any(isinstance(m, Int8Linear | Int8Slice) for m in model.modules())
        #: Whether the model chooses by rank, as mixtures of experts do; known once it is checked.
        self.ranks = False
        config = model.config.get_text_config(decoder=True)
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        # Off the CPU no library promises the same bits, and few launches count more.
        self.grouping: Grouping = "row" if device.type == "cpu" else "span"

    def calibrate(self) -> StepCost:
        """What a forward of few rows costs here, in seconds; refined while decoding."""
        seconds = {rows: min(self._timed(rows) for _ in range(2)) for rows in (1, 9)}
        per_row = max((seconds[9] - seconds[1]) / 8, 1e-3 * seconds[1])
        return StepCost(max(seconds[1] - per_row, 0.05 * seconds[1]), per_row)

    def _timed(self, rows: int) -> float:
        cache = self.new_cache()
        started = time.perf_counter()
        self.forward([RowBlock(cache, [1] * rows, rows)]).argmax(-1).tolist()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait until what was asked of the device is done, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self) -> None:
        """Prepare steps ahead; nothing to do where they are launched one operation at a time."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether keys and values may be copied from one cache into another.

        Not where the rotary embedding changes with the longest sequence in sight: what is stored
        then depends on more than the tokens.
        """
        kinds = [getattr(module, "rope_type", None) for module in self.model.modules()]
        named = {name for k in kinds for name in (k.values() if isinstance(k, dict) else (k,))}
        return not any(name == "longrope" or "dynamic" in (name or "") for name in named)

    def new_cache(self, expected_length: int = 0, limit: int | None = None) -> SequenceCache:
        """An empty cache with room for ``expected_length`` positions, later at most ``limit``."""
        return GrowingCache(self.num_layers, expected_length, limit)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of caches that end with so many positions each, all together."""
        return self.bytes_per_token * sum(round_up(length) for length in lengths)

    @torch.inference_mode()
    def forward(self, blocks: Sequence[RowBlock]) -> torch.Tensor:
        """Append every block to its cache and return the logits ``[sum of keep, vocab]``.

        The caches' lengths grow by the blocks' rows; truncate them to roll back.
        """
        step, logits = self._forward(blocks)
        for span in step.spans:
            span.cache.length = span.start + span.rows
        return logits

    def _forward(
        self,
        blocks: Sequence[RowBlock],
        shift: int = 0,
        step_type: type[PackedStep] = PackedStep,
    ) -> tuple[PackedStep, torch.Tensor]:
        """``shift`` is added to the positions that the model is told, not to those in the cache."""
        ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        spans = []
        for block in blocks:
            start, rows = block.cache.length, len(block.token_ids)
            spans.append(Span(block.cache, start, rows))
            ids.extend(block.token_ids)
            positions.extend(range(start + shift, start + shift + rows))
            kept.extend(range(len(ids) - block.keep, len(ids)))
        step = step_type(
            spans,
            grouping=self.grouping,
            implementation=self._attention,
            cache_dtype=self._cache_dtype,
        )
        output = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            cache=step,
            use_cache=True,
            # A model must compute at least one row of logits.
            logits_to_keep=torch.tensor(kept or [len(ids) - 1], device=self.device),
            ssd_step=step,
        )
        return step, output.logits[0, : len(kept)]

    @property
    def _is_row_exact(self) -> bool:
        """Whether a row's logits must have the same bits whatever stands beside it.

        In int8 that is the promise. In float32 last bits may differ, but not where they choose
        another expert.
        """
        return self.device.type == "cpu" and (self.is_int8 or self.ranks)

    @torch.inference_mode()
    def fuse_layers(self, context_length: int) -> int:
        """Fuse the small operations of an int8 model where that changes nothing.

        Tried at the first positions and at the last of ``context_length``: some models compute
        distant ones in another way.

        Returns: the number of layers replaced.
        """
        tokens = range(1, 10)
        recorder = Recorder(self.model)
        try:
            steps = [
                self._forward([RowBlock(self.new_cache(), tokens, 1)], shift)[0]
                for shift in (0, max(0, context_length - len(tokens)))
            ]
        finally:
            recorder.close()
        return fuse_layers(self.model, recorder, steps)

    @torch.inference_mode()
    def check_supported(self, name: str) -> None:
        """Run three tokens and see that every layer goes through our cache and attention.

        Raises:
          UnsupportedModelError: the model keeps state elsewhere, so it cannot be rolled back, or
            its attention is not computed here.
        """
        refusal = self._refusal(name)
        watch = FunctionWatch(self.model)
        try:
            with watch:
                step, _ = self._forward(
                    [RowBlock(self.new_cache(), [1, 2, 3], 1)], step_type=StepRecord
                )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{refusal} {error.message}", remedy=error.remedy
            ) from error
        except _FAILURES as error:
            raise self._failed(name, error) from error
        assert isinstance(step, StepRecord)
        reason = refusal_of_layers(self.num_layers, step.writes, step.reads)
        if reason is not None:
            raise UnsupportedModelError(f"{refusal} {reason}")
        self.ranks = watch.ranks
        if self._is_row_exact:
            make_functions_exact(watch.callers - activations(self.model))
        cache = step.spans[0].cache
        layers = [cache.read(layer, 0, 1) for layer in range(self.num_layers)]
        self.bytes_per_token = sum(keys.nbytes + values.nbytes for keys, values in layers)

    @torch.inference_mode()
    def check_against_library(self, name: str) -> None:
        """Compare logits with those of the model's own forward, and of rows alone and together.

        Windows are made small for the time of the check. Call it before layers are fused.

        Raises:
          UnsupportedModelError: the model does something that this engine leaves out, or, where
            rows must be exact, mixes them.
        """

        def forward(blocks: list[tuple[SequenceCache, list[int]]]) -> torch.Tensor:
            rows = [RowBlock(cache, tokens, len(tokens)) for cache, tokens in blocks]
            return ModelRunner.forward(self, rows)

        # Weights of other kinds than floats, or elsewhere, are not copied.
        plain = not self.is_int8 and all(
            p.is_floating_point() and p.device.type == self.device.type
            for p in self.model.parameters()
        )
        tolerance = _FLOAT32_TOLERANCE if plain else _COARSE_TOLERANCE
        widened = plain and self.model.dtype != torch.float32
        # A near tie between experts may be decided otherwise in one text, hardly in three.
        for attempt in range(3 if self.ranks else 1):
            try:
                with in_float32(self.model) if widened else nullcontext():
                    found = compare(self.model, forward, self.new_cache, attempt)
            except _FAILURES as error:
                raise self._failed(name, error) from error
            apart = float(found.difference.max() if plain else found.difference.median())
            if apart <= tolerance:
                break
        else:
            raise UnsupportedModelError(
                f"{self._refusal(name)} its logits are {apart:.1%} away from those that "
                "transformers computes with its own attention, so it needs something that this "
                "engine does not compute."
            )
        # Torch's own attention promises no bits, and was asked for.
        promised = self._is_row_exact and self._attention == "packed"
        if promised and not found.rows_are_alike:
            raise UnsupportedModelError(
                f"{self._refusal(name)} what it computes for a token depends on the tokens "
                "computed beside it, so speculation could change its text.",
                remedy="Use --dtype float32." if self.is_int8 else None,
            )

    def _failed(self, name: str, error: Exception) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._refusal(name)} {refusal_of_error(self.model, error)}",
            remedy="Use --dtype float32." if self.is_int8 else None,
        )

    def _refusal(self, name: str) -> str:
        return f"Model {name!r} ({type(self.model).__name__}) cannot be decoded by this engine:"
