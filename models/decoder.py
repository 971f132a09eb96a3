"""A decoder-only model: embedding, blocks, a last norm and the output layer.

The forward pass of one step, over the kernel interface. A residual stream `hidden` runs through the model; every part leaves what it
wants added in `branch`, and the norm in front of the next part adds it. The embedding is the first such branch. What a block does is
its architecture's own: llama.py, gemma.py.
"""

from typing import Protocol

import torch
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages, Program, Unrecorded
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Activations, Loader, RopeTable


class Block(Protocol):
    """One layer."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None: ...

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages) -> None:
        """`rope` is the table of this layer, see layers.RopeTable."""


class Decoder:
    """The whole model. Raises ModelError if the checkpoint's tensors are not exactly its own.

    A step allocates nothing but its logits and waits for nothing, so that it can become a CUDA graph. Such a graph keeps the addresses
    of what it was captured with: let `grow_rope` and `grow_activations` make room for the largest step before.

    config    of what this rank computes: heads and MLP are its part of the model's, if several ranks hold it together
    is_fixed  False: what is to be computed follows from what was, and a step cannot become a graph
    """

    def __init__(self, config: ModelConfig, loader: Loader, block: type[Block]) -> None:
        kernels, split = loader.kernels, loader.split
        split.check(config)
        self.config = config = split.config(config)
        self._kernels = kernels
        self._collectives = loader.collectives
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        tables = {rope: RopeTable(rope, config, kernels.device) for rope in ropes}
        self._ropes = list(tables.values())
        self._rope_of = [tables[rope] for rope in ropes]  # by layer: some share one
        self._first_id, rows = split.first_id(config), split.vocab_rows(config)
        self._embedding = loader.matrix("model.embed_tokens.weight", rows)
        self._blocks = [block(config, loader, layer) for layer in range(config.num_layers)]
        self._norm = loader.norm("model.norm.weight", config)
        self._head = self._embedding if config.tie_word_embeddings else loader.matrix("lm_head.weight", rows)
        loader.finish()
        self._activations = self._cut = Activations.allocate(config, 1, kernels.activation_dtype, kernels.device)
        self.is_fixed = config.num_experts == 0
        alone = loader.collectives.size == 1  # sums over ranks are no operations of the kernels
        self._program: Program = kernels.new_program() if alone and self.is_fixed else Unrecorded()

    def grow_rope(self, positions: int) -> None:
        """Make sure that positions 0 … `positions` - 1 can be computed; to begin with, those of layers.ROPE_POSITIONS can."""
        for rope in self._ropes:
            rope.upto(positions)

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
        if self.config.embedding_scale != 1:
            a.branch *= self.config.embedding_scale
        fixed = (*a.tensors(), *(rope.table for rope in self._ropes), kv.keys, kv.values)
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
        for block, rope in zip(self._blocks, self._rope_of, strict=True):
            block(a, rope.table, batch, kv)

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
        if self._collectives.size > 1:
            parts = self._collectives.all_gather(logits)  # [ranks, L, rows of each]; behind the vocabulary are zeros
            logits = parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size].contiguous()
        if cap := self.config.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
