"""How long-running work reports how far it is; drawing the bar is the caller's business."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from the working thread; must return quickly and never raise."""

    def __call__(self, stage: str, done: float, total: float, unit: str) -> None:
        """Report that ``done`` of ``total`` ``unit`` of ``stage`` are complete."""
        ...


def no_progress(stage: str, done: float, total: float, unit: str) -> None:
    """Report nothing."""
    del stage, done, total, unit
