"""How the CPU backend stores a model's weights: what --dtype and --quantization come to, for a checkpoint and the kernels there are.

    form = choose_format(checkpoint, kernels, dtype="auto", quantization="auto")
    form.name                                    # "Q4_1 and Q8_0 kept packed"
    Loader(form.tensors(checkpoint), kernels, form.dtype)

    quantization  matrices                                                         everything else
    none          `dtype`                                                          `dtype`, norms and biases float32
    gguf, awq, gptq, bitsandbytes, fp8
                  as the file has them, if such stay packed; else `dtype`          the same
    int8          8 bits and a scale for each output, quantized here               the same

Keys and values go by `dtype`, unless --kv-cache-dtype names another (kv_format.py).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trunkline.config import DTYPES, QUANTIZATIONS
from trunkline.errors import ConfigError
from trunkline.kernels.interface import Kernels
from trunkline.kernels.quantized import QuantizedMatrix, quantize_int8
from trunkline.kernels.reference import ReferenceKernels
from trunkline.models.checkpoint import Checkpoint, OnProgress
from trunkline.models.split import WHOLE, Split


class WeightFormat(NamedTuple):
    """The answer.

    dtype         of plain matrices, and what keys and values go by
    quantization  "none", "packed" or "int8"
    name          both for people: what most weights are stored as
    """

    dtype: torch.dtype
    quantization: str
    name: str

    def tensors(
        self, checkpoint: Checkpoint, on_progress: OnProgress | None = None, split: Split = WHOLE
    ) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """The tensors of `checkpoint`, or a rank's part of each, with matrices in this format where it is not a plain one."""
        if self.quantization == "packed":
            return checkpoint.packed_tensors(on_progress, split)
        plain = checkpoint.tensors(on_progress, split)
        return map(_as_int8, plain) if self.quantization == "int8" else plain


def _as_int8(named: tuple[str, Tensor]) -> tuple[str, Tensor | QuantizedMatrix]:
    name, tensor = named
    return name, quantize_int8(tensor) if tensor.ndim == 2 else tensor


def choose_format(checkpoint: Checkpoint, kernels: Kernels, *, dtype: str, quantization: str) -> WeightFormat:
    """The format that these settings ask for, one of config.DTYPES and one of config.QUANTIZATIONS.

    Raises ConfigError for a setting that there is not. (That "gguf" finds blocks, open_checkpoint has made sure of.)
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is '{dtype}'; allowed are {', '.join(DTYPES)}.")
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is '{quantization}'; allowed are {', '.join(QUANTIZATIONS)}.")
    packs = not isinstance(kernels, ReferenceKernels)
    kinds = checkpoint.packed_kinds
    if quantization == "auto":
        form = default_quantization(dtype, is_packed=bool(kinds), packs=packs)
    elif quantization in ("none", "int8"):
        form = quantization
    else:
        form = "packed" if kinds else "none"
    plain = _plain_dtype(dtype, checkpoint.config.dtype, kernels)
    name = str(plain).removeprefix("torch.")
    if form != "none":
        stored = _listed(kinds) if form == "packed" else "int8"
        kept = f"{stored} kept packed" if form == "packed" else stored
        name = kept if packs else f"{stored} as {name}"
    elif checkpoint.stored_quantization not in (None, "gguf") and not kinds:
        name = f"{name}, decoded from {checkpoint.stored_quantization}"
    return WeightFormat(plain, form, name)


def default_quantization(dtype: str, *, is_packed: bool, packs: bool) -> str:
    """What "auto" is: "packed" or "none".

    dtype      what the user wants weights stored as; whoever names one gets it, as ever
    is_packed  some matrices of the checkpoint can stay packed
    packs      the kernels multiply by packed matrices, instead of unpacking them first
    """
    return "packed" if dtype == "auto" and is_packed and packs else "none"


def _listed(names: Sequence[str]) -> str:
    """ "Q4_1", "Q4_1 and Q8_0", "Q4_K, Q6_K and Q8_0"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _plain_dtype(wanted: str, checkpoint: str, kernels: Kernels) -> torch.dtype:
    """ "auto": float16, except that bfloat16 checkpoints stay bfloat16; float32 where the compiled kernels are missing."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    if checkpoint == "bfloat16" and kernels.auto_dtype == torch.float16:
        return torch.bfloat16
    return kernels.auto_dtype
