"""The compiled loops against plain torch, and their rows against each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ssd_workers.engine import kernels
from ssd_workers.engine.int8 import quantize_rows
from ssd_workers.engine.row_threads import by_rows

GELU = 2 * (2 / np.pi) ** 0.5


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def gated(y: torch.Tensor, linear: float, cubic: float) -> tuple[torch.Tensor, np.ndarray]:
    """int8 rows and scales of the gate kernel for products ``y [R, 2n]``, already scaled."""
    out = torch.empty(len(y), y.shape[1] // 2, dtype=torch.uint8)
    scale = np.empty(len(y), np.float32)
    ones = np.ones(len(y), np.float32)
    arrays = (y.numpy(), ones, out.numpy(), scale)
    by_rows(kernels.gate, y.shape[1], arrays, np.float32(linear), np.float32(cubic))
    return out, scale


@pytest.mark.parametrize(
    ("linear", "cubic", "act"),
    [
        (1.0, 0.0, functional.silu),
        (GELU, GELU * 0.044715, lambda x: functional.gelu(x, approximate="tanh")),
        (1.702, 0.0, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
    ids=["silu", "gelu-tanh", "quick-gelu"],
)
@pytest.mark.parametrize("width", [1, 77, 8960])
def test_gate(linear: float, cubic: float, act, width: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    y = torch.randn(5, 2 * width) * 6
    out, scale = gated(y, linear, cubic)
    expected = act(y[:, :width]) * y[:, width:]
    scales = torch.from_numpy(scale)[:, None]
    back = (out.float() - 128) * scales
    # The nearest level, but for the last bits before rounding.
    assert ((back - expected).abs() <= 0.501 * scales + 1e-6).all()


def test_gate_of_extreme_values() -> None:
    y = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 1, 1, 1, 1, 1, 1]])
    out, scale = gated(y, 1.0, 0.0)
    values = (out.float() - 128) * torch.from_numpy(scale)[:, None]
    torch.testing.assert_close(values[0], torch.tensor([0, 0, 0, 0, 0, 1e4]), atol=80, rtol=0)
    assert np.isfinite(scale).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_not_hidden(bad: float) -> None:
    x = torch.ones(2, 40)
    x[1, 7] = bad
    _, scale = quantize_rows(x)
    assert np.isfinite(scale[0])
    assert not np.isfinite(scale[1])
    _, scale = gated(torch.cat([x, torch.ones(2, 40)], dim=1), 1.0, 0.0)
    assert np.isfinite(scale[0])
    # -inf is shut by its gate: its product is 0 * inf, which is no number either.
    assert not np.isfinite(scale[1])


def test_quantize_takes_the_nearest_level() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 333) * torch.tensor([1e-3, 1, 10, 1e4, 1, 1])[:, None]
    x[4] = 0
    rows, scale = quantize_rows(x)
    back = (rows.float() - 128) * torch.from_numpy(scale)[:, None]
    assert ((back - x).abs() <= 0.5001 * torch.from_numpy(scale)[:, None]).all()
    assert rows[0].max() in (1, 255) or rows[0].min() == 1
    assert (rows[4] == 128).all()


@pytest.mark.parametrize("width", [3, 128, 1536])
def test_rms_norm(width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, width), torch.randn(width)
    out = torch.empty_like(x)
    kernels.rms_norm(x.numpy(), out.numpy(), weight.numpy(), np.float32(1e-6))
    torch.testing.assert_close(out, functional.rms_norm(x, (width,), weight, eps=1e-6))


@pytest.mark.parametrize("bias", [True, False])
def test_dequantize(bias: bool) -> None:
    torch.manual_seed(0)
    y, scale = torch.randn(4, 55), torch.rand(4)
    shift = torch.randn(55) if bias else torch.empty(0)
    expected = y * scale[:, None] + (shift if bias else 0)
    kernels.dequantize(y.numpy(), scale.numpy(), shift.numpy())
    torch.testing.assert_close(y, expected)


def test_rows_on_other_threads_have_the_same_bits(three_threads: None) -> None:
    torch.manual_seed(0)
    y = torch.randn(100, 2 * 8960)
    out, scale = gated(y, 1.0, 0.0)
    for row in (0, 33, 34, 66, 99):
        alone, alone_scale = gated(y[row : row + 1], 1.0, 0.0)
        assert torch.equal(alone[0], out[row])
        assert alone_scale[0] == scale[row]


def test_a_forked_process_has_threads_of_its_own(three_threads: None) -> None:
    y = torch.randn(100, 2 * 8960)
    gated(y, 1.0, 0.0)
    child = os.fork()
    if child == 0:
        # Without threads of its own this would wait for ever.
        gated(y, 1.0, 0.0)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_machine_without_a_place_for_compiled_code_decodes_all_the_same(tmp_path: Path) -> None:
    """As in a container whose user has no home and may not write beside the package."""
    copy = tmp_path / "kernels_copy.py"
    shutil.copy(str(kernels.__file__), copy)
    code = (
        # Where tests run as root, no folder refuses to be written to.
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import numpy as np, kernels_copy as k\n"
        "y = np.ones((1, 4), np.float32)\n"
        "k.dequantize(y, np.full(1, 3, np.float32), np.empty(0, np.float32))\n"
        "print(y[0, 0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "3.0", done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr
