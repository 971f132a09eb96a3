"""Our own server, or another's, as a child process for as long as a measurement takes."""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
START_SECONDS = 120


class Running(NamedTuple):
    """A server. `pid` is that of the API process."""

    url: str
    pid: int


@contextlib.contextmanager
def serve(*flags: str) -> Iterator[str]:
    """`trunkline serve --port 0 …`: the address once it answers /health, until the block ends.

    Raises RuntimeError, with the server's last lines, if it does not start.
    """
    with start("trunkline", *flags) as server:
        yield server.url


@contextlib.contextmanager
def start(module: str, *flags: str) -> Iterator[Running]:
    """The same of `python -m MODULE serve --port 0 …`."""
    command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with launch(command) as server:
        yield server


@contextlib.contextmanager
def launch(
    command: Sequence[str],
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    log: TextIO | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[Running]:
    """Any server that answers /health, and all of its processes, until the block ends.

    url            where it will listen; None: the first address that it prints
    env            variables besides those of this process
    log            what it prints is copied there
    start_seconds  it may take until it answers

    Raises RuntimeError, with the server's last lines, if it does not start.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, of which nothing is left behind
    )
    lines: collections.deque[str] = collections.deque(maxlen=30)
    found: list[str] = [] if url is None else [url]

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if log is not None:
                log.write(line)
            if not found and (address := ADDRESS.search(line)):
                found.append(address[0])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + start_seconds
        while not (found and _healthy(found[0])):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("The server did not start. Its last lines:\n" + "".join(lines))
            time.sleep(0.1)
        yield Running(found[0], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
