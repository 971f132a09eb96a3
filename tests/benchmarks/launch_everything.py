"""Calls the wrappers of kernels as a GPU's owner would, on a driver that compiles and launches nothing; see test_kernels_aot.py.

Prints a line for each kernel that was not in Triton's cache: the gate had not compiled what is launched. In a process without
TRITON_INTERPRET.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from benchmarks.gpu_visit.scenes import LLAMA_8B, Asked, Scene
from trunkline.kernels.interface import Batch
from trunkline.kernels.triton import activation, bitmask, embedding, norm, pages, rotary
from trunkline.step import SPLIT

ARCH = 90
CPU = torch.device("cpu")


class NoDriver(DriverBase):
    """A Hopper that isn't there."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> Any:
        return None


def launch_nothing(run: Callable[..., Any]) -> Callable[..., Any]:
    def warm_up(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    return warm_up


def scenes() -> list[tuple[Scene, bool]]:
    """Scenes, and whether what is shared is read once."""
    asked = (
        Asked(contexts=(40, 700), new=(1, 1)),
        Asked(contexts=(40, 700), new=(40, 300)),
        Asked(contexts=(SPLIT + 1,) * 20, new=(1,) * 20, documents=(0,) * 20, prefix=SPLIT),
    )
    return [(Scene(each, LLAMA_8B, torch.bfloat16, CPU), each.prefix > 0) for each in asked]


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def store(scene: Scene, batch: Batch) -> None:
    rotary.rotate_and_store(scene.qkv, torch.zeros(1000, 128), batch, scene.kv, 0)


def main() -> None:
    triton.runtime.driver.set_active(NoDriver())
    JITFunction.run = launch_nothing(JITFunction.run)
    seen: list[tuple[str, bool]] = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: seen.append((src.name, cache_hit))
    for count in (1, 3, 16, 33):
        x, wide = rows(count, 4096), rows(count, 2 * 14336)
        norm.rms_norm(x, rows(4096), 1e-5, out=torch.empty_like(x))
        norm.add_rms_norm(x, x.clone(), rows(4096), 1e-5, out=torch.empty_like(x))
        activation.gated_mul(wide, "silu", out=rows(count, 14336))
        embedding.embed(torch.zeros(count, dtype=torch.int32), rows(1000, 4096), out=x)
        mask = torch.zeros(count, 4008, dtype=torch.int32)
        bitmask.apply_bitmask(torch.zeros(count, 128_256), mask, torch.zeros(count, dtype=torch.int32))
    for scene, shared in scenes():
        scene.launch(scene.plan(shared=shared))(0)
        store(scene, scene.batch(shared=False))
        ids = torch.arange(2, dtype=torch.int32)
        pages.copy_pages(scene.kv, ids, ids + 2)
    for name in sorted({name for name, cache_hit in seen if not cache_hit}):
        print(f"{name} was compiled at its launch")
    print(f"{len(seen)} launches looked for a kernel")


if __name__ == "__main__":
    main()
