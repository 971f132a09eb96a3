"""How a checkpoint makes an embedding of hidden states, as far as its files say. No tensors, no engine.

modules.json                   sentence-transformers: pooling, and whether unit length is made of it
1_Pooling/config.json          which token's hidden state, or their mean
config.json                    is_matryoshka, matryoshka_dimensions: how short embeddings may be cut
GGUF metadata                  ARCHITECTURE.pooling_type
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trunkline.errors import ModelError, shown
from trunkline.models.json_file import read_json, read_json_list

DEFAULT = "last"  # of a decoder, only the last token has read all of a text
# sentence-transformers' names
_KINDS = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last", "cls_token": "cls"}
_GGUF_KINDS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's numbers; 0: none
_MODE = "pooling_mode_"
_BUILT = ("Transformer", "Pooling", "Normalize")  # modules of sentence-transformers


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its embeddings.

    method      one of config.POOLINGS, or another name for what is not built
    normalize   whether unit length is made of them
    dimensions  lengths that they may be cut to; None: any
    unbuilt     what the checkpoint would do with them afterwards, and is not built, e.g. ("Dense",)
    """

    method: str = DEFAULT
    normalize: bool = True
    dimensions: tuple[int, ...] | None = ()
    unbuilt: tuple[str, ...] = ()

    @classmethod
    def of_folder(cls, folder: Path, config: Mapping[str, Any]) -> "PoolingSettings":
        """Of a Hugging Face folder, whose config.json is `config`. Raises ModelError for a file that can't be read."""
        dimensions = _dimensions(config)
        if not (folder / "modules.json").exists():
            return cls(method=_method(folder / "1_Pooling"), dimensions=dimensions)
        modules = [module for module in read_json_list(folder / "modules.json") if isinstance(module, dict)]
        kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
        return cls(
            method=_method(folder / kinds.get("Pooling", "1_Pooling")),
            normalize="Normalize" in kinds,
            dimensions=dimensions,
            unbuilt=tuple(kind for kind in kinds if kind not in _BUILT),
        )

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], architecture: str) -> "PoolingSettings":
        """Of a GGUF file."""
        kind = metadata.get(f"{architecture}.pooling_type")
        return cls(method=_GGUF_KINDS.get(kind, DEFAULT) if isinstance(kind, int) else DEFAULT)


def _method(folder: Path) -> str:
    """What the module in this folder does; several at once have all their names."""
    file = folder / "config.json"
    if not file.exists():
        return DEFAULT
    config = read_json(file)
    if isinstance(mode := config.get("pooling_mode"), str):
        modes = [mode]
    else:
        modes = [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]
    return " and ".join(_KINDS.get(mode, mode) for mode in modes) or DEFAULT


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    allowed = config.get("matryoshka_dimensions")
    if allowed is None:
        return None if config.get("is_matryoshka") is True else ()
    if not isinstance(allowed, list) or not all(type(number) is int and number > 0 for number in allowed):
        raise ModelError(
            f"config.json: 'matryoshka_dimensions' is {shown(allowed)}; allowed is a list of integers from 1."
        )
    return tuple(allowed)
