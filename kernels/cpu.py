"""The compiled CPU kernels: memory, checks, and calls into the C library by ctypes.

Every wrapper checks shapes and dtypes on one line and passes pointers; all arithmetic is in cpu_src/. Weights are stored
in float32, float16 or bfloat16, or as packed integers (quantized.py), pages in float32, float16 or float8_e4m3fn; sums are
float32, but for those of integers within a group, which are exact. The result of a row does not depend, to the bit, on which
other rows are in the batch, on how a prompt was cut into chunks, on the page table, or on the number of threads.

C rather than Numba: a shared library without Python's headers needs any compiler once instead of LLVM at every start,
it lets go of the interpreter's lock for the whole call, and its thread pool is ours (see cpu_src/pool.c). ctypes costs
about 3 µs a call.
"""

import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.errors import ConfigError
from trunkline.kernels.build import build_library, detect_target
from trunkline.kernels.interface import Activation, Batch, Int32, KvPages, PackedLinear
from trunkline.kernels.program import ADDRESSES, NUMBERS, CpuProgram, Recorder, name_of_call
from trunkline.kernels.quantized import IntegerFormat, QuantizedMatrix, dequantized
from trunkline.step import SPLIT

HUGE_PAGE = 2 * 2**20  # bytes
BLOCK_BYTES = 64 * 2**20  # of weights; untouched memory costs nothing
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum format in cpu_src/vector.h
KV_FORMATS = {torch.float32: 0, torch.float16: 1, torch.float8_e4m3fn: 3}  # of keys and values, from the same enum

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}  # enum activation in cpu_src/rows.c

_TYPES = {"p": c_void_p, "i": c_int, "l": c_long, "f": c_float}
_TYPES |= dict.fromkeys(NUMBERS, c_int) | dict.fromkeys(ADDRESSES, c_void_p)
_SIGNATURES = {  # one letter per argument, after the pool; capitals are what a step brings along, see program.py
    "pack": "ppiiiii",
    "linear": "ppppTiii",
    "embed": "pppTiiii",
    "pack_quantized": "ppppiiiiiiii",
    "linear_quantized": "ppppTiiiiii",
    "embed_quantized": "pppTiiiiiii",
    "norm": "ppppTif",
    "rotate_and_store": "ppASppppfTiiiiii",
    "attention": "plppGQCOLpffRPXiiiiii",
    "gated_mul": "ppTii",
}


class OperationTime(NamedTuple):
    """What an operation took while `CpuKernels` kept a profile."""

    calls: int
    seconds: float


class SharedSplits(NamedTuple):
    """What requests have in common, for cpu_src/attention.c.

    order   int32 [R]     the requests, those that share much next to each other
    labels  int32 [R, K]  of the first K splits of each; who has the same label reads the same pages, -1 is nobody else
    """

    order: Tensor
    labels: Tensor


def share_splits(readers: Int32, runs: Int32) -> SharedSplits:
    """From `Batch.readers` and `Batch.runs`, at least one run."""
    labels = np.full((readers.shape[1], runs.max() // SPLIT), -1, np.int32)
    for label, (start, end) in enumerate(runs // SPLIT):
        labels[readers[label] != 0, start:end] = label
    order = np.lexsort(labels.T[::-1])  # by the first split, then by the second, …: as the tree branches
    return SharedSplits(torch.from_numpy(order.astype(np.int32)), torch.from_numpy(labels))


class CpuKernels:
    """See interface.Kernels."""

    page_sizes = tuple(2**power for power in range(3, 10))

    def __init__(self, threads: int, library: Path | None = None, *, kv_dtype: torch.dtype | None = None) -> None:
        """
        kv_dtype  of keys and values, one of KV_FORMATS; None: as the weights are stored, see `kv_dtype`

        Raises build.BuildError if there is no `library` and none can be built.
        """
        assert kv_dtype is None or kv_dtype in KV_FORMATS, kv_dtype
        library = library or build_library()
        lib = ctypes.CDLL(str(library))
        lib.trunkline_pool_create.restype = c_void_p
        lib.trunkline_pool_create.argtypes = [c_int]
        lib.trunkline_pool_threads.argtypes = lib.trunkline_pool_destroy.argtypes = [c_void_p]
        lib.trunkline_pool_destroy.restype = None
        self._pool = lib.trunkline_pool_create(threads)
        if self._pool is None:
            raise MemoryError("no memory for a pool of threads")
        weakref.finalize(self, lib.trunkline_pool_destroy, self._pool)
        self._functions = {}
        for name, letters in _SIGNATURES.items():
            function = getattr(lib, f"trunkline_{name}")
            function.argtypes = [c_void_p, *(_TYPES[letter] for letter in letters)]
            self._functions[name] = function
        lib.trunkline_operation.argtypes = [c_char_p]
        lib.trunkline_run.argtypes = [c_void_p, c_void_p, c_int, c_void_p, c_void_p]
        self._lib = lib
        self._recorder: Recorder | None = None
        self._profile: dict[str, OperationTime] | None = None
        self._profiled: list[tuple[Sequence[str], np.ndarray]] = []  # of programs: calls' names and nanoseconds
        lib.trunkline_quantized_panel_bytes.restype = c_long
        lib.trunkline_quantized_panel_bytes.argtypes = [c_int] * 5
        self._panel: int = lib.trunkline_panel()
        self._memory = Memory()
        self._kv_dtype = kv_dtype
        self.threads: int = lib.trunkline_pool_threads(self._pool)
        self.device = torch.device("cpu")
        self.activation_dtype = torch.float32
        self.auto_dtype = torch.float16
        self.numerics = f"cpu {library.stem}"  # the stem is a digest of sources, flags and compiler
        self.description = f"{self.threads} thread{'s' * (self.threads != 1)}, compiled kernels for {detect_target()}"

    def supports_head_dim(self, head_dim: int) -> bool:
        return head_dim % 8 == 0

    def pack_linear(self, weights: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> PackedLinear:
        """Panels of output channels: [N / panel, K, panel], see cpu_src/linear.c; of integers, [N / panel, bytes of a panel], see
        cpu_src/quantized_layout.h."""
        assert all(weight.shape[1] == weights[0].shape[1] for weight in weights), [weight.shape for weight in weights]
        integers = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if len(integers) == len(weights):
            return self._pack_integers(integers)
        return self._pack_plain(dequantized(weights), dtype)

    def _pack_plain(self, weights: Sequence[Tensor], dtype: torch.dtype) -> PackedLinear:
        panel, k, n = self._panel, weights[0].shape[1], sum(len(weight) for weight in weights)
        packed = self._memory.take((-(-n // panel), k, panel), dtype)
        first = 0
        for weight in weights:
            source = weight.contiguous() if weight.dtype in FORMATS else weight.float().contiguous()
            formats = FORMATS[source.dtype], FORMATS[dtype]
            self._call("pack", source.data_ptr(), packed.data_ptr(), len(source), k, first, *formats)
            first += len(source)
        return PackedLinear(packed, n=n, k=k)

    def _pack_integers(self, matrices: Sequence[QuantizedMatrix]) -> PackedLinear:
        k, n = matrices[0].shape[1], sum(len(matrix) for matrix in matrices)
        integers = IntegerFormat.holding(matrices)
        layout = _layout(integers)
        panel_bytes = self._lib.trunkline_quantized_panel_bytes(k, *layout)
        packed = self._memory.take((-(-n // self._panel), panel_bytes), torch.uint8)
        first = 0
        for matrix in matrices:
            value, scale = matrix.value.contiguous(), matrix.scale.contiguous()
            offset = None if matrix.offset is None else matrix.offset.contiguous()
            groups = len(matrix), k // matrix.group
            assert value.dtype == torch.int8 and _is(scale, *groups), f"{scale.shape} of {matrix.shape}"
            assert offset is None or _is(offset, *groups), f"{offset.shape} of {matrix.shape}"
            self._call(
                "pack_quantized", value.data_ptr(), scale.data_ptr(), _pointer(offset), packed.data_ptr(), len(matrix), k, first,
                matrix.group, *layout,
            )  # fmt: skip
            first += len(matrix)
        return PackedLinear(packed, n=n, k=k, integers=integers)

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float16 beside bfloat16 weights: as small, eight times as precise, and keys and values are never large."""
        if self._kv_dtype is not None:
            return self._kv_dtype
        return torch.float16 if dtype == torch.bfloat16 else dtype

    def allocate_kv(
        self, *, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvPages:
        """Keys are [layer, page, kv_head, head_dim, page_size], values [layer, page, kv_head, page_size, head_dim]."""
        if page_size not in self.page_sizes:
            raise ConfigError(f"--block-size is {page_size}; allowed are {', '.join(map(str, self.page_sizes))}.")
        assert self.supports_head_dim(head_dim), head_dim
        pages = (num_layers, num_pages, kv_heads)
        keys = allocate((*pages, head_dim, page_size), self.kv_dtype(dtype))
        values = allocate((*pages, page_size, head_dim), self.kv_dtype(dtype))
        return KvPages(keys, values, num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim)

    def prepare(self, batch: Batch, kv: KvPages) -> Batch:
        """Batch.work becomes SharedSplits; None where nothing is shared."""
        if not len(batch.runs):
            return batch
        return replace(batch, work=share_splits(batch.readers.numpy(), batch.runs.numpy()))

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None, *, out: Tensor) -> None:
        rows, n, k = len(x), weight.n, weight.k
        assert _is(x, rows, k) and _is(out, rows, n) and (bias is None or _is(bias, n)), (
            f"{x.shape} {weight} {out.shape}"
        )
        pointers = x.data_ptr(), weight.data.data_ptr(), _pointer(bias), out.data_ptr()
        if weight.integers is None:
            self._call("linear", *pointers, rows, n, k, FORMATS[weight.data.dtype])
        else:
            self._call("linear_quantized", *pointers, rows, n, k, *_layout(weight.integers))

    def embed(self, ids: Tensor, weight: PackedLinear, *, out: Tensor, first_id: int = 0) -> None:
        rows, n, k = len(ids), weight.n, weight.k
        assert _is(ids, rows, dtype=torch.int32) and _is(out, rows, k), f"{ids} {weight} {out.shape}"
        pointers = ids.data_ptr(), weight.data.data_ptr(), out.data_ptr()
        if weight.integers is None:
            self._call("embed", *pointers, rows, n, k, first_id, FORMATS[weight.data.dtype])
        else:
            self._call("embed_quantized", *pointers, rows, n, k, first_id, *_layout(weight.integers))

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        rows, width = x.shape
        assert _is(x, rows, width) and _is(weight, width) and _is(out, rows, width), (
            f"{x.shape} {weight.shape} {out.shape}"
        )
        self._call("norm", x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, width, epsilon)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
        rows, width = x.shape
        assert _is(x, rows, width) and _is(residual, rows, width), f"{x.shape} {residual.shape}"
        assert _is(weight, width) and _is(out, rows, width), f"{weight.shape} {out.shape}"
        self._call("norm", x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, epsilon)

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
        rows, width, rotary, D = *qkv.shape, rope.shape[1], kv.head_dim
        query_heads = width // D - 2 * kv.kv_heads
        assert _is(qkv, rows, (query_heads + 2 * kv.kv_heads) * D) and len(batch.positions) == rows, (
            f"{qkv.shape} {batch}"
        )
        assert _is(rope, len(rope), rotary) and rotary <= D, f"{rope.shape}"
        assert all(norm is None or _is(norm, D) for norm in (q_norm, k_norm)), f"{q_norm} {k_norm}"
        self._call(
            "rotate_and_store", qkv.data_ptr(), rope.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
            _pointer(q_norm), _pointer(k_norm), _layer(kv.keys, layer), _layer(kv.values, layer), epsilon, rows, query_heads,
            kv.kv_heads, D, rotary, kv.page_size, KV_FORMATS[kv.keys.dtype],
        )  # fmt: skip

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
        rows, width, D = *qkv.shape, kv.head_dim
        query_heads = width // D - 2 * kv.kv_heads
        assert _is(qkv, rows, (query_heads + 2 * kv.kv_heads) * D) and _is(out, rows, query_heads * D), (
            f"{qkv.shape} {out.shape}"
        )
        assert query_heads % kv.kv_heads == 0 and len(batch.positions) == rows, f"{query_heads} heads, {batch}"
        assert window >= 0 and soft_cap >= 0, f"window {window}, soft cap {soft_cap}"
        requests, pages_per_request = batch.page_table.shape
        order, labels = batch.work or (None, None)
        assert order is None or (_is(order, requests, dtype=torch.int32) and labels is not None), f"{batch.work}"
        self._call(
            "attention", qkv.data_ptr(), width, _layer(kv.keys, layer), _layer(kv.values, layer),
            batch.page_table.data_ptr(), batch.query_start.data_ptr(), batch.context_len.data_ptr(), _pointer(order),
            _pointer(labels), out.data_ptr(), scale, soft_cap, requests, pages_per_request,
            0 if labels is None else labels.shape[1], query_heads, kv.kv_heads, D, kv.page_size, KV_FORMATS[kv.keys.dtype],
            window,
        )  # fmt: skip

    def gated_mul(self, gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
        rows, width = out.shape
        assert _is(gate_up, rows, 2 * width) and _is(out, rows, width), f"{gate_up.shape} {out.shape}"
        self._call("gated_mul", gate_up.data_ptr(), out.data_ptr(), rows, width, ACTIVATIONS[activation])

    def new_program(self) -> CpuProgram:
        return CpuProgram(self)

    @contextmanager
    def record(self, batch: Batch) -> Iterator[Recorder]:
        """Write down the operations that are called within, about `batch`; they run as ever."""
        assert self._recorder is None, "a program within a program"
        self._recorder = Recorder(batch)
        try:
            yield self._recorder
        finally:
            self._recorder = None

    def number_of(self, operation: str) -> int:
        """What a program's calls name an operation by."""
        number: int = self._lib.trunkline_operation(operation.encode())
        assert number >= 0, f"program.c does not know {operation}"
        return number

    def run(self, calls: np.ndarray, names: Sequence[str], variables: np.ndarray) -> None:
        """Run the calls of a program.

        calls      program.CALL [count]
        names      [count] of the calls, for the profile
        variables  int64, of each of program.VARIABLES
        """
        times = None if self._profile is None else np.zeros(len(calls), np.int64)
        times_at = None if times is None else times.ctypes.data
        if self._lib.trunkline_run(self._pool, calls.ctypes.data, len(calls), variables.ctypes.data, times_at) != 0:
            raise MemoryError("no memory for the workspace of a program")
        if times is not None:
            self._profiled.append((names, times))

    def start_profile(self) -> None:
        """From now on, note what every operation takes."""
        self._profile = {}
        self._profiled = []

    def stop_profile(self) -> dict[str, OperationTime]:
        """Times since `start_profile`, by operation; those of linear layers by their shapes: "linear 576 -> 960"."""
        for names, times in self._profiled:
            for name, nanoseconds in zip(names, times.tolist(), strict=True):
                self._count(name, nanoseconds * 1e-9)
        profile, self._profile = self._profile, None
        assert profile is not None, "start_profile() comes first"
        return profile

    def _count(self, name: str, seconds: float) -> None:
        assert self._profile is not None
        calls, before = self._profile.get(name, (0, 0.0))
        self._profile[name] = OperationTime(calls + 1, before + seconds)

    def _call(self, name: str, *arguments: float | None) -> None:
        if self._recorder is not None:
            self._recorder.add(name, _SIGNATURES[name], arguments)
        started_at = perf_counter()
        if self._functions[name](self._pool, *arguments) != 0:
            raise MemoryError(f"no memory for the workspace of {name}")
        if self._profile is not None:
            self._count(name_of_call(name, arguments), perf_counter() - started_at)


def _is(tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> bool:
    return tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()


def _layout(integers: IntegerFormat) -> tuple[int, int, int, int]:
    """As cpu_src/quantized_layout.h wants it."""
    return integers.bits, integers.group, FORMATS[integers.scale_dtype], integers.offsets


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(pages: Tensor, layer: int) -> int:
    """Address of a layer's pages."""
    assert 0 <= layer < len(pages), f"layer {layer} of {len(pages)}"
    return pages.data_ptr() + layer * pages.stride(0) * pages.itemsize


class Memory:
    """Hands out memory for weights from blocks that lie in 2 MB pages: small matrices alone would fill none."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros, aligned to 64 bytes."""
        num_bytes = _num_bytes(shape, dtype)
        if self._used + num_bytes > len(self._block):
            self._block, self._used = allocate((max(num_bytes, BLOCK_BYTES),), torch.uint8), 0
        piece = self._block[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        return piece.view(dtype).view(shape)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in 2 MB pages where the system has them (4 KB pages cost up to a third of the read bandwidth), freed with
    the tensor, and not occupied until touched."""
    region = mmap.mmap(-1, _num_bytes(shape, dtype) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(region, dtype=torch.uint8)
    start = -everything.data_ptr() % HUGE_PAGE
    return everything[start : start + _num_bytes(shape, dtype)].view(dtype).view(shape)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
