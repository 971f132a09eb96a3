"""The parts that decoder-only models are made of, over the kernel interface: linear layers, RoPE table, attention, gated MLP.

A part is made from a config and a `Loader`, which hands it its weights by Hugging Face's names, and works on the `Activations` of
a step. It knows no requests and no scheduler.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trunkline.errors import ModelError
from trunkline.kernels.interface import Batch, Kernels, KvPages, PackedLinear
from trunkline.models.config import ModelConfig

ROPE_POSITIONS = 4096  # of the table to begin with


class Loader:
    """Gives parts their weights, in the form the kernels want them.

    loader = Loader(checkpoint.tensors(), kernels, torch.float16)
    norm = loader.vector("model.norm.weight")
    qkv = loader.linear(["…q_proj", "…k_proj", "…v_proj"], bias=False)
    loader.finish()

    Tensors are read as they are asked for, and one that comes too early is kept until then: a model that asks in about the order of
    its checkpoint never holds more than a few of them beside the packed weights. Raises ModelError for a tensor that is missing,
    left over, or not representable.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], kernels: Kernels, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self._dtype = dtype
        self._tensors = iter(tensors)
        self._early: dict[str, Tensor] = {}

    def vector(self, name: str) -> Tensor:
        """[N], in the dtype of activations."""
        return self._take(name).to(self.kernels.activation_dtype, copy=True)

    def matrix(self, name: str) -> PackedLinear:
        """[N, K], packed."""
        return self.kernels.pack_linear([self._storable(name)], self._dtype)

    def linear(self, modules: Sequence[str], *, bias: bool) -> "Linear":
        """Linear layers of the same input, as one; `modules` are names without ".weight" and ".bias"."""
        weights = [self._storable(f"{module}.weight") for module in modules]
        biases = [self.vector(f"{module}.bias") for module in modules] if bias else []
        return Linear(
            self.kernels, self.kernels.pack_linear(weights, self._dtype), torch.cat(biases) if biases else None
        )

    def finish(self) -> None:
        """Raises ModelError if tensors are left."""
        self._early.update(self._tensors)
        if self._early:
            raise ModelError(
                f"The checkpoint has the tensor '{next(iter(self._early))}', for which this model has no use."
            )

    def _take(self, name: str) -> Tensor:
        while name not in self._early:
            found = next(self._tensors, None)
            if found is None:
                raise ModelError(f"The checkpoint lacks the tensor '{name}'.")
            self._early[found[0]] = found[1]
        return self._early.pop(name)

    def _storable(self, name: str) -> Tensor:
        tensor = self._take(name)
        low, high = (float(extreme) for extreme in tensor.aminmax())
        largest, limit = max(-low, high), torch.finfo(self._dtype).max
        if not largest <= limit:  # also if it is NaN
            dtype = str(self._dtype).removeprefix("torch.")
            raise ModelError(
                f"The tensor '{name}' holds {largest:g}; {dtype} reaches to {limit:g}. Try another --dtype."
            )
        return tensor


@dataclass(slots=True)
class Activations:
    """Where a step keeps its intermediate results: made once, grown to the largest step seen, cut to T rows for each.

    hidden     [T, H]                    the residual stream
    branch     [T, H]                    what is to be added to it next
    normed     [T, H]                    what a block reads
    qkv        [T, (Q + 2 KV) * D]
    attended   [T, Q * D]
    gate_up    [T, 2 I]
    gated      [T, I]
    """

    hidden: Tensor
    branch: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, rows: int, dtype: torch.dtype) -> "Activations":
        H, I = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths = (H, H, H, queries + 2 * keys, queries, 2 * I, I)
        return cls(*(torch.empty(rows, width, dtype=dtype) for width in widths))

    def cut(self, rows: int) -> "Activations":
        """The same memory, the first `rows` rows."""
        return Activations(*(getattr(self, field.name)[:rows] for field in fields(self)))


class Linear:
    """x [T, K] -> out [T, N]."""

    def __init__(self, kernels: Kernels, weight: PackedLinear, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        self._kernels.linear(x, self._weight, self._bias, out=out)


class RopeTable:
    """Cosines and sines of positions 0, 1, …, computed in float64, kept in float32.

    .upto(n)   float32 [≥ n, D]: D/2 cosines, then D/2 sines; grown by doubling, so a short chat on a long model pays for a short table
    """

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float64)
        self._longest = config.max_position_embeddings
        self._table = torch.empty(0, config.head_dim)

    def upto(self, positions: int) -> Tensor:
        if positions > len(self._table):
            grown = max(min(2 * len(self._table), self._longest), min(ROPE_POSITIONS, self._longest), positions)
            angles = torch.arange(grown, dtype=torch.float64)[:, None] * self._frequencies
            self._table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
        return self._table


class Attention:
    """normed -> branch: q, k, v in one product, RoPE, pages, attention, output projection."""

    def __init__(self, config: ModelConfig, loader: Loader, prefix: str) -> None:
        self._kernels = loader.kernels
        self._scale = config.head_dim**-0.5
        self._qkv = loader.linear([f"{prefix}.{name}_proj" for name in "qkv"], bias=config.attention_bias)
        self._o = loader.linear([f"{prefix}.o_proj"], bias=config.attention_bias)

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages, layer: int) -> None:
        self._qkv(a.normed, out=a.qkv)
        self._kernels.rotate_and_store(a.qkv, rope, batch, kv, layer)
        self._kernels.attention(a.qkv, batch, kv, layer, self._scale, out=a.attended)
        self._o(a.attended, out=a.branch)


class GatedMLP:
    """normed -> branch: down(silu(gate) * up), gate and up in one product."""

    def __init__(self, config: ModelConfig, loader: Loader, prefix: str) -> None:
        self._kernels = loader.kernels
        self._gate_up = loader.linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], bias=config.mlp_bias)
        self._down = loader.linear([f"{prefix}.down_proj"], bias=config.mlp_bias)

    def __call__(self, a: Activations) -> None:
        self._gate_up(a.normed, out=a.gate_up)
        self._kernels.gated_mul(a.gate_up, "silu", out=a.gated)
        self._down(a.gated, out=a.branch)
