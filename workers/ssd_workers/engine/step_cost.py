"""What a forward costs, as a function of its rows."""

from __future__ import annotations

# How much the previous steps count at each new one: about 100 are remembered. A row costs about a
# hundredth of a step, so it takes many to tell its cost from the noise of a busy machine.
_DECAY = 0.99
# A step that takes longer than this many times what was expected was held up by something else.
_LONGEST = 2.0


class StepCost:
    """Seconds of a forward as ``base + per_row * rows``, fitted to the latest ones.

    Parameters:
      base: seconds to begin with, for example from a calibration.
      per_row: seconds of each row to begin with.
    """

    def __init__(self, base: float, per_row: float) -> None:
        self.base = base
        self.per_row = per_row
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        # The starting values weigh as much as a few measured steps.
        for rows in (1, 9):
            for _ in range(4):
                self._add(rows, base + per_row * rows)

    def seconds(self, rows: int) -> float:
        """What a forward of ``rows`` rows takes."""
        return self.base + self.per_row * rows

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one forward. A step slowed down by something else counts as a slow one."""
        # What holds a step up says nothing about rows; if it goes on, expectations follow.
        self._add(rows, min(seconds, _LONGEST * self.seconds(rows)))
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x**2
        if variance > 0.25:
            slope = (self._xy / self._w - mean_x * mean_y) / variance
            # A row is never free, and never dearer than a step of its own.
            self.per_row = min(max(slope, 1e-3 * mean_y), mean_y)
        self.base = max(mean_y - self.per_row * mean_x, 0.05 * mean_y)

    def _add(self, rows: int, seconds: float) -> None:
        decay = _DECAY
        self._w = self._w * decay + 1.0
        self._x = self._x * decay + rows
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + rows * rows
        self._xy = self._xy * decay + rows * seconds
