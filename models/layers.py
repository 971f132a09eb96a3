"""The parts that decoder-only models are made of, over the kernel interface: linear layers, RoPE table, attention, gated MLP.

A part is made from a config and a `Loader`, which hands it its weights by Hugging Face's names, and works on the `Activations` of
a step. It knows no requests and no scheduler. Where several ranks hold a model together, config and weights are those of this rank's
part (split.py), and a part that ends in a sum over inputs adds the others' to its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trunkline.errors import ModelError
from trunkline.kernels.collectives import ALONE, Collectives
from trunkline.kernels.interface import Batch, Kernels, KvPages, PackedLinear
from trunkline.kernels.quantized import QuantizedMatrix
from trunkline.models.config import ModelConfig
from trunkline.models.rope import RopeConfig
from trunkline.models.split import Split

ROPE_POSITIONS = 4096  # of the table to begin with


class Loader:
    """Gives parts their weights, in the form and on the device that the kernels want them.

    loader = Loader(checkpoint.tensors(), kernels, torch.float16)
    norm = loader.vector("model.norm.weight")
    qkv = loader.linear(["…q_proj", "…k_proj", "…v_proj"], bias=False)
    loader.finish()

    Tensors are read as they are asked for, and one that comes too early is kept until then: a model that asks in about the order of
    its checkpoint never holds more than a few of them beside the packed weights. Raises ModelError for a tensor that is missing,
    left over, or not representable.

    tensors      as Checkpoint has them; a matrix may be a QuantizedMatrix, and stays one as far as the kernels can keep it
    dtype        of plain matrices; packed ones have their own numbers
    collectives  the ranks that hold the model; `split` is the part of this one, and of `tensors`
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
        kernels: Kernels,
        dtype: torch.dtype,
        collectives: Collectives = ALONE,
    ) -> None:
        self.kernels = kernels
        self.collectives = collectives
        self.split = Split(collectives.rank, collectives.size)
        self._dtype = dtype
        self._tensors = iter(tensors)
        self._early: dict[str, Tensor | QuantizedMatrix] = {}

    def vector(self, name: str) -> Tensor:
        """[N], in the dtype of activations."""
        return self._take_vector(name).to(self.kernels.device, self.kernels.activation_dtype, copy=True)

    def norm(self, name: str, config: ModelConfig) -> Tensor:
        """A norm's weight [N] as it is multiplied by, in the dtype of activations."""
        # Added before it is rounded: a small weight beside 1 would lose what it differs by.
        weight = self._take_vector(name).float() + config.norm_offset
        return weight.to(self.kernels.device, self.kernels.activation_dtype)

    def matrix(self, name: str, rows: int = 0) -> PackedLinear:
        """[N, K], packed; zeros are added if there are fewer than `rows`."""
        weights = [self._storable(name)]
        if (missing := rows - len(weights[0])) > 0:
            weights.append(_zeros_like(weights[0], missing))
        return self.kernels.pack_linear(weights, self._dtype)

    def linear(self, modules: Sequence[str], *, bias: bool) -> "Linear":
        """Linear layers of the same input, as one; `modules` are names without ".weight" and ".bias"."""
        weights = [self._storable(f"{module}.weight") for module in modules]
        biases = [self.vector(name) for module in modules if bias and self.split.holds(name := f"{module}.bias")]
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

    def _take(self, name: str) -> Tensor | QuantizedMatrix:
        while name not in self._early:
            found = next(self._tensors, None)
            if found is None:
                raise ModelError(f"The checkpoint lacks the tensor '{name}'.")
            self._early[found[0]] = found[1]
        return self._early.pop(name)

    def _take_vector(self, name: str) -> Tensor:
        tensor = self._take(name)
        assert isinstance(tensor, Tensor), f"{name} is a matrix"
        return tensor

    def _storable(self, name: str) -> Tensor | QuantizedMatrix:
        tensor = self._take(name)
        if isinstance(tensor, QuantizedMatrix):  # its scales are float32 everywhere
            return tensor
        if not tensor.numel():
            return tensor.to(self.kernels.device)
        low, high = (float(extreme) for extreme in tensor.aminmax())
        largest, limit = max(-low, high), torch.finfo(self._dtype).max
        if not largest <= limit:  # also if it is NaN
            dtype = str(self._dtype).removeprefix("torch.")
            raise ModelError(
                f"The tensor '{name}' holds {largest:g}; {dtype} reaches to {limit:g}. Try another --dtype."
            )
        return tensor.to(self.kernels.device)


def _zeros_like(matrix: Tensor | QuantizedMatrix, rows: int) -> Tensor | QuantizedMatrix:
    """[rows, K], all zeros, of the same kind as `matrix`."""
    if isinstance(matrix, Tensor):
        return matrix.new_zeros(rows, matrix.shape[1])
    value, scale, offset = matrix.value, matrix.scale, matrix.offset
    return replace(
        matrix,
        value=value.new_zeros(rows, value.shape[1]),
        scale=scale.new_zeros(rows, scale.shape[1]),
        offset=None if offset is None else offset.new_zeros(rows, offset.shape[1]),
    )


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
    def allocate(cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> "Activations":
        H, I = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths = (H, H, H, queries + 2 * keys, queries, 2 * I, I)
        return cls(
            *(torch.zeros(rows, width, dtype=dtype, device=device) for width in widths)
        )  # padded rows are computed, too

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order above."""
        return self.hidden, self.branch, self.normed, self.qkv, self.attended, self.gate_up, self.gated

    def cut(self, rows: int) -> "Activations":
        """The same memory, the first `rows` rows."""
        return Activations(*(tensor[:rows] for tensor in self.tensors()))


class Linear:
    """x [T, K] -> out [T, N]."""

    def __init__(self, kernels: Kernels, weight: PackedLinear, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        self._kernels.linear(x, self._weight, self._bias, out=out)


class RopeTable:
    """Cosines and sines of positions 0, 1, …, computed in float64, kept in float32 on the device.

    .upto(n)   float32 [≥ n, R]: cosines of the R/2 pairs of dimensions that are turned, then their sines; grown by doubling, so a short
               chat on a long model pays for a short table
    .table     what there is by now: at first ROPE_POSITIONS, or the model's length if that is less
    """

    def __init__(self, rope: RopeConfig, config: ModelConfig, device: torch.device | None = None) -> None:
        self._frequencies = torch.tensor(rope.inverse_frequencies(config.rotary_dim), dtype=torch.float64)
        self._factor = rope.attention_factor
        self._longest = config.max_position_embeddings
        self.table = torch.empty(0, config.rotary_dim, device=device)
        self.upto(1)

    def upto(self, positions: int) -> Tensor:
        if positions > len(self.table):
            grown = max(min(2 * len(self.table), self._longest), min(ROPE_POSITIONS, self._longest), positions)
            angles = torch.arange(grown, dtype=torch.float64)[:, None] * self._frequencies
            turns = torch.cat([angles.cos(), angles.sin()], dim=1) * self._factor
            self.table = turns.float().to(self.table.device)
        return self.table


class Attention:
    """normed -> branch: q, k, v in one product, norms of q and k if the model has them, RoPE, pages, attention, output projection."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._collectives = loader.collectives
        self._config = config
        self._layer = layer
        self._window = config.window_of(layer)
        prefix = f"model.layers.{layer}.self_attn"
        self._qkv = loader.linear([f"{prefix}.{name}_proj" for name in "qkv"], bias=config.qkv_bias)
        self._q_norm, self._k_norm = (
            loader.norm(f"{prefix}.{name}_norm.weight", config) if config.qk_norm else None for name in "qk"
        )
        self._o = loader.linear([f"{prefix}.o_proj"], bias=config.output_bias)

    def __call__(self, a: Activations, rope: Tensor, batch: Batch, kv: KvPages) -> None:
        """rope  the table of this layer, see RopeTable."""
        config = self._config
        self._qkv(a.normed, out=a.qkv)
        self._kernels.rotate_and_store(
            a.qkv,
            rope,
            batch,
            kv,
            self._layer,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            epsilon=config.rms_norm_eps,
        )
        self._kernels.attention(
            a.qkv,
            batch,
            kv,
            self._layer,
            config.attention_scale,
            out=a.attended,
            window=self._window,
            soft_cap=config.attention_soft_cap,
        )
        self._o(a.attended, out=a.branch)
        self._collectives.all_reduce(a.branch)


class GatedMLP:
    """normed -> branch: down(activation(gate) * up), gate and up in one product."""

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._collectives = loader.collectives
        self._activation = config.activation
        prefix = f"model.layers.{layer}.mlp"
        self._gate_up = loader.linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], bias=config.mlp_bias)
        self._down = loader.linear([f"{prefix}.down_proj"], bias=config.mlp_bias)

    def __call__(self, a: Activations) -> None:
        self._gate_up(a.normed, out=a.gate_up)
        self._kernels.gated_mul(a.gate_up, self._activation, out=a.gated)
        self._down(a.gated, out=a.branch)
        self._collectives.all_reduce(a.branch)


class Experts:
    """normed -> branch: of many gated MLPs those few that a router chooses for each token, weighted.        arXiv:1701.06538

    Expert after expert, each with the rows that go to it, in the order of their numbers: what a token gets does not depend on its
    neighbours. Which experts those are is known only while the step runs, so it is neither a CUDA graph nor a program.
    """

    def __init__(self, config: ModelConfig, loader: Loader, layer: int) -> None:
        self._kernels = loader.kernels
        self._collectives = loader.collectives
        self._config = config
        prefix = f"model.layers.{layer}.mlp"
        self._router = loader.linear([f"{prefix}.gate"], bias=False)
        self._experts = [
            (
                loader.linear(
                    [f"{prefix}.experts.{number}.gate_proj", f"{prefix}.experts.{number}.up_proj"], bias=False
                ),
                loader.linear([f"{prefix}.experts.{number}.down_proj"], bias=False),
            )
            for number in range(config.num_experts)
        ]

    def __call__(self, a: Activations) -> None:
        weights, chosen = self._route(a.normed)
        a.branch.zero_()
        for number in chosen.unique().tolist():
            rows, place = (chosen == number).nonzero(as_tuple=True)
            result = self._expert(number, a.normed[rows])
            a.branch.index_add_(0, rows, result * weights[rows, place, None].to(result.dtype))
        self._collectives.all_reduce(a.branch)

    def _route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, [T, experts_per_token]."""
        config = self._config
        logits = normed.new_empty(len(normed), config.num_experts)
        self._router(normed, out=logits)
        shares = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, chosen = shares.topk(config.experts_per_token, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if config.normalize_experts else weights, chosen

    def _expert(self, number: int, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, H]."""
        gate_up_proj, down_proj = self._experts[number]
        gate_up = x.new_empty(len(x), 2 * self._config.expert_size)
        gate_up_proj(x, out=gate_up)
        gated = x.new_empty(len(x), self._config.expert_size)
        self._kernels.gated_mul(gate_up, self._config.activation, out=gated)
        down = torch.empty_like(x)
        down_proj(gated, out=down)
        return down


def make_mlp(config: ModelConfig, loader: Loader, layer: int) -> GatedMLP | Experts:
    """What this layer has."""
    return Experts(config, loader, layer) if config.is_mixture(layer) else GatedMLP(config, loader, layer)
