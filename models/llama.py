"""Llama: pre-norm blocks of grouped-query attention and a gated MLP.        arXiv:2302.13971, arXiv:2307.09288

The forward pass of one step, over the kernel interface. A residual stream `hidden` runs through the model; every part leaves what it
wants added in `branch`, and the norm in front of the next part adds it. The embedding is the first such branch.
"""

import torch
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Activations, Attention, GatedMLP, Loader, RopeTable


class LlamaBlock:
    """One layer."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._epsilon = config.rms_norm_eps
        self._layer = layer
        prefix = f"model.layers.{layer}"
        self._input_norm = loader.vector(f"{prefix}.input_layernorm.weight")
        self._attention = Attention(config, loader, f"{prefix}.self_attn")
        self._post_attention_norm = loader.vector(f"{prefix}.post_attention_layernorm.weight")
        self._mlp = GatedMLP(config, loader, f"{prefix}.mlp")

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages) -> None:
        self._kernels.add_rms_norm(a.branch, a.hidden, self._input_norm, self._epsilon, out=a.normed)
        self._attention(a, rope, batch, kv, self._layer)
        self._kernels.add_rms_norm(a.branch, a.hidden, self._post_attention_norm, self._epsilon, out=a.normed)
        self._mlp(a)


class LlamaModel:
    """The whole model. Raises ModelError if the checkpoint's tensors are not exactly its own."""

    def __init__(self, config: ModelConfig, loader: Loader) -> None:
        self.config = config
        self._kernels = loader.kernels
        self._rope = RopeTable(config)
        self._embedding = loader.matrix("model.embed_tokens.weight")
        self._blocks = [LlamaBlock(config, loader, layer) for layer in range(config.num_layers)]
        self._norm = loader.vector("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else loader.matrix("lm_head.weight")
        loader.finish()
        self._activations = Activations.allocate(config, 1, self._kernels.activation_dtype)

    def forward(self, ids: Tensor, batch: Batch, kv: KvPages, wanted: Tensor) -> Tensor:
        """Logits [L, V] of the `wanted` rows, int64 [L]; writes the keys and values of all T rows into their pages.

        ids   int32 [T], each 0 … V-1
        """
        a = self._cut_activations(len(ids))
        rope = self._rope.upto(int(batch.context_len.max()))
        a.hidden.zero_()
        self._kernels.embed(ids, self._embedding, out=a.branch)
        for block in self._blocks:
            block(a, rope, batch, kv)
        return self._logits(a.hidden[wanted] + a.branch[wanted])

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = torch.empty_like(hidden)
        logits = hidden.new_empty(len(hidden), self.config.vocab_size)
        self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps, out=normed)
        self._kernels.linear(normed, self._head, out=logits)
        return logits

    def _cut_activations(self, rows: int) -> Activations:
        if rows > len(self._activations.hidden):
            self._activations = Activations.allocate(self.config, rows, self._kernels.activation_dtype)
        return self._activations.cut(rows)
