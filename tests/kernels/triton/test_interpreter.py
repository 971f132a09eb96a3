"""What `mend()` mends (without it, half of these fail), and that mending breaks nothing."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as triton_interpreter

from tests.kernels.factories import assert_close, random
from trunkline.kernels.triton import interpreter

pytestmark = pytest.mark.skipif(not interpreter.is_on(), reason="kernels run on the GPU here")


@pytest.fixture(autouse=True, scope="module")
def _mended() -> None:
    interpreter.mend()


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None], tl.arange(0, K)
    a = tl.load(a_ptr + rows * K + inner[None])
    b = tl.load(b_ptr + inner[:, None] * N + columns)
    tl.store(out_ptr + rows * N + columns, tl.dot(a, b, input_precision="ieee"))


def product(a: Tensor, b: Tensor) -> Tensor:
    out = torch.full((len(a), b.shape[1]), torch.nan)
    product_kernel[(1,)](a, b, out, M=len(a), N=b.shape[1], K=len(b))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_products_are_right(dtype: torch.dtype) -> None:
    a, b = random(16, 32).to(dtype), random(32, 16, seed=1).to(dtype)
    assert_close(product(a, b), a.double() @ b.double(), 1e-6)


def test_products_of_integers_are_exact() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((16, 64), (64, 16)))
    out = torch.zeros(16, 16, dtype=torch.int32)
    product_kernel[(1,)](a, b, out, M=16, N=16, K=64)
    assert torch.equal(out, a.int() @ b.int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_do_not_depend_on_how_many_rows_there_are(dtype: torch.dtype) -> None:
    a, b = random(128, 256).to(dtype), random(256, 64, seed=1).to(dtype)
    everything = product(a, b)
    for count in (1, 2, 8, 16, 64):
        assert torch.equal(product(a[:count], b), everything[:count]), f"{count} of 128 rows"


@triton.jit
def shifted(x):
    return tl.softmax(x) + tl.cdiv(7, 2)


@triton.jit
def nested_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, tl.sort(x) + shifted(x) + tl.zeros([BLOCK], tl.float32) + tl.argmax(x, 0))


def test_functions_call_functions() -> None:
    """Triton's own, which know the language as `core`, and ours: also when a launch before failed in one of them."""
    x, out = random(16), torch.empty(16)
    with pytest.raises(Exception, match="axis"):
        failing_kernel[(1,)](x, BLOCK=16)
    for _ in range(2):
        nested_kernel[(1,)](x, out, BLOCK=16)
        assert_close(out, (x.sort().values + x.softmax(0) + 4 + x.argmax()).double(), 1e-6)


@triton.jit
def failing_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=7)


def test_a_launch_patches_once_and_restores() -> None:
    """Nested calls search nothing (which is what takes the time), and outside a launch the language is as it was."""
    patches, before = 0, tl.load
    original = triton_interpreter._patch_builtin

    def counting(*arguments: object) -> None:
        nonlocal patches
        patches += 1
        original(*arguments)

    x, out = random(16), torch.empty(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_interpreter, "_patch_builtin", counting)
        nested_kernel[(1,)](x, out, BLOCK=16)
    assert patches < 8
    assert tl.load is before


@triton.jit
def counting_kernel(count_ptr, out_ptr):
    total = 0
    for i in range(tl.load(count_ptr)):
        total += i
    tl.store(out_ptr, total)


def test_a_loop_may_end_at_a_loaded_number() -> None:
    count, out = torch.tensor([5], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    counting_kernel[(1,)](count, out)
    assert out.item() == 10


@triton.jit
def conversion_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_round_as_torch_does(dtype: torch.dtype) -> None:
    x = random(256)
    out = torch.zeros(256, dtype=dtype)
    conversion_kernel[(1,)](x, out, BLOCK=256)
    assert torch.equal(out.float(), x.to(dtype).float())
