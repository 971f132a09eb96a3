"""AWQ, GPTQ, bitsandbytes and fp8 folders: what their bits stand for, exactly; logits packed and decoded; refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kernels.factories import compiled
from tests.models.test_llama import assert_close, compiled_logits
from tests.quantized_folders import Awq, Fp8, Gptq, Int8, Nf4, Tool, quantized
from tests.workers.plans import PAGE_SIZE, need_compiler
from trunkline.config import ModelSource
from trunkline.errors import ConfigError, ModelError
from trunkline.kernels.quantized import QuantizedMatrix
from trunkline.models.checkpoint import Checkpoint, open_checkpoint
from trunkline.models.quantized_folder import AWQ, scheme_of
from trunkline.models.split import Split
from trunkline.models.weights import tensor_shapes
from trunkline.workers.runner import load_runner

# Of 64 and 96 inputs: groups of 40 and 128 are short at the end.
TOOLS: dict[str, Tool] = {
    "awq": Awq(),
    "awq, large groups": Awq(group=64),
    "gptq": Gptq(),
    "gptq, act-order": Gptq(act_order=True),
    "gptq, v2": Gptq(version=2),
    "gptq, a short last group": Gptq(group=40),
    "gptq, act-order and a short last group": Gptq(group=40, act_order=True),
    "gptq, one group": Gptq(group=-1),
    "gptq, 8 bits": Gptq(bits=8),
    "gptq, 8 bits, act-order": Gptq(bits=8, act_order=True),
    "gptq, biases of zeros": Gptq(biases=True),
    "bitsandbytes int8": Int8(),
    "bitsandbytes nf4": Nf4(),
    "bitsandbytes nf4, nested": Nf4(nested=True),
    "fp8": Fp8(),
    "fp8, each output": Fp8(each_output=True),
    "fp8, blocks": Fp8(block=(48, 40)),
}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
PACKED = [name for name in TOOLS if not name.startswith(("fp8", "bitsandbytes nf4")) and "act-order" not in name]
each_tool = pytest.mark.parametrize("tool", TOOLS)


def opened(folder: Path, quantization: str = "auto") -> Checkpoint:
    return open_checkpoint(ModelSource(path=str(folder), quantization=quantization))


@each_tool
def test_the_numbers_are_those_that_the_bits_stand_for(tmp_path: Path, tool: str) -> None:
    folder, plain = quantized(tmp_path, TOOLS[tool], **SIZES)
    checkpoint = opened(folder)
    expected = dict(opened(plain).tensors())
    found = dict(checkpoint.tensors())
    assert list(found) == list(tensor_shapes(checkpoint.config))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    packed = [name for name, tensor in checkpoint.packed_tensors() if isinstance(tensor, QuantizedMatrix)]
    assert bool(packed) == bool(checkpoint.packed_kinds) == (tool in PACKED)
    if packed:
        assert packed == [name for name in expected if "_proj.weight" in name]
    assert checkpoint.config.quantization == checkpoint.stored_quantization == TOOLS[tool].config["quant_method"]


@pytest.mark.parametrize(
    "tool", ["awq", "gptq", "gptq, act-order", "bitsandbytes int8", "bitsandbytes nf4", "fp8, blocks"]
)
def test_parts_of_ranks_are_the_whole(tmp_path: Path, tool: str) -> None:
    folder, plain = quantized(tmp_path, TOOLS[tool], **SIZES)
    checkpoint, twin = opened(folder), opened(plain)
    for rank in range(2):
        split = Split(rank, 2)
        expected = dict(twin.tensors(split=split))
        for name, tensor in checkpoint.packed_tensors(split=split):
            numbers = tensor.dequantize() if isinstance(tensor, QuantizedMatrix) else tensor
            torch.testing.assert_close(numbers, expected[name], rtol=1e-6, atol=1e-7)


@each_tool
def test_logits_are_those_of_the_numbers(tmp_path: Path, tool: str) -> None:
    """Packed where it can stay so, as near as activations of 8 bits allow, and decoded."""
    need_compiler()
    folder, plain = quantized(tmp_path, TOOLS[tool], **SIZES)
    logits = []
    for path, quantization in ((plain, "none"), (folder, "none"), (folder, "auto")):
        dtype = "auto" if quantization == "auto" and tool in PACKED else "float32"
        runner = load_runner(opened(path), dtype, 1, quantization=quantization)
        assert ("kept packed" in runner.dtype) == (dtype == "auto")
        runner.allocate(20, PAGE_SIZE)
        logits.append(compiled_logits(runner))
    assert_close(logits[1], logits[0].double(), 1e-5)
    if tool in PACKED:
        assert float((logits[2] - logits[0]).norm() / logits[0].norm()) < 0.05
    else:
        assert_close(logits[2], logits[0].double(), 1e-5)


@pytest.mark.parametrize("tool", PACKED)
def test_products_equal_dequantize_then_multiply(tmp_path: Path, tool: str) -> None:
    need_compiler()
    folder, _ = quantized(tmp_path, TOOLS[tool], **SIZES)
    kernels = compiled()
    for _, matrix in opened(folder).packed_tensors():
        if isinstance(matrix, QuantizedMatrix):
            x = torch.randn(5, matrix.shape[1], generator=torch.Generator().manual_seed(1))
            out = torch.empty(5, len(matrix))
            kernels.linear(x, kernels.pack_linear([matrix], torch.float16), out=out)
            assert_close(out, x.double() @ matrix.dequantize().double().T, 1e-2)


def test_the_flag_must_name_what_is_there(tmp_path: Path) -> None:
    folder, plain = quantized(tmp_path, Awq(), **SIZES)
    assert opened(folder, "awq").stored_quantization == "awq"
    with pytest.raises(ConfigError, match=r"--quantization is 'gptq', but the weights of .* are 'awq'; leave it out"):
        opened(folder, "gptq")
    with pytest.raises(ConfigError, match=r"--quantization is 'awq', but the weights of .* are not quantized"):
        opened(plain, "awq")
    with pytest.raises(ConfigError, match="--quantization is 'gguf', but no matrix"):
        opened(folder, "gguf")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quant_method": "aqlm"}, "'quant_method' is 'aqlm'; allowed is 'awq' or 'gptq' or 'bitsandbytes' or 'fp8'"),
        ({"quant_method": "awq", "bits": 3}, "'bits' is 3; allowed is 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version' is 'gemv'; allowed is 'gemm'"),
        ({"quant_method": "gptq", "bits": 2}, "'bits' is 2; allowed is 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "32"}, "'group_size' is '32'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size' is .128."),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    folder, _ = quantized(tmp_path, Awq(), **SIZES)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=f"config.json: quantization_config: {sentence}"):
        opened(folder)


def test_awqs_version_may_be_in_capitals() -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"}
    assert scheme_of({"quantization_config": settings}) == AWQ(128)


def edited(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Tensors of the second layer's q_proj replaced, or left out."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part, value in changes.items():
        name = f"model.layers.1.self_attn.q_proj.{part}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("tool", "changes", "sentence"),
    [
        ("gptq", {"qzeros": None}, r"lacks 1 of the .* tensors .*, the first is 'model\.layers\.1\.self_attn\.q_proj\.qzeros'"),
        ("gptq", {"scales": torch.ones(3, 64)}, r"scales' has the shape \[3, 64\]; the config calls for \[2, 64\]"),
        ("gptq", {"qweight": torch.zeros(8, 64)}, "qweight' has the dtype F32; allowed is I32"),
        ("gptq, act-order", {"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "g_idx' names groups from 9 to 9; there are 2"),
        ("gptq, biases of zeros", {"bias": torch.ones(64)}, r"bias', which is not part of a llama model, and is not 0"),
        ("bitsandbytes nf4", {"weight.absmax": torch.ones(3)}, "q_proj.weight' has 4096 numbers in blocks of 64, but 3 scales"),
        ("bitsandbytes nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "should hold what bitsandbytes says"),
        ("bitsandbytes nf4, nested", {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"blocksize": 64}'), dtype=torch.uint8)}, r"weight\.absmax' is torch\.uint8, which is not what"),
        ("fp8", {"weight_scale": torch.tensor(float("nan"))}, "weight_scale' holds a value that is not finite"),
    ],
)  # fmt: skip
def test_damaged_folders_are_told(tmp_path: Path, tool: str, changes: dict[str, Any], sentence: str) -> None:
    folder, _ = quantized(tmp_path, TOOLS[tool], **SIZES)
    with pytest.raises(ModelError, match=sentence):
        dict(opened(edited(folder, changes)).tensors())


def test_inputs_that_are_out_of_order_are_found_whatever_the_config_says(tmp_path: Path) -> None:
    folder, plain = quantized(tmp_path, Gptq(act_order=True), **SIZES)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (folder / "config.json").write_text(json.dumps(config))
    expected = dict(opened(plain).tensors())
    for name, tensor in opened(folder).tensors():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_a_bias_of_what_is_not_quantized_is_not_overlooked(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, Gptq(), **SIZES)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.bias": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has the tensor 'model\.norm\.bias'"):
        opened(folder)


def test_sizes_that_awq_cannot_pack(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, Awq(), **SIZES)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError,
        match=r"has 64 outputs and 64 inputs; AWQ packs multiples of 8 outputs, and of its group's 48 inputs",
    ):
        opened(folder)
