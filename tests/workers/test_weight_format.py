"""What --dtype and --quantization come to, and that every format computes what its weights mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import VOCAB_SIZE, tiny_gguf, tiny_model
from tests.workers.plans import PAGE_SIZE, Chunk, need_compiler, pages_for, run
from trunkline.config import ModelSource
from trunkline.errors import ConfigError
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Kernels, PackedLinear
from trunkline.kernels.quantized import QuantizedMatrix
from trunkline.kernels.reference import ReferenceKernels
from trunkline.models.checkpoint import Checkpoint, builtin_model, open_checkpoint
from trunkline.models.layers import Loader
from trunkline.models.registry import make_model
from trunkline.workers.runner import ModelRunner, load_runner
from trunkline.workers.weight_format import WeightFormat, choose_format

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole blocks of 256
PROMPT = [token * 7 % VOCAB_SIZE for token in range(40)]


def opened(path: Path, quantization: str = "auto") -> Checkpoint:
    return open_checkpoint(ModelSource(path=str(path), quantization=quantization))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writers of checkpoints by what is in them: a ggml type, "mixed", or a dtype of safetensors."""
    folder = tmp_path_factory.mktemp("formats")

    def write(kind: str) -> Path:
        path = folder / kind
        if path.exists() or (path := folder / f"{kind}.gguf").exists():
            return path
        if kind.startswith(("float", "bfloat")):
            return tiny_model(folder / kind, dtype=kind, **WIDE)
        if kind == "mixed":
            others = {"token_embd": "Q8_0", "attn_v": "Q6_K", "ffn_up": "F16", "attn_output": "Q5_K"}
            return tiny_gguf(path, quantization="Q4_K", others=others, **WIDE)
        return tiny_gguf(path, quantization=kind, **WIDE)

    return write


def compiled() -> CpuKernels:
    need_compiler()
    return CpuKernels(1)


@pytest.mark.parametrize(
    ("kind", "dtype", "quantization", "expected"),
    [
        ("float32", "auto", "auto", WeightFormat(torch.float16, "none", "float16")),
        ("bfloat16", "auto", "auto", WeightFormat(torch.bfloat16, "none", "bfloat16")),
        ("bfloat16", "auto", "int8", WeightFormat(torch.bfloat16, "int8", "int8")),
        ("Q4_1", "auto", "auto", WeightFormat(torch.float16, "packed", "Q4_1 kept packed")),
        ("Q4_1", "auto", "none", WeightFormat(torch.float16, "none", "float16")),
        ("Q4_1", "auto", "int8", WeightFormat(torch.float16, "int8", "int8")),
        ("Q4_1", "float32", "auto", WeightFormat(torch.float32, "none", "float32")),
        ("Q4_1", "float32", "gguf", WeightFormat(torch.float32, "packed", "Q4_1 kept packed")),
        ("mixed", "auto", "auto", WeightFormat(torch.float16, "packed", "Q4_K, Q5_K, Q8_0 and Q6_K kept packed")),
        ("F16", "auto", "auto", WeightFormat(torch.float16, "none", "float16")),
    ],
)
def test_what_settings_come_to(
    files: Callable[[str], Path], kind: str, dtype: str, quantization: str, expected: WeightFormat
) -> None:
    checkpoint = opened(files(kind), quantization)
    assert choose_format(checkpoint, compiled(), dtype=dtype, quantization=quantization) == expected


@pytest.mark.parametrize(
    ("dtype", "quantization", "name"),
    [
        ("auto", "auto", "float32"),
        ("auto", "gguf", "Q4_1 as float32"),
        ("auto", "int8", "int8 as float32"),
        ("float16", "gguf", "Q4_1 as float16"),
    ],
)
def test_kernels_that_unpack_everything(files: Callable[[str], Path], dtype: str, quantization: str, name: str) -> None:
    checkpoint = opened(files("Q4_1"))
    assert choose_format(checkpoint, ReferenceKernels(), dtype=dtype, quantization=quantization).name == name


def test_settings_that_there_are_not(files: Callable[[str], Path]) -> None:
    checkpoint, kernels = opened(files("Q4_1")), ReferenceKernels()
    with pytest.raises(ConfigError, match="--dtype is 'int3'; allowed are auto, float32"):
        choose_format(checkpoint, kernels, dtype="int3", quantization="auto")
    with pytest.raises(
        ConfigError, match="--quantization is 'aqlm'; allowed are auto, none, gguf, awq, gptq, bitsandbytes, fp8, int8"
    ):
        choose_format(checkpoint, kernels, dtype="auto", quantization="aqlm")


def reference(checkpoint: Checkpoint, form: WeightFormat) -> ModelRunner:
    """In float64, with every matrix as the floats that the format stands for."""
    kernels: Kernels = ReferenceKernels(torch.float64)
    plain = WeightFormat(torch.float64, "none", "float64")
    tensors = (
        (name, tensor.dequantize() if isinstance(tensor, QuantizedMatrix) else tensor.to(form.dtype).double())
        for name, tensor in form.tensors(checkpoint)
    )
    return ModelRunner(make_model(checkpoint.config, Loader(tensors, kernels, plain.dtype)), kernels, plain)


FORMATS = [
    *((kind, "gguf") for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "mixed")),
    *((kind, "int8") for kind in ("float32", "bfloat16", "Q4_K")),
    *((kind, "none") for kind in ("float32", "Q6_K")),
]


@pytest.mark.parametrize(("kind", "quantization"), FORMATS)
def test_logits_are_those_of_the_weights_that_the_format_stands_for(
    files: Callable[[str], Path], kind: str, quantization: str
) -> None:
    kernels = compiled()
    checkpoint = opened(files(kind))
    form = choose_format(checkpoint, kernels, dtype="float32", quantization=quantization)
    runner = load_runner(checkpoint, "float32", 1, quantization=quantization)
    logits = []
    for loaded in (runner, reference(checkpoint, form)):
        loaded.allocate(len(pages_for(len(PROMPT))), PAGE_SIZE)
        chunk = Chunk(PROMPT, 0, len(PROMPT), pages_for(len(PROMPT)))
        logits.append(run(loaded, [chunk], all_rows=True).double())
    ours, expected = logits
    assert expected.std() > 1
    worst = float((ours - expected).abs().max() / expected.std())
    assert worst < (1e-4 if quantization == "none" else 5e-3), "activations are rounded to 16 bits beside integers"


@pytest.mark.parametrize("kind", ["bfloat16", "Q4_1"])
def test_int8_is_made_of_every_matrix_as_the_checkpoint_means_it(files: Callable[[str], Path], kind: str) -> None:
    checkpoint = opened(files(kind))
    form = choose_format(checkpoint, ReferenceKernels(), dtype="auto", quantization="int8")
    for (name, plain), (same, stored) in zip(checkpoint.tensors(), form.tensors(checkpoint), strict=True):
        assert name == same
        if plain.ndim == 1:
            assert isinstance(stored, torch.Tensor) and torch.equal(stored, plain)
        else:
            assert isinstance(stored, QuantizedMatrix) and stored.group == plain.shape[1]
            steps = (stored.dequantize() - plain.float()).abs() / stored.scale
            assert steps.max() <= 0.501 and stored.value.abs().amax(dim=1).eq(127).all(), name


def test_formats_are_told_apart_and_leave_keys_and_values_alone(files: Callable[[str], Path]) -> None:
    """KV on disk must not be found by other weights; and a page takes what it took."""
    need_compiler()
    asked = [("auto", "none"), ("auto", "gguf"), ("auto", "int8"), ("float32", "gguf"), ("bfloat16", "none")]
    runners = [load_runner(opened(files("Q4_1")), dtype, 1, quantization=quantization) for dtype, quantization in asked]
    assert len({runner.numerics for runner in runners}) == len(asked)
    assert [runner.page_bytes(8) // runners[0].page_bytes(8) for runner in runners] == [1, 1, 1, 2, 1]


# 28,311,552 weights of the embedding and 106,168,320 of the layers' matrices.
EMBEDDING, LAYERS = 49152 * 576, 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("auto", EMBEDDING * 34 / 32 + LAYERS * 20 / 32),  # Q8_0 and Q4_1, as in the file
        ("none", (EMBEDDING + LAYERS) * 2),
        ("int8", EMBEDDING + LAYERS),  # and some scales
    ],
)
def test_what_the_built_in_models_weights_take(
    monkeypatch: pytest.MonkeyPatch, quantization: str, expected: float
) -> None:
    need_compiler()
    taken = []
    pack = CpuKernels.pack_linear

    def pack_and_count(*arguments: Any) -> PackedLinear:
        packed = pack(*arguments)
        taken.append(packed.num_bytes)
        return packed

    monkeypatch.setattr(CpuKernels, "pack_linear", pack_and_count)
    load_runner(opened(Path(builtin_model())), threads=1, quantization=quantization)
    assert expected <= sum(taken) < 1.01 * expected
