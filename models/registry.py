"""Which class runs an architecture. Imported without torch: a class is imported when a model of its kind is loaded."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from trunkline.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from trunkline.kernels.interface import Batch, KvPages
    from trunkline.models.config import ModelConfig

MODELS = {"llama": "trunkline.models.llama:LlamaModel"}  # architecture, a key of config.ARCHITECTURES -> module:class


class Model(Protocol):
    """What a model class offers; it is made by `Class(config, loader)`."""

    config: "ModelConfig"

    def forward(self, ids: "Tensor", batch: "Batch", kv: "KvPages", wanted: "Tensor | None") -> "Tensor":
        """See llama.LlamaModel.forward."""

    def last_hidden(self, rows: int) -> "Tensor":
        """See llama.LlamaModel.last_hidden."""

    def grow_rope(self, positions: int) -> None:
        """See llama.LlamaModel.grow_rope."""

    def grow_activations(self, rows: int) -> None:
        """See llama.LlamaModel.grow_activations."""


def model_class(architecture: str) -> Any:
    """The class of `architecture`. Raises ModelError if there is none."""
    if architecture not in MODELS:
        raise ModelError(f"The architecture is '{architecture}'; those that can be run are {', '.join(MODELS)}.")
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)
