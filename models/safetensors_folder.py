"""The *.safetensors files of a Hugging Face folder: what is in them, by their headers, and one tensor at a time.

    weights = read_safetensors(Path("SmolLM2-135M"))   # headers only: milliseconds, whatever the size
    weights.tensors["lm_head.weight"]                  # StoredTensor(file="model.safetensors", dtype="BF16", shape=…)
    weights.read("lm_head.weight")                     # a torch tensor
    weights.read("lm_head.weight", (slice(0, 100),))   # its first 100 rows: no more of it is read

A file is the length of the header (u64, little-endian), the header (JSON: name -> dtype, shape, data_offsets), and the
data, which the offsets tile without gaps.                              https://huggingface.co/docs/safetensors

The `safetensors` library reads the data. The headers are checked here first, so that a truncated or foreign file is
named in a sentence before torch is imported. Knows nothing of models.
"""

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trunkline.errors import ModelError
from trunkline.models.json_file import read_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20  # the library's own limit
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # those we read

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header."""

    dtype: str
    shape: list[_Natural]
    data_offsets: tuple[_Natural, _Natural]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    file: str  # name within the folder
    dtype: str  # as safetensors spells it, e.g. "BF16"
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The tensors of one folder, whichever file holds them.

    left_out  what Hugging Face's names of a whole model begin with, and these do not
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    left_out: str = ""

    def spelled(self, name: str) -> str:
        """What the folder calls the tensor `name`."""
        return name.removeprefix(self.left_out)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> "torch.Tensor":
        """The tensor, or the part of it at `index`, in its own dtype; the whole one is mapped from the file.

        Raises ModelError if a value is not finite.
        """
        import safetensors
        import torch

        name = self.spelled(name)
        path = self.folder / self.tensors[name].file
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor '{name}' cannot be read: {error}.") from error
        if not tensor.numel():
            return tensor
        is_float8 = tensor.dtype.itemsize == 1 and tensor.is_floating_point()  # of which torch knows no extremes
        lowest, highest = torch.aminmax(
            tensor.float() if is_float8 else tensor
        )  # passes NaN on, and copies nothing else
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            raise ModelError(f"{path}: tensor '{name}' holds a value that is not finite.")
        return tensor


def read_safetensors(folder: Path) -> SafetensorsFolder:
    """The headers of the folder's files: model.safetensors, or the shards that model.safetensors.index.json names, or
    the only *.safetensors file there is.

    Raises ModelError if a file is missing, truncated or corrupt.
    """
    tensors: dict[str, StoredTensor] = {}
    weight_map = _weight_map(folder)
    for file in dict.fromkeys(weight_map.values()) if weight_map else [_single_file(folder)]:
        for name, tensor in _read_header(folder, file).items():
            if name in tensors:
                raise ModelError(f"{folder}: tensor '{name}' is both in {tensors[name].file} and in {file}.")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise ModelError(f"{folder / INDEX} says that tensor '{name}' is in {file}, but it is not.")
    return SafetensorsFolder(folder, tensors)


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: file of each tensor. Empty if the folder is not sharded."""
    if (folder / "model.safetensors").exists() or not (folder / INDEX).exists():
        return {}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{folder / INDEX}: 'weight_map' is missing or empty; expected an object of tensor names to files."
        )
    for name, file in weight_map.items():
        # Only plain names: an index must not reach outside its folder.
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise ModelError(
                f"{folder / INDEX}: tensor '{name}' is said to be in {file!r}; allowed is the name of a .safetensors"
                " file in the same folder."
            )
        if not (folder / file).exists():
            raise ModelError(f"{folder} lacks {file}, which {INDEX} names; download it too.")
    return weight_map


def _single_file(folder: Path) -> str:
    if (folder / "model.safetensors").exists():
        return "model.safetensors"
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} holds {len(files)} .safetensors files, but neither model.safetensors nor {INDEX}, which says"
            " which of them belong to the model."
        )
    return files[0]


def _read_header(folder: Path, file: str) -> dict[str, StoredTensor]:
    path = folder / file
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
        raise ModelError(f"{path} is not a file, but a folder, pipe or device.")
    with path.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'.")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or (length > status.st_size - 8 and length <= MAX_HEADER_BYTES):
            raise ModelError(
                f"{path} is truncated: it ends inside its header, at byte {status.st_size}; download it again."
            )
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} is not a safetensors file: its first 8 bytes announce a header of {length} bytes."
            )
        entries = _decode_header(path, stream.read(length))
    _check_layout(path, entries, status.st_size - 8 - length)
    return {
        name: StoredTensor(file, entry.dtype, tuple(entry.shape), entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _decode_header(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        objects = msgspec.json.decode(header, type=dict[str, Any])
        objects.pop("__metadata__", None)
        return msgspec.convert(objects, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid safetensors file: its header is wrong: {error}.") from error


def _check_layout(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    """The tensors must follow each other without gap or overlap, and end where the file ends."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        size = DTYPE_BYTES.get(entry.dtype)
        if start != end or stop < start:
            raise ModelError(
                f"{path} is corrupt: tensor '{name}' lies at bytes {start} to {stop} of the data, not from {end} on."
            )
        if size is not None and stop - start != size * math.prod(entry.shape):
            raise ModelError(
                f"{path} is corrupt: tensor '{name}' has {stop - start} bytes; {entry.dtype} of shape {entry.shape} has"
                f" {size * math.prod(entry.shape)}."
            )
        end = stop
    if end > data_bytes:
        raise ModelError(
            f"{path} is truncated: its tensors take {end} bytes, of which {data_bytes} are there; download it again."
        )
    if end < data_bytes:
        raise ModelError(f"{path} is corrupt: {data_bytes - end} bytes follow the last tensor.")
