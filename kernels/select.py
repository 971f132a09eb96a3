"""Which implementation of the kernels serves a device."""

import logging
import os

from trunkline.errors import ConfigError
from trunkline.kernels.build import BuildError
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Kernels
from trunkline.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def select_kernels(device: str = "auto", threads: int | None = None, *, head_dim: int) -> Kernels:
    """The fastest kernels there are for `device` ("auto" or "cpu") and heads of size `head_dim`.

    threads   of the CPU; None: all the cores this process may use

    Without a compiler, or for a head size the compiled kernels don't know, these are the slow reference ones: a warning says so.
    Raises ConfigError for a device that has no kernels.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(f"--device is '{device}', for which there are no kernels yet; allowed are 'auto' and 'cpu'.")
    try:
        kernels = CpuKernels(threads or available_cores())
    except BuildError as error:
        logger.warning(
            "The CPU kernels are not compiled: %s. Falling back to torch, which is several times slower.", error
        )
        return ReferenceKernels(why="no compiler")
    if not kernels.supports_head_dim(head_dim):
        logger.warning(
            "The CPU kernels want head sizes that 8 divides, not %d. Falling back to torch, several times slower.",
            head_dim,
        )
        return ReferenceKernels(why=f"head size {head_dim}")
    return kernels


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
