"""What the API process costs: CPU time of a streamed token and of a request, and requests a second. Writes api-cost.md.

    python -m benchmarks.api_cost                                # two minutes; the built-in model's tokenizer and template
    python -m benchmarks.api_cost --rounds 1 --output -          # a quick look, to the terminal
    python -m benchmarks.api_cost --only "1 token" --output -    # some of the rows

The server is `trunkline serve` as it is: uvicorn, uvloop, httptools, the application, the engine's socket and messages. Only
the engine process is another (stub_engine.py), which computes nothing. Clients are connections that are kept alive and
send what OpenAI's Python client sends, headers included; they do next to nothing with the answer but count.

CPU time is the API process's own, all its threads, user and system, as the kernel accounts it to the nanosecond. It is pinned
to the first CPU; engine and clients share the last. What else runs there makes it dearer by a tenth all the same, since it empties
the caches; --undisturbed (as root) lets nothing else run there while the API process wants to. All rows
are measured once a round, in turn; the table has the medians. A stream's request is in the cost of its tokens.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, cast

import uvloop

from benchmarks.server import children, start
from trunkline.bench.cli import make_texts
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align
from trunkline.bench.texts import Texts

PAGE = Path(__file__).with_name("api-cost.md")
COST, RATE = 0, 1  # of `figures`
PACKAGES = ("uvicorn", "uvloop", "httptools", "fastapi", "starlette", "pydantic", "msgspec", "pyzmq", "tokenizers")
# Title of a case, bound, of which figure.
GOALS = (
    ("64 streams of 256 tokens", 60.0, COST),
    ("streamed, 1 token", 700.0, COST),
    ("not streamed, 1 token", 700.0, COST),
    ("not streamed, 1 token", 600.0, RATE),
)
HEAD = """\
# What the API process costs

Written by `.venv/bin/python -m benchmarks.api_cost`; [what it measures](README.md#the-api-process)."""
PROMPT_TOKENS, SYSTEM_TOKENS = 100, 2000  # of the user's message, and of a system message that all share
HEADERS = """\
Host: 127.0.0.1
Accept-Encoding: gzip, deflate
Connection: keep-alive
Accept: application/json
Content-Type: application/json
User-Agent: OpenAI/Python 2.8.1
X-Stainless-Lang: python
X-Stainless-Package-Version: 2.8.1
X-Stainless-OS: Linux
X-Stainless-Arch: x64
X-Stainless-Runtime: CPython
X-Stainless-Runtime-Version: 3.11.7
X-Stainless-Async: async:asyncio
X-Stainless-Retry-Count: 0
X-Stainless-Read-Timeout: 600
Authorization: Bearer unused
"""


class Case(NamedTuple):
    """One row.

    streams     requests at a time
    max_tokens  that each is answered with
    is_streamed as server-sent events
    has_system  the system message comes before the user's
    requests    in all
    """

    title: str
    streams: int
    max_tokens: int
    requests: int
    is_streamed: bool = True
    has_system: bool = False
    path: str = "/v1/chat/completions"

    @property
    def unit(self) -> str:
        """What its cost is divided by."""
        return "token" if self.max_tokens > 1 else "request"


CASES = (
    Case("64 streams of 256 tokens", 64, 256, 64),
    Case("8 streams of 256 tokens", 8, 256, 16),
    Case("1 stream of 256 tokens", 1, 256, 1),
    Case("streamed, 1 token", 8, 1, 1000),
    Case("not streamed, 1 token", 8, 1, 1000, is_streamed=False),
    Case("not streamed, 1 token, system message of 2,000 tokens", 8, 1, 500, is_streamed=False, has_system=True),
    Case("completions, not streamed, 1 token", 8, 1, 1000, is_streamed=False, path="/v1/completions"),
)


class Measured(NamedTuple):
    """One case, once.

    cpu_seconds  of the API process
    events       server-sent events that were received, [DONE] included; of them `writes` came alone or first
    """

    cpu_seconds: float
    wall_seconds: float
    events: int
    writes: int


class Connection(asyncio.Protocol):
    """Sends one request after the other, until there are no more."""

    def __init__(self, requests: Iterator[bytes], done: "asyncio.Future[None]") -> None:
        self.events = self.writes = 0
        self._requests = requests
        self._done = done
        self._received = bytearray()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one in all but name
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._is_whole():
            self._send()

    def connection_lost(self, exception: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exception or RuntimeError("The server closed a connection."))

    def _is_whole(self) -> bool:
        """Whether the answer has come; then it is counted, and forgotten. Raises RuntimeError for an error."""
        received = self._received
        if received.endswith(b"\r\n0\r\n\r\n"):
            if not received.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]\n\n" not in received:
                self._fail()
            self.events += received.count(b"data: ")
            self.writes += received.count(b"\r\ndata: ")
        else:
            head, blank, body = received.partition(b"\r\n\r\n")
            _, name, rest = head.partition(b"content-length: ")
            if not (blank and name) or len(body) < int(rest.split(b"\r\n", 1)[0]):
                return False
            if not received.startswith(b"HTTP/1.1 200 "):
                self._fail()
        received.clear()
        return True

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()

    def _fail(self) -> None:
        self._done.set_exception(RuntimeError(f"The server answered {bytes(self._received[:2000])!r}"))
        self._transport.close()


class Requests:
    """Makes the requests of a case: no two have the same user's message."""

    def __init__(self, texts: Texts, model: str) -> None:
        self._texts = texts
        self._model = model
        self._system = texts.piece(SYSTEM_TOKENS, random.Random("system"), first=True)
        self._numbers = itertools.count()

    def of(self, case: Case) -> list[bytes]:
        return [self._request(case) for _ in range(case.requests)]

    def _request(self, case: Case) -> bytes:
        number = next(self._numbers)
        text = self._texts.piece(PROMPT_TOKENS, random.Random(f"user {number}"), first=True)
        body: dict[str, object] = {"model": self._model, "temperature": 0.7, "max_tokens": case.max_tokens}
        if case.path == "/v1/completions":
            body["prompt"] = text
        else:
            messages = [{"role": "user", "content": text}]
            body["messages"] = [{"role": "system", "content": self._system}] * case.has_system + messages
        if case.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        encoded = json.dumps(body).encode()
        head = f"POST {case.path} HTTP/1.1\n{HEADERS}Content-Length: {len(encoded)}\n\n"
        return head.replace("\n", "\r\n").encode() + encoded


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


async def measure(case: Case, url: str, pid: int, requests: list[bytes]) -> Measured:
    """Send all; raises RuntimeError if one is not answered well, or a stream has fewer events than tokens."""
    loop = asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    waiting = iter(requests)
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    connections, ends = [], []
    for _ in range(case.streams):
        end: asyncio.Future[None] = loop.create_future()
        ends.append(end)
        _, connection = await loop.create_connection(lambda end=end: Connection(waiting, end), host, int(port))  # type: ignore[misc]
        connections.append(connection)
    await asyncio.gather(*ends)
    await asyncio.sleep(0.05)  # what the server does after the last answer: the log's line
    measured = Measured(
        cpu_seconds(pid) - cpu,
        time.perf_counter() - wall - 0.05,
        sum(connection.events for connection in connections),
        sum(connection.writes for connection in connections),
    )
    # The role, a token each, the end, the usage, [DONE].
    if case.is_streamed and measured.events != len(requests) * (case.max_tokens + 4):
        raise RuntimeError(f"{case.title}: {measured.events} events for {len(requests)} × {case.max_tokens} tokens")
    return measured


def pin(pid: int, cpu: int, *, undisturbed: bool = False) -> None:
    """Let all threads of a process run on one CPU only; `undisturbed`, before all others that want to run there."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {cpu})
        if undisturbed:
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


def run(
    cases: Sequence[Case], rounds: int, model: str | None, *, undisturbed: bool = False
) -> dict[Case, list[Measured]]:
    """All cases, `rounds` times, after one that is not counted."""
    texts = make_texts(model)
    results: dict[Case, list[Measured]] = {case: [] for case in cases}
    with (
        start("benchmarks.stub_engine", *([] if model is None else [model])) as server,
        contextlib.ExitStack() as stack,
    ):
        first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        pin(server.pid, first, undisturbed=undisturbed)
        for pid in (*children(server.pid), os.getpid()):
            pin(pid, last)
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
            name = json.load(response)["data"][0]["id"]
        requests = Requests(texts, name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for number in range(rounds + 1):
                for case in cases:
                    sized = case if number else case._replace(requests=min(case.requests, 200), max_tokens=1)
                    measured = runner.run(measure(sized, server.url, server.pid, requests.of(sized)))
                    if number:
                        results[case].append(measured)
    return results


def figures(case: Case, measured: Sequence[Measured]) -> tuple[list[float], list[float]]:
    """Of each round: µs of CPU time a token or request, and requests a second."""
    num = case.requests * (case.max_tokens if case.unit == "token" else 1)
    return (
        [1e6 * one.cpu_seconds / num for one in measured],
        [case.requests / one.wall_seconds for one in measured],
    )


def table(results: dict[Case, list[Measured]]) -> str:
    """Markdown."""
    rows = [["", "CPU time, µs", "of each round", "requests/s", "of each round", "events a write"]]
    for case, measured in results.items():
        costs, rates = figures(case, measured)
        row = [case.title, f"{statistics.median(costs):.0f} a {case.unit}", " ".join(f"{cost:.0f}" for cost in costs)]
        if case.unit == "request":
            row += [f"{statistics.median(rates):.0f}", " ".join(f"{rate:.0f}" for rate in rates)]
        else:
            row += ["", ""]
        together = [one.events / one.writes for one in measured if one.writes]
        rows.append([*row, f"{statistics.median(together):.2f}" if together else ""])
    return align(rows)


def machine(arguments: Sequence[str]) -> str:
    """What ran where."""
    facts = platform_facts()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    command = shlex.join([".venv/bin/python", "-m", "benchmarks.api_cost", *arguments])
    return (
        f"{facts['cpus']} CPUs ({_cpu_name()}), of which the API process has one; Python {facts['python']}, {packages}; trunkline"
        f" {facts['trunkline']}; {datetime.now(UTC).date()}; load average {os.getloadavg()[0]:.1f}; `{command}`."
    )


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def verdicts(results: dict[Case, list[Measured]]) -> list[str]:
    """The goals beside what was measured, of the cases that they are about."""
    by_title = {case.title: figures(case, measured) for case, measured in results.items()}
    lines = []
    for title, goal, which in GOALS:
        if title in by_title:
            found = statistics.median(by_title[title][which])
            is_met = found <= goal if which == COST else found >= goal
            unit = ("µs", "requests/s")[which]
            lines.append(f"- {title}: {found:.0f} {unit}, {'met' if is_met else 'not met'} ({'≤≥'[which]} {goal:g}).")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.api_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a GGUF file (default: the built-in model)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--requests", type=int, metavar="N", help="of a case, at most")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title has this in it")
    parser.add_argument(
        "--undisturbed", action="store_true", help="let no other process have the API process's CPU first"
    )
    parser.add_argument("--output", metavar="FILE", help="the page (default: benchmarks/api-cost.md); - prints it only")
    args = parser.parse_args(arguments)
    cases = [case for case in CASES if args.only in case.title]
    if args.requests is not None:
        cases = [case._replace(requests=min(case.requests, args.requests)) for case in cases]
    results = run(cases, args.rounds, args.model, undisturbed=args.undisturbed)
    page = "\n\n".join((HEAD, table(results), "\n".join(verdicts(results)), machine(arguments or sys.argv[1:]))) + "\n"
    print(page)
    if args.output != "-":
        Path(args.output or PAGE).write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
