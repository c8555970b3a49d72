"""Decoding steps of fixed shapes, for CUDA graphs and ``torch.compile``; prompts run as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ssd_integrations.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from ssd_workers.engine.config import AttnImplementation, DecodeStep
from ssd_workers.engine.fixed_step import FixedStep
from ssd_workers.engine.placement import Placement
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.engine.slots import (
    MIN_CAPACITY,
    SlotCache,
    SlotPool,
    pool_capacity,
    power_of_two,
)
from ssd_workers.engine.step_executors import (
    CompiledSteps,
    CudaRecorder,
    EagerSteps,
    GraphSteps,
    StepExecutor,
    StepFunction,
)

ROW_BUCKETS = (1, 3, 5, 9, 17)
"""Rows of a sequence: drafts of 0, 2, 4, 8 and 16 tokens, and one."""

MAX_STEP_ROWS = 512
"""Rows of a step, padding included; more keep a device busy without graphs."""

# Buffers for more sequences are made when there are more.
_INITIAL_SLOTS = 8


@dataclass(frozen=True)
class Bucket:
    """The shape of a step: ``slots`` sequences of ``rows`` rows over ``keys`` keys."""

    slots: int
    rows: int
    keys: int


class FixedShapeRunner(ModelRunner):
    """Pads decoding steps to one of few shapes; a step with more rows is left to the base class.

    Parameters:
      model: loaded with this engine's attention.
      device: where all of the model is.
      attention: how the rows of prompts attend to their keys.
      make_executor: what runs steps of fixed shapes.
      max_num_seqs: sequences that there will be at once; more are possible.
    """

    joins_prompts = False

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        attention: AttnImplementation,
        make_executor: Callable[[StepFunction, torch.device], StepExecutor],
        max_num_seqs: int = _INITIAL_SLOTS,
    ) -> None:
        super().__init__(model, device, attention)
        # With a padding token some models look for it in the input, which waits for the device.
        model.config.get_text_config(decoder=True).pad_token_id = None
        pool = SlotPool(self.num_layers, min(max_num_seqs, _INITIAL_SLOTS))

        # Not a method: a cycle through the runner would keep its memory until it is collected.
        def step(inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
            return _step(model, pool, inputs, num_keys)

        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._executor = make_executor(step, device)
        self._version = pool.version

    @property
    def reuses_prefixes(self) -> bool:
        """False: blocks are copied between caches of one sequence each, which these are not."""
        return False

    def new_cache(self, expected_length: int = 0, limit: int | None = None) -> SlotCache:
        """A slot of the common buffers, with room for ``expected_length`` positions at first."""
        del limit  # capacities are those of all sequences
        return SlotCache(self._pool, expected_length)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the buffers once they have held such sequences; every slot is the longest's.

        Counted for as many sequences as there can be, since buffers do not shrink.
        """
        slots = power_of_two(max(self._max_num_seqs, self._pool.num_slots, len(lengths)))
        return self.bytes_per_token * slots * pool_capacity(max(lengths, default=0))

    @torch.inference_mode()
    def forward(self, blocks: Sequence[RowBlock]) -> torch.Tensor:
        if max(len(block.token_ids) for block in blocks) > ROW_BUCKETS[-1]:
            return super().forward(blocks)
        if not self._pool.is_allocated:  # the first step tells the layers' shapes
            return super().forward(blocks)
        caches = [_slot_cache(block) for block in blocks]
        bucket = self._bucket(blocks, caches)
        if bucket is None:
            return super().forward(blocks)
        return self._forward_fixed(blocks, caches, bucket)

    @torch.inference_mode()
    def check_supported(self, name: str) -> None:
        """As the base class, and run the smallest step of fixed shapes.

        Raises:
          UnsupportedModelError: also where the model cannot be recorded or compiled, such as one
            that waits for the device in the middle of a forward, and where padding would change
            which experts a row is sent to.
        """
        super().check_supported(name)
        if self._is_row_exact:
            raise UnsupportedModelError(
                f"Model {name!r} ({type(self.model).__name__}) cannot be decoded in steps of "
                "fixed shapes on a CPU: it chooses among experts, which has to be row-exact.",
                remedy="Use decode_step='eager'.",
            )
        try:
            self._run_padding(Bucket(1, 1, MIN_CAPACITY))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reason = str(error).strip() or type(error).__name__
            raise UnsupportedModelError(
                f"Model {name!r} ({type(self.model).__name__}) cannot be decoded in steps of "
                f"fixed shapes: {reason.splitlines()[0]}",
                remedy="Use decode_step='eager'.",
            ) from error

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Prepare the buckets of the fewest keys, up to the sequences that there is room for now.

        Raises:
          ModelLoadError: they do not fit the device's memory.
        """
        slots = 1
        try:
            while slots <= self._pool.num_slots:
                for rows in ROW_BUCKETS:
                    self._run_padding(Bucket(slots, rows, MIN_CAPACITY))
                slots *= 2
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"Steps of {slots} sequences do not fit the memory of {self.device}: {error}",
                remedy="Use a smaller max_num_seqs, or decode_step='eager'.",
            ) from error

    def _bucket(self, blocks: Sequence[RowBlock], caches: Sequence[SlotCache]) -> Bucket | None:
        """The smallest shape that holds ``blocks``; None if it is too large.

        Makes room for the new rows, and moves sequences together where that makes it smaller.
        """
        longest = max(block.cache.length + len(block.token_ids) for block in blocks)
        self._pool.reserve(longest)
        if power_of_two(1 + max(cache.slot for cache in caches)) > power_of_two(len(caches)):
            self._pool.close_gaps()
        slots = power_of_two(1 + max(cache.slot for cache in caches))
        widest = max(len(block.token_ids) for block in blocks)
        rows = next(bucket for bucket in ROW_BUCKETS if bucket >= widest)
        if slots * rows > MAX_STEP_ROWS:
            return None
        keys = pool_capacity(longest)
        return Bucket(slots, rows, keys)

    def _forward_fixed(
        self, blocks: Sequence[RowBlock], caches: Sequence[SlotCache], bucket: Bucket
    ) -> torch.Tensor:
        ids, positions, write_at = self._padding(bucket)
        kept: list[int] = []
        for block, cache in zip(blocks, caches, strict=True):
            start, rows = cache.length, len(block.token_ids)
            ids[cache.slot][:rows] = block.token_ids
            positions[cache.slot][:rows] = write_at[cache.slot][:rows] = range(start, start + rows)
            end = cache.slot * bucket.rows + rows
            kept.extend(range(end - block.keep, end))
        logits = self._run([ids, positions, write_at], bucket)
        # A copy: the executor may write its own at the next step.
        chosen = logits.index_select(0, torch.tensor(kept, dtype=torch.long, device=logits.device))
        for block in blocks:
            block.cache.length += len(block.token_ids)
        return chosen

    def _padding(self, bucket: Bucket) -> list[list[list[int]]]:
        """Token ids, positions and where to write, all padding.

        Token 0 at position 0, which every model can embed, sees one key and is written to scratch.
        """
        fill = (0, 0, self._pool.capacity)
        return [[[value] * bucket.rows for _ in range(bucket.slots)] for value in fill]

    def _run_padding(self, bucket: Bucket) -> None:
        self._run(self._padding(bucket), bucket)

    def _run(self, inputs: list[list[list[int]]], bucket: Bucket) -> torch.Tensor:
        if self._version != self._pool.version:
            self._executor.reset()
            self._version = self._pool.version
        return self._executor.run(torch.tensor(inputs), bucket.keys)


def _step(
    model: PreTrainedModel, pool: SlotPool, inputs: torch.Tensor, num_keys: int
) -> torch.Tensor:
    ids, positions, write_at = inputs.unbind(0)
    step = FixedStep(pool.keys, pool.values, positions, write_at, num_keys)
    output = model(input_ids=ids, position_ids=positions, cache=step, use_cache=True, ssd_step=step)
    logits: torch.Tensor = output.logits
    return logits.flatten(0, 1)


def _slot_cache(block: RowBlock) -> SlotCache:
    assert isinstance(block.cache, SlotCache)  # made by this runner
    return block.cache


def make_runner(
    model: PreTrainedModel,
    device: torch.device,
    attention: AttnImplementation,
    decode_step: DecodeStep,
    max_num_seqs: int = _INITIAL_SLOTS,
    dtype: str = "",
) -> ModelRunner:
    """The runner for ``decode_step``.

    A model of ``dtype`` "int8" keeps keys and values as float16, whose error is a tenth of what
    int8 products have: half the memory, and half of what a step reads of a long context.
    """

    def executor(step: StepFunction, device: torch.device) -> StepExecutor:
        if decode_step == "graphs":
            return GraphSteps(step, device, CudaRecorder(device))
        if decode_step == "compile":
            return CompiledSteps(step, device)
        return EagerSteps(step, device)

    if decode_step == "eager":
        halves = dtype == "int8" and attention == "packed"
        return ModelRunner(model, device, attention, torch.float16 if halves else None)
    return FixedShapeRunner(model, device, attention, executor, max_num_seqs)


def check_decode_step(decode_step: DecodeStep, placement: Placement, dtype: str) -> None:
    """Refuse what cannot work before any weights are read.

    Raises:
      InvalidRequestError: graphs without CUDA, or fixed shapes with a map of devices or int8.
    """
    if decode_step == "eager":
        return
    if decode_step == "graphs" and placement.device.type != "cuda":
        raise InvalidRequestError(
            f"decode_step='graphs' records CUDA graphs, and device {placement.device.type!r} "
            "has none.",
            remedy="Use device='cuda' on a machine with a GPU, or decode_step='eager' here.",
        )
    if placement.device_map is not None:
        raise InvalidRequestError(
            f"decode_step={decode_step!r} needs the whole model on one device, "
            f"not device_map={placement.device_map!r}.",
            remedy="Use device=, or decode_step='eager'.",
        )
    if dtype == "int8":
        raise InvalidRequestError(
            f"decode_step={decode_step!r} cannot run dtype 'int8', whose products are not torch's.",
            remedy="Use dtype='float32', or decode_step='eager'.",
        )
