"""Recorded traffic: when requests came, how long they were, which parts of their prompts were the same. No text.

A trace is a file of JSON objects, one request a line, in the format that Mooncake published (Qin et al., FAST '25):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, …, 2352]}

timestamp is in milliseconds, lengths are in tokens. Each id of hash_ids stands for 512 tokens: equal ids mean equal
tokens. Traces of short prompts have one id for 16 tokens, run by run: "runs": [[10, 3], [7, 1]] is 10, 11, 12, 7.

    rows = read_trace("trace.jsonl", limit=2000)
    rows[0].prompt()        # tokens that are shared with other rows as far as the ids say
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import numpy as np

from trunkline.errors import ConfigError
from trunkline.step import Int32

HASH_BLOCK = 512  # tokens that an id of hash_ids stands for
RUN_BLOCK = 16  # and an id of runs
FIRST_OUTPUT_TOKEN = 2**30  # the tokens of prompts are below, so that what a simulation generates is like no prompt
BUCKET_SECONDS = 1.0  # timestamps that lie apart by this and more are rounded down to some clock tick


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One request of a trace.

    arrival     seconds after the first one
    num_prompt  tokens, at least 1
    num_output  tokens, at least 1
    blocks      int32 [ceil(num_prompt / block_size)]: equal numbers are equal tokens, in all rows read together
    """

    arrival: float
    num_prompt: int
    num_output: int
    blocks: Int32
    block_size: int

    def prompt(self) -> bytes:
        """Token ids, int32 little-endian, num_prompt of them: block b is b · block_size and those that follow."""
        tokens = self.blocks[:, None] * self.block_size + np.arange(self.block_size, dtype=np.int32)
        return tokens.reshape(-1)[: self.num_prompt].astype("<i4").tobytes()


class _Line(msgspec.Struct):
    """A line of the file, as it stands there."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    runs: list[tuple[int, int]] | None = None


def read_trace(path: str | Path, *, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` requests of a trace, in the order of the file. Those with an empty prompt are left out.

    Raises ConfigError, naming the line, for what is no trace.
    """
    try:
        with open(path, "rb") as lines:
            return _rows(str(path), islice(lines, limit))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror}.") from None


def spread(rows: Sequence[TraceRow], *, seed: int = 1) -> list[TraceRow]:
    """The rows in order of arrival. Where timestamps are ticks of a second or more, each is moved inside its tick.

    Requests that were recorded in steps of 3 s did not come in one burst every 3 s.
    """
    ticks = sorted({row.arrival for row in rows})
    tick = min((after - before for before, after in pairwise(ticks)), default=0.0)
    if tick >= BUCKET_SECONDS:
        rng = random.Random(seed)
        rows = [replace(row, arrival=row.arrival + rng.random() * tick) for row in rows]
    return sorted(rows, key=lambda row: row.arrival)


def _rows(name: str, lines: Iterable[bytes]) -> list[TraceRow]:
    decoder = msgspec.json.Decoder(_Line)
    numbers: dict[int, int] = {}  # id in the file -> number of the block, in order of appearance

    def number(block: int) -> int:
        return numbers.setdefault(block, len(numbers))

    rows: list[TraceRow] = []
    start: float | None = None
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _row(decoder.decode(line), number)
            if rows and row.block_size != rows[0].block_size:
                raise ValueError(
                    "it has ids of another length than those before: hash_ids or runs, not both in one file"
                )
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{name}, line {at} is no request of a trace: {str(error).rstrip('.')}.") from None
        start = row.arrival if start is None else start
        if row.num_prompt:
            rows.append(replace(row, arrival=row.arrival - start))
    if not rows:
        raise ConfigError(f"The trace {name} holds no request; give a file with one JSON object a line.")
    if len(numbers) * rows[0].block_size > FIRST_OUTPUT_TOKEN:
        raise ConfigError(
            f"The first {len(rows):,} requests of {name} have {len(numbers) * rows[0].block_size:,} different tokens;"
            f" allowed are {FIRST_OUTPUT_TOKEN:,}. Read fewer (--rows)."
        )
    return rows


def _row(line: _Line, number: Callable[[int], int]) -> TraceRow:
    """Raises ValueError, in words, for a line whose parts contradict each other."""
    ids: Iterable[int]
    if line.hash_ids is not None:
        block_size, ids, num_ids = HASH_BLOCK, line.hash_ids, len(line.hash_ids)
    elif line.runs is not None:
        ids = (first + i for first, count in line.runs for i in range(count))  # a line may claim any number of them
        block_size, num_ids = RUN_BLOCK, sum(max(0, count) for _, count in line.runs)
    else:
        raise ValueError("it has neither hash_ids nor runs")
    if line.timestamp < 0 or line.input_length < 0 or line.output_length < 0:
        raise ValueError("timestamp and lengths must not be negative")
    if max(line.input_length, line.output_length) > FIRST_OUTPUT_TOKEN:
        raise ValueError(f"lengths must not be above {FIRST_OUTPUT_TOKEN}")
    needed = -(-line.input_length // block_size)
    if num_ids != needed:
        raise ValueError(
            f"{line.input_length} tokens are {needed} blocks of {block_size} tokens, but there are {num_ids} ids"
        )
    return TraceRow(
        arrival=line.timestamp / 1000,
        num_prompt=line.input_length,
        num_output=max(1, line.output_length),
        blocks=np.fromiter(map(number, ids), np.int32, num_ids),
        block_size=block_size,
    )
