"""Long vectors compute what short ones do: results of the AVX-512 and the AVX2 library are the same, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.factories import HERE, KV_DTYPES, Heads, Requests, compiled, random
from tests.kernels.matrices import matrices
from trunkline.kernels.quantized import QuantizedMatrix, quantize_int8

pytestmark = pytest.mark.skipif("avx512" not in HERE, reason="this processor has no AVX-512 with VNNI")

WIDE, NARROW = ("avx512", "avx2")
ROWS = st.integers(1, 130)  # from 85 on, matrices of 8 bits are widened


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS, n=st.integers(1, 40), k=st.integers(1, 600), dtype=st.sampled_from(["float32", "float16", "bfloat16"])
)
def test_plain_weights(rows: int, n: int, k: int, dtype: str) -> None:
    x, weight = random(rows, k), random(n, k, seed=1)
    assert_equal(x, weight, getattr(torch, dtype))


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, matrix=matrices(), biased=st.booleans())
def test_packed_weights(rows: int, matrix: QuantizedMatrix, biased: bool) -> None:
    bias = random(len(matrix), seed=2) if biased else None
    assert_equal(random(rows, matrix.shape[1]), matrix, bias=bias)


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, n=st.integers(1, 40), k=st.integers(1, 900))
def test_int8(rows: int, n: int, k: int) -> None:
    assert_equal(random(rows, k), quantize_int8(random(n, k, seed=1)))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention(dtype: torch.dtype) -> None:
    requests = Requests([700, 33, 5], Heads(query=6, kv=2, dim=24))
    results = []
    for target in (WIDE, NARROW):
        kernels = compiled(target)
        kv = requests.allocate(kernels, dtype)
        prompts = requests.attend(kernels, kv, requests.everything(), window=600, soft_cap=20.0)
        results.append((prompts, requests.attend(kernels, kv, [(0, 699, 700), (1, 30, 33)], store=False)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_operations_on_rows() -> None:
    results = []
    for target in (WIDE, NARROW):
        kernels = compiled(target)
        normed, gated = torch.empty(9, 77), torch.empty(9, 77)
        kernels.add_rms_norm(random(9, 77), random(9, 77, seed=1), random(77, seed=2), 1e-5, out=normed)
        kernels.gated_mul(random(9, 154), "gelu_tanh", out=gated)
        results.append((normed, gated))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def assert_equal(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    dtype: torch.dtype = torch.float16,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    outs = []
    for target in (WIDE, NARROW):
        kernels = compiled(target)
        out = torch.empty(len(x), len(weight))
        kernels.linear(x, kernels.pack_linear([weight], dtype), bias, out=out)
        outs.append(out)
    assert torch.equal(*outs)
