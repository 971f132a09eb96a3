"""Someone who reads a page and does what it says: shell and Python, block after block, against a live server. Judges nothing but answers.

with Reader(page, "http://127.0.0.1:40123", folder) as reader:
    for block in blocks(page):
        reader.do(block)
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.documentation import ROOT, SHELL, Block, commands, serves

SECONDS = 120.0  # of one block; only for what would otherwise hang
SHOWN_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8000\b")
CLIENTS = re.compile(
    r"trunkline (?:chat|complete|run-batch(?![^\n]*--model)|cache \w+|grammar check|bench serve)(?=\s)(?![^\n]*--(?:base-)?url)"
)
ANYTHING = "…"  # in an answer that is shown: as a key, there may be others; in a string, anything


class Reader:
    """Stands in a folder that looks like the checkout: what the page's commands write lands there."""

    def __init__(self, page: Path, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.said: str | None = None  # by the last block that was run
        self.section = -1  # of that block
        for entry in ROOT.iterdir():
            if entry.name not in (".venv", ".git"):
                (folder / entry.name).symlink_to(entry)
        self._make_programs()
        pieces = [sys.executable, "-P", str(ROOT / "tests" / "python_pieces.py")]
        self.errors = (folder / "errors of python").open("w+")
        self.python = subprocess.Popen(
            pieces,
            cwd=folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.python.stdin is not None and self.python.stdout is not None
        self.python.stdin.close()
        self.python.wait(SECONDS)
        self.python.stdout.close()
        self.errors.close()

    def do(self, block: Block) -> None:
        """Run a block that can be run; hold a `json` block against what the one before it in its section said.

        Raises AssertionError if it fails, or if the answer has another shape.
        """
        if block.language == "json" and self.said is not None and block.heading == self.section:
            self._compare(block)
            self.said = None
        if block.language not in (*SHELL, "python"):
            return
        self.said, self.section = None, block.heading
        is_missing = block.needs_package and importlib.util.find_spec(block.needs_package) is None
        if block.not_run or is_missing or is_for_a_server(block):
            return
        text = addressed(block.text, self.url)
        self.said = self._python(block, text) if block.language == "python" else self._shell(block, text)

    def _shell(self, block: Block, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{block.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _python(self, block: Block, text: str) -> str:
        assert self.python.stdin is not None and self.python.stdout is not None
        self.python.stdin.write(json.dumps({"name": block.name, "code": text}) + "\n")
        self.python.stdin.flush()
        line = self.python.stdout.readline()
        self.errors.seek(0)
        answer = json.loads(line) if line else {"output": "", "error": f"Python has ended: {self.errors.read()}"}
        assert answer["error"] is None, f"{block.name} raised:\n{answer['error']}"
        return str(answer["output"])

    def _compare(self, block: Block) -> None:
        assert self.said is not None
        differences = [other_shape(json.loads(block.text), answer) for answer in json_values(self.said)]
        if "" not in differences:  # several commands may have answered, and some that run in the background later
            raise AssertionError(f"{block.name} shows another answer than the server gave: {differences}\n{self.said}")

    def _environment(self) -> dict[str, str]:
        # curl takes an HTTP error for success unless it is told otherwise.
        return {
            **os.environ,
            "BASE_URL": self.url,
            "CURL_HOME": str(self.folder),
            "PATH": f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def _make_programs(self) -> None:
        """.venv/bin has this Python, `trunkline` and what else the pages call; nothing installs anything."""
        programs = {"python": "", "trunkline": "-m trunkline", "locust": "-m locust"}
        folder = self.folder / ".venv" / "bin"
        folder.mkdir(parents=True)
        for name, arguments in programs.items():
            (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
            (folder / name).chmod(0o755)
        (self.folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")


def addressed(text: str, url: str) -> str:
    """With the address of the server that runs in place of the one that pages show, or that our clients ask by default."""
    text = SHOWN_ADDRESS.sub(url.removeprefix("http://"), text)
    return CLIENTS.sub(lambda found: f"{found[0]} --url {url}", text)


def is_for_a_server(block: Block) -> bool:
    """Whether it starts servers, and nothing else: its flags are checked, and a server runs already."""
    return block.language in SHELL and any(map(serves, commands(block.text)))


def json_values(text: str) -> list[Any]:
    """The JSON objects and lists in a text, one after the other."""
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
            found.append(value)
        except ValueError:
            place += 1
    return [value for value in found if isinstance(value, dict | list)]


def other_shape(shown: Any, got: Any, place: str = "") -> str:
    """Where an answer that a page shows differs in shape from what came: keys, and types of values. "" if nowhere.

    Of lists the elements that both have are compared, and none may be empty where the other is not.
    """
    place = place or "the answer"
    if isinstance(shown, dict) and isinstance(got, dict):
        known = shown.keys() - {ANYTHING}
        if missing := known - got.keys():
            return f"{place} has no {sorted(missing)}"
        if (more := got.keys() - known) and ANYTHING not in shown:
            return f"{place} also has {sorted(more)}"
        differences = [other_shape(shown[key], got[key], f"{place}.{key}") for key in sorted(known)]
    elif isinstance(shown, list) and isinstance(got, list):
        if bool(shown) != bool(got):
            return f"{place} is {got!r}"
        differences = [
            other_shape(one, other, f"{place}[{i}]") for i, (one, other) in enumerate(zip(shown, got, strict=False))
        ]
    else:
        return "" if _kind(shown) == _kind(got) else f"{place} is {got!r}, where {shown!r} is shown"
    return next(filter(None, differences), "")


def _kind(value: Any) -> str:
    """Numbers are of one kind, whole or not."""
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
