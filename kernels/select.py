"""Which implementation of the kernels serves a device."""

import logging
import os
from typing import TYPE_CHECKING, Literal

import torch

from trunkline.errors import ConfigError
from trunkline.kernels.build import BuildError
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Kernels
from trunkline.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from trunkline.kernels.triton.kernels import TritonKernels

logger = logging.getLogger(__name__)


def resolve_device(device: str = "auto") -> Literal["cpu", "cuda"]:
    """Which of the two is meant: "auto" is a GPU where there is one.

    Raises ConfigError for "cuda" where there is no GPU, unless TRITON_INTERPRET=1 is set: its kernels then run on the CPU, in
    Triton's interpreter.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device is '{device}', for which there are no kernels; allowed are 'auto', 'cpu' and 'cuda'."
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ConfigError(
            f"--device is 'cuda', but torch {torch.__version__}, built {built}, finds no GPU. Please see that nvidia-smi lists"
            " one and that torch is built for its driver, or use --device cpu."
        )
    return "cuda"


def cpu_kernels(threads: int | None = None, *, head_dim: int, kv_dtype: torch.dtype | None = None) -> Kernels:
    """The fastest kernels there are for this CPU and heads of size `head_dim`.

    threads   None: all the cores this process may use
    kv_dtype  of keys and values: float32, float16 or float8_e4m3fn; None: as the weights are stored

    Without a compiler, or for a head size the compiled kernels don't know, these are the slow reference ones: a warning says so.
    """
    try:
        kernels = CpuKernels(threads or available_cores(), kv_dtype=kv_dtype)
    except BuildError as error:
        logger.warning(
            "The CPU kernels are not compiled: %s. Falling back to torch, which is several times slower.", error
        )
        return ReferenceKernels(why="no compiler", kv_dtype=kv_dtype)
    if not kernels.supports_head_dim(head_dim):
        logger.warning(
            "The CPU kernels want head sizes that 8 divides, not %d. Falling back to torch, several times slower.",
            head_dim,
        )
        return ReferenceKernels(why=f"head size {head_dim}", kv_dtype=kv_dtype)
    return kernels


def gpu_kernels(
    dtype: torch.dtype,
    *,
    head_dim: int,
    query_heads: int,
    max_model_len: int,
    kv_dtype: torch.dtype | None = None,
) -> "TritonKernels":
    """The kernels for this process's GPU; without one, for the CPU in Triton's interpreter. See `resolve_device` first.

    dtype          of weights and activations
    query_heads    of a layer, on this rank
    max_model_len  tokens of a request
    kv_dtype       of keys and values; None: that of the weights

    Raises ConfigError if the GPU, or these kernels, can't do what is asked for.
    """
    from trunkline.kernels.triton.kernels import TritonKernels  # where there is no GPU, Triton may be missing

    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
        logger.warning(
            "TRITON_INTERPRET=1 is set: GPU kernels run on the CPU, in Triton's interpreter, many thousand times slower. That is"
            " for looking at them, not for serving."
        )
    kernels = TritonKernels(device, dtype, query_heads=query_heads, max_model_len=max_model_len, kv_dtype=kv_dtype)
    if not kernels.supports_head_dim(head_dim):
        raise ConfigError(
            f"The heads of this model are of size {head_dim}; the GPU kernels know sizes up to 256 that 8 divides. Please use"
            " --device cpu."
        )
    return kernels


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
