"""The GGUF header parser against the library's reader, against damage, and dequantizing."""

import os
import random
import struct
import tracemalloc
from array import array

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.k_quants import quantize
from tests.tiny import tiny_gguf
from trunkline.errors import ModelError
from trunkline.models import gguf as ours
from trunkline.models.checkpoint import builtin_model
from trunkline.models.gguf import GGML_TYPES, read_gguf
from trunkline.models.gguf_blocks import PACKINGS

UINT32, STRING, ARRAY = 4, 8, 9  # metadata types
F32 = 0


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def tensor(name, dimensions, kind=F32, offset=0):
    """A tensor's description; `dimensions` innermost first, as in the file."""
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def raw_gguf(path, *, keys=(), tensors=(), data=b"", version=3, num_keys=None, num_tensors=None):
    """Write a file byte by byte, so that it can be wrong in any way."""
    counts = struct.pack(
        "<IQQ", version, *(len(seen) if n is None else n for n, seen in ((num_tensors, tensors), (num_keys, keys)))
    )
    header = b"GGUF" + counts + b"".join(keys) + b"".join(tensors)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def small_gguf(path):
    """Every kind of metadata value and three tensors, in less than 900 bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["", "a", "né", "中文 🙂"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("weights", [0.5, -1.5])
    writer.add_array("flags", [True, False])
    writer.add_bool("flag", True)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 1e300)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(4, dtype=np.float16))
    quantized = gguf.quants.quantize(
        np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("c", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal_to_library(path):
    """Same metadata, same tensors at the same places, same values, as gguf.GGUFReader finds them."""
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(v) if isinstance(v, array) else v for name, v in file.metadata.items()} == fields
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        mine = file.tensors[theirs.name]
        assert mine.kind.name == theirs.tensor_type.name
        assert mine.shape == tuple(theirs.shape.tolist()[::-1])
        assert (mine.offset, mine.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        np.testing.assert_array_equal(
            file.dequantize(theirs.name), gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        )


def test_small_file_equals_the_librarys_reading(tmp_path):
    path = small_gguf(tmp_path / "small.gguf")
    assert_equal_to_library(path)
    metadata = read_gguf(path).metadata
    assert metadata["words"] == ["", "a", "né", "中文 🙂"]
    assert metadata["flag"] is True and metadata["flags"] == [True, False]
    assert metadata["numbers"] == array("i", [1, -2, 3])


def test_tiny_model_equals_the_librarys_reading(tmp_path):
    assert_equal_to_library(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0"))


NAMES = st.text(min_size=1, max_size=12)
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = st.one_of(
    st.tuples(st.just("add_uint32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("add_int32"), INT32),
    st.tuples(st.just("add_float32"), FLOATS),
    st.tuples(st.just("add_bool"), st.booleans()),
    st.tuples(st.just("add_string"), st.text(min_size=1, max_size=30)),
    st.tuples(st.just("add_array"), st.lists(st.text(max_size=8), min_size=1, max_size=20)),
    st.tuples(st.just("add_array"), st.lists(INT32, min_size=1, max_size=20)),
    st.tuples(st.just("add_array"), st.lists(FLOATS, min_size=1, max_size=20)),
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
KINDS = st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])


@settings(max_examples=50)  # each writes a file
@given(
    keys=st.dictionaries(NAMES, VALUES, max_size=6),
    tensors=st.dictionaries(NAMES, st.tuples(SHAPES, KINDS), min_size=1, max_size=4),
    alignment=st.sampled_from([None, 8, 64, 4096]),
    seed=st.integers(0, 100),
)
def test_any_file_equals_the_librarys_reading(tmp_path_factory, keys, tensors, alignment, seed):
    path = tmp_path_factory.getbasetemp() / "property.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, (method, value) in keys.items():
        getattr(writer, method)(f"x.{name}", value)
    generator = np.random.default_rng(seed)
    for name, (shape, kind_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind_name]
        shape = (*shape[:-1], shape[-1] * gguf.GGML_QUANT_SIZES[kind][0])
        values = generator.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_equal_to_library(path)


def test_every_truncation_is_a_model_error(tmp_path):
    path = small_gguf(tmp_path / "cut.gguf")
    needed = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(path).tensors.values())
    for length in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, length)
        if length >= needed:  # only padding behind the last tensor is lost
            read_gguf(path)
            continue
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(path)


def test_flipped_bytes_parse_or_are_a_model_error(tmp_path):
    content = small_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "flipped.gguf"
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 2, 8])):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
            for name in file.tensors:
                file.dequantize(name)
        except ModelError:
            refused += 1
    assert 50 < refused < 300


HOSTILE = {
    "tensor count": ({"num_tensors": 2**63}, "9223372036854775808 tensors, allowed are 65536"),
    "key count": ({"num_keys": 2**64 - 1}, "metadata keys, allowed are 65536"),
    "more keys than there are": ({"num_keys": 65536}, "truncated or corrupt"),
    "string length": ({"keys": [struct.pack("<Q", 2**64 - 1)]}, "truncated or corrupt: metadata key 1 of 1"),
    "array of strings": (
        {"keys": [key("k", ARRAY, struct.pack("<IQ", STRING, 2**60))]},
        "truncated or corrupt: metadata 'k'",
    ),
    "string in an array": (
        {"keys": [key("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**62))]},
        "truncated or corrupt: metadata 'k'",
    ),
    "array of numbers": ({"keys": [key("k", ARRAY, struct.pack("<IQ", UINT32, 2**60))]}, "truncated or corrupt"),
    "array of arrays": ({"keys": [key("k", ARRAY, struct.pack("<IQ", ARRAY, 2**60))]}, "elements of type 9"),
    "unknown value type": ({"keys": [key("k", 13, b"")]}, "unknown type 13"),
    "a key twice": ({"keys": [key("k", UINT32, b"1234")] * 2}, "the key appears twice .reading metadata 'k'"),
    "invalid UTF-8": ({"keys": [key("k", STRING, string(b"\xff\xfe"))]}, "not UTF-8"),
    "invalid UTF-8 in an array": (
        {"keys": [key("k", ARRAY, struct.pack("<IQ", STRING, 1) + string(b"\xff"))]},
        "not UTF-8",
    ),
    "alignment 0": (
        {"keys": [key("general.alignment", UINT32, struct.pack("<I", 0))]},
        "alignment is 0; allowed is a power",
    ),
    "alignment 48": ({"keys": [key("general.alignment", UINT32, struct.pack("<I", 48))]}, "alignment is 48"),
    "alignment of 2 GiB": (
        {"keys": [key("general.alignment", UINT32, struct.pack("<I", 2**31))]},
        "alignment is 2147483648",
    ),
    "alignment as text": ({"keys": [key("general.alignment", STRING, string("32"))]}, "alignment is 32"),
    "no dimensions": ({"tensors": [tensor("t", [])]}, "0 dimensions"),
    "many dimensions": ({"tensors": [string("t") + struct.pack("<I", 2**32 - 1)]}, "4294967295 dimensions"),
    "empty tensor": ({"tensors": [tensor("t", [4, 0])]}, "its shape is .0, 4."),
    "shape that overflows": ({"tensors": [tensor("t", [2**32, 2**32])]}, "its shape is"),
    "unknown tensor type": (
        {"tensors": [tensor("t", [4], kind=999)]},
        "ggml type 999; those that can be read are F32, F16",
    ),
    "type we cannot decode": ({"tensors": [tensor("t", [32], kind=9)]}, "'t' has the ggml type 9"),
    "broken block": ({"tensors": [tensor("t", [33], kind=8)]}, "33 elements are not whole blocks of 32"),
    "unaligned offset": (
        {"tensors": [tensor("t", [4], offset=4)], "data": b"\0" * 64},
        "offset 4 is not a multiple of 32",
    ),
    "offset past the end": ({"tensors": [tensor("t", [4], offset=2**63)]}, "truncated or corrupt: tensor 't' ends at"),
    "data past the end": (
        {"tensors": [tensor("t", [9])], "data": b"\0" * 32},
        "truncated or corrupt: tensor 't' ends at",
    ),
    "a tensor twice": ({"tensors": [tensor("t", [4])] * 2, "data": b"\0" * 32}, "'t' appears twice"),
    "version 1": ({"version": 1}, "GGUF version 1; supported are 2 and 3"),
    "big-endian": ({"version": 3 << 24}, "GGUF version 3, big-endian"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_without_great_allocations(tmp_path, what):
    fields, sentence = HOSTILE[what]
    path = raw_gguf(tmp_path / "hostile.gguf", **fields)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=sentence) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert "hostile.gguf" in str(caught.value)


def test_a_header_is_read_no_further_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "MAX_HEADER_BYTES", 256)
    path = raw_gguf(tmp_path / "long.gguf", keys=[key("k", STRING, string("x" * 300))])
    with pytest.raises(ModelError, match="the header is longer than 256 bytes"):
        read_gguf(path)
    many = b"".join(string("ab") for _ in range(40))
    path = raw_gguf(tmp_path / "long.gguf", keys=[key("k", ARRAY, struct.pack("<IQ", STRING, 25) + many)])
    with pytest.raises(ModelError, match="the header is longer than 256 bytes"):
        read_gguf(path)


@pytest.mark.parametrize("kind", [STRING, ARRAY])
def test_a_string_beyond_the_limit_is_not_copied(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ours, "MAX_HEADER_BYTES", 4096)
    value = struct.pack("<Q", 4 * 2**20)
    path = raw_gguf(
        tmp_path / "long.gguf", keys=[key("k", kind, struct.pack("<IQ", STRING, 1) * (kind == ARRAY) + value)]
    )
    os.truncate(path, 8 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="the header is longer than 4096 bytes"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "is empty"),
        (b"PK\3\4" + b"\0" * 100, r"it starts with b'PK\\x03\\x04', not b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer.*git lfs pull"),
        (b"GGUF", "truncated"),
    ],
)
def test_other_files_are_told_apart(tmp_path, content, sentence):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        read_gguf(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="is not a file, but a folder"):
        read_gguf(tmp_path)


def test_type_table_agrees_with_the_library():
    """Sizes are the library's, and what we list is what it can dequantize."""
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except NotImplementedError:
            assert kind.value not in GGML_TYPES
        else:
            assert GGML_TYPES[kind.value] == (kind.name, block, num_bytes)


@pytest.mark.parametrize("type_id", GGML_TYPES)
def test_every_type_is_dequantized_as_the_library_does(tmp_path, monkeypatch, type_id):
    kind, (_, block, num_bytes) = gguf.GGMLQuantizationType(type_id), GGML_TYPES[type_id]
    stored = np.random.default_rng(type_id).integers(
        0, 64, (7, 2 * num_bytes), np.uint8
    )  # bytes of small, finite floats
    path = raw_gguf(tmp_path / "t.gguf", tensors=[tensor("t", [2 * block, 7], type_id)], data=stored.tobytes())
    monkeypatch.setattr(ours, "CHUNK_ELEMENTS", 4 * block)  # rows 0-1, 2-3, 4-5, 6
    values = read_gguf(path).dequantize("t")
    assert values.dtype == np.float32 and values.shape == (7, 2 * block)
    np.testing.assert_array_equal(values, gguf.quants.dequantize(stored, kind))


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory):
    """Matrices of 7 × 512 of every type that stays packed, each called by its type, and some that do not."""
    names = [*PACKINGS, "F16", "vector"]
    values = np.random.default_rng(3).standard_normal((7, 512), np.float32)
    stored = [values[0] if name == "vector" else quantize(values, name) for name in names]
    kinds = [gguf.GGMLQuantizationType["F32" if name == "vector" else name] for name in names]
    path = tmp_path_factory.mktemp("packed") / "packed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, data, kind in zip(names, stored, kinds, strict=True):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def floats_of(blocks, group):
    products = blocks.value * np.repeat(blocks.scale, group, axis=1)
    return products if blocks.offset is None else products + np.repeat(blocks.offset, group, axis=1)


@pytest.mark.parametrize("kind", PACKINGS)
@given(rows=st.tuples(st.integers(0, 7), st.integers(0, 7)), groups=st.tuples(st.integers(0, 16), st.integers(0, 16)))
@settings(max_examples=10)
def test_any_part_unpacked_is_that_part_dequantized(packed_file, kind, rows, groups):
    index = (slice(*sorted(rows)), slice(*(32 * group for group in sorted(groups))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "CHUNK_ELEMENTS", 1024)  # rows 0-1, 2-3, 4-5, 6
        for depth in range(3):
            blocks = packed_file.unpack(kind, index[:depth])
            assert blocks.value.dtype == np.int8 and blocks.value.flags.c_contiguous
            floats = floats_of(blocks, PACKINGS[kind].group)
            np.testing.assert_array_equal(floats, packed_file.dequantize(kind, index[:depth]))


def test_what_cannot_stay_packed(packed_file):
    """Other types, vectors, and columns that begin or end inside a group."""
    assert packed_file.unpack("F16") is packed_file.unpack("vector") is None
    inside = [slice(16, 512), slice(0, 48), slice(8, 24)]
    assert [packed_file.unpack("Q4_1", (slice(0, 3), columns)) for columns in inside] == [None] * 3
    halves = [packed_file.unpack("Q6_K", (slice(0, 3), columns)) is None for columns in inside]
    assert halves == [False, False, True], "its groups are of 16"


def test_unpacking_takes_little_memory_beside_the_result(packed_file, tmp_path, monkeypatch):
    values = np.ones((2048, 512), np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1).tobytes()
    path = raw_gguf(tmp_path / "large.gguf", tensors=[tensor("t", [512, 2048], 3)], data=data)
    monkeypatch.setattr(ours, "CHUNK_ELEMENTS", 2**15)
    tracemalloc.start()
    blocks = read_gguf(path).unpack("t")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.15 * sum(part.nbytes for part in blocks)


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("bad", [0x7E00, 0xFC00])  # not a number, minus infinity
def test_a_damaged_block_is_not_unpacked(packed_file, tmp_path, kind, bad):
    """In any of its float16 numbers, and outside the part that is asked for, as in `dequantize`."""
    described = packed_file.tensors[kind]
    _, block, num_bytes = described.kind
    for place in {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2]):
        stored = np.array(packed_file._rows(described))
        stored[5, num_bytes * (512 // block - 1) + place :][:2] = np.array([bad], "<u2").view(np.uint8)
        path = raw_gguf(
            tmp_path / "bad.gguf", tensors=[tensor("t", [512, 7], described.type_id)], data=stored.tobytes()
        )
        file = read_gguf(path)
        for read in (file.dequantize, file.unpack):
            with pytest.raises(ModelError, match=r"bad\.gguf: tensor 't' holds a value that is not finite"):
                read("t", (slice(5, 6), slice(0, 32)))
            read("t", (slice(0, 5),))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1"])
def test_a_value_that_is_not_finite_names_its_tensor(tmp_path, bad, kind):
    values = np.ones((8, 32), np.float32)
    values[5, 17] = bad
    number = gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        data = gguf.quants.quantize(values, number).tobytes()
    path = raw_gguf(tmp_path / "bad.gguf", tensors=[tensor("blk.0.ffn_up.weight", [32, 8], number)], data=data)
    with pytest.raises(
        ModelError, match=r"bad\.gguf: tensor 'blk\.0\.ffn_up\.weight' holds a value that is not finite"
    ):
        read_gguf(path).dequantize("blk.0.ffn_up.weight")


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    file = read_gguf(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="changed while it was being read"):
        file.dequantize("token_embd.weight")


def test_a_library_that_cannot_decode_a_type_is_named(tmp_path, monkeypatch):
    def too_old(data, kind):
        raise NotImplementedError("Dequantization for F32 is not yet implemented")

    monkeypatch.setattr(gguf.quants, "dequantize", too_old)
    with pytest.raises(
        ModelError, match=r"stored as F32, which the installed gguf package cannot decode.*upgrade gguf"
    ):
        read_gguf(tiny_gguf(tmp_path / "tiny.gguf")).dequantize("token_embd.weight")


@pytest.mark.real
@pytest.mark.slow
def test_builtin_file_equals_the_librarys_reading():
    assert_equal_to_library(builtin_model())
