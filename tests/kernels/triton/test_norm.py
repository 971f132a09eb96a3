"""RMSNorm with and without the addition: right by the float64 oracle, and row by row."""

import math

import pytest
import torch

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton import norm
from trunkline.kernels.triton.norm import CONFIGS, add_rms_norm, rms_norm, specs

ORACLE = ReferenceKernels(torch.float64)
SHAPES = [(1, 1), (3, 7), (17, 64), (5, 576), (2, 5000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, std=3).to(dtype), random(width, seed=1).to(dtype)
    out, oracle = torch.full_like(x, math.nan), torch.empty(rows, width, dtype=torch.float64)
    rms_norm(x, weight, 1e-5, out=out)
    ORACLE.rms_norm(x.double(), weight.double(), 1e-5, out=oracle)
    assert_close(out, oracle, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = random(rows, width).to(dtype), random(rows, width, seed=1).to(dtype)
    weight, out = random(width, seed=2).to(dtype), torch.full_like(x, math.nan)
    total, oracle = residual.double(), torch.empty(rows, width, dtype=torch.float64)
    ORACLE.add_rms_norm(x.double(), total, weight.double(), 1e-5, out=oracle)
    sums = (x.float() + residual.float()).to(dtype)
    add_rms_norm(x, residual, weight, 1e-5, out=out)
    assert torch.equal(residual, sums)
    assert_close(out, oracle, TOLERANCE[dtype])
    separate = torch.empty_like(out)
    rms_norm(residual, weight, 1e-5, out=separate)
    assert torch.equal(out, separate)


def test_epsilon_counts() -> None:
    out = torch.empty(1, 4)
    rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5, out=out)
    assert torch.equal(out, torch.zeros(1, 4))
    rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 12.0, out=out)
    assert out[0].tolist() == pytest.approx([0.5] * 4)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(19, 300), random(300, seed=1)
    together, alone = torch.empty_like(x), torch.empty(1, 300)
    rms_norm(x, weight, 1e-5, out=together)
    for row in (0, 7, 18):
        rms_norm(x[row : row + 1], weight, 1e-5, out=alone)
        assert torch.equal(alone[0], together[row])


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes an empty grid for an error, the interpreter does not: nothing may be launched."""
    monkeypatch.setattr(norm, "_rms_norm_kernel", None)
    rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, out=torch.empty(0, 8))


def test_misfits_are_refused() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.empty(2, 8), torch.ones(7), 1e-5, out=torch.empty(2, 8))
    with pytest.raises(AssertionError):
        rms_norm(torch.empty(2, 8), torch.ones(8), 1e-5, out=torch.empty(2, 8, dtype=torch.float16))
    with pytest.raises(AssertionError, match="at most 16384"):
        rms_norm(torch.empty(1, 20_000), torch.ones(20_000), 1e-5, out=torch.empty(1, 20_000))


def test_what_is_shipped() -> None:
    assert len({spec.name for spec in specs(90)}) == len(specs(90)) == 6 * len(CONFIGS)
