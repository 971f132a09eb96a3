"""What the ranks of a model that is split over several devices do together. One rank alone does nothing.

    ranks = connect(Path("/tmp/trunkline-x"), rank=1, size=2, device=torch.device("cpu"))   # every rank says so; blocks until all have
    ranks.all_reduce(branch)                       # branch: the sum over ranks, in place
    parts = ranks.all_gather(logits)               # [2, L, N]: of every rank, in their order
    num_pages = ranks.minimum(num_pages)
    ranks.close()

Tensors go by NCCL between GPUs and by gloo between CPUs, over the loopback interface; numbers and bytes always by gloo. All ranks
make the same calls in the same order, with tensors of the same shapes. The ranks find each other through a file in a folder that only
this user may enter. torch's process groups are made here directly, without `init_process_group`: that is one for a whole process,
and belongs to whoever embeds us.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from trunkline.errors import TrunklineError

LOOPBACK = "127.0.0.1"
_c10d: Any = torch.distributed  # it exports more than its type hints say
# For one operation. Ranks that read weights from a slow disk under load come minutes apart; one that died is noticed at once,
# by its closed connection and by whoever watches the process.
TIMEOUT = timedelta(minutes=30)


class CollectiveError(TrunklineError):
    """The ranks can't go on together: one is gone, or does something else."""


class Collectives(Protocol):
    """The ranks of one model.

    rank   this one, 0 … size-1
    size   how many there are
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum over ranks, in place; contiguous, in any floating dtype."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x, in the order of ranks."""

    def minimum(self, number: int) -> int:
        """The least of the ranks' numbers. Blocks."""

    def compare(self, name: bytes, what: str) -> None:
        """Make sure that all ranks say the same `name`, of 32 bytes. Blocks. Raises CollectiveError, which says `what` differs."""

    def abort(self) -> None:
        """End what this rank waits for on its GPU, with an error: one that is gone would be waited for until TIMEOUT. From any
        thread. Between CPUs the closed connection does that."""

    def close(self) -> None:
        """Idempotent."""


class OneRank:
    """See Collectives: nobody else is there."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def minimum(self, number: int) -> int:
        return number

    def compare(self, name: bytes, what: str) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = OneRank()


class Ranks:
    """See Collectives.

    host      a gloo process group
    device    an NCCL one, for the tensors on GPUs; None: gloo takes them, too
    """

    def __init__(self, host: Any, device: Any = None) -> None:
        self.rank: int = host.rank()
        self.size: int = host.size()
        self._host = host
        self._device = device

    def all_reduce(self, x: Tensor) -> None:
        """On CPUs the parts are added in the order of ranks. gloo's own sum adds each element in an order that depends on where in the
        tensor it is, and so on how many rows there are."""
        if self._device is not None:
            with _one_error():
                self._device.allreduce([x]).wait()
            return
        parts = self.all_gather(x)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x += part

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gather(self._device or self._host, x)

    def minimum(self, number: int) -> int:
        return int(self._gather(self._host, torch.tensor([number])).min())

    def compare(self, name: bytes, what: str) -> None:
        names = self._gather(self._host, torch.tensor(list(name), dtype=torch.uint8))
        for rank in range(self.size):
            if not torch.equal(names[rank], names[0]):
                raise CollectiveError(f"Rank {rank} of {self.size} has another {what} than rank 0.")

    def abort(self) -> None:
        if (device := self._device) is not None:
            device.abort()

    def close(self) -> None:
        if self._host is not None:
            self._host.shutdown()
        self._host = self._device = None

    def _gather(self, group: Any, x: Tensor) -> Tensor:
        assert x.is_contiguous(), x.shape
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            with _one_error():
                group._allgather_base(parts.view(-1), x.view(-1)).wait()  # NCCL's waits on the stream, not here
        return parts


@contextmanager
def _one_error() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:  # AttributeError: closed
        raise CollectiveError(f"The ranks of the model lost each other: {error}") from error


def connect(folder: Path, *, rank: int, size: int, device: torch.device) -> Collectives:
    """Meet the other ranks; blocks until all `size` of them have met each other.

    folder  an empty one that only this user may enter, the same for all ranks. Between CPUs it is not needed any more after this
    device  where the tensors are: a CPU, or this rank's own GPU

    Raises CollectiveError if one does not come within TIMEOUT.
    """
    if size == 1:
        return ALONE
    with _one_error():
        store = _c10d.FileStore(str(folder / "ranks"), size)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        host = _c10d.ProcessGroupGloo(_c10d.PrefixStore("host", store), rank, size, options)
        if device.type == "cpu":
            ranks = Ranks(host)
            ranks.minimum(0)
            return ranks
        nccl = _c10d.ProcessGroupNCCL.Options()
        nccl._timeout = TIMEOUT
        torch.cuda.set_device(device)
        return Ranks(host, _c10d.ProcessGroupNCCL(_c10d.PrefixStore("device", store), rank, size, nccl))
