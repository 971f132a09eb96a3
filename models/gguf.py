"""GGUF files: metadata, tensor descriptions, and one tensor at a time as float32.

    file = read_gguf("model.gguf")              # reads the header only, and checks that the tensors fit the file
    file.metadata["llama.block_count"]          # 30
    file.tensors["blk.0.attn_q.weight"]         # GGUFTensor(kind=Q4_1, shape=(576, 576), offset=…, num_bytes=…)
    file.dequantize("blk.0.attn_q.weight")      # float32 [576, 576]
    file.unpack("blk.0.attn_q.weight")          # the same as small integers with scales: gguf_blocks.py

A file is a header, then aligned tensor data, all little-endian:

    "GGUF"  version u32  tensors u64  keys u64
    key:     name string, type u32, value                    string: length u64, UTF-8 bytes
    tensor:  name string, dimensions u32, each u64 (innermost first), type u32, offset u64 from the start of the data
                                                             https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Why not `gguf.GGUFReader`: it keeps a NumPy view of every element of every array, which takes more than two seconds for
a vocabulary of 49,152 tokens, in each process that opens the file; and slices past the end of a truncated or hostile
file come back short instead of failing. Here every count and offset is checked against the file before it is used, and
arrays are read in one pass. Dequantizing is the library's (`gguf.quants`), imported when the first tensor is asked for.

Knows nothing of models: what keys and tensors mean is config.py's and weights.py's.
"""

import math
import mmap
import stat
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trunkline.errors import ModelError
from trunkline.models.gguf_blocks import PACKINGS, Blocks, unpack

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER_BYTES = 64 * 2**20  # real ones are below 16 MiB; bounds what a hostile file can make us allocate
MAX_ENTRIES = 2**16  # metadata keys; tensors
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**40  # of one tensor
MAX_ALIGNMENT = 2**16
ALL = slice(None)  # of the rows, or of the columns
CHUNK_ELEMENTS = 2**20  # decoded at a time: intermediate copies stay small beside the result


class GGMLType(NamedTuple):
    """How a tensor's rows are stored: blocks of `block` elements in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


# Those that `gguf.quants` can dequantize, by their number in the file; a test holds this table against the library's.
GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}

# Metadata values, by their number in the file; of scalars, the letter that `struct` and `array` know them by.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file."""

    name: str
    type_id: int  # a key of GGML_TYPES
    shape: tuple[int, ...]  # outermost first, as in NumPy: [out, in] for a linear layer
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def kind(self) -> GGMLType:
        return GGML_TYPES[self.type_id]


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    """The header of one file. Nothing stays open; `dequantize` maps the file again.

    metadata  values by key: int, float, bool, str, list[str], list[bool], or array.array of numbers
    tensors   in the order of the file
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    num_bytes: int  # of the whole file

    def dequantize(self, name: str, index: tuple[slice, ...] = ()) -> "np.ndarray":
        """float32 in the tensor's shape, freshly allocated; or the part at `index`, of a vector or a matrix. Matrices that lie one behind the
        other in a tensor of three dimensions are one of all their rows to an index.

        Rows outside it are not decoded. Of those inside, columns are cut out a few rows at a time: blocks run along rows.

        Raises ModelError if the file's size changed since it was described, if the installed gguf package cannot decode
        the type, or if a value is not finite: a damaged block would otherwise surface as NaN logits of every request.
        """
        import gguf
        import numpy as np

        tensor = self.tensors[name]
        kind = tensor.kind
        row = tensor.shape[-1]
        rows, columns = ((ALL,) * (len(tensor.shape) == 1) + index + (ALL, ALL))[:2]
        stored = self._rows(tensor)[rows]
        result = np.empty((len(stored), len(range(row)[columns])), np.float32)
        for part, chunk in _chunks(stored, row):
            try:
                with np.errstate(all="ignore"):  # what is not finite is reported below, once and by name
                    values = gguf.quants.dequantize(chunk, gguf.GGMLQuantizationType(tensor.type_id))
            except (NotImplementedError, ValueError) as error:
                raise ModelError(
                    f"{self.path.name}: tensor '{name}' is stored as {kind.name}, which the installed gguf package"
                    f" cannot decode ({error}); upgrade gguf."
                ) from error
            if values.shape != (len(chunk), row):
                raise ModelError(
                    f"{self.path.name}: tensor '{name}' decodes to the shape {values.shape}, expected {(len(chunk), row)}."
                )
            self._check_finite(name, values)
            result[part] = values[:, columns]
        if index:
            return result[0] if len(tensor.shape) == 1 else result
        return result.reshape(tensor.shape)

    def unpack(self, name: str, index: tuple[slice, ...] = ()) -> Blocks | None:
        """The matrix `name`, or the part of it at `index`, freshly allocated; its `scale * value + offset` is what `dequantize` gives.
        None if it has no such form: it is no matrix, its type is none of PACKINGS, or the columns at `index` begin or end inside a group.

        Raises ModelError as `dequantize` does: a value is not finite where a scale or an offset is not.
        """
        import numpy as np

        tensor = self.tensors[name]
        packing = PACKINGS.get(tensor.kind.name)
        if packing is None or len(tensor.shape) < 2 or (len(tensor.shape) > 2 and not index):
            return None
        row = tensor.shape[-1]
        rows, columns = (*index, ALL, ALL)[:2]
        first, last, _ = columns.indices(row)
        if first % packing.group or last % packing.group:
            return None
        stored = self._rows(tensor)[rows]
        groups = slice(first // packing.group, last // packing.group)
        value = np.empty((len(stored), last - first), np.int8)
        scale = np.empty((len(stored), groups.stop - groups.start), np.float32)
        offset = np.empty_like(scale) if packing.has_offset else None
        for part, chunk in _chunks(stored, row):
            with np.errstate(all="ignore"):  # as above
                blocks = unpack(tensor.kind.name, chunk.reshape(-1, tensor.kind.num_bytes))
            self._check_finite(name, blocks.scale)
            value[part] = blocks.value.reshape(len(chunk), -1)[:, columns]
            scale[part] = blocks.scale.reshape(len(chunk), -1)[:, groups]
            if offset is not None and blocks.offset is not None:
                self._check_finite(name, blocks.offset)
                offset[part] = blocks.offset.reshape(len(chunk), -1)[:, groups]
        return Blocks(value, scale, offset)

    def _check_finite(self, name: str, values: "np.ndarray") -> None:
        import numpy as np

        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.path.name}: tensor '{name}' holds a value that is not finite; the file is damaged."
            )

    def _rows(self, tensor: GGUFTensor) -> "np.ndarray":
        """uint8 [rows, bytes of a row], a view of the file."""
        import numpy as np

        kind = tensor.kind
        shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1] // kind.block * kind.num_bytes)
        try:
            if self.path.stat().st_size != self.num_bytes:
                raise ModelError(f"{self.path} changed while it was being read.")
            return np.memmap(self.path, np.uint8, "r", tensor.offset, shape)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}.") from error


def _chunks(stored: "np.ndarray", row: int) -> "Iterator[tuple[slice, np.ndarray]]":
    """Some rows at a time, and which: of `row` elements each, CHUNK_ELEMENTS together."""
    step = max(1, CHUNK_ELEMENTS // row)
    for start in range(0, len(stored), step):
        chunk = stored[start : start + step]
        yield slice(start, start + len(chunk)), chunk


def read_gguf(path: str | Path) -> GGUFFile:
    """The header of the file at `path`.

    Raises ModelError if the file is missing, truncated, corrupt, or holds what we cannot read.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise ModelError(f"{path} is not a file, but a folder, pipe or device.")
        if status.st_size == 0:
            raise ModelError(f"{path} is empty.")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


class _Cursor:
    """Reads forward through the header, never past its end. Errors name the file and what was being read."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self.name = name
        self.data = data
        self.offset = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.reading = "the header"

    def error(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.name} is not a valid GGUF file: {problem} (reading {self.reading}, byte {self.offset})."
        )

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return the offset of the first."""
        start = self.offset
        if num_bytes > self.end - start:
            if self.end == len(self.data):
                raise ModelError(
                    f"{self.name} is truncated or corrupt: {self.reading} needs {num_bytes} bytes at byte {start}, but"
                    f" the file ends at byte {self.end}; download it again."
                )
            raise self.error(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        self.offset += num_bytes
        return start

    def u32(self) -> int:
        return int.from_bytes(self.data[self.take(4) : self.offset], "little")

    def u64(self) -> int:
        return int.from_bytes(self.data[self.take(8) : self.offset], "little")

    def count(self, what: str, limit: int) -> int:
        """A u64 that must not exceed `limit`."""
        count = self.u64()
        if count > limit:
            raise self.error(f"{count} {what}, allowed are {limit}")
        return count

    def string(self) -> str:
        length = self.u64()
        start = self.take(length)
        try:
            return self.data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise self.error("a string is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """The hot loop: vocabularies and merges are hundreds of thousands of short strings."""
        data, offset, end = self.data, self.offset, self.end
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (length,) = unpack(data, offset)
                offset += 8
                if length > end - offset:
                    self.offset = offset
                    self.take(length)
                strings.append(data[offset : offset + length].decode())
                offset += length
        except UnicodeDecodeError as error:
            raise self.error("a string is not UTF-8") from error
        except struct.error:  # the length itself lies past the end of the file
            self.offset = offset
            self.take(8)
        self.take(offset - self.offset)
        return strings

    def value(self, kind: int) -> Any:
        """A metadata value of type `kind`."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.error(f"a value has the unknown type {kind}")
        letter = _SCALARS[kind]
        (value,) = struct.unpack_from("<" + letter, self.data, self.take(struct.calcsize("<" + letter)))
        return value != 0 if kind == _BOOL else value

    def array(self) -> list[str] | list[bool] | array:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise self.error(f"an array has elements of type {kind}; allowed are numbers, booleans and strings")
        values = array(_SCALARS[kind])
        start = self.take(count * struct.calcsize("<" + values.typecode))
        values.frombytes(self.data[start : self.offset])
        if sys.byteorder == "big":
            values.byteswap()
        return [value != 0 for value in values] if kind == _BOOL else values


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(path.name, data)
    version = _check_magic(cursor)
    num_tensors = cursor.count("tensors", MAX_ENTRIES)
    num_keys = cursor.count("metadata keys", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.reading = f"metadata key {index + 1} of {num_keys}"
        key = cursor.string()
        cursor.reading = f"metadata '{_short(key)}'"
        if key in metadata:
            raise cursor.error("the key appears twice")
        metadata[key] = cursor.value(cursor.u32())
    described = []
    for index in range(num_tensors):
        cursor.reading = f"tensor {index + 1} of {num_tensors}"
        described.append(_tensor(cursor))
    cursor.reading = "the tensor data"
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in described:
        if tensor.name in tensors:
            raise ModelError(f"{path.name} is not a valid GGUF file: tensor '{_short(tensor.name)}' appears twice.")
        tensors[tensor.name] = _placed(tensor, data_start, alignment, cursor)
    return GGUFFile(path=path, version=version, metadata=metadata, tensors=tensors, num_bytes=len(data))


class _Described(NamedTuple):
    """A tensor as the header describes it, before it is checked against the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the tensor data


def _check_magic(cursor: _Cursor) -> int:
    """The version, 2 or 3."""
    magic = cursor.data[:4]
    if magic == b"vers":
        raise ModelError(f"{cursor.name} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'.")
    if magic != b"GGUF":
        raise ModelError(f"{cursor.name} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
    cursor.take(4)
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        seen = f"{swapped}, big-endian" if swapped in (2, 3) else str(version)
        raise ModelError(f"{cursor.name} has GGUF version {seen}; supported are 2 and 3, little-endian.")
    return version


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {_short(alignment)}; allowed is a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _tensor(cursor: _Cursor) -> _Described:
    name = cursor.string()
    cursor.reading = f"tensor '{_short(name)}'"
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"it has {num_dimensions} dimensions, allowed are 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    if not 0 < math.prod(shape) <= MAX_ELEMENTS:
        raise cursor.error(f"its shape is {list(shape)}")
    return _Described(name, shape, type_id=cursor.u32(), offset=cursor.u64())


def _placed(tensor: _Described, data_start: int, alignment: int, cursor: _Cursor) -> GGUFTensor:
    """The tensor's place in the file, once it is known to lie inside."""
    cursor.reading = f"tensor '{_short(tensor.name)}'"
    kind = GGML_TYPES.get(tensor.type_id)
    if kind is None:
        known = ", ".join(kind.name for kind in GGML_TYPES.values())
        raise ModelError(
            f"{cursor.name}: tensor '{_short(tensor.name)}' has the ggml type {tensor.type_id}; those that can be"
            f" read are {known}."
        )
    if tensor.shape[-1] % kind.block:
        raise cursor.error(
            f"its rows of {tensor.shape[-1]} elements are not whole blocks of {kind.block}, as {kind.name} has them"
        )
    if tensor.offset % alignment:
        raise cursor.error(f"its offset {tensor.offset} is not a multiple of {alignment}")
    num_bytes = math.prod(tensor.shape) // kind.block * kind.num_bytes
    offset = data_start + tensor.offset
    if offset + num_bytes > len(cursor.data):
        raise ModelError(
            f"{cursor.name} is truncated or corrupt: tensor '{_short(tensor.name)}' ends at byte"
            f" {offset + num_bytes}, the file at byte {len(cursor.data)}; download it again."
        )
    return GGUFTensor(tensor.name, tensor.type_id, tensor.shape, offset, num_bytes)


def _short(seen: object) -> str:
    """At most 80 printable characters of something a file says, for a message."""
    text = str(seen)[:80]
    return text if text.isprintable() else ascii(text)[1:-1]
