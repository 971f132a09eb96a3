"""Packed linear layers and the embedding that shares their weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.factories import TARGETS, THIS_MACHINE, assert_close, compiled, random
from trunkline.kernels.reference import ReferenceKernels

ORACLE = ReferenceKernels(torch.float64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 5), (16, 8), (17, 40), (48, 1), (100, 33), (960, 576)]  # (N, K)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, target: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    kernels = compiled(target)
    out = torch.full((len(x), len(weight)), torch.nan)
    kernels.linear(x, kernels.pack_linear([weight], dtype), bias, out=out)
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_the_oracle(target: str, dtype: torch.dtype, n: int, k: int) -> None:
    """On the weights as rounded: the arithmetic is float32's, whatever the storage."""
    weight, bias = random(n, k), random(n, seed=1)
    for rows in (1, 2, 5, 6, 7, 13, 200):
        x = random(rows, k, seed=2)
        exact = torch.empty(rows, n, dtype=torch.float64)
        ORACLE.linear(x.double(), ORACLE.pack_linear([weight.to(dtype)], torch.float64), bias, out=exact)
        assert_close(multiply(x, weight, dtype, target=target, bias=bias), exact, 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(target: str, dtype: torch.dtype) -> None:
    weight, x = random(50, 70), random(400, 70, seed=1)
    together = multiply(x, weight, dtype, target=target)
    for rows in (1, 2, 3, 4, 5, 6, 8, 193, 399):
        assert torch.equal(multiply(x[:rows], weight, dtype, target=target), together[:rows])
        assert torch.equal(multiply(x[-rows:].clone(), weight, dtype, target=target), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_matter(dtype: torch.dtype) -> None:
    weight, x = random(300, 64), random(250, 64, seed=1)
    outputs = []
    for threads in (1, 2, 7):
        kernels = compiled(threads=threads)
        out = torch.empty(250, 300)
        kernels.linear(x, kernels.pack_linear([weight], dtype), out=out)
        outputs.append(out)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_stacked_layers_equal_the_layers(sizes: list[int]) -> None:
    """q, k and v in one product, of any sizes: packing is a matter of place alone."""
    kernels, x = compiled(), random(3, 12)
    weights = [random(size, 12, seed=i) for i, size in enumerate(sizes)]
    stacked = torch.empty(3, sum(sizes))
    kernels.linear(x, kernels.pack_linear(weights, torch.float16), out=stacked)
    for weight, part in zip(weights, stacked.split(sizes, dim=1), strict=True):
        assert torch.equal(multiply(x, weight, torch.float16, target=THIS_MACHINE), part)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_packs_into_any(target: str, source: torch.dtype, dtype: torch.dtype) -> None:
    kernels, weight = compiled(target), random(20, 9).to(source)
    weight[3, 3:6] = torch.tensor([0.0, 1e-7, -3e-5])
    packed = kernels.pack_linear([weight], dtype).data  # [panels, K, panel]
    rows = packed.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[:20], weight.float().to(dtype)) and not rows[20:].any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_returns_the_stored_rows(target: str, dtype: torch.dtype) -> None:
    kernels, weight = compiled(target), random(50, 21)
    weight[7, :4] = torch.tensor([0.0, 6e-8, -6e-5, 65504.0])  # zero, subnormal in float16, its largest
    ids = torch.tensor([49, 0, 7, 16, 15, 7], dtype=torch.int32)
    out = torch.empty(6, 21)
    kernels.embed(ids, kernels.pack_linear([weight], dtype), out=out)
    assert torch.equal(out, weight.to(dtype).float()[ids.long()])


def test_wrong_shapes_are_caught() -> None:
    kernels = compiled()
    weight = kernels.pack_linear([random(4, 3)], torch.float32)
    for x, out in [
        (torch.zeros(2, 4), torch.zeros(2, 4)),
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 4)),
        (torch.zeros(3, 2).T, torch.zeros(2, 4)),
    ]:
        with pytest.raises(AssertionError):
            kernels.linear(x, weight, out=out)
