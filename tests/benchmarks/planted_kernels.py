"""One kernel in configurations that the gate must refuse, and one that it must pass; see test_kernels_aot.py.

Not in the test itself, which runs in the interpreter: the gate is a process of its own, where this is compiled.
"""

import triton
import triton.language as tl

from trunkline.kernels.triton.spec import Config, KernelSpec


@triton.jit(do_not_specialize=["k"])
def multiply_kernel(
    a_ptr, b_ptr, out_ptr, k, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    rows, columns, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None], tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        a = tl.load(a_ptr + rows * stride + (start + inner)[None])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + columns)
        total += tl.dot(a, b, input_precision=PRECISION)
    tl.store(out_ptr + rows * N + columns, total)


def spec(
    name: str,
    *,
    dtype: str = "bf16",
    m: int = 64,
    n: int = 64,
    k: int = 64,
    precision: str = "ieee",
    num_warps: int = 4,
    num_stages: int = 3,
    needs: tuple[str, ...] = (),
    quick: bool = False,
) -> KernelSpec:
    pointers = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "out_ptr": "*fp32"}
    blocks = {"M": m, "N": n, "K": k}
    return KernelSpec(
        name=name,
        kernel=multiply_kernel,
        types={**pointers, "k": "i32", "stride": "i32:16"},
        constants={**blocks, "PRECISION": precision},
        config=Config(blocks, num_warps, num_stages),
        needs=needs,
        quick=quick,
    )


def specs(arch: int) -> list[KernelSpec]:
    wgmma = ("HGMMA",) if arch == 90 else ()
    sound = spec("sound", needs=wgmma, quick=True)
    if arch != 90:
        return [sound, spec("sound, float32", dtype="fp32", m=16, n=16, k=16)]
    return [
        sound,
        spec("too large a block", m=256, n=128, num_warps=4, num_stages=2),
        spec("too many stages", m=128, n=128, num_warps=8, num_stages=8),
        spec("too few rows", m=16, needs=wgmma),
        spec("rounded", dtype="fp32", m=16, n=16, k=16, precision="tf32"),
        spec("K too small", m=16, n=16, k=8),
    ]
