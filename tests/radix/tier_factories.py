"""Tiers whose reads and writes run when the test says so, over files that fail when it says so."""

import errno
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from trunkline.radix.disk_tier import DiskTier
from trunkline.radix.events import HASH_BYTES
from trunkline.radix.files import Files
from trunkline.radix.segment import Layout, Owner, owner_digest
from trunkline.radix.tiers import Tiers
from trunkline.step import CopyKind, PageCopy

FINGERPRINT = "0123456789abcdef" * 2
PAGE_BYTES = 48


def name(prefix: int) -> bytes:
    """The prefix hash of page number `prefix`."""
    return hashlib.sha256(prefix.to_bytes(8, "little")).digest()[:HASH_BYTES]


def names(*prefixes: int) -> bytes:
    return b"".join(map(name, prefixes))


def payload(prefix: int) -> np.ndarray:
    """uint8 [PAGE_BYTES]: what the page of that prefix holds, wherever it is."""
    return np.frombuffer(hashlib.sha512(name(prefix)).digest()[:PAGE_BYTES], np.uint8)


def owner(tenant: str = "", salt: str = "") -> Owner:
    return Owner(owner_digest(tenant), owner_digest(salt))


class FaultyFiles(Files):
    """Real files, except that

    room      bytes that can still be written: then ENOSPC; None: no end
    unreadable, unwritable   what these system calls raise
    clock     seconds added to the time
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self.unreadable: OSError | None = None
        self.unwritable: OSError | None = None
        self.clock = 0.0

    def now(self) -> float:
        return super().now() + self.clock

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        if self.unreadable is not None:
            raise self.unreadable
        return super().read(file, buffer, offset)

    def create(self, path: Path) -> int:
        if self.unwritable is not None:
            raise self.unwritable
        return super().create(path)

    def write(self, file: int, data: bytes | memoryview) -> None:
        if self.room is not None:
            if len(data) > self.room:
                super().write(file, memoryview(data)[: self.room])
                self.room = 0
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= len(data)
        super().write(file, data)


class ManualIO:
    """A tiers.Background that runs nothing by itself."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def read(self, job: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((future, job))
        return future

    write = read

    def run(self, which: int = 0) -> None:
        """Run one job that waits."""
        future, job = self.jobs.pop(which)
        future.set_result(job())

    def run_all(self) -> None:
        while self.jobs:
            self.run()

    def wait(self, futures: "list[Future[Any]]", seconds: float) -> None:
        self.run_all()

    def close(self, seconds: float) -> None:
        self.run_all()


class Device:
    """The pages of a device, and tiers behind it: a worker that only copies.

    device = Device(tmp_path)
    device.compute(3, page=0)               # page 0 holds the KV of prefix 3
    device.store(3, page=0)
    device.step()                           # the copies until now are done
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        num_pages: int = 16,
        num_slots: int = 8,
        max_bytes: int = 2**20,
        files: Files | None = None,
    ) -> None:
        self.memory = np.zeros((num_pages, PAGE_BYTES), np.uint8)
        self.host_pages = np.zeros((num_slots, PAGE_BYTES), np.uint8)
        self.copies: list[PageCopy] = []
        self.io = ManualIO()
        disk = open_disk(root, max_bytes=max_bytes, files=files) if root is not None else None
        self.tiers = Tiers(self.host_pages, self.copies, disk, self.io)
        self.last_step = 0

    def compute(self, prefix: int, page: int) -> None:
        self.memory[page] = payload(prefix)

    def store(self, *prefixes: int, page: int = 0, tenant: str = "", salt: str = "") -> int:
        """Pages from `page` on hold these prefixes, and are stored."""
        pages = np.arange(page, page + len(prefixes), dtype=np.int32)
        return self.tiers.store(owner(tenant, salt), names(*prefixes), pages)

    def load(self, *prefixes: int, page: int = 0) -> tuple[int, int]:
        """Load the prompt of these prefixes into pages from `page` on; how many came from host memory and from disk."""
        pages = np.arange(page, page + len(prefixes), dtype=np.int32)
        loaded = self.tiers.load(names(*prefixes), 0, len(prefixes), pages)
        return loaded.host, loaded.disk

    def plan(self) -> list[PageCopy]:
        """Take the copies into a step, which is yet to be done."""
        copies = self.copies[:]
        self.copies.clear()
        self.last_step += 1
        self.tiers.step_planned(self.last_step)
        return copies

    def run(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            if copy.kind is CopyKind.STORE:
                self.host_pages[copy.target] = self.memory[copy.source]
            else:
                self.memory[copy.target] = self.host_pages[copy.source]

    def step(self) -> None:
        self.run(self.plan())
        self.tiers.step_done(self.last_step)

    def fill(self, *prefixes: int, tenant: str = "", salt: str = "") -> None:
        """Compute and store these prefixes, one after the other in page 0."""
        for prefix in prefixes:
            self.compute(prefix, 0)
            self.store(prefix, tenant=tenant, salt=salt)
            self.step()

    def save(self, *prefixes: int, tenant: str = "", salt: str = "") -> None:
        """The same, and write them to disk as one segment."""
        self.fill(*prefixes, tenant=tenant, salt=salt)
        self.tiers.poll(0.0, idle=True)
        self.io.run_all()
        self.tiers.poll(0.0)

    def found(self, *prefixes: int) -> tuple[int, int]:
        found = self.tiers.look_up(names(*prefixes), 0, len(prefixes))
        return found.num_ready, found.num_coming

    def holds(self, prefix: int, page: int) -> bool:
        return bool((self.memory[page] == payload(prefix)).all())


def open_disk(root: Path, *, max_bytes: int = 2**20, files: Files | None = None) -> DiskTier:
    return DiskTier(root, Layout(FINGERPRINT, 16, PAGE_BYTES), max_bytes=max_bytes, files=files)
