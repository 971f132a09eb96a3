"""Every operation in plain torch: the oracle that the other kernels are tested against, and the fallback without a
compiler.

Written to be obviously right, not fast: requests one after the other, pages gathered, masks spelled out. In float64 it
is exact enough to judge float32 kernels. Its matrix products are the BLAS library's, whose rounding depends on the
number of rows: unlike the compiled kernels, it does not give the same bits in every batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trunkline.kernels.interface import Activation, Batch, KvPages, PackedLinear, Unrecorded
from trunkline.kernels.quantized import QuantizedMatrix, dequantized


class ReferenceKernels:
    """See interface.Kernels. Pages are [layer, page, page_size, kv_heads, head_dim]."""

    device = torch.device("cpu")
    page_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        activation_dtype: torch.dtype = torch.float32,
        *,
        why: str = "",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """
        why       there are no others, for people
        kv_dtype  of keys and values; None: as the weights are stored
        """
        self.activation_dtype = activation_dtype
        self._kv_dtype = kv_dtype
        self.auto_dtype = torch.float32
        self.description = f"torch kernels: {why}" if why else "torch kernels"
        self.numerics = f"reference {activation_dtype} torch-{torch.__version__}"

    def supports_head_dim(self, head_dim: int) -> bool:
        return True

    def pack_linear(self, weights: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> PackedLinear:
        stacked = torch.cat([weight.to(dtype) for weight in dequantized(weights)])
        return PackedLinear(stacked, n=stacked.shape[0], k=stacked.shape[1])

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._kv_dtype or dtype

    def allocate_kv(
        self, *, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvPages:
        shape = (num_layers, num_pages, page_size, kv_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=self.kv_dtype(dtype)) for _ in range(2))
        return KvPages(keys, values, num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim)

    def prepare(self, batch: Batch, kv: KvPages) -> Batch:
        return batch

    def new_program(self) -> Unrecorded:
        return Unrecorded()

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, out: Tensor) -> None:
        torch.matmul(x, weight.data.to(x.dtype).T, out=out)
        if bias is not None:
            out += bias.to(x.dtype)

    def embed(self, ids: Tensor, weight: PackedLinear, *, out: Tensor, first_id: int = 0) -> None:
        rows = ids.long() - first_id
        here = (rows >= 0) & (rows < weight.n)
        out.copy_(weight.data[rows.where(here, 0)] * here[:, None])

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        out.copy_(x / torch.sqrt(mean_square + epsilon) * weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        residual += x
        self.rms_norm(residual, weight, epsilon, out=out)

    def rotate_and_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        batch: Batch,
        kv: KvPages,
        layer: int,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        heads = qkv.view(len(qkv), -1, kv.head_dim)  # [T, Q + 2 KV, D]
        num_queries = heads.shape[1] - 2 * kv.kv_heads
        for weight, part in ((q_norm, heads[:, :num_queries]), (k_norm, heads[:, num_queries : -kv.kv_heads])):
            if weight is not None:
                self.rms_norm(part.clone(), weight, epsilon, out=part)
        half = rope.shape[1] // 2
        cosines, sines = rope[batch.positions.long(), None].to(qkv.dtype).split(half, dim=-1)  # [T, 1, half] each
        rotated = heads[:, : -kv.kv_heads]
        first, second = rotated[..., :half].clone(), rotated[..., half : 2 * half].clone()
        rotated[..., :half] = first * cosines - second * sines
        rotated[..., half : 2 * half] = second * cosines + first * sines
        slots = batch.slots.long()
        keys, values = heads[:, -2 * kv.kv_heads :].split(kv.kv_heads, dim=1)
        kv.keys[layer].flatten(0, 1)[slots] = _fit(keys, kv.keys.dtype)
        kv.values[layer].flatten(0, 1)[slots] = _fit(values, kv.values.dtype)

    def attention(
        self,
        qkv: Tensor,
        batch: Batch,
        kv: KvPages,
        layer: int,
        scale: float,
        *,
        out: Tensor,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        queries = qkv.view(len(qkv), -1, kv.head_dim)[:, : -2 * kv.kv_heads]  # [T, Q, D]
        group = queries.shape[1] // kv.kv_heads
        starts = batch.query_start.tolist()
        for request, context in enumerate(batch.context_len.tolist()):
            rows = slice(starts[request], starts[request + 1])
            pages = batch.page_table[request, : -(-context // kv.page_size)].long()
            keys, values = (
                pool[layer, pages]
                .flatten(0, 1)[:context]
                .to(qkv.dtype)
                .repeat_interleave(group, dim=1)  # [context, Q, D]
                for pool in (kv.keys, kv.values)
            )
            scores = torch.einsum("tqd,cqd->qtc", queries[rows] * scale, keys)
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            ahead = torch.arange(context)[None] - batch.positions[rows, None]  # [rows, context]
            hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[rows] = torch.einsum("qtc,cqd->tqd", weights, values).flatten(1)

    def gated_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        functional = torch.nn.functional
        out.copy_((functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up)


def _fit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype`; what is out of its range becomes its largest number rather than infinity."""
    limits = torch.finfo(dtype)
    return values.clamp(limits.min, limits.max).to(dtype)
