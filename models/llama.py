"""Llama: pre-norm blocks of grouped-query attention and a gated MLP.        arXiv:2302.13971, arXiv:2307.09288

The forward pass of one step, over the kernel interface. A residual stream `hidden` runs through the model; every part leaves what it
wants added in `branch`, and the norm in front of the next part adds it. The embedding is the first such branch.
"""

import torch
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages, Program, Unrecorded
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
    """The whole model. Raises ModelError if the checkpoint's tensors are not exactly its own.

    A step allocates nothing but its logits and waits for nothing, so that it can become a CUDA graph. Such a graph keeps the addresses
    of what it was captured with: let `grow_rope` and `grow_activations` make room for the largest step before.

    config  of what this rank computes: heads and MLP are its part of the model's, if several ranks hold it together
    """

    def __init__(self, config: ModelConfig, loader: Loader) -> None:
        kernels, split = loader.kernels, loader.split
        split.check(config)
        self.config = config = split.config(config)
        self._kernels = kernels
        self._collectives = loader.collectives
        self._rope = RopeTable(config, kernels.device)
        self._first_id, rows = split.first_id(config), split.vocab_rows(config)
        self._embedding = loader.matrix("model.embed_tokens.weight", rows)
        self._blocks = [LlamaBlock(config, loader, layer) for layer in range(config.num_layers)]
        self._norm = loader.vector("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else loader.matrix("lm_head.weight", rows)
        loader.finish()
        self._activations = self._cut = Activations.allocate(config, 1, kernels.activation_dtype, kernels.device)
        alone = loader.collectives.size == 1  # sums over ranks are no operations of the kernels
        self._program: Program = kernels.new_program() if alone else Unrecorded()

    def grow_rope(self, positions: int) -> None:
        """Make sure that positions 0 … `positions` - 1 can be computed; to begin with, those of layers.ROPE_POSITIONS can."""
        self._rope.upto(positions)

    def grow_activations(self, rows: int) -> None:
        """Make room for steps of so many rows. `forward` does so too, if it must."""
        if rows > len(self._activations.hidden):
            kernels = self._kernels
            self._activations = Activations.allocate(self.config, rows, kernels.activation_dtype, kernels.device)
            self._cut = self._activations

    def forward(self, ids: Tensor, batch: Batch, kv: KvPages, wanted: Tensor | None) -> Tensor:
        """Logits [L, V] of the `wanted` rows, int32 or int64 [L], on every rank; writes the keys and values of all T rows into their pages.

        ids     int32 [T], each 0 … V-1
        wanted  None: all rows, as where each request generates a token
        batch   after `Kernels.prepare`; its positions must be within what `grow_rope` was told of
        """
        self.grow_activations(len(ids))
        a = self._rows(len(ids))
        a.hidden.zero_()
        self._kernels.embed(ids, self._embedding, out=a.branch, first_id=self._first_id)
        self._collectives.all_reduce(a.branch)
        fixed = (*a.tensors(), self._rope.table, kv.keys, kv.values)
        self._program(lambda: self._run_blocks(a, batch, kv), batch, fixed)
        if wanted is None:
            return self._logits(self.last_hidden(len(ids)))
        hidden = a.hidden[wanted] + a.branch[wanted]
        normed = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps, out=normed)
        return self._logits(normed)

    def _rows(self, rows: int) -> Activations:
        """The first of them. Steps of the same number follow one another: it need not be cut each time."""
        if len(self._cut.hidden) != rows:
            self._cut = self._activations.cut(rows)
        return self._cut

    def _run_blocks(self, a: Activations, batch: Batch, kv: KvPages) -> None:
        for block in self._blocks:
            block(a, self._rope.table, batch, kv)

    def last_hidden(self, rows: int) -> Tensor:
        """Hidden states [rows, H] after the last norm, of all rows of the step that `forward` computed last, on every rank.
        They last until the next `forward`."""
        a = self._rows(rows)
        self._kernels.add_rms_norm(a.branch, a.hidden, self._norm, self.config.rms_norm_eps, out=a.normed)
        a.branch.zero_()  # it is added
        return a.normed

    def _logits(self, normed: Tensor) -> Tensor:
        logits = normed.new_empty(len(normed), self._head.n, dtype=torch.promote_types(normed.dtype, torch.float32))
        self._kernels.linear(normed, self._head, out=logits)
        if self._collectives.size == 1:
            return logits
        parts = self._collectives.all_gather(logits)  # [ranks, L, rows of each]; behind the vocabulary are zeros
        return parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size].contiguous()
