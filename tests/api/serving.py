"""A real `trunkline serve` with the tiny model, for tests that speak HTTP to it.

with Server(tiny_model(folder), "--max-model-len", "512") as server:
    httpx.get(server.url + "/health")
"""

import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import httpx

MODEL = "tiny"
# Long enough that a stream never ends by itself before a test has cut it.
CONTEXT = 8192
PATIENCE = 60.0  # seconds; only for what would otherwise hang


class Server:
    """One process. `output` holds what it has written so far, stdout and stderr as they come.

    model  None: the built-in one
    """

    def __init__(self, model: Path | str | None, *flags: str) -> None:
        named = [str(model)] if model else []
        command = [sys.executable, "-m", "trunkline", "serve", *named, "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.output = ""
        self.url = self.wait_for(r"Listening on (http://\S+?),").group(1)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output holds `pattern`. Raises AssertionError, showing the output, if the process ends first."""
        while not (match := re.search(pattern, self.output)):
            line = self._lines.get(timeout=PATIENCE)
            assert line is not None, f"the server ended without saying {pattern!r}:\n{self.output}"
            self.output += line
        return match

    def wait_ready(self) -> Self:
        self.wait_for("Ready: ")
        return self

    def wait_exit(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            self.output += line
        return code

    def engine_pid(self) -> int:
        """The only child of the server."""
        (pid,) = children(self.process.pid)
        return pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            finally:
                self.process.kill()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics, by name and labels as written there."""
    page = httpx.get(url + "/metrics").text
    samples = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in samples}


def wait_idle(url: str) -> dict[str, float]:
    """Wait until no request is left in the engine; returns the metrics of that moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        now = metrics(url)
        running = now['trunkline:num_requests_running{model_name="tiny"}']
        waiting = now['trunkline:num_requests_waiting{model_name="tiny"}']
        if not running and not waiting:
            return now
        assert time.monotonic() < deadline, f"{running:g} requests still run, {waiting:g} wait"


def sse_events(text: str) -> list[str]:
    """The data of every event of a stream."""
    assert text.splitlines() == text.removesuffix("\n").split("\n"), "other characters end a line for some clients"
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
