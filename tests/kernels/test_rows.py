"""Norms, rotary embedding with the write into pages, gated activation: against the float64 oracle, and row by row."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.factories import STORAGE, TARGETS, Heads, Requests, assert_close, compiled, random
from trunkline.kernels.interface import Activation, Kernels
from trunkline.kernels.reference import ReferenceKernels

ORACLE = ReferenceKernels(torch.float64)
ROWS = (1, 3, 100)


def both(target: str) -> list[Kernels]:
    return [compiled(target), ORACLE]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [1, 7, 8, 64, 576, 20_000])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(target: str, width: int, rows: int) -> None:
    x, weight = random(rows, width, std=3), random(width, seed=1)
    outputs = []
    for kernels in both(target):
        out = torch.empty(rows, width, dtype=kernels.activation_dtype)
        kernels.rms_norm(x.to(out.dtype), weight.to(out.dtype), 1e-5, out=out)
        outputs.append(out)
    assert_close(outputs[0], outputs[1], 1e-6)
    last = torch.empty(1, width)
    compiled(target).rms_norm(x[-1:].clone(), weight, 1e-5, out=last)
    assert torch.equal(last[0], outputs[0][-1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(target: str, rows: int) -> None:
    x, residual, weight = random(rows, 70), random(rows, 70, seed=1), random(70, seed=2)
    outputs, sums = [], []
    for kernels in both(target):
        total = residual.to(kernels.activation_dtype, copy=True)
        out = torch.empty_like(total)
        kernels.add_rms_norm(x.to(out.dtype), total, weight.to(out.dtype), 1e-5, out=out)
        outputs.append(out)
        sums.append(total)
    assert torch.equal(sums[0], x + residual)
    assert_close(outputs[0], outputs[1], 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 5, 8, 33, 1536])
def test_gated_mul(target: str, width: int, activation: Activation) -> None:
    gate_up = random(20, 2 * width, std=4)
    outputs = []
    for kernels in both(target):
        out = torch.empty(20, width, dtype=kernels.activation_dtype)
        kernels.gated_mul(gate_up.to(out.dtype), activation, out=out)
        outputs.append(out)
    assert_close(outputs[0], outputs[1], 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_extremes(target: str, activation: Activation) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, -80.0, -87.5, -88.5, -1e4, 88.5, 1e4, 3e38, math.nan])
    out = torch.empty(1, len(gate))
    compiled(target).gated_mul(torch.cat([gate, torch.ones_like(gate)])[None], activation, out=out)
    if activation == "silu":
        expected = torch.nn.functional.silu(gate.double())
    else:  # torch's own loses its digits where tanh is nearly -1
        cubic = 2 * math.sqrt(2 / math.pi) * (gate.double() + 0.044715 * gate.double() ** 3)
        expected = gate.double() / (1 + (-cubic).exp())
    torch.testing.assert_close(out[0], expected.float(), rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rotary", [24, 8])
def test_rotate_and_store(target: str, dtype: torch.dtype, rotary: int) -> None:
    """q and k turned (the first `rotary` numbers of a head), v as it was; read back from pages of either layout."""
    requests = Requests([37, 5], Heads(query=3, kv=3, dim=24))
    requests.rope = requests.rope[:, :rotary].contiguous()
    chunks = requests.everything()
    turned, keys, values = [], [], []
    for kernels in both(target):
        batch, qkv = requests.batch(chunks), requests.rows(chunks, kernels.activation_dtype)
        kv = requests.allocate(kernels, dtype if kernels is not ORACLE else torch.float64)
        kernels.rotate_and_store(qkv, requests.rope, batch, kv, 1)
        turned.append(qkv)
        page, place = batch.slots.long() // 16, batch.slots.long() % 16
        if kernels is ORACLE:
            keys.append(kv.keys[1, page, place])
            values.append(kv.values[1, page, place])
        else:
            keys.append(kv.keys[1, page, :, :, place].float())
            values.append(kv.values[1, page, :, place].float())
            written = kv.keys[1].float().isfinite().sum()
            assert written == 42 * 3 * 24 and kv.keys[0].isnan().all(), "these tokens of this layer, and nothing else"
    assert_close(turned[0], turned[1], 1e-6)
    stored = max(STORAGE[compiled(target).kv_dtype(dtype)], 1e-6)
    assert_close(keys[0], keys[1], stored)
    assert_close(values[0], values[1], stored)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("q", "k"), [(True, True), (True, False), (False, True)])
def test_heads_are_normed_before_they_are_turned(target: str, q: bool, k: bool) -> None:
    requests, turned, keys = Requests([37, 5], Heads(query=4, kv=2, dim=24)), [], []
    weights = [random(24, seed=seed) if wanted else None for seed, wanted in ((7, q), (8, k))]
    for kernels in both(target):
        batch = requests.batch(requests.everything())
        qkv = requests.rows(requests.everything(), kernels.activation_dtype)
        kv = requests.allocate(kernels, torch.float32 if kernels is not ORACLE else torch.float64)
        q_norm, k_norm = (None if weight is None else weight.to(qkv.dtype) for weight in weights)
        kernels.rotate_and_store(qkv, requests.rope, batch, kv, 1, q_norm=q_norm, k_norm=k_norm, epsilon=1e-3)
        turned.append(qkv)
        page, place = batch.slots.long() // 16, batch.slots.long() % 16
        keys.append(kv.keys[1, page, place] if kernels is ORACLE else kv.keys[1, page, :, :, place])
    assert_close(turned[0], turned[1], 1e-6)
    assert_close(keys[0], keys[1], 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_embeddings_of_a_part_of_the_vocabulary(target: str, dtype: torch.dtype) -> None:
    """Ids before and behind it become zeros, also where the packed weights are padded."""
    weights, ids = random(21, 40), torch.tensor([99, 100, 0, 120, 121, 127, 5000, 110], dtype=torch.int32)
    outputs = []
    for kernels in both(target):
        out = torch.full((len(ids), 40), math.nan, dtype=kernels.activation_dtype)
        kernels.embed(ids, kernels.pack_linear([weights], dtype), out=out, first_id=100)
        outputs.append(out)
    assert torch.equal(outputs[0].double(), outputs[1])
    assert torch.equal(outputs[0][1], weights[0].to(dtype).float()) and not outputs[0][[0, 2, 4, 5, 6]].any()


def stored_values(numbers: Tensor, dtype: torch.dtype, target: str) -> Tensor:
    """What `numbers`, [rows, 8], become in pages of `dtype`: [rows, 8]; bytes, if it has eight bits."""
    requests = Requests([len(numbers)], Heads(query=1, kv=1, dim=8))
    requests.qkv[0][:, 16:] = numbers
    kv = requests.allocate(compiled(target), dtype)
    batch = requests.batch(requests.everything())
    compiled(target).rotate_and_store(requests.rows(requests.everything()), requests.rope, batch, kv, 0)
    slots = batch.slots.long()
    values = kv.values[0].view(torch.uint8) if dtype.itemsize == 1 else kv.values[0]
    return values[slots // 16, 0, slots % 16]


@pytest.mark.parametrize("target", TARGETS)
def test_float16_storage_rounds_to_nearest_even(target: str) -> None:
    """All kinds of float16 numbers, their neighbours and the ties between them; what is too large becomes the largest."""
    halves = torch.arange(0, 0x7C00, 5, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    step = torch.cat([halves[1:], halves[-1:] + 32]) - halves
    numbers = torch.cat(
        [halves, halves + step / 10, halves + step / 2, -halves, torch.tensor([65519.0, 65520.0, 1e30, -1e30])]
    )
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 8)).view(-1, 8)
    stored = stored_values(numbers, torch.float16, target)
    assert torch.equal(stored, numbers.clamp(-65504, 65504).half())


@pytest.mark.parametrize("target", TARGETS)
def test_float8_storage_equals_torchs(target: str) -> None:
    """All float16 numbers, float32 numbers of every kind, and ties: rounded as torch rounds them, but for what is too large."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    bits = torch.randint(-(2**31), 2**31, (2**17,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e3)), random(2**12)])
    numbers = torch.cat([halves, bits.view(torch.float32), near, -near])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 8)).view(-1, 8)
    stored = stored_values(numbers, torch.float8_e4m3fn, target)
    expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(stored, expected.where(~numbers.isnan(), 0x7F))
