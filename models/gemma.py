"""Gemma 2's and 3's block: norms before attention and MLP, and behind them.        arXiv:2408.00118, arXiv:2503.19786"""

from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Activations, Attention, GatedMLP, Loader


class GemmaBlock:
    """See decoder.Block."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._epsilon = config.rms_norm_eps
        prefix = f"model.layers.{layer}"
        self._input_norm = loader.norm(f"{prefix}.input_layernorm.weight", config)
        self._attention = Attention(config, loader, layer)
        self._post_attention_norm = loader.norm(f"{prefix}.post_attention_layernorm.weight", config)
        self._pre_mlp_norm = loader.norm(f"{prefix}.pre_feedforward_layernorm.weight", config)
        self._mlp = GatedMLP(config, loader, layer)
        self._post_mlp_norm = loader.norm(f"{prefix}.post_feedforward_layernorm.weight", config)

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages) -> None:
        self._kernels.add_rms_norm(a.branch, a.hidden, self._input_norm, self._epsilon, out=a.normed)
        self._attention(a, rope, batch, kv)
        self._kernels.rms_norm(a.branch, self._post_attention_norm, self._epsilon, out=a.branch)
        self._kernels.add_rms_norm(a.branch, a.hidden, self._pre_mlp_norm, self._epsilon, out=a.normed)
        self._mlp(a)
        self._kernels.rms_norm(a.branch, self._post_mlp_norm, self._epsilon, out=a.branch)
