"""Hugging Face folders whose matrices are stored in few bits: AWQ, GPTQ, bitsandbytes, fp8.

    scheme = scheme_of(hf_config)                        # None: a folder of plain numbers
    scheme.parts("model.layers.0.mlp.up_proj", (1536, 576), stored_names)    # {"….up_proj.qweight": Part((72, 1536), ("I32",)), …}
    scheme.read(load, "model.layers.0.mlp.up_proj", (1536, 576), parts)      # a QuantizedMatrix, or a plain tensor

    method         what stands for `weight` [N, K]                                                    becomes
    awq            qweight int32 [K, N/8], qzeros int32 [K/G, N/8], scales [K/G, N]; eight numbers     4 bits in groups of G
                   of an int32 in the order 0 2 4 6 1 3 5 7
    gptq           qweight int32 [K·b/32, N], qzeros int32 [⌈K/G⌉, N·b/32], scales [⌈K/G⌉, N],         4 or 8 bits in groups; plain
                   g_idx int32 [K]: the group of each input; a zero is stored less 1, but in v2        where g_idx is out of order
    bitsandbytes   weight int8 [N, K], SCB float32 [N]: LLM.int8()                                     8 bits
                   weight uint8 [N·K/2, 1], absmax of each block, its codebook: nf4, fp4; the          plain
                   absmax may be quantized once more
    fp8            weight float8_e4m3fn [N, K], weight_scale of all or of each output, or              plain
                   weight_scale_inv of each block

A matrix without such parts is a plain one: the tools leave some out, as the output layer. Knows no model. torch is imported when a matrix
is read. AWQ: arXiv:2306.00978; GPTQ: arXiv:2210.17323; LLM.int8(): arXiv:2208.07339; QLoRA: arXiv:2305.14314.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec

from trunkline.errors import ModelError
from trunkline.models.fields import MAX_WIDTH, Fields

if TYPE_CHECKING:
    from torch import Tensor

    from trunkline.kernels.quantized import QuantizedMatrix

Shape = tuple[int, ...]
FLOATS = ("F32", "F16", "BF16")
Load = Callable[[str], "Tensor"]  # a stored tensor by its name

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight numbers in an int32, from its lowest bits on
METHODS = ("awq", "gptq", "bitsandbytes", "fp8")


class Part(NamedTuple):
    """A stored tensor: its shape, and the types that it may have, as safetensors spells them."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


Parts = dict[str, Part]


class Scheme(Protocol):
    """How one folder stores its matrices.

    method  one of METHODS
    kinds   for people, of matrices that can stay packed; (): all are decoded
    """

    @property
    def method(self) -> str: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        """Names of the tensors that stand for `module`.weight; None: it is stored as it is."""

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        """True for tensors that say nothing new."""

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "QuantizedMatrix | Tensor":
        """The matrix, of the tensors `parts`. A plain one is float32."""


def scheme_of(hf_config: Mapping[str, Any]) -> Scheme | None:
    """What config.json says about it. Raises ModelError for a method or a setting that can't be read."""
    config = Fields("config.json", hf_config)
    if config.get("quantization_config") is None:
        return None
    fields = config.section("quantization_config")
    method = fields.get("quant_method")
    if method not in METHODS:
        raise fields.refuse("quant_method", " or ".join(map(repr, METHODS)))
    return {"awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes, "fp8": _fp8}[method](fields)


def _awq(fields: Fields) -> Scheme:
    if str(fields.get("version") or "gemm").lower() != "gemm":
        raise fields.refuse("version", "'gemm'")
    if fields.integer("bits", 1, 32, default=4) != 4:
        raise fields.refuse("bits", "4")
    return AWQ(_group_size(fields))


def _gptq(fields: Fields) -> Scheme:
    bits = fields.integer("bits", 1, 32)
    if bits not in (4, 8):
        raise fields.refuse("bits", "4 or 8")
    is_ordered = not fields.boolean("desc_act", default=False)
    return GPTQ(_group_size(fields), bits, is_ordered, 0 if fields.get("checkpoint_format") == "gptq_v2" else 1)


def _bitsandbytes(fields: Fields) -> Scheme:
    if fields.get("load_in_8bit"):
        return BitsAndBytes8()
    return BitsAndBytes4(fields.get("bnb_4bit_quant_type") or "fp4")


def _fp8(fields: Fields) -> Scheme:
    block = fields.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise fields.refuse("weight_block_size", "two numbers of outputs and inputs")
    return Float8(None if block is None else (block[0], block[1]))


def _group_size(fields: Fields) -> int:
    """Inputs; 0: all."""
    if fields.get("group_size") in (-1, None):
        return 0
    return fields.integer("group_size", 1, MAX_WIDTH)


def _grouped(value: "Tensor", scale: "Tensor", zero: "Tensor", group: int, bits: int) -> "QuantizedMatrix":
    """scale * (value - zero) of value int32 [N, K], scale and zero [N, groups]; the last group may be short."""
    import torch

    from trunkline.kernels.quantized import QuantizedMatrix

    k = value.shape[1]
    scale = scale.float()
    shift = 128 if bits == 8 else 0  # what a byte holds has a sign
    offset = (shift - zero).float() * scale
    if k % group:  # of the same scales in smaller groups, which divide the inputs
        smaller = math.gcd(group, k)
        scale, offset = (part.repeat_interleave(group // smaller, dim=1)[:, : k // smaller] for part in (scale, offset))
        group = smaller
    return QuantizedMatrix((value - shift).to(torch.int8), scale.contiguous(), offset.contiguous(), group, bits)


def _unpacked(packed: "Tensor", bits: int) -> "Tensor":
    """int32 [..., W] -> int32 [..., W, 32 / bits], from the lowest bits on."""
    import torch

    return (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)


@dataclass(frozen=True)
class AWQ:
    """`group` inputs share a scale; 0: all."""

    group: int
    method = "awq"
    kinds = ("AWQ",)

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        if f"{module}.qweight" not in stored:
            return None
        n, k = shape
        if n % 8 or k % (self.group or k):
            raise ModelError(
                f"'{module}' has {n} outputs and {k} inputs; AWQ packs multiples of 8 outputs, and of its group's {self.group} inputs."
            )
        groups = k // (self.group or k)
        return {
            f"{module}.qweight": Part((k, n // 8), ("I32",)),
            f"{module}.qzeros": Part((groups, n // 8), ("I32",)),
            f"{module}.scales": Part((groups, n)),
        }

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        return False

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "QuantizedMatrix":
        value, zero = (self._in_order(load(f"{module}.{part}")) for part in ("qweight", "qzeros"))
        return _grouped(value.T, load(f"{module}.scales").T, zero.T, self.group or shape[1], 4)

    @staticmethod
    def _in_order(packed: "Tensor") -> "Tensor":
        """int32 [rows, N/8] -> int32 [rows, N]."""
        import torch

        numbers = _unpacked(packed, 4)
        ordered = torch.empty_like(numbers)
        ordered[..., list(AWQ_ORDER)] = numbers
        return ordered.flatten(1)


@dataclass(frozen=True)
class GPTQ:
    """
    group       inputs that share a scale; 0: all
    bits        4 or 8
    is_ordered  inputs of a group are neighbours
    less        what a zero is stored less by
    """

    group: int
    bits: int
    is_ordered: bool
    less: int
    method = "gptq"

    @property
    def kinds(self) -> tuple[str, ...]:
        return (f"GPTQ of {self.bits} bits",) if self.is_ordered else ()

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        if f"{module}.qweight" not in stored:
            return None
        n, k = shape
        groups, in_word = -(-k // (self.group or k)), 32 // self.bits
        parts = {
            f"{module}.qweight": Part((-(-k // in_word), n), ("I32",)),
            f"{module}.qzeros": Part((groups, -(-n // in_word)), ("I32",)),
            f"{module}.scales": Part((groups, n)),
        }
        if f"{module}.g_idx" in stored or not self.is_ordered:
            parts[f"{module}.g_idx"] = Part((k,), ("I32", "I64"))
        return parts

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        # AutoGPTQ writes a bias for every layer; whoever reads the layer looks that it is 0.
        return name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in stored

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "QuantizedMatrix | Tensor":
        import torch

        n, k = shape
        words = _unpacked(load(f"{module}.qweight").T.contiguous(), self.bits)  # [N, K / in_word, in_word]
        value = words.flatten(1)[:, :k]
        zero = _unpacked(load(f"{module}.qzeros"), self.bits).flatten(1)[:, :n].T + self.less
        scale = load(f"{module}.scales").T
        group = self.group or k
        if f"{module}.g_idx" not in parts:
            return _grouped(value, scale, zero, group, self.bits)
        of_input = load(f"{module}.g_idx").long()
        if of_input.min() < 0 or of_input.max() >= scale.shape[1]:
            raise ModelError(
                f"Tensor '{module}.g_idx' names groups from {of_input.min()} to {of_input.max()}; there are {scale.shape[1]}."
            )
        if torch.equal(of_input, torch.arange(k) // group):  # in order after all
            return _grouped(value, scale, zero, group, self.bits)
        return (value - zero[:, of_input]).float() * scale.float()[:, of_input]


class BitsAndBytes8:
    """LLM.int8(): a scale for each output."""

    method = "bitsandbytes"
    kinds = ("bitsandbytes' int8",)

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        if f"{module}.SCB" not in stored:
            return None
        return {f"{module}.weight": Part(shape, ("I8",)), f"{module}.SCB": Part(shape[:1])}

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        return name.endswith(".weight_format")

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "QuantizedMatrix":
        from trunkline.kernels.quantized import QuantizedMatrix

        scale = load(f"{module}.SCB").float()[:, None] / 127
        return QuantizedMatrix(load(f"{module}.weight").contiguous(), scale, None, shape[1], 8)


_Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _State(msgspec.Struct, frozen=True):
    """What bitsandbytes says about the blocks of a matrix: numbers in each; of absmax, if that is quantized too, and what was taken off."""

    blocksize: _Size
    nested_blocksize: _Size | None = None
    nested_offset: float = 0.0


def _spread(scales: "Tensor", block: int, count: int, name: str) -> "Tensor":
    """The scale of each of `count` numbers, of which `block` share one."""
    needed = -(-count // block)
    if len(scales) < needed:
        raise ModelError(f"Tensor '{name}' has {count} numbers in blocks of {block}, but {len(scales)} scales.")
    return scales[:needed].float().repeat_interleave(block)[:count]


@dataclass(frozen=True)
class BitsAndBytes4:
    """`kind` is nf4 or fp4: the codebook itself is stored."""

    kind: str
    method = "bitsandbytes"
    kinds: ClassVar[tuple[str, ...]] = ()

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        weight = f"{module}.weight"
        if self._state(module) not in stored:
            return None
        parts = {
            weight: Part((-(-shape[0] * shape[1] // 2), 1), ("U8",)),
            f"{weight}.quant_map": Part((16,)),
            self._state(module): Part(stored[self._state(module)], ("U8",)),
        }
        # How many of these there are follows from the sizes of blocks, which the state says.
        if f"{weight}.nested_absmax" in stored:
            parts |= {
                f"{weight}.absmax": Part(stored.get(f"{weight}.absmax", ()), ("U8",)),
                f"{weight}.nested_absmax": Part(stored[f"{weight}.nested_absmax"]),
                f"{weight}.nested_quant_map": Part((256,)),
            }
        else:
            parts[f"{weight}.absmax"] = Part(stored.get(f"{weight}.absmax", ()))
        return parts

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        return False

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "Tensor":
        import torch

        weight = f"{module}.weight"
        state = self._settings(load, module)
        absmax = load(f"{weight}.absmax").flatten()
        if (absmax.dtype == torch.uint8) != (state.nested_blocksize is not None):
            raise ModelError(
                f"Tensor '{weight}.absmax' is {absmax.dtype}, which is not what '{self._state(module)}' says."
            )
        if state.nested_blocksize:
            nested = load(f"{weight}.nested_absmax").flatten()
            of_blocks = _spread(nested, state.nested_blocksize, len(absmax), f"{weight}.absmax")
            absmax = load(f"{weight}.nested_quant_map").float()[absmax.long()] * of_blocks + state.nested_offset
        packed = load(weight).flatten()
        numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: shape[0] * shape[1]]
        scales = _spread(absmax, state.blocksize, len(numbers), weight)
        return (load(f"{weight}.quant_map").float()[numbers.long()] * scales).view(shape)

    def _settings(self, load: Load, module: str) -> "_State":
        name = self._state(module)
        try:
            return msgspec.json.decode(bytes(load(name).tolist()), type=_State)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelError(
                f"Tensor '{name}' should hold what bitsandbytes says about its blocks: {error}."
            ) from error

    def _state(self, module: str) -> str:
        return f"{module}.weight.quant_state.bitsandbytes__{self.kind}"


@dataclass(frozen=True)
class Float8:
    """`block`: outputs and inputs that share a scale; None: all, or all of an output."""

    block: tuple[int, int] | None
    method = "fp8"
    kinds: ClassVar[tuple[str, ...]] = ()

    def parts(self, module: str, shape: Shape, stored: Mapping[str, Shape]) -> Parts | None:
        scale = self._scale(module, stored)
        if scale is None:
            return None
        wanted: Shape
        if self.block is not None:
            wanted = (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))
        else:
            wanted = stored[scale] if stored[scale] in ((), (1,), (shape[0],)) else (shape[0], 1)
        return {f"{module}.weight": Part(shape, ("F8_E4M3",)), scale: Part(wanted)}

    def is_redundant(self, name: str, stored: Collection[str]) -> bool:
        return name.endswith((".input_scale", ".activation_scale"))  # of activations, which are not rounded here

    def read(self, load: Load, module: str, shape: Shape, parts: Collection[str]) -> "Tensor":
        weight = load(f"{module}.weight").float()
        if self.block is None:
            return weight * load(f"{module}.weight_scale").float().reshape(-1, 1)
        scale = load(f"{module}.weight_scale_inv").float()
        for dim, size in enumerate(self.block):
            scale = scale.repeat_interleave(min(size, shape[dim]), dim=dim).narrow(dim, 0, shape[dim])
        return weight * scale

    def _scale(self, module: str, stored: Collection[str]) -> str | None:
        name = f"{module}.weight_scale" if self.block is None else f"{module}.weight_scale_inv"
        return name if name in stored else None
