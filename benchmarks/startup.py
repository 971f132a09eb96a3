"""How soon `trunkline serve` answers after the command, and how much memory its processes take.

    python -m benchmarks.startup                                  # second, first and bare starts of the built-in model
    python -m benchmarks.startup --kinds second --starts 9
    python -m benchmarks.startup --model path/to/model --dtype bfloat16 --kv-cache-memory 2GiB     # other flags are the server's

    second  all is there: compiled kernels, .pyc files
    first   as after `make serve` has installed it: no compiled kernels, and no .pyc files of Trunkline's; those of the libraries
            were written by pip
    bare    no compiled kernels, and no .pyc file at all: not even the standard library's

Times are from just before the process is started to the lines "Listening …" and "Ready …" on its standard output, and to the end of
the first answer, of a chat request that is sent at that line. Medians; in brackets the fastest and the slowest. What the disk takes is
left out: one start that is not counted puts all files into the system's memory.

Memory is Pss of /proc/PID/smaps_rollup: a page that n processes share counts 1/n in each. It is looked at in one more start of each
kind, since looking takes time. On a machine with other Python processes, or a second server, it is too low: they share libraries with
ours. The KV pool occupies nothing before the first request, so "ready" is without it; "answered" is with what a request writes, which
are whole pages of 2 MB in every layer.
"""

import argparse
import collections
import contextlib
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.server import ADDRESS, ROOT, START_SECONDS, children
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align

KINDS = ("second", "first", "bare")
QUESTION = "What is the capital of France?"
MAX_TOKENS = 16
WATCH_SECONDS = 0.02  # between two looks at the memory
ENGINE = "trunkline.scheduler.process"
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist")


class Times(NamedTuple):
    """Seconds since the command."""

    listening: float
    ready: float
    answered: float


class Memory(NamedTuple):
    """Bytes that processes occupy at one moment, by what they are: "API", "engine", or the name of a program."""

    pss: dict[str, int]
    rss: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.pss.values())


class Footprint(NamedTuple):
    """Of one start: at the moment when most was occupied before the server was ready, then, and after its first answer."""

    peak: Memory
    ready: Memory
    answered: Memory


class Lines:
    """What a process prints, with the time of each line."""

    def __init__(self, stream: IO[str]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=30)
        self._stream = stream
        self._found: queue.Queue[tuple[float, str] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, beginning: str, deadline: float) -> tuple[float, str]:
        """The next line that begins so, and `time.perf_counter()` when it came. Raises RuntimeError if none comes by then."""
        while True:
            try:
                found = self._found.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                found = None
            if found is None:
                said = "".join(self.last)
                raise RuntimeError(f"The server did not say {beginning!r}. Its last lines:\n{said}")
            if found[1].startswith(beginning):
                return found

    def close(self) -> None:
        """Once the process has ended."""
        self._reader.join()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            self.last.append(line)
            self._found.put((time.perf_counter(), line))
        self._found.put(None)


class Watch:
    """Looks at the memory of a process and its descendants again and again, from now until `close`, and remembers when it was most."""

    def __init__(self, pid: int) -> None:
        self.peak = Memory({}, {})
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            self.peak = max(self.peak, memory(self._pid), key=lambda found: found.total)


def descendants(pid: int) -> list[int]:
    """A process, its children, and theirs; those that end meanwhile may be left out."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += children(each)
    return found


def memory(pid: int) -> Memory:
    """Of a server and its descendants, now."""
    pss: collections.Counter[str] = collections.Counter()
    rss: collections.Counter[str] = collections.Counter()
    for each in descendants(pid):
        folder = Path(f"/proc/{each}")
        try:
            rollup = (folder / "smaps_rollup").read_text(encoding="ascii")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        sizes = dict(line.split(":") for line in rollup.splitlines()[1:])
        role = "API" if each == pid else "engine" if ENGINE.encode() in words else Path(words[0].decode()).name
        pss[role] += 1024 * int(sizes["Pss"].split()[0])
        rss[role] += 1024 * int(sizes["Rss"].split()[0])
    return Memory(dict(pss), dict(rss))


@contextlib.contextmanager
def surroundings(kind: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder and the environment of a start of that kind."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start would be a first one
    if kind == "second":
        yield ROOT, env
        return
    with tempfile.TemporaryDirectory(prefix="trunkline-start-") as name:
        folder = Path(name)
        env["XDG_CACHE_HOME"] = str(folder / "cache")
        if kind == "bare":
            env["PYTHONPYCACHEPREFIX"] = str(folder / "pyc")
            yield ROOT, env
            return
        shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield folder / "checkout", env


@contextlib.contextmanager
def server(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[tuple[int, Lines]]:
    """Started at once; whatever happens, neither it nor a process that it started is left."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = Lines(process.stdout)
    try:
        yield process.pid, lines
    finally:
        left = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in left[1:]:  # those that a server which was killed has left
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lines.close()


def ask(url: str) -> str:
    """The answer to one chat request. Raises RuntimeError if it is empty."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    if not answer:
        raise RuntimeError(f"The server answered {QUESTION!r} with nothing.")
    return str(answer)


def measure(kind: str, flags: Sequence[str]) -> Times:
    """One start. Raises RuntimeError, with the server's last lines, if it does not come to an answer."""
    return _start(kind, flags, watches=False)[0]


def look(kind: str, flags: Sequence[str]) -> Footprint:
    """One start, for its memory."""
    footprint = _start(kind, flags, watches=True)[1]
    assert footprint is not None
    return footprint


def _start(kind: str, flags: Sequence[str], *, watches: bool) -> tuple[Times, Footprint | None]:
    command = [sys.executable, "-m", "trunkline", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with surroundings(kind) as (folder, env):
        began = time.perf_counter()
        with server(command, folder, env) as (pid, lines):
            with contextlib.closing(Watch(pid)) if watches else contextlib.nullcontext() as watch:
                listening, line = lines.until("Listening on ", began + START_SECONDS)
                address = ADDRESS.search(line)
                assert address is not None, line
                ready, _ = lines.until("Ready: ", began + START_SECONDS)
            at_ready = memory(pid) if watches else None
            ask(address[0])
            answered = time.perf_counter()
            footprint = None
            if watch is not None and at_ready is not None:
                footprint = Footprint(watch.peak, at_ready, memory(pid))
    return Times(listening - began, ready - began, answered - began), footprint


def times_table(results: Mapping[str, Sequence[Times]]) -> str:
    """Markdown: a row for each kind of start."""
    rows = [["start", "listening, s", "ready, s", "first answer, s", "starts"]]
    for kind, starts in results.items():
        cells = [
            f"{statistics.median(each):.2f} ({min(each):.2f} – {max(each):.2f})" for each in zip(*starts, strict=True)
        ]
        rows.append([kind, *cells, str(len(starts))])
    return align(rows)


def memory_table(results: Mapping[str, Footprint]) -> str:
    """Markdown: a row for each kind of start, the most memory it took on its way, and at two moments, by process."""
    rows = [["start", "at most until ready, MB", "ready, MB", "answered, MB"]]
    for kind, footprint in results.items():
        rows.append([kind, *map(_shown, footprint)])
    return align(rows)


def _shown(found: Memory) -> str:
    parts = ", ".join(f"{role} {size / 1e6:.0f}" for role, size in sorted(found.pss.items(), key=lambda item: -item[1]))
    return f"{found.total / 1e6:.0f} ({parts})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what begins like one of ours may be the server's
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of start (default: all)")
    parser.add_argument("--starts", type=int, default=5, metavar="N", help="of each kind, counted (default: 5)")
    parser.add_argument("--output", metavar="FILE", help="also write what was measured, as JSON")
    args, flags = parser.parse_known_args(arguments)
    if args.starts < 1:
        parser.error(f"--starts is {args.starts}; allowed is 1 or more")
    times: dict[str, list[Times]] = {}
    footprints: dict[str, Footprint] = {}
    measure("second", flags)  # so that every file has been read once
    for kind in args.kinds:
        times[kind] = [measure(kind, flags) for _ in range(args.starts)]
        footprints[kind] = look(kind, flags)
    print(times_table(times), memory_table(footprints), sep="\n\n")
    if args.output:
        results = {
            "platform": platform_facts(),
            "flags": flags,
            "times": {kind: [start._asdict() for start in starts] for kind, starts in times.items()},
            "memory": {
                kind: {moment: found._asdict() for moment, found in footprint._asdict().items()}
                for kind, footprint in footprints.items()
            },
        }
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
