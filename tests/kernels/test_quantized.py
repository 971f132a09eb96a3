"""Matrices of small integers: their meaning, the format they are packed in, and the compiled product with them."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.factories import TARGETS, compiled, random
from tests.kernels.matrices import CENTRED, FORMATS, NONE, STORED, make_matrix, matrices
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import PackedLinear
from trunkline.kernels.quantized import IntegerFormat, QuantizedMatrix, quantize_int8
from trunkline.kernels.reference import ReferenceKernels

ROUNDING = 0.501 / 32767  # of a row, relative to its largest number: half a unit of int16, and what float32 adds
each_format = pytest.mark.parametrize("kind", FORMATS)


def multiply(
    x: Tensor, matrix: QuantizedMatrix | PackedLinear, *, kernels: CpuKernels | None = None, bias: Tensor | None = None
) -> Tensor:
    kernels = kernels or compiled()
    packed = matrix if isinstance(matrix, PackedLinear) else kernels.pack_linear([matrix], torch.float16)
    assert packed.integers is not None
    out = torch.full((len(x), packed.n), torch.nan)
    kernels.linear(x, packed, bias, out=out)
    return out


def look_up(packed: PackedLinear, kernels: CpuKernels, rows: int) -> Tensor:
    out = torch.full((rows, packed.k), torch.nan)
    kernels.embed(torch.arange(rows, dtype=torch.int32), packed, out=out)
    return out


def assert_within_rounding(ours: Tensor, x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> None:
    """As far from the product in float64 as rounding x to int16 and sums in float32 may take it, and no further."""
    exact = x.double() @ matrix.dequantize().double().T + (0 if bias is None else bias.double())
    parts = matrix.value.double().unflatten(1, (-1, matrix.group)).abs() * matrix.scale.double()[..., None]
    if matrix.offset is not None:
        parts += matrix.offset.double().abs()[..., None]
    spans = matrix.scale.shape[1] + matrix.shape[1] // 512
    largest = x.double().abs().amax(dim=1, keepdim=True) * parts.sum(dim=(1, 2))
    bound = largest * (ROUNDING + (spans + 4) * 2**-23) + 1e-27  # rows below 2^-100 may become zeros
    if bias is not None:
        bound += bias.double().abs() * 2**-23
    assert ((ours.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("target", TARGETS)
@given(matrix=matrices(), rows=st.integers(1, 70), power=st.integers(-40, 30), biased=st.booleans())
def test_as_near_as_int16_allows(target: str, matrix: QuantizedMatrix, rows: int, power: int, biased: bool) -> None:
    n, k = matrix.shape
    x = random(rows, k, seed=1) * 10.0 ** torch.randint(power - 2, power + 3, (rows, 1))
    bias = random(n, seed=2, std=10.0**power) if biased else None
    assert_within_rounding(multiply(x, matrix, kernels=compiled(target), bias=bias), x, matrix, bias)


@pytest.mark.parametrize("target", TARGETS)
@given(matrix=matrices())
def test_integers_that_need_no_rounding_are_multiplied_exactly(target: str, matrix: QuantizedMatrix) -> None:
    """With one scale for all, as a power of two, and a row whose largest number is 32767."""
    plain = QuantizedMatrix(matrix.value, torch.full_like(matrix.scale, 0.25), None, matrix.group, matrix.bits)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-500, 501, (7, matrix.shape[1]), generator=generator).float()
    x[:, 0] = 32767
    assert torch.equal(multiply(x, plain, kernels=compiled(target)), x @ plain.dequantize().T)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("group", [0, 512])
@pytest.mark.parametrize(("bits", "value", "offset"), [(8, -128, None), (8, 127, -128.0), (4, 0, -8.0), (4, 15, -8.0)])
def test_sums_do_not_overflow(target: str, group: int, bits: int, value: int, offset: float | None) -> None:
    matrix = make_matrix(16, 5120, group=group, bits=bits)
    ones = torch.ones_like(matrix.scale)
    stored = None if offset is None else offset * ones
    extreme = QuantizedMatrix(torch.full_like(matrix.value, value), ones, stored, matrix.group, bits)
    x = torch.tensor([[1.0], [-1.0]]).repeat(1, 5120)
    total = 5120 * (value + (offset or 0.0))
    ours = multiply(x, extreme, kernels=compiled(target))
    largest = 5120 * (abs(value) + abs(offset or 0.0))
    assert torch.allclose(ours, torch.tensor([[total], [-total]]), atol=1e-6 * largest)


@pytest.mark.parametrize("target", TARGETS)
@each_format
def test_a_row_does_not_depend_on_the_others(target: str, kind: str) -> None:
    kernels, x = compiled(target), random(400, 576, seed=1)
    packed = kernels.pack_linear([make_matrix(50, 576, **FORMATS[kind])], torch.float16)
    together = multiply(x, packed, kernels=kernels)
    for rows in (1, 2, 3, 4, 5, 6, 7, 18, 23, 24, 25, 227, 399):
        assert torch.equal(multiply(x[:rows], packed, kernels=kernels), together[:rows])
        assert torch.equal(multiply(x[-rows:].clone(), packed, kernels=kernels), together[-rows:])


def test_many_rows_are_as_good_as_few() -> None:
    """More than are rounded at once."""
    matrix, x = make_matrix(20, 40), random(2500, 40)
    packed = compiled().pack_linear([matrix], torch.float16)
    pieces = [multiply(piece, packed) for piece in x.split(100)]
    assert torch.equal(multiply(x, packed), torch.cat(pieces))


@each_format
def test_threads_do_not_matter(kind: str) -> None:
    matrix, x = make_matrix(300, 576, **FORMATS[kind]), random(250, 576, seed=1)
    one, two, seven = (multiply(x, matrix, kernels=compiled(threads=threads)) for threads in (1, 2, 7))
    assert torch.equal(one, two) and torch.equal(one, seven)


def test_callers_from_several_threads_take_turns() -> None:
    """Rounded rows are in memory that they share."""
    kernels, matrix = compiled(threads=3), make_matrix(16, 2048)
    packed = kernels.pack_linear([matrix], torch.float16)
    inputs = [random(200 + i, 2048, seed=i) for i in range(4)]  # their rounding takes as long as the product
    expected = [multiply(x, packed, kernels=kernels) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(30):
            assert all(map(torch.equal, callers.map(lambda x: multiply(x, packed, kernels=kernels), inputs), expected))


@pytest.mark.parametrize("target", TARGETS)
@each_format
def test_a_sick_row_is_noticed_and_harms_no_other(target: str, kind: str) -> None:
    kernels = compiled(target)
    packed = kernels.pack_linear([make_matrix(20, 576, **FORMATS[kind])], torch.float16)
    x = random(40, 576)
    healthy = multiply(x, packed, kernels=kernels)
    sick = {3: math.nan, 11: math.inf, 12: -math.inf, 39: math.nan}
    for place, (row, number) in zip((0, 13, 575, 575), sick.items(), strict=True):
        x[row, place] = number
    result = multiply(x, packed, kernels=kernels)
    for row in range(40):
        assert result[row].isnan().all() if row in sick else torch.equal(result[row], healthy[row])


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_any_size(target: str) -> None:
    kernels, matrix, bias = compiled(target), make_matrix(20, 64, group=32, offsets=STORED), random(20)
    x = random(5, 64) * torch.tensor([[0.0], [1e30], [1e-30], [1e-44], [3e34]])
    result = multiply(x, matrix, kernels=kernels)
    assert not result[0].any() and result.isfinite().all()
    assert_within_rounding(result, x, matrix)
    assert torch.equal(multiply(x, matrix, kernels=kernels, bias=bias)[0], bias)


@pytest.mark.parametrize("target", TARGETS)
@given(matrix=matrices())
def test_embed_returns_the_exact_rows(target: str, matrix: QuantizedMatrix) -> None:
    kernels = compiled(target)
    packed = kernels.pack_linear([matrix], torch.float16)
    assert torch.equal(look_up(packed, kernels, len(matrix)), matrix.dequantize())


def test_embed_knows_the_rows_of_its_rank_alone() -> None:
    kernels, matrix = compiled(), make_matrix(20, 64, group=32, offsets=STORED)
    ids = torch.tensor([99, 100, 119, 120, 0], dtype=torch.int32)
    out = torch.full((5, 64), torch.nan)
    kernels.embed(ids, kernels.pack_linear([matrix], torch.float16), out=out, first_id=100)
    exact = matrix.dequantize()
    assert torch.equal(out[1:3], exact[[0, 19]]) and not out[[0, 3, 4]].any()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), kind=st.sampled_from(list(FORMATS)))
def test_stacked_layers_equal_the_layers(sizes: list[int], kind: str) -> None:
    """q, k and v in one product, of any sizes: packing is a matter of place alone."""
    kernels, x = compiled(), random(3, 96)
    parts = [make_matrix(size, 96, **FORMATS[kind], seed=seed) for seed, size in enumerate(sizes)]
    together = multiply(x, kernels.pack_linear(parts, torch.float16))
    for part, ours in zip(parts, together.split(sizes, dim=1), strict=True):
        assert torch.equal(multiply(x, part), ours)


@given(parts=st.lists(st.sampled_from(list(FORMATS)), min_size=1, max_size=4))
def test_different_formats_share_one_that_holds_them_all(parts: list[str]) -> None:
    kernels, x = compiled(), random(9, 96)
    stacked = [make_matrix(10 + i, 96, **FORMATS[kind], seed=i) for i, kind in enumerate(parts)]
    packed = kernels.pack_linear(stacked, torch.float16)
    sizes = [len(part) for part in stacked]
    assert torch.equal(look_up(packed, kernels, packed.n), torch.cat([part.dequantize() for part in stacked]))
    for part, ours in zip(stacked, multiply(x, packed).split(sizes, dim=1), strict=True):
        assert_within_rounding(ours, x, part)


@pytest.mark.parametrize("kernels", [compiled, ReferenceKernels])
def test_a_plain_matrix_among_them_makes_all_plain(kernels: type) -> None:
    weight, matrix = random(10, 64), make_matrix(7, 64)
    packed = kernels().pack_linear([matrix, weight], torch.float16)
    assert packed.integers is None and packed.data.dtype == torch.float16
    out = torch.empty(17, 64)
    kernels().embed(torch.arange(17, dtype=torch.int32), packed, out=out)
    assert torch.equal(out, torch.cat([matrix.dequantize(), weight]).half().float())


def test_the_reference_dequantizes() -> None:
    matrix = make_matrix(7, 64, group=16, offsets=STORED)
    packed = ReferenceKernels().pack_linear([matrix, matrix], torch.float32)
    assert torch.equal(packed.data, matrix.dequantize().repeat(2, 1))


FORMAT_OF = {  # of a stack of matrices with 192 inputs
    ("per channel",): (8, 192, torch.float32, NONE),
    ("Q8_0", "Q8_0"): (8, 32, torch.float16, NONE),
    ("Q4_0",): (4, 32, torch.float16, CENTRED),
    ("Q4_1",): (4, 32, torch.float16, STORED),
    ("Q4_K",): (4, 32, torch.float32, STORED),
    ("Q4_0", "Q4_1"): (4, 32, torch.float16, STORED),
    ("Q4_K", "Q6_K"): (8, 16, torch.float32, STORED),
    ("per channel", "Q8_0"): (8, 32, torch.float32, NONE),
}


@pytest.mark.parametrize("kinds", FORMAT_OF, ids="+".join)
def test_the_smallest_format_that_holds_all(kinds: Sequence[str]) -> None:
    stack = [make_matrix(5, 192, **FORMATS[kind]) for kind in kinds]
    assert IntegerFormat.holding(stack) == IntegerFormat(*FORMAT_OF[tuple(kinds)])


def test_scales_are_halved_only_if_all_survive_it() -> None:
    matrix = make_matrix(5, 64, group=32, offsets=STORED, half=True)
    assert IntegerFormat.holding([matrix]).scale_dtype == torch.float16
    assert matrix.offset is not None
    for number in (1 + 2**-11, 65536.0, 2**-25):
        for numbers in (matrix.scale, matrix.offset):
            kept = numbers[4, 1].item()
            numbers[4, 1] = number
            assert IntegerFormat.holding([matrix]).scale_dtype == torch.float32
            numbers[4, 1] = kept


def test_long_groups_are_cut() -> None:
    assert IntegerFormat.holding([make_matrix(3, 3072, group=1536)]).group == 512
    assert IntegerFormat.holding([make_matrix(3, 1536)]).group == 1536


def test_groups_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^60 inputs are in groups of \[6, 60\]; they must be multiples of 4"):
        compiled().pack_linear([make_matrix(3, 60, group=6), make_matrix(3, 60)], torch.float16)


def test_bytes_of_a_packed_matrix() -> None:
    """What is measured against the bandwidth: 4 bits a value, and a float16 scale and offset for 32 of them."""
    packed = compiled().pack_linear([make_matrix(32, 1024, **FORMATS["Q4_1"])], torch.float16)
    assert packed.num_bytes == 32 * 1024 * 5 / 8


def test_int8_is_off_by_half_a_unit_at_most() -> None:
    weight = random(9, 50) * 10.0 ** torch.arange(-4.0, 5.0)[:, None]
    weight[4] = 0
    matrix = quantize_int8(weight)
    assert matrix.value.abs().amax(dim=1).tolist() == [127] * 4 + [0] + [127] * 4
    assert ((matrix.dequantize() - weight).abs() <= matrix.scale * 0.5001).all()
    assert (matrix.group, matrix.bits, matrix.offset) == (50, 8, None)


def test_dequantized_number_by_number() -> None:
    matrix = make_matrix(3, 12, group=4, offsets=STORED)
    assert matrix.offset is not None
    for n in range(3):
        for k in range(12):
            scaled = matrix.scale[n, k // 4] * matrix.value[n, k]
            assert matrix.dequantize()[n, k] == scaled + matrix.offset[n, k // 4]


def test_wrong_shapes_are_caught() -> None:
    kernels, matrix = compiled(), make_matrix(4, 32, group=16)
    packed = kernels.pack_linear([matrix], torch.float16)
    with pytest.raises(AssertionError):
        kernels.linear(torch.zeros(2, 16), packed, out=torch.zeros(2, 4))
    with pytest.raises(AssertionError):
        kernels.pack_linear([matrix, make_matrix(4, 16)], torch.float16)
    with pytest.raises(AssertionError):
        kernels.pack_linear([QuantizedMatrix(matrix.value, matrix.scale[:, :1], None, 16, 8)], torch.float16)
