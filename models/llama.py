"""Llama's block: a norm before attention, a norm before the MLP.        arXiv:2302.13971, arXiv:2307.09288

Mistral, Qwen 2 and 3, Phi-3 and SmolLM3 have the same one. What they add to its parts, windows, biases, norms of queries and keys, layers
without RoPE, experts in place of the MLP, is in the config.
"""

from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Activations, Attention, Loader, make_mlp


class LlamaBlock:
    """See decoder.Block."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._epsilon = config.rms_norm_eps
        prefix = f"model.layers.{layer}"
        self._input_norm = loader.norm(f"{prefix}.input_layernorm.weight", config)
        self._attention = Attention(config, loader, layer)
        self._post_attention_norm = loader.norm(f"{prefix}.post_attention_layernorm.weight", config)
        self._mlp = make_mlp(config, loader, layer)

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages) -> None:
        self._kernels.add_rms_norm(a.branch, a.hidden, self._input_norm, self._epsilon, out=a.normed)
        self._attention(a, rope, batch, kv)
        self._kernels.add_rms_norm(a.branch, a.hidden, self._post_attention_norm, self._epsilon, out=a.normed)
        self._mlp(a)
