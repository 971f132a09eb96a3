"""The headers of *.safetensors files: whole, sharded, truncated and hostile."""

import json

import numpy as np
import pytest
import torch

from tests.tiny import Tiny, tiny_model, write_safetensors
from trunkline.config import ModelSource
from trunkline.errors import ModelError
from trunkline.models.checkpoint import open_checkpoint


def opened(folder):
    return open_checkpoint(ModelSource(path=str(folder)))


def shard(folder, *, num_shards=2):
    """Split the folder's model.safetensors into shards and an index, as large models come."""
    weights = {name: tensor.numpy().copy() for name, tensor in opened(folder).tensors()}
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(weights.items())[number::num_shards])
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_equal_the_whole(tmp_path):
    whole = opened(tiny_model(tmp_path / "whole"))
    shards = opened(shard(tiny_model(tmp_path / "shards"), num_shards=3))
    for (name, expected), (other, tensor) in zip(whole.tensors(), shards.tensors(), strict=True):
        assert other == name and torch.equal(tensor, expected)


def test_the_only_safetensors_file_may_have_any_name(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert opened(folder).load_format == "safetensors"


def test_every_truncation_of_a_safetensors_file_is_a_model_error(tmp_path):
    folder = tiny_model(tmp_path / "tiny", num_layers=1, hidden_size=8, intermediate_size=8, vocab_size=298)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in [*range(0, header + 64, 7), len(content) - 4, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="truncated"):
            opened(folder)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header, sentence",
    [
        (b"{", "its header is wrong"),
        (b"[]", "its header is wrong"),
        (b'{"a": 1}', "its header is wrong"),
        (b'{"a":' * 10**5, "its header is wrong"),
        (b'{"\xff": 1}', "its header is wrong"),
        ({"a": entry(shape=[-2])}, "its header is wrong"),
        ({"a": entry(shape="2")}, "its header is wrong"),
        ({"a": entry(offsets=[0, 2**70])}, "its header is wrong"),
        ({"a": entry(offsets=[0])}, "its header is wrong"),
        ({"a": entry(shape=[3])}, r"'a' has 8 bytes; F32 of shape \[3\] has 12"),
        ({"a": entry(shape=[2**40, 2**40])}, r"'a' has 8 bytes"),
        ({"a": entry(shape=[1], offsets=[4, 8])}, "'a' lies at bytes 4 to 8 of the data, not from 0 on"),
        ({"a": entry(), "b": entry()}, "'b' lies at bytes 0 to 8 of the data, not from 8 on"),
        ({"a": entry(offsets=[8, 0])}, "'a' lies at bytes 8 to 0"),
        ({"a": entry(shape=[20], offsets=[0, 80])}, "truncated: its tensors take 80 bytes, of which 8 are there"),
        ({}, "8 bytes follow the last tensor"),
    ],
)
def test_hostile_safetensors_headers(tmp_path, header, sentence):
    folder = tiny_model(tmp_path / "tiny")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(ModelError, match=sentence):
        opened(folder)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"\x80\x02}q\x00X\x05\x00" + b"\0" * 50, "is not a safetensors file: its first 8 bytes announce"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer.*git lfs pull"),
    ],
)
def test_files_that_only_look_like_safetensors(tmp_path, content, sentence):
    folder = tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        opened(folder)


def test_a_dtype_we_do_not_read_is_refused_by_name(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(
        ModelError, match=r"tensor 'model\.embed_tokens\.weight' has the dtype I32; .* are F32, F16, BF16"
    ):
        opened(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_value_that_is_not_finite_names_its_tensor(tmp_path, bad, dtype):
    folder = tiny_model(tmp_path / "tiny", dtype=dtype)
    weights = Tiny().weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    write_safetensors(folder / "model.safetensors", weights, dtype)
    with pytest.raises(
        ModelError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' holds a value that is not finite"
    ):
        list(opened(folder).tensors())


def test_missing_shard_is_named(tmp_path):
    folder = shard(tiny_model(tmp_path / "tiny"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        opened(folder)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "pytorch_model.bin", 7, None]
)
def test_an_index_cannot_reach_outside_its_folder(tmp_path, file):
    folder = shard(tiny_model(tmp_path / "tiny"))
    write_safetensors(tmp_path / "secret.safetensors", {"model.norm.weight": np.ones(64, np.float32)})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelError, match=r"'model\.norm\.weight' is said to be in .*; allowed is the name of a \.safetensors"
    ):
        opened(folder)


def test_an_index_must_agree_with_its_shards(tmp_path):
    folder = shard(tiny_model(tmp_path / "tiny"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="says that tensor 'ghost' is in"):
        opened(folder)
    path.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="'weight_map' is missing or empty"):
        opened(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"holds 2 \.safetensors files, but neither"):
        opened(folder)


def test_one_safetensors_file_needs_its_folder(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    with pytest.raises(ModelError, match="is one safetensors file; give the folder that holds it"):
        opened(folder / "model.safetensors")
