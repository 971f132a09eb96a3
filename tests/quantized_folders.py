"""Folders as AutoAWQ, GPTQ's tools, bitsandbytes and fp8 quantizers write them: the tiny model of tests.tiny with its linear layers in few bits.

    folder, plain = quantized(tmp_path, Gptq(bits=4, group=32, act_order=True))
    # `plain` is a folder of float32 that holds exactly the numbers that the bits of the other stand for

Packing is written out here in NumPy, number by number: a second opinion on what the loader reads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model

Arrays = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.7230,
    1.0,
]


class Tool(Protocol):
    """Quantizes a matrix [N, K]: the tensors that are stored for a module, and the numbers that they stand for."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]: ...


def quantized(path: Path, tool: Tool, **overrides: Any) -> tuple[Path, Path]:
    """The folder, and its plain twin. Embedding and output layer stay as they are, as with the real tools."""
    folder, plain = tiny_model(path / "quantized", **overrides), tiny_model(path / "plain", **overrides)
    weights = load_file(folder / "model.safetensors")
    stored, twin = {}, {}
    for name, tensor in weights.items():
        if "_proj.weight" not in name:
            stored[name] = twin[name] = tensor
            continue
        parts, numbers = tool.quantize(tensor.float().numpy())
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": values.contiguous() for part, values in parts.items()}
        twin[name] = torch.from_numpy(numbers.astype(np.float32)).contiguous()
    save_file(stored, folder / "model.safetensors")
    save_file(twin, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(tool.config)}))
    return folder, plain


def pack(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """int [rows, M] -> int32 [rows, ⌈M·bits/32⌉], eight or four neighbours a word, that of `order[i]` at place i."""
    count = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // count)), np.uint32)
    for column in range(numbers.shape[1]):
        word, place = divmod(column, count)
        at = place if order is None else order.index(place)
        words[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(at * bits)
    return torch.from_numpy(words.view(np.int32))


def groups(weight: np.ndarray, group: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values [N, K], scales float16 [N, G] and zeros [N, G] of groups along K; the last may be short."""
    n, k = weight.shape
    count = -(-k // group)
    values, scales, zeros = np.zeros((n, k), np.int64), np.zeros((n, count), np.float16), np.zeros((n, count), np.int64)
    for g in range(count):
        part = weight[:, g * group : (g + 1) * group]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scales[:, g] = np.maximum(high - low, 1e-4) / (2**bits - 1)
        scale = scales[:, g].astype(np.float32)
        zeros[:, g] = np.clip(np.rint(-low / scale), 1, 2**bits - 1)
        values[:, g * group : (g + 1) * group] = np.clip(
            np.rint(part / scale[:, None]) + zeros[:, g, None], 0, 2**bits - 1
        )
    return values, scales, zeros


@dataclass
class Awq:
    group: int = 32

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        values, scales, zeros = groups(weight, self.group, 4)
        of_input = np.arange(weight.shape[1]) // self.group
        parts = {
            "qweight": pack(values.T, 4, AWQ_ORDER),
            "qzeros": pack(zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, (values - zeros[:, of_input]) * scales.astype(np.float32)[:, of_input]


@dataclass
class Gptq:
    bits: int = 4
    group: int = 32  # -1: all
    act_order: bool = False
    version: int = 1
    biases: bool = False  # of zeros, as AutoGPTQ writes them

    @property
    def config(self) -> dict[str, Any]:
        v2 = {"checkpoint_format": "gptq_v2"} if self.version == 2 else {}
        return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.act_order} | v2

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        n, k = weight.shape
        group = k if self.group == -1 else self.group
        of_input = np.arange(k) // group
        if self.act_order:  # inputs that matter most first: here any order
            of_input = np.random.default_rng(k).permutation(of_input)
        order = np.argsort(of_input, kind="stable")
        sorted_values, scales, zeros = groups(weight[:, order], group, self.bits)
        values = np.empty_like(sorted_values)
        values[:, order] = sorted_values
        parts = {
            "qweight": pack(values, self.bits).T,
            "qzeros": pack((zeros - (1 if self.version == 1 else 0)).T, self.bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(of_input.astype(np.int32)),
        }
        if self.biases:
            parts["bias"] = torch.zeros(n, dtype=torch.float16)
        return parts, (values - zeros[:, of_input]) * scales.astype(np.float32)[:, of_input]


@dataclass
class Int8:
    """LLM.int8()."""

    config: ClassVar = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        largest = np.abs(weight).max(axis=1, keepdims=True).astype(np.float32)
        values = np.rint(weight / largest * 127).astype(np.int8)
        parts = {
            "weight": torch.from_numpy(values),
            "SCB": torch.from_numpy(largest[:, 0]),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return parts, values.astype(np.float32) * (largest / np.float32(127))


@dataclass
class Nf4:
    """QLoRA's; nested: the scales of blocks are quantized, too."""

    nested: bool = False
    block: int = 64
    nested_block: int = 256

    config: ClassVar = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        code = np.array(NF4, np.float32)
        flat = weight.flatten()
        padded = np.pad(flat, (0, -len(flat) % self.block)).reshape(-1, self.block)
        absmax = np.abs(padded).max(axis=1).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": self.block,
            "dtype": "float16",
            "shape": list(weight.shape),
        }
        parts: Arrays = {"weight.quant_map": torch.from_numpy(code)}
        if self.nested:
            offset = float(absmax.mean())
            nested_code = np.linspace(-1, 1, 256, dtype=np.float32)
            centred = np.pad(absmax - offset, (0, -len(absmax) % self.nested_block)).reshape(-1, self.nested_block)
            largest = np.abs(centred).max(axis=1).astype(np.float32)
            index = np.abs(centred[..., None] / largest[:, None, None] - nested_code).argmin(axis=-1)
            absmax = ((nested_code[index] * largest[:, None]).flatten()[: len(absmax)] + np.float32(offset)).astype(
                np.float32
            )
            parts |= {
                "weight.absmax": torch.from_numpy(index.flatten()[: len(absmax)].astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(largest),
                "weight.nested_quant_map": torch.from_numpy(nested_code),
            }
            state |= {"nested_blocksize": self.nested_block, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            parts["weight.absmax"] = torch.from_numpy(absmax)
        index = np.abs(padded[..., None] / absmax[:, None, None] - code).argmin(axis=-1)
        numbers = (code[index] * absmax[:, None]).flatten()[: len(flat)].reshape(weight.shape)
        index = index.flatten()[: len(flat)].astype(np.uint8)
        parts["weight"] = torch.from_numpy((index[::2] << 4 | index[1::2])[:, None].copy())
        said = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(said)
        return parts, numbers


@dataclass
class Fp8:
    block: tuple[int, int] | None = None
    each_output: bool = False

    @property
    def config(self) -> dict[str, Any]:
        blocks = {} if self.block is None else {"weight_block_size": list(self.block)}
        return {"quant_method": "fp8", "activation_scheme": "dynamic"} | blocks

    def quantize(self, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        n, k = weight.shape
        height, width = self.block or ((1, k) if self.each_output else (n, k))
        scale = np.zeros((-(-n // height), -(-k // width)), np.float32)
        for i, j in np.ndindex(*scale.shape):
            scale[i, j] = np.abs(weight[i * height : (i + 1) * height, j * width : (j + 1) * width]).max() / 448
        spread = scale.repeat(height, axis=0)[:n].repeat(width, axis=1)[:, :k]
        values = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
        name = "weight_scale" if self.block is None else "weight_scale_inv"
        stored = torch.from_numpy(scale if self.block or self.each_output else scale.reshape(()))
        parts = {"weight": values, name: stored, "input_scale": torch.tensor(1.0)}
        return parts, values.float().numpy() * spread
