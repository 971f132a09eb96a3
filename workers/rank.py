"""A rank's process: `python -m trunkline.workers.rank FD`, started by rank 0 (group.py).

    FD    one end of a socket pair to rank 0. In comes Start, then plans; out go Hello, Loaded and, at the end of its life, Broken.
          Its end means that rank 0 is gone, and ends this process at once, whatever it is doing

It loads its part of the model and runs every plan on it. It schedules nothing and chooses no tokens. Log lines are rank 0's to
write: what would be said here is the same there, and what goes wrong here is told to it.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from trunkline.config import EngineConfig
from trunkline.errors import StartupError
from trunkline.kernels.collectives import connect
from trunkline.workers.plan_message import decode_plan
from trunkline.workers.worker import device_of, load_part

MAX_FRAME = 2**28  # bytes


class Start(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    size: int
    folder: str  # where the ranks find each other


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The libraries are imported; it is about to meet the others."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """It takes plans."""


class Broken(msgspec.Struct, tag=True, frozen=True):
    """It can't go on. `is_startup`: for a reason that a user can mend, a sentence."""

    why: str
    is_startup: bool = False


FromRank = Hello | Loaded | Broken


def serve(connection: Connection) -> None:
    """Load, then run plans for as long as rank 0 lives. Returns only by an exception."""
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, frames), name="rank 0", daemon=True).start()
    start = msgspec.msgpack.decode(frames.get(), type=Start)
    connection.send_bytes(msgspec.msgpack.encode(Hello()))
    ranks = connect(
        Path(start.folder), rank=start.rank, size=start.size, device=device_of(start.config.worker, start.rank)
    )
    worker = load_part(start.config, ranks)
    connection.send_bytes(msgspec.msgpack.encode(Loaded()))
    expected = 0
    while True:
        number, plan = decode_plan(frames.get())
        if number != expected:
            raise RuntimeError(f"plan {number} came where plan {expected} should have")
        expected += 1
        handle: Any = worker.submit(plan)
        worker.wait(handle)


def _read(connection: Connection, frames: "queue.SimpleQueue[bytes]") -> None:
    """Take what rank 0 sends, on a thread that does nothing else, so that its end is seen in the middle of a step, too."""
    try:
        while True:
            frames.put(connection.recv_bytes(MAX_FRAME))
    finally:  # also if this thread itself fails
        os._exit(0)


def main() -> None:
    logging.disable()
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except BaseException as error:
        is_startup = isinstance(error, StartupError)
        broken = Broken(str(error) if is_startup else f"{type(error).__name__}: {error}", is_startup)
        with contextlib.suppress(OSError):
            connection.send_bytes(msgspec.msgpack.encode(broken))
        raise
    finally:
        os._exit(1)  # at once: a thread may wait for a rank that is gone


if __name__ == "__main__":
    main()
