"""TritonKernels as an implementation of the interface: what it stores, plans and refuses, and a layer's operations in a row."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.factories import Heads, Requests, assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.errors import ConfigError
from trunkline.kernels.interface import Batch, Kernels, make_batch
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton.attention import Work
from trunkline.kernels.triton.kernels import TritonKernels

CPU = torch.device("cpu")
ORACLE = ReferenceKernels(torch.float64)


def make_kernels(
    dtype: torch.dtype = torch.float32, *, query_heads: int = 4, kv_dtype: torch.dtype | None = None
) -> TritonKernels:
    return TritonKernels(CPU, dtype, query_heads=query_heads, max_model_len=700, kv_dtype=kv_dtype)


def attend(kernels: Kernels, requests: Requests, dtype: torch.dtype) -> Tensor:
    """Write everything into pages, and attend to it with the last row of each request."""
    kv = requests.allocate(kernels, dtype)
    everything = kernels.prepare(requests.batch(requests.everything()), kv)
    kernels.rotate_and_store(requests.rows(requests.everything(), dtype), requests.rope, everything, kv, 1)
    last = [(request, context - 1, context) for request, context in enumerate(requests.contexts)]
    batch, qkv = kernels.prepare(requests.batch(last), kv), requests.rows(last, dtype)
    kernels.rotate_and_store(qkv, requests.rope, batch, kv, 1)
    out = torch.full((len(qkv), requests.heads.query * requests.heads.dim), math.nan, dtype=dtype)
    kernels.attention(qkv, batch, kv, 1, requests.heads.dim**-0.5, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (3, 33), (9, 128), (1, 576), (70, 20)])
def test_linear(rows: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    """Also into float32, as logits want it."""
    kernels, x = make_kernels(dtype), random(rows, k).to(dtype)
    parts = [random(5, k, seed=1), random(12, k, seed=2)]
    added = random(17, seed=3).to(dtype) if bias else None
    weight = kernels.pack_linear(parts, dtype)
    assert (weight.n, weight.k) == (17, k)
    expected = torch.empty(rows, 17, dtype=torch.float64)
    exact = [part.to(dtype).double() for part in parts]
    ORACLE.linear(x.double(), ORACLE.pack_linear(exact, torch.float64), added, out=expected)
    for out in (torch.full((rows, 17), math.nan, dtype=of) for of in (dtype, torch.float32)):
        kernels.linear(x, weight, added, out=out)
        assert_close(out, expected, TOLERANCE[out.dtype] if out.dtype == dtype else 1e-5)


def test_weights_are_of_the_activations_dtype() -> None:
    with pytest.raises(AssertionError, match=r"weights in torch\.float16, activations in torch\.float32"):
        make_kernels().pack_linear([random(4, 4)], torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_what_was_stored(dtype: torch.dtype) -> None:
    requests = Requests([37, 5], Heads(query=4, kv=2, dim=16))
    expected = attend(ORACLE, requests, torch.float64)
    assert_close(attend(make_kernels(dtype), requests, dtype), expected, 2e-2 if dtype != torch.float32 else 1e-5)


def test_keys_and_values_in_float8() -> None:
    requests = Requests([37, 5], Heads(query=4, kv=2, dim=16))
    kernels = make_kernels(torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert kernels.kv_dtype(torch.bfloat16) == torch.float8_e4m3fn
    expected = attend(ORACLE, requests, torch.float64)
    assert_close(attend(kernels, requests, torch.bfloat16), expected, 0.1)


def decoding(requests: Requests, positions: list[int]) -> Batch:
    return make_batch(
        positions=np.array(positions, np.int32),
        query_start=np.arange(len(positions) + 1, dtype=np.int32),
        context_len=np.array(positions, np.int32) + 1,
        page_table=requests.page_table,
        page_size=16,
        num_pages=requests.num_pages,
    )


def test_a_plan_for_a_graph_has_the_same_shape_whatever_the_contexts() -> None:
    requests, kernels = Requests([600, 40], Heads(query=4, kv=2, dim=16)), make_kernels()
    kv = requests.allocate(kernels, torch.float32)
    works: list[Work] = []
    for positions in ([599, 39], [3, 511]):
        batch = kernels.plan(decoding(requests, positions), kv, num_requests=2)
        works.append(batch.work)
    first, second = works
    assert first.buffer.shape == second.buffer.shape and first.capacity == second.capacity
    first.copy_(second)
    assert torch.equal(first.buffer, second.buffer)


def test_room_for_partial_results_stays_where_graphs_know_it() -> None:
    requests, kernels = Requests([600, 40], Heads(query=4, kv=2, dim=16)), make_kernels()
    kv = requests.allocate(kernels, torch.float32)
    kernels.plan(decoding(requests, [599, 39]), kv, num_requests=2)
    (room,) = kernels._workspaces
    kernels.plan(decoding(requests, [3, 2]), kv)
    assert kernels._workspaces == [room]
    kernels.plan(decoding(requests, [599, 39]), kv, num_requests=2)
    assert kernels._workspaces == [room]
    kernels._reserve(len(room.parts) + 1, 16)
    assert kernels._workspaces[0] is room and len(kernels._workspaces[1].parts) == 2 * len(room.parts)


def test_what_it_says_of_itself() -> None:
    kernels = make_kernels(torch.float16)
    assert (kernels.device, kernels.auto_dtype, kernels.kv_dtype(torch.float16)) == (CPU, torch.float16, torch.float16)
    assert "interpreter" in kernels.description
    assert kernels.numerics != make_kernels(torch.bfloat16).numerics
    assert [dim for dim in (12, 64, 96, 128, 256, 264) if kernels.supports_head_dim(dim)] == [64, 96, 128, 256]


@pytest.mark.parametrize("page_size", [8, 24, 128])
def test_page_sizes(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--block-size is {page_size}; allowed are 16, 32, 64"):
        make_kernels().allocate_kv(
            num_layers=1, num_pages=2, page_size=page_size, kv_heads=1, head_dim=64, dtype=torch.float32
        )


def test_float8_needs_a_chip_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")

    def kernels(kv_dtype: torch.dtype | None) -> TritonKernels:
        return TritonKernels(torch.device("cuda"), torch.float16, query_heads=4, max_model_len=100, kv_dtype=kv_dtype)

    assert "A100" in kernels(None).numerics
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is 'fp8', but NVIDIA A100 \(compute capability 8\.0\)"):
        kernels(torch.float8_e4m3fn)


def test_prepare_leaves_the_plan_as_it_was() -> None:
    requests, kernels = Requests([20], Heads(query=4, kv=2, dim=16)), make_kernels()
    batch = requests.batch(requests.everything())
    prepared = kernels.prepare(batch, requests.allocate(kernels, torch.float32))
    assert batch.work is None and prepared.work is not None
    for field in dataclasses.fields(batch):
        if field.name != "work":
            assert torch.equal(getattr(prepared, field.name), getattr(batch, field.name))
