"""The operations a model is made of, as one interface with several implementations.

    kernels = cpu_kernels(threads=2, head_dim=64)                # select.py
    weight = kernels.pack_linear([q, k, v], torch.float16)       # once, when the model is loaded
    kernels.linear(x, weight, out=qkv)                           # every step

    reference   plain torch: the oracle of every test, the fallback without a C compiler; also in float64
    cpu         compiled C: as fast as memory and multipliers allow, the same bits whatever the batch
    triton      GPUs; on a CPU, in Triton's interpreter, to be looked at

Operations write into `out` tensors that the caller owns, so that a step allocates nothing. They know no models,
requests or text: only tensors, and the `Batch` that says which rows belong together.

Letters: T token rows, R requests, P page slots of the longest request, K inputs and N outputs of a linear layer, H
hidden size, I intermediate size, D head size, Q query heads, KV key-value heads, S shared runs. Activations are
contiguous and in `kernels.activation_dtype`; all tensors are on `kernels.device`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trunkline.kernels.quantized import IntegerFormat, QuantizedMatrix
from trunkline.step import SPLIT, SharedRun

Activation = Literal["silu", "gelu_tanh"]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which rows of a step belong together, and where their keys and values lie. All tensors int32.

    Example, page_size 16: request 0 decodes at position 33, request 1 reads a chunk of 3 after 16 cached tokens.

    positions     [T]    [33, 16, 17, 18]
    slots         [T]    [65, 48, 49, 50]           page * page_size + place in the page: where the row's K and V go
    query_start   [R+1]  [0, 1, 4]                  rows query_start[r]:query_start[r+1] belong to request r
    context_len   [R]    [34, 19]                   tokens in the cache once this step's rows are written
    page_table    [R,P]  [[9, 7, 4], [2, 3, 0]]     token at position p lies in page_table[r, p // page_size]; 0 pads
    readers       [S,R]  0 or 1                     whether request r reads shared run s (step.SharedRun) with the others
    runs          [S,2]                             its first token and the one behind its last
    work          whatever the implementation makes of all this (Kernels.prepare); None until then
    """

    positions: Tensor
    slots: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    readers: Tensor
    runs: Tensor
    work: Any = None


def make_batch(
    *,
    positions: Int32,
    query_start: Int32,
    context_len: Int32,
    page_table: Int32,
    shared: Sequence[SharedRun] = (),
    page_size: int,
    num_pages: int,
) -> Batch:
    """A Batch from a plan's arrays, its slots looked up; on the CPU.

    Raises ValueError if they would lead a kernel outside the `num_pages` pages, or requests share what they do not have in
    common: kernels trust a Batch.
    """
    lengths = query_start[1:] - query_start[:-1]
    requests = np.repeat(np.arange(len(lengths)), lengths)
    if len(requests) != len(positions) or query_start[0] != 0 or len(lengths) != len(context_len):
        raise ValueError(
            f"query_start {query_start} does not cut {len(positions)} rows into {len(context_len)} requests."
        )
    if len(page_table) != len(context_len) or page_table.min() < 0 or page_table.max() >= num_pages:
        raise ValueError(
            f"The page table names pages {page_table.min()} to {page_table.max()} of {len(page_table)} requests; there are"
            f" {num_pages} pages and {len(context_len)} requests."
        )
    if context_len.max() > page_table.shape[1] * page_size:
        raise ValueError(
            f"{page_table.shape[1]} pages of {page_size} tokens are too few for context_len {context_len}."
        )
    cached = context_len - lengths
    if cached.min() < 0 or (positions != np.arange(len(positions)) + (cached - query_start[:-1])[requests]).any():
        raise ValueError(f"positions {positions} are not the last of context_len {context_len}.")
    index, place = np.divmod(positions, page_size)
    slots = page_table[requests, index] * page_size + place
    readers, runs = _shared(shared, cached, page_table, page_size)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32))

    return Batch(
        positions=tensor(positions),
        slots=tensor(slots),
        query_start=tensor(query_start),
        context_len=tensor(context_len),
        page_table=tensor(page_table),
        readers=tensor(readers),
        runs=tensor(runs),
    )


def _shared(
    shared: Sequence[SharedRun], num_cached: Int32, page_table: Int32, page_size: int
) -> tuple[npt.NDArray[np.int8], Int32]:
    """`readers` and `runs` of a Batch. num_cached: tokens of each request that were there before this step."""
    readers = np.zeros((len(shared), len(page_table)), np.int8)
    runs = np.array([run[1:] for run in shared], np.int32).reshape(-1, 2)
    for index, (requests, start, end) in enumerate(shared):
        if start % SPLIT or end % SPLIT or not 0 <= start < end or SPLIT % page_size:
            raise ValueError(
                f"Tokens {start} to {end - 1} are shared; with pages of {page_size} it must be splits of {SPLIT}."
            )
        if len(requests) < 2 or len(set(requests.tolist())) < len(requests) or requests.max() >= len(page_table):
            raise ValueError(
                f"Requests {requests} share a run; it takes two of those that there are, {len(page_table)}."
            )
        if requests.min() < 0 or (num_cached[requests] < end).any():
            raise ValueError(f"Requests {requests} share tokens up to {end}; cached are {num_cached[requests]}.")
        tables = page_table[requests, start // page_size : end // page_size]
        if (tables != tables[0]).any():
            raise ValueError(
                f"Requests {requests} share tokens {start} to {end - 1}, but their page tables differ there."
            )
        readers[index, requests] = 1
    for first, (start, end) in enumerate(runs):
        overlapping = (runs[:first, 0] < end) & (runs[:first, 1] > start)
        if (readers[:first][overlapping] & readers[first]).any():
            raise ValueError(f"A request reads tokens {start} to {end - 1} in two shared runs.")
    return readers, runs


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weights of a linear layer, in an order that only the kernels that packed them understand.

    data      whatever the implementation likes
    n, k      outputs and inputs
    integers  how they are stored, if they are packed integers; None: floating point, in the dtype of `data`
    """

    data: Tensor
    n: int
    k: int
    integers: IntegerFormat | None = None

    @property
    def num_bytes(self) -> int:
        """What a product with them reads, padding included."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of all layers. What a page looks like inside is the implementation's affair.

    keys, values   dimension 0 is the layer, dimension 1 the page
    page_size      tokens per page
    """

    keys: Tensor
    values: Tensor
    num_pages: int
    page_size: int
    kv_heads: int
    head_dim: int


class Program(Protocol):
    """A sequence of operations that every step repeats."""

    def __call__(self, body: Callable[[], None], batch: Batch, fixed: Sequence[Tensor]) -> None:
        """Do what `body` does, by calling it or otherwise.

        body   only calls operations of the kernels: the same ones each time, over as many rows as the batch has, on weights that
               never move and on `fixed`
        batch  after `prepare`
        fixed  the other tensors, cut to any number of rows; `body` is called again when one has moved
        """


class Unrecorded:
    """The Program of kernels that gain nothing by one."""

    def __call__(self, body: Callable[[], None], batch: Batch, fixed: Sequence[Tensor]) -> None:
        body()


class Kernels(Protocol):
    """One implementation of every operation.

    description        for people, e.g. "2 threads, compiled kernels for avx2"
    device             where all tensors are
    numerics           names how results come about and what a page looks like inside; equal only if both are, bit by
                       bit
    activation_dtype   of everything but weights, ids and KV pages
    auto_dtype         how weights are stored if nobody says
    page_sizes         the page sizes that `allocate_kv` takes; empty: any
    """

    description: str
    device: torch.device
    numerics: str
    activation_dtype: torch.dtype
    auto_dtype: torch.dtype
    page_sizes: tuple[int, ...]

    def supports_head_dim(self, head_dim: int) -> bool:
        """True if `attention` handles heads of this size."""

    def pack_linear(self, weights: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> PackedLinear:
        """Pack matrices [n_i, K], stacked into one of N = sum of n_i rows, rounded to `dtype`.

        Where all are QuantizedMatrix, kernels that can multiply by integers keep them, exactly, in one format for the whole stack;
        otherwise they are dequantized. Raises ValueError for groups that can't be kept.
        """

    def allocate_kv(
        self, *, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvPages:
        """KV storage for weights of `dtype`; see `kv_dtype` for its own. Its content is undefined until written."""

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """How keys and values are stored beside weights of `dtype`."""

    def prepare(self, batch: Batch, kv: KvPages) -> Batch:
        """The batch on `device`, with what `attention` can know of it before the first layer; once a step."""

    def new_program(self) -> Program:
        """One for every sequence of operations that is to be repeated."""

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, out: Tensor) -> None:
        """out[t, n] = sum over k of x[t, k] * weight[n, k], + bias[n].

        x [T, K], bias [N], out [T, N]
        """

    def embed(self, ids: Tensor, weight: PackedLinear, *, out: Tensor, first_id: int = 0) -> None:
        """out[t] = weight[ids[t] - first_id], or zeros if there is no such row: row look-up in the weights of an output
        layer, which many models tie to the embedding.

        ids int32 [T]; out [T, K]; first_id: of the N rows of a vocabulary that is split over ranks
        """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        """out = x / sqrt(mean(x², of each row) + epsilon) * weight.        arXiv:1910.07467

        x, out [T, H]; weight [H]
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        """residual += x, in place; then out = rms_norm(residual). x, residual, out [T, H]; weight [H]."""

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
        """Turn the heads of q and k in place by their positions, and write k and v into the pages.

        qkv   [T, (Q + 2 KV) * D]: q, then k, then v of every row; Q follows from the width
        rope  float32 [positions, rotary]: cosines of rotary/2 frequencies, then their sines. Element i of a head,
              i < rotary/2, is paired with element i + rotary/2; the rest of the head stays. arXiv:2104.09864, Hugging
              Face's order
        q_norm, k_norm  [D]: before they are turned, q and k become rms_norm of each head, with these weights and
              `epsilon`; None: they don't
        """

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
        """Causal attention over the pages: row i of request r sees its tokens 0 … position, this step's rows included.

        out[t, q] = sum over tokens of softmax(score) * value, where score = scale * query · key; query head q reads kv
        head q // (Q / KV). Splits of a context (step.SPLIT) are worked through one by one and merged in order.

        qkv       [T, (Q + 2 KV) * D], after `rotate_and_store`; only q is read
        batch     after `prepare`
        out       [T, Q * D]
        window    the newest tokens that a row sees, its own included; 0: all
        soft_cap  score becomes soft_cap * tanh(score / soft_cap); 0: it stays.        arXiv:2408.00118
        """

    def gated_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        """out = activation(gate) * up. gate_up [T, 2 I]: gate, then up; out [T, I].        arXiv:2002.05202

        silu(x) = x * sigmoid(x); gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x³)).        arXiv:1606.08415
        """
