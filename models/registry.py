"""Which block runs an architecture. Imported without torch: a block is imported when a model of its kind is loaded."""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from trunkline.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from trunkline.kernels.interface import Batch, KvPages
    from trunkline.models.config import ModelConfig
    from trunkline.models.layers import Loader

_LLAMA, _GEMMA = "trunkline.models.llama:LlamaBlock", "trunkline.models.gemma:GemmaBlock"
BLOCKS = {  # architecture, a key of ARCHITECTURES -> module:class
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "smollm3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}


class Model(Protocol):
    """What a worker needs of a model."""

    config: "ModelConfig"
    is_fixed: bool
    """See decoder.Decoder."""

    def forward(self, ids: "Tensor", batch: "Batch", kv: "KvPages", wanted: "Tensor | None") -> "Tensor":
        """See decoder.Decoder.forward."""

    def last_hidden(self, rows: int) -> "Tensor":
        """See decoder.Decoder.last_hidden."""

    def grow_rope(self, positions: int) -> None:
        """See decoder.Decoder.grow_rope."""

    def grow_activations(self, rows: int) -> None:
        """See decoder.Decoder.grow_activations."""


def make_model(config: "ModelConfig", loader: "Loader") -> Model:
    """The model of `config.architecture`, with the weights that `loader` has.

    Raises ModelError if the architecture has no block, or the weights are not exactly the model's own.
    """
    from trunkline.models.decoder import Decoder

    if config.architecture not in BLOCKS:
        raise ModelError(f"The architecture is '{config.architecture}'; those that can be run are {', '.join(BLOCKS)}.")
    module, name = BLOCKS[config.architecture].split(":")
    return Decoder(config, loader, getattr(import_module(module), name))
