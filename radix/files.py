"""The file system as the disk tier uses it: names of folders and segments, and the system calls. Knows nothing of their
content.

<folder>/<fingerprint>/<time>-<random>.kv        segments (segment.py), immutable once they have this name
<folder>/<fingerprint>/<time>-<random>.kv.tmp    one that is being written, or that somebody died over
"""

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = re.compile(r"[0-9a-f]{32}")  # a fingerprint
SEGMENT = re.compile(r"\d{20}-[0-9a-f]{12}\.kv")


class FileInfo(NamedTuple):
    """A segment file, finished or not."""

    path: Path
    num_bytes: int
    used_at: float  # seconds since the epoch: written, or read last


class Files:
    """The system calls, in one place so that a test can let one fail. All may raise OSError."""

    def now(self) -> float:
        """Seconds since the epoch, on the clock of the file system's times."""
        return time.time()

    def list(self, root: Path) -> list[FileInfo]:
        """Files of ours in all folders of ours below `root`; what vanishes meanwhile is left out."""
        found = []
        for folder in os.scandir(root):
            if not (FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for file in os.scandir(folder.path):
                if SEGMENT.fullmatch(file.name.removesuffix(".tmp")):
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    found.append(FileInfo(Path(file.path), status.st_size, status.st_mtime))
        return found

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on; how many bytes there were."""
        done = 0
        while done < len(buffer):
            num_bytes = os.preadv(file, [buffer[done:]], offset + done)
            if num_bytes == 0:
                break
            done += num_bytes
        return done

    def write(self, file: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, path: Path, target: Path) -> None:
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path) -> None:
        os.utime(path)
