"""What the GPU worker asks of a device: streams, events, pinned memory, graphs, and how much memory there is.

    device = CudaDevice(torch.device("cuda"))
    with device.on(stream):                    # what is enqueued here runs on that stream, in order
        device.copy(pinned, buffer)            # returns at once
        device.launch(lambda: forward(buffer))
        done = device.record()
    done.synchronize()                         # the host waits for all of that

Nothing else of the worker touches `torch.cuda`. So the same worker runs where there is no GPU: on HostDevice, which does
everything at once, and in tests on a device that does it as late and as oddly interleaved as a GPU might.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class DeviceMemory(NamedTuple):
    """Bytes of a device: all of them, and those that nobody uses, this process or another."""

    total: int
    free: int


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block the caller until the stream has come here. Raises RuntimeError if the device failed before."""


class Graph(Protocol):
    """Work that was captured, to be launched again as a whole, on the same addresses."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One accelerator.

    torch_device  where its tensors are
    name          for people, e.g. "NVIDIA H200"
    """

    torch_device: torch.device
    name: str

    def new_stream(self) -> Any:
        """Work on one stream is done in order; work on two is done in any, but for `wait_for`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is enqueued inside goes to `stream`."""

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches. It must not look at any result."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy between device memory and pinned memory, or on the device."""

    def record(self) -> Event:
        """The point that the current stream's work has come to."""

    def wait_for(self, event: Event) -> None:
        """What is enqueued on the current stream from now on begins after `event`. The host does not wait."""

    def seconds_between(self, first: Event, last: Event) -> float:
        """Of the device's time, between two events that have both happened."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies read and write while the host goes on. Zeros."""

    def new_graph_pool(self) -> Any:
        """Memory for what graphs allocate, of which only one runs at a time. It is gone when the last of them is: graphs
        to come need a new one."""

    def capture(self, work: Callable[[], None], pool: Any) -> Graph:
        """Record what `work` launches. Its kernels must have run before, so that none is compiled meanwhile.

        What they read and did not allocate themselves must stay allocated for as long as the graph: it holds addresses.
        """

    def memory(self) -> DeviceMemory: ...

    def trim(self) -> None:
        """Give memory back that is allocated, but not used any more."""

    def synchronize(self) -> None:
        """Block until all is done."""


class CudaDevice:
    """A GPU, through torch.cuda."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = torch.cuda.get_device_name(torch_device)
        torch.cuda.set_device(torch_device)

    def new_stream(self) -> Any:
        stream: Any = torch.cuda.Stream
        return stream(self.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record()
        return event

    def wait_for(self, event: Any) -> None:
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def seconds_between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1000

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def new_graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], pool: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Another thread of this process may allocate pinned memory, which a stricter mode would call an error.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(total, free)

    def trim(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class HostDevice:
    """No device: the host does everything at once. For kernels in Triton's interpreter.

    memory  what `memory` reports
    """

    torch_device = torch.device("cpu")
    name = "the host"

    def __init__(self, memory: Callable[[], DeviceMemory]) -> None:
        self._memory = memory

    def new_stream(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def record(self) -> Event:
        return _Now()

    def wait_for(self, event: Event) -> None:
        pass

    def seconds_between(self, first: Event, last: Event) -> float:
        return 0.0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def new_graph_pool(self) -> Any:
        return None

    def capture(self, work: Callable[[], None], pool: Any) -> Graph:
        return _Again(work)

    def memory(self) -> DeviceMemory:
        return self._memory()

    def trim(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Now:
    """Has happened."""

    def synchronize(self) -> None:
        pass


class _Again:
    """A graph of the host: its work, done once more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()
