"""Loaded models whose decoding steps have fixed shapes, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from ssd_workers.engine.fixed_runner import FixedShapeRunner, make_runner
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.step_executors import GraphSteps
from tests.graph_recorder import CpuRecorder

CPU = torch.device("cpu")


def recorded(model: LoadedModel) -> LoadedModel:
    """``model`` with every step of fixed shapes recorded once and played back."""
    runner = FixedShapeRunner(
        model.runner.model,
        CPU,
        "packed",
        lambda step, device: GraphSteps(step, device, CpuRecorder(device)),
    )
    runner.check_supported("tiny")
    return replace(model, runner=runner)


def static(model: LoadedModel) -> LoadedModel:
    """``model`` with steps of fixed shapes, one operation after the other."""
    runner = make_runner(model.runner.model, CPU, "packed", "static")
    runner.check_supported("tiny")
    return replace(model, runner=runner)


def fixed_runner(model: LoadedModel) -> FixedShapeRunner:
    assert isinstance(model.runner, FixedShapeRunner)
    return model.runner
