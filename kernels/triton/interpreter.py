"""Triton's interpreter, made fit for our kernels; call `mend()` before the first one runs.

    TRITON_INTERPRET=1 python …        # kernels run in NumPy on the CPU, one program after the other

What is mended:

    `tl.dot` of bfloat16    the interpreter holds bfloat16 as integers, and multiplies those (triton#11584)
    `tl.dot` as such        summed in float64: the bits of a row must not depend on how BLAS cuts a matrix into blocks
    calls of functions      each one searched all of triton.language for what to patch: now once a launch, which halves the time

Arithmetic on bfloat16 other than `tl.dot` is wrong there, too: kernels turn what they load into float32 at once.
"""

import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

FLOAT8 = 8  # bits


def is_on() -> bool:
    """Whether kernels that are defined now will be interpreted."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def mend() -> None:
    """Idempotent."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)


def _create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    product = np.matmul(_float64(a), _float64(b)) if _is_float(a) else np.matmul(a.data, b.data, dtype=d.data.dtype)
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _is_float(handle: Any) -> bool:
    return bool(handle.dtype.scalar.is_floating())


def _float64(handle: Any) -> npt.NDArray[np.float64]:
    scalar = handle.dtype.scalar
    data = handle.data
    if scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    elif scalar.primitive_bitwidth == FLOAT8:
        data = interpreter._convert_float(data, scalar, tl.float16, None).view(np.float16)
    converted: npt.NDArray[np.float64] = data.astype(np.float64)
    return converted


class _PatchOnce:
    """In place of interpreter._patch_lang: a kernel's own launch patches, the functions that it calls find that done."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._is_patched = False

    def __call__(self, function: Any) -> Any:
        if self._is_patched:
            return _Nothing()
        scope = self._patch(function)
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
