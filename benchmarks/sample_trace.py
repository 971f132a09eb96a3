"""Makes benchmarks/sample_trace.jsonl: traffic that nobody sent, in Mooncake's format, for `trunkline simulate`.

    .venv/bin/python -m benchmarks.sample_trace > benchmarks/sample_trace.jsonl

Four kinds of requests, mixed, over five minutes:

    assistant  one system prompt, three of 40 documents (a few are popular), a question
    agent      a system prompt with tools; each call sends all calls before it again
    chat       a short system prompt; each turn sends the turns before it again
    report     a long text that nobody sent before

All numbers are drawn at random from a fixed seed: the file is always the same. It is part of Trunkline and under its
license.
"""

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

SEED = 7
SECONDS = 300
BLOCK = 512  # tokens of an id


class Request(NamedTuple):
    """At `seconds`, whole blocks with the given contents, and then `rest` tokens that nobody else has."""

    seconds: float
    contents: tuple[str, ...]
    rest: int
    num_output: int


def requests() -> list[Request]:
    """All of them, in the order in which they come."""
    rng = random.Random(SEED)
    found = [*_assistant(rng, 150), *_reports(rng, 10)]
    for number in range(12):
        found += _session(
            rng, f"agent {number}", head=("agent: tools",) * 4, turns=12, pause=6, blocks=2, num_output=60
        )
    for number in range(20):
        found += _session(rng, f"chat {number}", head=("chat: system",), turns=6, pause=25, blocks=1, num_output=250)
    return sorted(request for request in found if request.seconds < SECONDS)


def lines() -> Iterator[str]:
    """The file. As in Mooncake's traces, an id stands for its block and all that comes before it in the prompt."""
    ids: dict[tuple[int, str], int] = {}
    for number, request in enumerate(requests()):
        hash_ids: list[int] = []
        before = -1
        for content in (*request.contents, f"rest {number}"):
            before = ids.setdefault((before, content), len(ids))
            hash_ids.append(before)
        row = {
            "timestamp": round(1000 * request.seconds),
            "input_length": BLOCK * len(request.contents) + request.rest,
            "output_length": request.num_output,
            "hash_ids": hash_ids,
        }
        yield json.dumps(row)


def _assistant(rng: random.Random, count: int) -> Iterator[Request]:
    popularity = [1 / (rank + 1) for rank in range(40)]
    for _ in range(count):
        documents: list[int] = []
        while len(documents) < 3:
            (document,) = rng.choices(range(40), popularity)
            if document not in documents:
                documents.append(document)
        contents = ["assistant: system"] * 2 + [f"document {document}" for document in documents]
        yield Request(rng.uniform(0, SECONDS), tuple(contents), rng.randint(20, 200), rng.randint(50, 300))


def _reports(rng: random.Random, count: int) -> Iterator[Request]:
    for number in range(count):
        contents = (f"report {number}",) * rng.randint(10, 40)
        yield Request(rng.uniform(0, SECONDS), contents, rng.randint(1, 400), rng.randint(300, 800))


def _session(
    rng: random.Random, name: str, *, head: tuple[str, ...], turns: int, pause: float, blocks: int, num_output: int
) -> Iterator[Request]:
    """Someone who comes back: at most `turns` times, after `pause` seconds on average, with up to `blocks` more
    blocks."""
    seconds = rng.uniform(0, SECONDS)
    contents = head
    for turn in range(rng.randint(2, turns)):
        yield Request(seconds, contents, rng.randint(20, 500), rng.randint(num_output // 2, 2 * num_output))
        contents += (f"{name}: {turn}",) * rng.randint(1, blocks)
        seconds += 2 + rng.expovariate(1 / pause)


if __name__ == "__main__":
    for line in lines():
        print(line)
