"""A device that works as late, and in as odd an order, as a GPU might: what is enqueued runs when somebody waits, or sometimes
a bit earlier; streams take turns at random, and some are a hundred times as fast as others. And a model for it whose tokens are
a hash of what it reads through the page table.

Host memory that is changed too early, a stream that fails to wait, a page that is given away too soon, a stale number in a
padded row: each shows as a wrong token.
"""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trunkline.kernels.interface import Batch, KvPages
from trunkline.workers.device import DeviceMemory
from trunkline.workers.sampler import Samples, sample

VOCAB_SIZE = 97
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")
ALLOCATING = ("empty", "zeros", "ones", "full", "new_", "arange", "clone", "cat", "index", "where", "to_copy")


class FakeEvent:
    """See device.Event; `at` is the clock when it happened."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.at: int | None = None

    def happen(self) -> None:
        self.at = self._device.clock

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.at is not None)


class FakeDevice:
    """See device.Device.

    clock     operations done
    captured  graphs
    """

    torch_device = torch.device("cpu")
    name = "fake"

    def __init__(self, seed: int = 0, *, eager: float = 0.2, total: int = 2**30) -> None:
        """eager: how likely an operation is done as soon as another is enqueued."""
        self.clock = 0
        self.captured: list[FakeGraph] = []
        self.used = 0
        self.total = total
        self._random = random.Random(seed)
        self._eager = eager
        self._lock = threading.RLock()
        self._streams: list[deque[Any]] = [deque()]
        self._speeds = [1.0]  # of the streams
        self._current = threading.local()

    @property
    def _stream(self) -> deque[Any]:
        return getattr(self._current, "stream", self._streams[0])

    def new_stream(self) -> Any:
        stream: deque[Any] = deque()
        self._streams.append(stream)
        self._speeds.append(self._random.choice([0.01, 1.0, 100.0]))
        return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._current.stream = self._stream, stream
        yield
        self._current.stream = before

    def launch(self, work: Callable[[], Any]) -> None:
        with self._lock:
            self._stream.append(work)
            while self._random.random() < self._eager and self._run_one():
                pass

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.shape == target.shape and source.dtype == target.dtype
        self.launch(lambda: target.copy_(source))

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self.launch(event.happen)
        return event

    def wait_for(self, event: Any) -> None:
        with self._lock:
            self._stream.append(event)

    def seconds_between(self, first: Any, last: Any) -> float:
        assert first.at is not None and last.at is not None
        return float(last.at - first.at)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def new_graph_pool(self) -> Any:
        return object()

    def capture(self, work: Callable[[], None], pool: Any) -> "FakeGraph":
        with self._lock:
            assert not any(self._streams), "the device has work while it captures"
            graph = FakeGraph(work, pool)
            self.captured.append(graph)
            return graph

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.total, self.total - self.used)

    def trim(self) -> None:
        pass

    def synchronize(self) -> None:
        self.run_until(lambda: not any(self._streams))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            while not is_done():
                assert self._run_one(), "everything waits for an event that never happens"

    def _run_one(self) -> bool:
        """The next operation of one of the streams that can go on."""
        for stream in self._streams:
            while stream and isinstance(stream[0], FakeEvent) and stream[0].at is not None:
                stream.popleft()
        ready = [index for index, stream in enumerate(self._streams) if stream and not isinstance(stream[0], FakeEvent)]
        if not ready:
            return False
        self.clock += 1
        (index,) = self._random.choices(ready, [self._speeds[index] for index in ready])
        self._streams[index].popleft()()
        return True


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks; True would import all of torch.compile, which takes ten seconds."""
        return False


class _Made(NamedTuple):
    """A tensor that an operation of the graph gives."""

    number: int


class _Outside(NamedTuple):
    """A tensor that was there before the graph, which holds its address, and nothing that keeps it alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    place: tuple[Any, ...]  # offset, shape, stride

    def resolve(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "memory that a graph reads was given back"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class _Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    results: list[_Made]


class Launches(_Mode):
    """Notes operations, and on which memory they run; raises where a graph could not follow: at an operation that waits for a result,
    or that gets a shape from one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Operation] = []
        self._numbers = itertools.count()
        self._made: dict[int, tuple[_Made, Tensor]] = {}  # by id; kept, so that no id comes twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        assert not name.startswith(SYNCHRONIZING), f"{name} waits for the device"
        if name == "index":
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                "a mask as an index waits for the device"
            )
        noted_args, noted_kwargs = tree_map_only(Tensor, self._note, (args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        leaves = tree_leaves(result)
        results = [_Made(next(self._numbers)) for _ in leaves]
        self._made |= {id(leaf): (made, leaf) for leaf, made in zip(leaves, results, strict=True)}
        self.seen.append(_Operation(function, noted_args, noted_kwargs, results))
        return result

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._made.clear()

    def _note(self, tensor: Tensor) -> _Made | _Outside:
        if id(tensor) in self._made:
            return self._made[id(tensor)][0]
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return _Outside(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, place)


class Frozen(_Mode):
    """Raises at any operation that allocates."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        assert not name.startswith(ALLOCATING), f"{name} allocates"
        return function(*args, **(kwargs or {}))


class FakeGraph:
    """The operations of `work`, done again on the same memory, which must be there still: nothing of the caller's is kept alive.

    pool  that it was captured with
    """

    def __init__(self, work: Callable[[], None], pool: Any = None) -> None:
        self.pool = pool
        self.replays = 0
        with Launches() as launches:
            work()
        self._operations = launches.seen

    def replay(self) -> None:
        made: dict[_Made, Tensor] = {}
        for function, args, kwargs, results in self._operations:
            args, kwargs = tree_map_only(_Outside, _Outside.resolve, (args, kwargs), is_leaf=_is_noted)
            args, kwargs = tree_map_only(_Made, made.__getitem__, (args, kwargs), is_leaf=_is_noted)
            made |= zip(results, tree_leaves(function(*args, **kwargs)), strict=True)
        self.replays += 1


def _is_noted(value: Any) -> bool:
    return isinstance(value, _Made | _Outside)


# A model.


class HashKernels:
    """What GpuRunner asks of kernels. A page's keys are tokens, as floats; pages beyond the pool take what padded rows write."""

    description = "hash"
    numerics = "hash"

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def allocate_kv(self, *, num_layers, num_pages, page_size, kv_heads, head_dim, dtype) -> KvPages:
        shape = (num_layers, num_pages + 1, kv_heads, page_size, head_dim)
        keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        return KvPages(keys, values, num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim)

    def plan(self, batch: Batch, kv: KvPages, *, num_requests: int) -> Batch:
        return batch


class TorchPages:
    """kernels/triton/pages.py in torch."""

    @staticmethod
    def copy_pages(kv: KvPages, sources: Tensor, targets: Tensor) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            kv.keys[:, target] = kv.keys[:, source]
            kv.values[:, target] = kv.values[:, source]

    @staticmethod
    def gather_pages(kv: KvPages, pages: Tensor, staging: Tensor) -> None:
        both = torch.stack([kv.keys[:, pages.long()], kv.values[:, pages.long()]]).transpose(0, 2).contiguous()
        staging.copy_(both.transpose(1, 2).contiguous().view(torch.uint8).view(staging.shape))

    @staticmethod
    def scatter_pages(kv: KvPages, staging: Tensor, pages: Tensor) -> None:
        both = staging.view(torch.float32).view(len(pages), 2, *kv.keys[:, 0].shape)
        for number, page in enumerate(pages.tolist()):
            kv.keys[:, page], kv.values[:, page] = both[number]


def coefficients(positions: Any) -> Any:
    return positions * 7919 % 101 + 1


class HashModel:
    """The token behind tokens t_0 … t_n is the sum of (t_p + 1) * coefficient(p), modulo the vocabulary. The hidden state of a token is
    its id, and a one."""

    is_fixed = True

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.config: Any = SimpleNamespace(
            vocab_size=vocab_size, num_layers=1, num_kv_heads=1, head_dim=2, hidden_size=2
        )
        self._ids = torch.empty(0)

    def grow_rope(self, positions: int) -> None:
        pass

    def grow_activations(self, rows: int) -> None:
        pass

    def last_hidden(self, rows: int) -> Tensor:
        return torch.stack([self._ids[:rows], torch.ones(rows)], dim=1)

    def forward(self, ids: Tensor, batch: Batch, kv: KvPages, wanted: Tensor | None) -> Tensor:
        self._ids = ids.float()
        page_size, rows = kv.page_size, len(ids)
        storage = kv.keys[0, :, 0, :, 0]  # [pages, page_size]
        nowhere = kv.num_pages * page_size
        slots = torch.where(batch.slots < 0, nowhere, batch.slots).long()
        storage.index_put_((slots // page_size, slots % page_size), ids.float())
        request = torch.searchsorted(batch.query_start[1:], torch.arange(rows, dtype=torch.int32), right=True)
        table = batch.page_table[request.clamp(max=len(batch.page_table) - 1)].long()
        read = storage[table].flatten(1)  # [rows, tokens]
        position = torch.arange(read.shape[1])
        seen = position <= batch.positions[:, None]
        sums = torch.where(seen, (read + 1) * coefficients(position), 0.0).sum(1)
        target = torch.fmod(sums if wanted is None else sums[wanted], self.config.vocab_size)
        return -(torch.arange(self.config.vocab_size) - target[:, None]).abs()


def next_token(tokens: list[int], vocab_size: int = VOCAB_SIZE) -> int:
    return sum((token + 1) * coefficients(position) for position, token in enumerate(tokens)) % vocab_size


class HashSampler:
    """workers/sampler.py as a sampler on the device."""

    def prepare(self, rows: Any, *, num_previous: int = 0) -> Any:
        return rows

    def sample(self, logits: Tensor, prepared: Any, masks: Tensor | None, previous: Tensor | None) -> Any:
        before = np.empty(0, np.int32) if previous is None else previous.numpy().copy()

        def fill_in(output: Any) -> Any:
            return [token if token >= 0 else before[-1 - token] for token in output.tolist()]

        rows = [
            row if row.output is None else msgspec.structs.replace(row, output=np.array(fill_in(row.output), np.int32))
            for row in prepared
        ]
        samples = sample(logits, rows, None if masks is None else masks.numpy())
        return SimpleNamespace(token_ids=torch.from_numpy(samples.token_ids), samples=samples)

    def to_host(self, samples: Any) -> Any:
        return samples.samples

    def fetch(self, samples: Any) -> Samples:
        return samples
