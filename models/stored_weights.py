"""Where the tensors of a checkpoint come from: a Hugging Face folder, plain or quantized, a GGUF file, or chance.

    weights = FolderWeights(read_safetensors(folder), config)
    weights.read("model.layers.0.self_attn.q_proj.weight")        # under the names that weights.py has for a Llama, in any format

torch is imported when a tensor is read.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from trunkline.errors import ModelError
from trunkline.models.config import ModelConfig
from trunkline.models.gguf import GGUFFile
from trunkline.models.gguf_blocks import PACKINGS
from trunkline.models.quantized_folder import Part, Parts, Scheme
from trunkline.models.safetensors_folder import SafetensorsFolder
from trunkline.models.weights import (
    Index,
    Shape,
    gguf_place,
    hf_place,
    is_interleaved,
    stored_shapes,
    tensor_shapes,
    unpermute,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trunkline.kernels.quantized import QuantizedMatrix

DUMMY_STD = 0.02


class Weights(Protocol):
    """The tensors of one checkpoint, in whatever form they are stored."""

    def read(self, name: str, index: Index = ()) -> "torch.Tensor":
        """The tensor of that Hugging Face name, or the part of it at `index`, on the CPU."""


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Hands out the tensors of a Hugging Face folder."""

    folder: SafetensorsFolder
    config: ModelConfig

    @property
    def parts(self) -> Parts:
        """What the folder must have, by its own names."""
        shapes = stored_shapes(self.config, hf_place)
        return {self.folder.spelled(name): Part(shape) for name, shape in shapes.items()}

    def read(self, name: str, index: Index = ()) -> "torch.Tensor":
        place = hf_place(name, self.config)
        return self.folder.read(place.name, place.index_of(index))


@dataclass(frozen=True)
class QuantizedFolderWeights:
    """The same of a folder whose matrices are stored in few bits, decoded or packed."""

    folder: SafetensorsFolder
    config: ModelConfig
    scheme: Scheme

    @property
    def packed_kinds(self) -> tuple[str, ...]:
        """See Checkpoint.packed_kinds."""
        return self.scheme.kinds

    @cached_property
    def _found(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self.folder.tensors.items()}

    @cached_property
    def parts(self) -> Parts:
        """What the folder must have, by its own names."""
        parts: Parts = {}
        for name, shape in stored_shapes(self.config, hf_place).items():
            parts |= self._stand_ins(name, shape) or {self.folder.spelled(name): Part(shape)}
        return parts

    def read(self, name: str, index: Index = ()) -> "torch.Tensor":
        from trunkline.kernels.quantized import QuantizedMatrix

        tensor = self.read_packed(name, index)
        return tensor.dequantize() if isinstance(tensor, QuantizedMatrix) else tensor

    def read_packed(self, name: str, index: Index = ()) -> "torch.Tensor | QuantizedMatrix":
        """The matrix in the bits that the folder has, if they can stay; else as `read` gives it."""
        place = hf_place(name, self.config)
        shape = stored_shapes(self.config, hf_place)[place.name]
        parts = self._stand_ins(place.name, shape)
        if parts is None:
            return self.folder.read(place.name, place.index_of(index))
        module = self.folder.spelled(place.name).removesuffix(".weight")
        self._check_no_bias(module)
        return _cut(self.scheme.read(self.folder.read, module, shape, parts), place.index_of(index))

    def _stand_ins(self, name: str, shape: Shape) -> Parts | None:
        """The tensors that stand for the matrix `name`; None: it is stored as it is."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return None
        return self.scheme.parts(self.folder.spelled(name).removesuffix(".weight"), shape, self._found)

    def _check_no_bias(self, module: str) -> None:
        """Some tools write a bias of zeros for every layer."""
        name = f"{module}.bias"
        if name in self.folder.tensors and name not in self.parts and self.folder.read(name).any():
            raise ModelError(
                f"{self.folder.folder} has the tensor '{name}', which is not part of a {self.config.architecture} model, and is not 0."
            )


def _cut(matrix: "torch.Tensor | QuantizedMatrix", index: Index) -> "torch.Tensor | QuantizedMatrix":
    """The part at `index`; decoded, if columns begin or end inside a group."""
    from trunkline.kernels.quantized import QuantizedMatrix

    if not index:
        return matrix
    if not isinstance(matrix, QuantizedMatrix):
        return matrix[index]
    rows, columns = (*index, slice(None))[:2]
    first, last, _ = columns.indices(matrix.shape[1])
    group = matrix.group
    if (first, last) == (0, matrix.shape[1]):
        groups = slice(None)
    elif first % group or last % group:
        return matrix.dequantize()[index]
    else:
        groups = slice(first // group, last // group)
    offset = None if matrix.offset is None else matrix.offset[rows, groups]
    return QuantizedMatrix(matrix.value[rows, columns], matrix.scale[rows, groups], offset, group, matrix.bits)


@dataclass(frozen=True, slots=True)
class GGUFWeights:
    """Dequantizes one tensor after the other, or hands it out packed."""

    file: GGUFFile
    config: ModelConfig

    @property
    def packed_kinds(self) -> tuple[str, ...]:
        """See Checkpoint.packed_kinds."""
        matrices = [tensor for tensor in self.file.tensors.values() if len(tensor.shape) >= 2]
        return tuple(kind for kind, _ in bytes_of(matrices, lambda tensor: tensor.kind.name) if kind in PACKINGS)

    def read(self, name: str, index: Index = ()) -> "torch.Tensor":
        import torch

        place = gguf_place(name, self.config)
        return torch.from_numpy(self._in_order(name, self.file.dequantize(place.name, place.index_of(index))))

    def read_packed(self, name: str, index: Index = ()) -> "torch.Tensor | QuantizedMatrix":
        """The matrix as the file has it, if it has a packed form (GGUFFile.unpack); else as `read` gives it."""
        import torch

        from trunkline.kernels.quantized import QuantizedMatrix

        place = gguf_place(name, self.config)
        blocks = self.file.unpack(place.name, place.index_of(index))
        if blocks is None:
            return self.read(name, index)

        def tensor(part: "np.ndarray") -> torch.Tensor:
            return torch.from_numpy(self._in_order(name, part))

        packing = PACKINGS[self.file.tensors[place.name].kind.name]
        offset = None if blocks.offset is None else tensor(blocks.offset)
        return QuantizedMatrix(tensor(blocks.value), tensor(blocks.scale), offset, packing.group, packing.bits)

    def _in_order(self, name: str, rows: "np.ndarray") -> "np.ndarray":
        """Rows of the tensor `name`, in Hugging Face's order."""
        return unpermute(rows, len(rows) // self.config.head_dim) if is_interleaved(name, self.config) else rows


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """Random weights. Each tensor depends on the seed and its name alone: fewer layers give the same first layers, and the parts of
    all ranks the same whole. So of a part, the whole tensor is made first."""

    config: ModelConfig
    seed: int

    def read(self, name: str, index: Index = ()) -> "torch.Tensor":
        import torch

        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(tensor_shapes(self.config)[name], generator=generator) * DUMMY_STD
        if name.endswith("norm.weight"):
            values += 1 - self.config.norm_offset
        return values[index].to(getattr(torch, self.config.dtype))


def bytes_of(tensors: Iterable[Any], kind_of: Callable[[Any], str]) -> list[tuple[str, int]]:
    """Kinds and their bytes, the most first."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[kind_of(tensor)] += tensor.num_bytes
    return num_bytes.most_common()
