"""The tier on disk: which page lies in which segment file, and the reading and writing of those files.

    disk = DiskTier(Path("/var/cache/kv"), layout, max_bytes=10 * 2**30)     # reads headers only
    job = disk.reads([(prefix_hash, slot), …])[0]                           # engine's thread
    result = disk.read(job)                                                 # an I/O thread
    disk.take_read(result)                                                  # engine's thread

What is in a segment says segment.py; where it lies, files.py.

What can go wrong with a disk is a miss and a counter here, never an exception: a page that is not, to the bit, what was
written is not there. Several servers may share a folder: names are unique, a segment appears whole or not at all, and
one that another server deleted is a miss. Nothing is synced to the device; what a power failure tears is found by its
checksum.

Only `read` and `write` run beside the engine's loop. They touch files and the memory they are given, nothing else of
the tier.
"""

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trunkline.errors import ConfigError
from trunkline.radix.files import FOLDER, Files
from trunkline.radix.segment import (
    MAX_HEADER_BYTES,
    MAX_PAGES,
    Damaged,
    Layout,
    Owner,
    Record,
    checksum,
    owner_digest,
    pack_header,
    payload_offset,
    segment_bytes,
    unpack_header,
)
from trunkline.step import UInt8
from trunkline.units import format_bytes

logger = logging.getLogger("trunkline.engine")

TROUBLES = ("corrupt", "missing", "read", "write", "no_space")
READ_PAGES = 32  # of one job: a large look-up is spread over the I/O threads
STALE_SECONDS = 600  # a file that has been in the making for so long was given up


class Segment:
    """A segment file: where it is, and what its header says."""

    __slots__ = ("path", "records", "touched")

    def __init__(self, path: Path, records: list[Record]) -> None:
        self.path = path
        self.records = records
        self.touched = False  # used since its time was last set

    @property
    def num_pages(self) -> int:
        return len(self.records)


class Place(NamedTuple):
    """Where a page is.

    number  of the page in its segment, from 0 on
    """

    segment: Segment
    number: int


class ReadJob(NamedTuple):
    """Pages of one segment, and the host slots [page_bytes] that they go to."""

    segment: Segment
    numbers: list[int]
    targets: list[UInt8]


class ReadResult(NamedTuple):
    """troubles: for each page None if it is in its slot, else one of TROUBLES."""

    job: ReadJob
    troubles: list[str | None]
    seconds: float


class Page(NamedTuple):
    """A page to write: its name, its owner and its content [page_bytes]."""

    prefix_hash: bytes
    owner: Owner
    payload: UInt8


class Room(NamedTuple):
    """removed: segments of any model that had to make room. num_bytes: of all that are left."""

    removed: list[Path]
    num_bytes: int


class WriteResult(NamedTuple):
    """segment: None if it could not be written; trouble says why. room: None if there wasn't any."""

    segment: Segment | None
    trouble: str | None
    room: Room | None


class DiskTier:
    """The segments of one layout in a folder that may hold those of others, too.

    max_bytes            of all segments in the folder: those used least recently are deleted
    segment_pages        pages of one segment at most: of four that are full, one can be deleted to make room for
                         another
    num_bytes            of all segments in the folder, as last seen
    troubles             how often each of TROUBLES happened
    removed_pages_total  pages whose segments were deleted to make room
    """

    def __init__(self, root: Path, layout: Layout, *, max_bytes: int, files: Files | None = None) -> None:
        """Opens the folder, which is made if need be, and reads the headers of its segments.

        Raises ConfigError if the folder can't be used.
        """
        assert FOLDER.fullmatch(layout.fingerprint), layout.fingerprint
        self.layout = layout
        self.root = root
        self.folder = root / layout.fingerprint
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.troubles = dict.fromkeys(TROUBLES, 0)
        self.removed_pages_total = 0
        self._files = files or Files()
        self._places: dict[bytes, Place] = {}
        self._segments: dict[Path, Segment] = {}
        least = segment_bytes(1, layout.page_bytes)
        if max_bytes < least:
            raise ConfigError(
                f"--disk-cache-size is {format_bytes(max_bytes)}; one page of this model takes {format_bytes(least)}"
                " on disk. Please raise it."
            )
        self.segment_pages = MAX_PAGES
        while self.segment_pages > 1 and segment_bytes(self.segment_pages, layout.page_bytes) > max_bytes // 4:
            self.segment_pages //= 2
        try:
            self._prepare_folder()
            self._read_headers()
        except OSError as error:
            raise ConfigError(
                f"--disk-cache-dir is {str(root)!r}, which can't be used: {error.filename or root}: {error.strerror}."
                " Please name a folder that this user can write to."
            ) from error

    # ---------------------------------------------------------------- looking up

    def find(self, prefix_hash: bytes) -> Place | None:
        return self._places.get(prefix_hash)

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._places

    def __len__(self) -> int:
        """Pages that can be read."""
        return len(self._places)

    def use(self, prefix_hash: bytes) -> None:
        """A page was used, if only its copy in memory: its segment counts as recently used from the next write on."""
        if place := self._places.get(prefix_hash):
            place.segment.touched = True

    # ---------------------------------------------------------------- reading

    def reads(self, wanted: Iterable[tuple[bytes, UInt8]]) -> list[ReadJob]:
        """Jobs that bring pages, all of which are here, into host slots: one segment each, at most READ_PAGES pages."""
        jobs: list[ReadJob] = []
        newest: dict[Path, ReadJob] = {}
        for prefix_hash, target in wanted:
            segment, number = self._places[prefix_hash]
            job = newest.get(segment.path)
            if job is None or len(job.numbers) == READ_PAGES:
                job = newest[segment.path] = ReadJob(segment, [], [])
                jobs.append(job)
            job.numbers.append(number)
            job.targets.append(target)
        return jobs

    def read(self, job: ReadJob) -> ReadResult:
        """Runs in an I/O thread."""
        started_at = time.perf_counter()
        troubles: list[str | None] = [None] * len(job.numbers)
        try:
            file = self._files.open(job.segment.path)
        except OSError as error:
            return ReadResult(job, [_kind(error, "read")] * len(job.numbers), 0.0)
        try:
            offset = payload_offset(job.segment.num_pages)
            for i, (number, target) in enumerate(zip(job.numbers, job.targets, strict=True)):
                troubles[i] = self._read_page(file, offset + number * len(target), target, job.segment.records[number])
        finally:
            self._files.close(file)
        return ReadResult(job, troubles, time.perf_counter() - started_at)

    def _read_page(self, file: int, offset: int, target: UInt8, record: Record) -> str | None:
        try:
            num_bytes = self._files.read(file, target.data, offset)
        except OSError as error:
            return _kind(error, "read")
        sound = num_bytes == len(target) and checksum(record.prefix_hash, target.data) == record.checksum
        return None if sound else "corrupt"

    def take_read(self, result: ReadResult) -> None:
        """Note what a read found: pages that couldn't be read aren't looked for again."""
        segment = result.job.segment
        segment.touched = True
        for number, trouble in zip(result.job.numbers, result.troubles, strict=True):
            if trouble is None:
                continue
            self._note(trouble, f"{segment.path}, page {number}")
            if trouble == "missing":  # the file is gone, and all its pages with it
                self._forget(segment)
            else:
                self._forget_page(segment, number)

    # ---------------------------------------------------------------- writing

    def write(self, pages: Sequence[Page], touched: Sequence[Path]) -> WriteResult:
        """Write one segment, in an I/O thread; before that, delete what was used least recently if the folder is full.

        touched  segments that were used: their time is set first
        """
        for path in touched:
            try:
                self._files.touch(path)
            except OSError:
                continue  # deleted by another server: the next read finds out
        room = None
        name = f"{time.time_ns():020}-{secrets.token_hex(6)}.kv"
        path, draft = self.folder / name, self.folder / f"{name}.tmp"
        records = [Record(hash_, owner, checksum(hash_, payload.data)) for hash_, owner, payload in pages]
        try:
            room = self._make_room(segment_bytes(len(pages), self.layout.page_bytes))
            self._write_file(draft, [pack_header(self.layout, records), *(page.payload.data for page in pages)])
            self._files.rename(draft, path)
        except OSError as error:
            self._remove(draft)
            return WriteResult(None, _kind(error, "write"), room)
        return WriteResult(Segment(path, records), None, room)

    def _write_file(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        file = self._files.create(path)
        try:
            for part in parts:
                self._files.write(file, part)
        finally:
            self._files.close(file)

    def _make_room(self, num_bytes: int) -> Room:
        """Delete segments until `num_bytes` more fit, those used least recently first. Raises OSError."""
        if num_bytes > self.max_bytes:
            raise OSError(errno.ENOSPC, f"a segment of {num_bytes} bytes is larger than --disk-cache-size")
        files = sorted(self._files.list(self.root), key=lambda file: (file.used_at, file.path))
        total, removed = sum(file.num_bytes for file in files), []
        for file in files:
            if total + num_bytes <= self.max_bytes:
                break
            fresh = self._files.now() - file.used_at < STALE_SECONDS
            if file.path.suffix == ".tmp" and fresh:
                continue  # another server is writing it
            if self._remove(file.path):
                removed.append(file.path)
                total -= file.num_bytes
        return Room(removed, total)

    def take_write(self, result: WriteResult) -> None:
        """Note what a write did."""
        if result.room is not None:
            self.num_bytes = result.room.num_bytes
            for path in result.room.removed:
                if segment := self._segments.get(path):
                    self.removed_pages_total += self._forget(segment)
        if result.trouble is not None:
            self._note(result.trouble, f"a segment in {self.folder}")
        if result.segment is not None:
            self.num_bytes += segment_bytes(result.segment.num_pages, self.layout.page_bytes)
            self._add(result.segment)

    def take_touched(self) -> list[Path]:
        """Segments used since the last call, for `write`."""
        touched = [segment for segment in self._segments.values() if segment.touched]
        for segment in touched:
            segment.touched = False
        return [segment.path for segment in touched]

    # ---------------------------------------------------------------- deleting

    def delete(self, segment: Segment) -> int:
        """Delete a segment; how many pages that makes unreadable."""
        self._remove(segment.path)
        return self._forget(segment)

    def flush(self, tenant: str | None, salt: str | None) -> list[bytes]:
        """Delete every segment that holds a page of the tenant and salt (None: of any), all its other pages with it.

        Returns the names of those that can't be read any more.

        Those are of the same tenant (Tiers.poll). Deleting too much is a miss later; rewriting a file in place would
        leave what users wrote on the disk.
        """
        doomed = [
            segment
            for segment in self._segments.values()
            if any(matches(record.owner, tenant, salt) for record in segment.records)
        ]
        names = [record.prefix_hash for segment in doomed for record in segment.records]
        for segment in doomed:
            self.delete(segment)
        return [name for name in dict.fromkeys(names) if name not in self._places]

    def _forget(self, segment: Segment) -> int:
        self._segments.pop(segment.path, None)
        return sum(self._forget_page(segment, number) for number in range(segment.num_pages))

    def _forget_page(self, segment: Segment, number: int) -> bool:
        """Unless another segment has the page, too, and is the one that is read."""
        prefix_hash = segment.records[number].prefix_hash
        if self._places.get(prefix_hash) != Place(segment, number):
            return False
        del self._places[prefix_hash]
        return True

    # ---------------------------------------------------------------- starting

    def _prepare_folder(self) -> None:
        """Make the folder for this user alone, and see that it can be written to. KV is as private as its text."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._check_root()
        self.folder.mkdir(exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"--disk-cache-dir is {str(self.root)!r}, but {self.folder.name} in it can be written to by others."
                " Please remove it, or name another folder."
            )
        probe = self.folder / f"{secrets.token_hex(6)}.probe"
        self._write_file(probe, [b"ok"])
        self._files.remove(probe)

    def _check_root(self) -> None:
        """Whoever could put another folder in the place of ours would choose what is read. In a sticky one only its
        owner could."""
        status = self.root.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"--disk-cache-dir is {str(self.root)!r}, which belongs to another user (uid {status.st_uid}), who could"
                " exchange what is in it. Please name a folder of your own."
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"--disk-cache-dir is {str(self.root)!r}, which can be written to by others (its mode is"
                f" {stat.S_IMODE(status.st_mode):o}). Please run chmod go-w on it, or name another folder."
            )

    def _read_headers(self) -> None:
        """Index the segments of this layout, the oldest first: of a page that is there twice, the newest is read."""
        files = self._files.list(self.root)
        self.num_bytes = sum(file.num_bytes for file in files)
        for path, num_bytes, used_at in sorted(files):
            if path.suffix == ".tmp":
                if self._files.now() - used_at > STALE_SECONDS:
                    self._remove(path)
            elif path.parent == self.folder:
                self._read_header(path, num_bytes)

    def _read_header(self, path: Path, num_bytes: int) -> None:
        buffer = bytearray(min(num_bytes, MAX_HEADER_BYTES))
        try:
            file = self._files.open(path)
            try:
                header = buffer[: self._files.read(file, memoryview(buffer), 0)]
            finally:
                self._files.close(file)
            self._add(Segment(path, unpack_header(bytes(header), self.layout, num_bytes)))
        except OSError as error:
            self._note(_kind(error, "read"), str(path))
        except Damaged as error:
            self._note("corrupt", f"{path}: {error}")
            self._remove(path)

    # ---------------------------------------------------------------- helpers

    def _add(self, segment: Segment) -> None:
        self._segments[segment.path] = segment
        for number, record in enumerate(segment.records):
            self._places[record.prefix_hash] = Place(segment, number)

    def _remove(self, path: Path) -> bool:
        """True if the file is gone by our doing or another's."""
        try:
            self._files.remove(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _note(self, trouble: str, where: str) -> None:
        """Count it; the first of its kind is worth a line in the log."""
        self.troubles[trouble] += 1
        if self.troubles[trouble] == 1:
            logger.warning(
                "Disk cache: %s (%s). Such pages are computed again; further cases are only counted.",
                trouble.replace("_", " "),
                where,
            )


def matches(owner: Owner, tenant: str | None, salt: str | None) -> bool:
    """True if the page is the tenant's and of that salt; None stands for any."""
    return (tenant is None or owner.tenant == owner_digest(tenant)) and (
        salt is None or owner.salt == owner_digest(salt)
    )


def _kind(error: OSError, otherwise: str) -> str:
    """Which of TROUBLES an error is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no_space"
    return "missing" if isinstance(error, FileNotFoundError) and otherwise == "read" else otherwise
