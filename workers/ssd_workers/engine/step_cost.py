"""What a forward costs, as a function of its sequences and of its rows."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

# How much the previous steps count at each new one: about 100 are remembered. A row costs about a
# hundredth of a step, so it takes many to tell its cost from the noise of a busy machine.
_DECAY = 0.99
# A step that takes longer than this many times what was expected was held up by something else.
_LONGEST = 2.0
# How firmly base, sequence and row keep to what they began with, in steps. As long as there is one
# sequence, what it costs cannot be told from the base.
_FIRMNESS = np.array([0.1, 10.0, 5.0])
# Kernels work on blocks of rows, and the first row of a new one can cost as much as ten others.
_BLOCK_ROWS = 16
# The same for what a block costs beside the straight line.
_BLOCK_FIRMNESS = 4.0


class StepCost:
    """``base + per_sequence * sequences + per_row * rows``, and what a block of rows adds to that.

    Fitted to the latest steps: a ridge regression towards the starting values, and for each block
    of rows the mean of what remains.

    Parameters:
      base: seconds to begin with, for example from a calibration.
      per_row: seconds of each row to begin with.
    """

    def __init__(self, base: float, per_row: float) -> None:
        self.base = base
        self.per_sequence = 0.0
        self.per_row = per_row
        self._start = np.array([base, 0.0, per_row])
        self._weights: NDArray[np.float64] = np.diag(_FIRMNESS)
        # Moments of what was observed: of the features, and of them with the seconds beyond start.
        self._features = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._blocks: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def seconds(self, sequences: int, rows: int) -> float:
        """What a forward of ``rows`` rows of ``sequences`` sequences takes."""
        line = self.base + self.per_sequence * sequences + self.per_row * rows
        return max(line + self._beside_the_line(rows), 0.05 * line)

    def observe(self, sequences: int, rows: int, seconds: float) -> None:
        """Learn from one forward. A step slowed down by something else counts as a slow one."""
        # What holds a step up says nothing about rows; if it goes on, expectations follow.
        seconds = min(seconds, _LONGEST * self.seconds(sequences, rows))
        features = np.array([1.0, sequences, rows])
        beyond = seconds - self._beside_the_line(rows) - float(features @ self._start)
        self._features = _DECAY * self._features + np.outer(features, features)
        self._seconds = _DECAY * self._seconds + features * beyond
        change = np.linalg.solve(self._features + self._weights, self._seconds)
        base, per_sequence, per_row = self._start + change
        # A row is never free, and never dearer than a step of its own.
        self.per_row = float(min(max(per_row, 1e-3 * seconds), seconds))
        self.per_sequence = float(min(max(per_sequence, 0.0), seconds))
        self.base = float(max(base, 0.05 * seconds))
        self._learn_block(
            rows, seconds - float(features @ (self.base, self.per_sequence, self.per_row))
        )

    def _beside_the_line(self, rows: int) -> float:
        weight, total = self._blocks[(rows - 1) // _BLOCK_ROWS]
        return total / (weight + _BLOCK_FIRMNESS)

    def _learn_block(self, rows: int, seconds: float) -> None:
        block = (rows - 1) // _BLOCK_ROWS
        weight, total = self._blocks[block]
        self._blocks[block] = (_DECAY * weight + 1.0, _DECAY * total + seconds)
