"""Triton's interpreter, made fit for our kernels; call `mend()` before the first one runs.

    TRITON_INTERPRET=1 python …        # kernels run in NumPy on the CPU, one program after the other

What is mended:

    `tl.dot` of bfloat16    the interpreter holds bfloat16 as integers, and multiplies those (triton#11584)
    `tl.dot` as such        summed in float64: the bits of a row must not depend on how BLAS cuts a matrix into blocks
    calls of functions      each one searched all of triton.language for what to patch: now once a launch, which halves the time
    a conversion of floats  one to bfloat16 cut numbers off instead of rounding them, one to float8 was off by up to a quarter
    a loop's bound          one that was loaded is an array of one element, which NumPy from 2.4 on takes for no integer (triton#9171)

Arithmetic on bfloat16 other than `tl.dot` is wrong there, too: kernels turn what they load into float32 at once.
"""

import functools
import os
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

FLOAT8 = 8  # bits
TORCH_DTYPES = {  # Triton's name -> torch's
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def is_on() -> bool:
    """Whether kernels that are defined now will be interpreted."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def mend() -> None:
    """Idempotent."""
    triton_interpreter.InterpreterBuilder.create_dot = _create_dot
    triton_interpreter._convert_float = _convert_float
    triton_interpreter._patch_lang = _PatchOnce(triton_interpreter._patch_lang)


def _create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    product = np.matmul(_float64(a), _float64(b)) if _is_float(a) else np.matmul(a.data, b.data, dtype=d.data.dtype)
    return triton_interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _is_float(handle: Any) -> bool:
    return bool(handle.dtype.scalar.is_floating())


def _float64(handle: Any) -> npt.NDArray[np.float64]:
    scalar = handle.dtype.scalar
    data = handle.data
    if scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    elif scalar.primitive_bitwidth == FLOAT8:
        data = triton_interpreter._convert_float(data, scalar, tl.float16, None).view(np.float16)
    converted: npt.NDArray[np.float64] = data.astype(np.float64)
    return converted


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Bits of `data` as `target`: the nearest number there is, as on a GPU."""
    assert rounding_mode != triton_interpreter._ir.ROUNDING_MODE.RTZ, "numbers cut off are not what our kernels want"
    tensor = torch.from_numpy(np.ascontiguousarray(data)).view(TORCH_DTYPES[source.name]).to(TORCH_DTYPES[target.name])
    return tensor.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


class _EveryName:
    """Stands in for a function that knows triton.language by both names under which Triton's own functions use it."""

    __globals__: ClassVar = {"tl": tl, "core": tl.core}


class _PatchOnce:
    """In place of the interpreter's _patch_lang: a kernel's own launch patches, the functions that it calls find that done."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._is_patched = False

    def __call__(self, function: Any) -> Any:
        if self._is_patched:
            return _Nothing()
        scope = self._patch(_EveryName)
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        self._is_patched = True
        return _Launch(self, scope)

    def done(self) -> None:
        self._is_patched = False


class _Nothing:
    def restore(self) -> None:
        pass


class _Launch:
    def __init__(self, patch: _PatchOnce, scope: Any) -> None:
        self._patch = patch
        self._scope = scope

    def restore(self) -> None:
        self._patch.done()
        self._scope.restore()
