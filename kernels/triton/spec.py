"""What is shipped: every kernel in every configuration in which it can be launched, for the gate that compiles them all.

Each module of kernels has a function `specs(arch)` that lists its own. Launches take their configuration from the same
tables, so that nothing is compiled that is not launched, and nothing launched that was not compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ARCHS = (80, 90, 100)  # compute capabilities: Ampere (A100), Hopper (H100, H200), Blackwell (B200)

TYPE_NAMES = {  # torch's dtype -> Triton's name of it
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


class Config(NamedTuple):
    """How a kernel is launched.

    blocks      its constants that are sizes of blocks, by name
    num_warps   of 32 threads, per program
    num_stages  of the software pipeline
    registers   that the compiler may give a thread; None: as it thinks best, which for a few kernels is too few
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What a launch and a compilation are told besides the kernel's own arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """A kernel in one configuration.

    name       row of the table, e.g. "attend_splits bfloat16 D128 M64"
    kernel     the function under @triton.jit
    types      Triton's names of the types of its arguments that are not constants, in order: "*bf16", "i32", "fp32"; ":16"
               behind one says that it is divisible by 16, as pointers are
    constants  values of the others, those of `config.blocks` included
    needs      instructions one of which must be in its machine code, e.g. ("HGMMA",) for wgmma
    quick      part of what `make check` compiles for every architecture
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config
    needs: tuple[str, ...] = ()
    quick: bool = False
