"""The Triton kernels as an implementation of the interface: memory, checks, and the plan of a step's attention.

Row kernels, attention and copies are ours. A linear layer over 16-bit weights is the vendor's: nothing beats cuBLAS there.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import triton
from torch import Tensor

from trunkline.errors import ConfigError
from trunkline.kernels.interface import Activation, Batch, KvPages, PackedLinear, Unrecorded
from trunkline.kernels.quantized import QuantizedMatrix, dequantized
from trunkline.kernels.triton import activation as activations
from trunkline.kernels.triton import attention as paged_attention
from trunkline.kernels.triton import embedding, interpreter, norm, rotary
from trunkline.kernels.triton.tiles import arch_of

LARGEST_HEAD = 256  # numbers
FLOAT8_CAPABILITY = (8, 9)  # the first chips that convert to float8_e4m3fn


class TritonKernels:
    """See interface.Kernels. Keys and values are each [layer, page, kv_head, page_size, head_dim]."""

    page_sizes: tuple[int, ...] = (16, 32, 64)

    def __init__(
        self,
        device: torch.device,
        activation_dtype: torch.dtype,
        *,
        query_heads: int,
        max_model_len: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """
        device         a GPU; the CPU where kernels are interpreted
        query_heads    of a layer, on this rank
        max_model_len  tokens of a request: the longest context that `plan` must have room for
        kv_dtype       of keys and values: float8_e4m3fn, or None: as the weights

        Raises ConfigError if the GPU can't do what is asked for.
        """
        if device.type == "cpu":
            interpreter.mend()
            self.description = "Triton's interpreter, to be looked at"
        else:
            self.description = "Triton kernels"
            capability = torch.cuda.get_device_capability(device)
            if kv_dtype == torch.float8_e4m3fn and capability < FLOAT8_CAPABILITY:
                raise ConfigError(
                    f"--kv-cache-dtype is 'fp8', but {torch.cuda.get_device_name(device)} (compute capability"
                    f" {capability[0]}.{capability[1]}) can't convert to it; 8.9 and later can. Please use 'auto'."
                )
        self.device = device
        self.activation_dtype = activation_dtype
        self.auto_dtype = activation_dtype
        self.numerics = f"triton-{triton.__version__} torch-{torch.__version__} {_name(device)} {activation_dtype}"
        self._arch = arch_of(device)
        self._query_heads = query_heads
        self._max_model_len = max_model_len
        self._kv_dtype = kv_dtype
        self._workspaces: list[paged_attention.Workspace] = []  # the last one is used

    def supports_head_dim(self, head_dim: int) -> bool:
        return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD

    def pack_linear(self, weights: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> PackedLinear:
        """[N, K], as they are; integers are dequantized."""
        assert dtype == self.activation_dtype, f"weights in {dtype}, activations in {self.activation_dtype}"
        stacked = torch.cat([weight.to(self.device, dtype) for weight in dequantized(weights)])
        return PackedLinear(stacked, n=stacked.shape[0], k=stacked.shape[1])

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._kv_dtype or dtype

    def allocate_kv(
        self, *, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvPages:
        if page_size not in self.page_sizes:
            raise ConfigError(f"--block-size is {page_size}; allowed are {', '.join(map(str, self.page_sizes))}.")
        assert self.supports_head_dim(head_dim), head_dim
        shape = (num_layers, num_pages, kv_heads, page_size, head_dim)
        keys, values = (torch.empty(shape, dtype=self.kv_dtype(dtype), device=self.device) for _ in range(2))
        return KvPages(keys, values, num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim)

    def prepare(self, batch: Batch, kv: KvPages) -> Batch:
        planned = self.plan(batch, kv)
        tensors = {field.name: getattr(planned, field.name).to(self.device) for field in fields(planned)}
        return replace(planned, **tensors)

    def plan(self, batch: Batch, kv: KvPages, *, num_requests: int = 0) -> Batch:
        """The batch, on the host, with the work of its attention, on the host, too; and room for its partial results.

        num_requests  if not 0, the work is of the same shape for all batches of so many requests with one row each: a
                      CUDA graph can be replayed with any of them
        """
        capacity = None
        if num_requests:
            capacity = paged_attention.decode_capacity(
                num_requests, self._max_model_len, kv, self._query_heads, self._arch
            )
        work = paged_attention.plan_attention(batch, kv, self._query_heads, self._arch, capacity)
        self._reserve(work.capacity.parts, kv.head_dim)
        return replace(batch, work=work)

    def _reserve(self, slots: int, head_dim: int) -> None:
        """Make room for so many partial results. Graphs keep the address of the room there was: it is never given back."""
        room = len(self._workspaces[-1].parts) if self._workspaces else 0
        if slots > room or not self._workspaces:
            slots = max(slots, 2 * room)
            self._workspaces.append(paged_attention.Workspace(slots, self._query_heads, head_dim, self.device))

    def new_program(self) -> Unrecorded:
        return Unrecorded()

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, out: Tensor) -> None:
        assert x.shape == (len(out), weight.k) and out.shape[1] == weight.n, f"{x.shape} {weight} {out.shape}"
        matrix = weight.data.T
        if out.dtype == x.dtype:
            if bias is None:
                torch.mm(x, matrix, out=out)
            else:
                torch.addmm(bias, x, matrix, out=out)
            return
        assert out.dtype == torch.float32, f"{x.dtype} {out.dtype}"
        if self.device.type == "cpu":  # has no product of 16-bit numbers that stays float32
            torch.mm(x.float(), matrix.float(), out=out)
        else:
            torch.mm(x, matrix, out_dtype=torch.float32, out=out)
        if bias is not None:
            out += bias

    def embed(self, ids: Tensor, weight: PackedLinear, *, out: Tensor, first_id: int = 0) -> None:
        embedding.embed(ids, weight.data, out=out, first_id=first_id)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        norm.rms_norm(x, weight, epsilon, out=out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        norm.add_rms_norm(x, residual, weight, epsilon, out=out)

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
        rotary.rotate_and_store(qkv, rope, batch, kv, layer, q_norm=q_norm, k_norm=k_norm, epsilon=epsilon)

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
        paged_attention.attention(
            qkv, batch, kv, layer, scale,
            out=out, workspace=self._workspaces[-1], window=window, soft_cap=soft_cap,
        )  # fmt: skip

    def gated_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        activations.gated_mul(gate_up, activation, out=out)


def _name(device: torch.device) -> str:
    return "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
