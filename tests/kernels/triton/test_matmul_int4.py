"""Matmul over GPTQ's and AWQ's words: right by float64 on every layout, group size and kind of zeros."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.triton.matmul_int4 import (
    TILES,
    Int4Weight,
    dequantize,
    matmul_int4,
    reference,
    sort_by_group,
    specs,
)
from trunkline.kernels.triton.spec import ARCHS

SHAPES = [  # M, N, K, group_size
    (1, 80, 128, 32),
    (5, 208, 256, 64),
    (17, 48, 256, 128),
    (33, 144, 192, -1),
    (70, 96, 160, 32),
]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes, axis, order=range(8)):
    """Codes [a, b] as int32 words of eight along `axis`: nibble i is the order[i]-th of the eight."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for nibble, place in enumerate(order):
        words |= codes[..., place::8] << np.uint32(4 * nibble)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def make_weight(layout, n, k, group_size=-1, *, zeros="stored", seed=0):
    """(Int4Weight, what it stands for: float64 [K, N]). zeros: stored, minus_one or absent."""
    rng = np.random.default_rng(seed)
    inputs = k if group_size == -1 else group_size
    codes = rng.integers(0, 16, (k, n))
    zero = np.full((k // inputs, n), 8) if zeros == "absent" else rng.integers(0, 16, (k // inputs, n))
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, zero.shape)).half()
    order = AWQ_ORDER if layout == "awq" else range(8)
    weight = Int4Weight(
        layout=layout,
        qweight=pack(codes, 1, order) if layout == "awq" else pack(codes, 0),
        scales=scales,
        qzeros=None if zeros == "absent" else pack((zero - (zeros == "minus_one")) % 16, 1, order),
        group_size=group_size,
        zeros_minus_one=None if zeros == "absent" else zeros == "minus_one",
    )
    exact = torch.from_numpy(codes - zero.repeat(inputs, axis=0)).double()
    return weight, exact * scales.double().repeat_interleave(inputs, 0)


def multiply(x, weight, bias=None):
    out = torch.full((len(x), weight.n), math.nan, dtype=x.dtype)
    matmul_int4(x, weight, bias, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["gptq", "awq"])
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)), ids=str)
def test_equals_float64(index, shape, layout, dtype) -> None:
    m, n, k, group_size = shape
    zeros = ("minus_one", "stored", "absent")[(index + (layout == "awq")) % 3]
    weight, exact = make_weight(layout, n, k, group_size, zeros=zeros)
    x, bias = random(m, k, seed=1).to(dtype), random(n, seed=2).to(dtype)
    assert_close(multiply(x, weight, bias), x.double() @ exact + bias.double(), TOLERANCE[dtype])


@given(
    layout=st.sampled_from(["gptq", "awq"]),
    zeros=st.sampled_from(["minus_one", "stored", "absent"]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    groups=st.integers(1, 3),
    n=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_reference_reads_the_formats(layout, zeros, group_size, groups, n, seed) -> None:
    k = 96 * groups if group_size == -1 else group_size * groups
    weight, exact = make_weight(layout, 16 * n, k, group_size, zeros=zeros, seed=seed)
    assert torch.equal(dequantize(weight), exact)
    x, bias = random(3, k, seed=seed).double(), random(16 * n)
    assert torch.equal(reference(x, weight, bias), x @ exact + bias.double())


def test_words_by_hand() -> None:
    """0x76543210: GPTQ's codes 0 … 7 go down the inputs, AWQ's over the outputs in its order."""
    one, word = torch.eye(32), 0x76543210
    scales = torch.ones(1, 16).half()
    gptq = Int4Weight(layout="gptq", qweight=torch.full((4, 16), word, dtype=torch.int32), scales=scales)
    awq = Int4Weight(layout="awq", qweight=torch.full((32, 2), word, dtype=torch.int32), scales=scales)
    assert (multiply(one, gptq)[:, 3] + 8).tolist() == list(range(8)) * 4
    assert (multiply(one, awq)[5] + 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7] * 2


@pytest.mark.parametrize("zeros", ["stored", "minus_one"])
def test_stored_symmetric_zeros_are_as_absent_ones(zeros) -> None:
    """vllm#47770: symmetric checkpoints come with qzeros, without, and with qzeros that say 7 for 8."""
    absent, _ = make_weight("gptq", 48, 128, 32, zeros="absent")
    word = 0x77777777 if zeros == "minus_one" else -0x77777778
    stored = Int4Weight(
        layout="gptq", qweight=absent.qweight, scales=absent.scales, group_size=32,
        qzeros=torch.full((4, 6), word, dtype=torch.int32), zeros_minus_one=zeros == "minus_one",
    )  # fmt: skip
    x = random(3, 128)
    assert torch.equal(multiply(x, stored), multiply(x, absent))


def test_zero_offset_by_default() -> None:
    qzeros = torch.zeros(1, 2, dtype=torch.int32)
    scales = torch.ones(1, 16).half()
    gptq = Int4Weight(layout="gptq", qweight=torch.zeros(4, 16, dtype=torch.int32), scales=scales, qzeros=qzeros)
    awq = Int4Weight(layout="awq", qweight=torch.zeros(32, 2, dtype=torch.int32), scales=scales, qzeros=qzeros)
    assert dequantize(gptq)[0, 0] == -1 and dequantize(awq)[0, 0] == 0


def test_one_group_of_all_inputs() -> None:
    """vllm#37329: a group size of -1 was used as a number."""
    whole, exact = make_weight("gptq", 32, 96, -1)
    named = Int4Weight(layout="gptq", qweight=whole.qweight, scales=whole.scales, qzeros=whole.qzeros,
                       zeros_minus_one=False)  # fmt: skip
    x = random(2, 96)
    assert_close(multiply(x, whole), x.double() @ exact, 1e-5)
    assert torch.equal(multiply(x, whole), multiply(x, named))


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_block_never_spans_two_groups(layout) -> None:
    """vllm#39705: with BLOCK_K over the group size, later groups got the first one's scales. Here they differ by 1000."""
    weight, _ = make_weight(layout, 16, 128, 32)
    weight.scales.copy_(torch.tensor([1e-3, 1.0, 1e-3, 1.0])[:, None])
    x = random(20, 128).half()
    assert_close(multiply(x, weight), reference(x, weight), TOLERANCE[torch.float16])
    assert all(config.blocks["BLOCK_K"] > 32 for tiles in TILES.values() for rows, config in tiles.items() if rows)


def test_groups_in_any_order() -> None:
    """desc_act: input i belongs to group g_idx[i]."""
    k, n, group_size = 128, 48, 32
    rng = np.random.default_rng(3)
    g_idx = torch.from_numpy(rng.permutation(np.arange(k) // group_size).astype(np.int32))
    codes, scales = rng.integers(0, 16, (k, n)), torch.from_numpy(rng.uniform(0.01, 0.1, (k // group_size, n))).half()
    exact = torch.from_numpy(codes - 8).double() * scales.double()[g_idx.long()]
    qweight, order = sort_by_group(pack(codes, 0), g_idx)
    weight = Int4Weight(layout="gptq", qweight=qweight, scales=scales, group_size=group_size)
    x = random(5, k)
    assert_close(multiply(x[:, order].contiguous(), weight), x.double() @ exact, 1e-5)


@pytest.mark.parametrize("rows", [(1, 3, 16), (17, 40, 64)], ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_the_others(rows, seed) -> None:
    weight, _ = make_weight("gptq", 48, 64, 32, seed=seed)
    x = random(rows[-1], 64, seed=seed).bfloat16()
    together = multiply(x, weight)
    for count in rows[:-1]:
        assert torch.equal(multiply(x[:count], weight), together[:count])
        assert torch.equal(multiply(x[-count:].clone(), weight), together[-count:])


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kernels.triton.matmul_int4.matmul_int4_kernel", None)
    assert multiply(torch.empty(0, 64), make_weight("awq", 16, 64)[0]).shape == (0, 16)


def test_misfits_are_refused() -> None:
    weight, _ = make_weight("gptq", 48, 128, 32)
    parts = {"layout": "gptq", "qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
    with pytest.raises(AssertionError, match="group_size 48 is none of"):
        Int4Weight(**parts, group_size=48)
    with pytest.raises(AssertionError, match=r"scales \(4, 48\) must be \(2, 48\)"):
        Int4Weight(**parts, group_size=64)
    with pytest.raises(AssertionError, match=r"qzeros \(6, 4\) must be \(4, 6\)"):  # vllm#47770: transposed
        Int4Weight(**{**parts, "qzeros": weight.qzeros.T.contiguous()}, group_size=32)
    with pytest.raises(AssertionError, match=r"qweight \(16, 96\) of gptq must be \(16, 48\)"):
        Int4Weight(**{**parts, "qweight": torch.zeros(16, 96, dtype=torch.int32)}, group_size=32)
    with pytest.raises(AssertionError, match=r"qweight \(32, 48\) of awq must be \(32, 6\)"):
        Int4Weight(layout="awq", qweight=torch.zeros(32, 48, dtype=torch.int32), scales=weight.scales[:1])
    with pytest.raises(AssertionError, match="multiple of the group size"):
        Int4Weight(**{**parts, "qweight": weight.qweight[:12]}, group_size=64)
    with pytest.raises(AssertionError, match="x has 64 columns, the weights 128 inputs"):
        multiply(torch.empty(2, 64), weight)
    with pytest.raises(AssertionError, match="out"):
        matmul_int4(torch.empty(2, 128), weight, out=torch.empty(2, 40))
    with pytest.raises(AssertionError, match=r"x is torch\.float32, out torch\.float16"):
        matmul_int4(torch.empty(2, 128), weight, out=torch.empty(2, 48, dtype=torch.float16))
    with pytest.raises(AssertionError):
        multiply(torch.empty(2, 128), weight, torch.empty(47))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_shipped(arch) -> None:
    """Every tile that a launch can take, once."""
    shipped = {(spec.types["x_ptr"], spec.constants["AWQ"], *spec.config.blocks.values()) for spec in specs(arch)}
    assert len(shipped) == len({spec.name for spec in specs(arch)}) == len(specs(arch))
    for (rows, config), awq in itertools.product(TILES[arch].items(), (False, True)):
        m, n, k = config.blocks.values()
        for x_type in ("*bf16", "*fp16") if rows else ("*fp32",):
            assert {(x_type, awq, m, n, k), (x_type, awq, m, n, 32)} <= shipped
