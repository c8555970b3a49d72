"""Ways to run a function of fixed shapes: as it is, compiled, or recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

StepFunction = Callable[[torch.Tensor, int], torch.Tensor]
"""``inputs [3, slots, rows]`` on the device and a number of keys, to logits [slots*rows, vocab]."""


_MAX_COMPILATIONS = 10_000


class StepExecutor(Protocol):
    """Runs a step function; what it returns is valid until the next run."""

    def run(self, inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
        """The logits for ``inputs``, which are on the CPU."""

    def reset(self) -> None:
        """Forget what was prepared: the buffers that the function writes are others now."""


class EagerSteps:
    """One operation after the other, in the same shapes as the other executors."""

    def __init__(self, step: StepFunction, device: torch.device) -> None:
        self._step = step
        self._device = device

    def run(self, inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
        return self._step(inputs.to(self._device), num_keys)

    def reset(self) -> None:
        pass


class CompiledSteps:
    """Through ``torch.compile``, once for each bucket at its first use; takes tens of seconds.

    Parameters:
      step: what is compiled, as one graph without a way back to Python.
      device: where it runs.
    """

    def __init__(self, step: StepFunction, device: torch.device) -> None:
        self._device = device
        self._compiled: StepFunction = torch.compile(step, fullgraph=True, dynamic=False)
        self._prepared: set[tuple[torch.Size, int]] = set()

    def run(self, inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
        on_device, bucket = inputs.to(self._device), (inputs.shape, num_keys)
        if bucket in self._prepared:
            return self._compiled(on_device, num_keys)
        # torch gives up at the ninth shape, taking it for an accident.
        with torch._dynamo.config.patch(
            recompile_limit=_MAX_COMPILATIONS, accumulated_recompile_limit=_MAX_COMPILATIONS
        ):
            logits = self._compiled(on_device, num_keys)
        self._prepared.add(bucket)
        return logits

    def reset(self) -> None:
        self._prepared.clear()


class Recorder(Protocol):
    """Records what a function asks of the device."""

    def record(self, function: Callable[[], object]) -> Callable[[], None]:
        """Something that does the same work again, on the same tensors."""

    def wait(self) -> None:
        """Return when nothing recorded is running any more."""


@dataclass(frozen=True)
class _Graph:
    """``replay`` reads ``inputs`` and writes ``logits``."""

    inputs: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]


class GraphSteps:
    """Records the step once for each bucket and plays it back: one launch instead of hundreds.

    Parameters:
      step: must do the same operations at every call, and never wait for the device.
      device: where it runs.
      recorder: how; see :class:`CudaRecorder`.
    """

    def __init__(self, step: StepFunction, device: torch.device, recorder: Recorder) -> None:
        self._step = step
        self._device = device
        self._recorder = recorder
        self._graphs: dict[tuple[torch.Size, int], _Graph] = {}
        # Logits are large: graphs that differ in their keys only share a tensor for them.
        self._logits: dict[torch.Size, torch.Tensor] = {}

    def run(self, inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
        graph = self._graphs.get((inputs.shape, num_keys))
        if graph is None:
            graph = self._graphs[inputs.shape, num_keys] = self._record(inputs, num_keys)
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.logits

    def reset(self) -> None:
        self._recorder.wait()
        self._graphs.clear()
        self._logits.clear()

    def _record(self, inputs: torch.Tensor, num_keys: int) -> _Graph:
        # What a graph reads and writes has to stay in place as long as it is played.
        static = inputs.to(self._device, copy=True)
        first = self._step(static, num_keys)
        logits = self._logits.setdefault(inputs.shape, torch.empty_like(first))
        replay = self._recorder.record(lambda: logits.copy_(self._step(static, num_keys)))
        return _Graph(static, logits, replay)


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], object]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            # Libraries set themselves up at the first calls on a stream; a graph cannot hold that.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of an application may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()

        def replay() -> None:
            # On the current stream of the model's device, like everything else.
            with torch.cuda.device(self._device):
                graph.replay()

        return replay

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
