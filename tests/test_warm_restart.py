"""The disk tier end to end: killed, started again, and the same answers out of the files; or out of none, if they are wrong."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from tests.tiny import VOCAB_SIZE, tiny_model
from trunkline import LLM, SamplingParams

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


# ---- the tiny model, in this process


def prompts(num: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE - 4) for _ in range(rng.randrange(40, 160))] for _ in range(num)]


class Life:
    """An LLM over a disk cache that is gone without a word at the end: nothing is written then that was not before."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.llm = LLM(model, disk_cache_dir=str(folder), dtype="float32", threads=1, num_pages=200)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert not self.llm.engine.has_work, "what is to be written has been handed over, so that closing adds nothing"
        self.llm.close()

    def answers(self, asked: list[list[int]]) -> list[tuple[int, ...]]:
        outputs = self.llm.generate(asked, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    @property
    def hits(self) -> dict[str, int]:
        return dict(self.llm.engine.scheduler.counters.hits_by_tier)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_the_same_answers_out_of_the_files(model: Path, tmp_path: Path) -> None:
    asked = prompts(8)
    with Life(model, tmp_path / "kv") as first:
        expected = first.answers(asked)
        assert first.answers(asked) == expected
    with Life(model, tmp_path / "kv") as second:
        assert second.answers(asked) == expected
        assert second.hits["disk"] == sum((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in asked)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*.kv")}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kv").iterdir()} == {0o700}


def test_one_weight_changed_hits_nothing(model: Path, tmp_path: Path) -> None:
    asked = prompts(3)
    with Life(model, tmp_path / "kv") as first:
        first.answers(asked)
        first.answers(asked)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # a bit of the exponent of the last float32
    weights.write_bytes(content)
    with Life(model, tmp_path / "kv") as second:
        second.answers(asked)
        assert second.hits == {"device": 0, "host": 0, "disk": 0}


def test_flipped_bytes_give_no_wrong_token(model: Path, tmp_path: Path) -> None:
    asked = prompts(8)
    with Life(model, tmp_path / "kv") as first:
        expected = first.answers(asked)
        first.answers(asked)
    flip_bytes(tmp_path / "kv", 200)
    with Life(model, tmp_path / "kv") as second:
        assert second.answers(asked) == expected
        assert sum(second.llm.engine.stats()["tier_errors_total"].values()) > 0


def flip_bytes(folder: Path, number: int) -> None:
    """Change so many random bytes in the files, wherever they are."""
    rng = random.Random(11)
    files = sorted(folder.glob("*/*.kv"))
    sizes = [file.stat().st_size for file in files]
    for file in rng.choices(files, sizes, k=number):
        with file.open("r+b") as stream:
            at = rng.randrange(file.stat().st_size)
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ rng.randrange(1, 256)]))


# ---- the built-in model, over sockets, killed


class Server:
    """`trunkline serve` with a disk cache, and all its processes."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trunkline", "serve", "--port", "0", "--disk-cache-dir", str(folder), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if ready := re.search(r"Ready: (http://\S+)/v1", line):
                self.url = ready[1]
                break
        else:
            raise AssertionError(f"it did not start: {self.lines}")
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """kill -9, the API process and the engine."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def ask(self, prompt: str, max_tokens: int = 16) -> tuple[str, int, int]:
        """The greedy answer, the tokens of the prompt, and how many of them were cached."""
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.kill()


TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.real
@pytest.mark.slow
def test_killed_under_load_and_started_again(tmp_path: Path) -> None:
    """kill -9 while it answers others; then the same answers, and at least 90 % of the pages of what was served twice."""
    folder = tmp_path / "kv"
    stories = [f"Story {i}. {TEXT[i * 700 : i * 700 + 2500]}" for i in range(4)]
    with running(folder) as server:
        expected = []
        for story in stories:
            text, _, cached = server.ask(story)
            assert cached < PAGE_SIZE
            assert server.ask(story)[0] == text
            expected.append(text)
        load = [
            threading.Thread(target=_ask_until_killed, args=(server, f"Load {i}. {TEXT[i : i + 3000]}"), daemon=True)
            for i in range(4)
        ]
        for thread in load:
            thread.start()
        time.sleep(5)  # what the promise allows
        server.kill()
        for thread in load:
            thread.join()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with running(folder) as server:
        for story, text in zip(stories, expected, strict=True):
            answer, num_tokens, cached = server.ask(story)
            assert answer == text
            assert cached >= 0.9 * (num_tokens // PAGE_SIZE) * PAGE_SIZE
    flip_bytes(copy, 200)
    with running(copy) as server:
        assert [server.ask(story)[0] for story in stories] == expected


def _ask_until_killed(server: Server, prompt: str) -> None:
    try:
        for i in range(1000):
            server.ask(f"{i} {prompt}", max_tokens=64)
    except OSError:
        return
