"""Load in place of workloads: so many prompts of a kind, coming at a rate. Names are those of vLLM's `bench serve`. No clock, no network.

| dataset           | prompts                                                                       | come                          |
|-------------------|-------------------------------------------------------------------------------|-------------------------------|
| random            | one prefix for all, then tokens of their own                                  | at the request rate           |
| prefix_repetition | several prefixes, each with its share of the prompts, which end differently   | at the request rate           |
| trace             | of a recorded trace (traces.py): what was equal there is equal text here      | as recorded, or at the rate   |
| custom            | of a file of JSON lines: {"prompt": "…"}, maybe with "output_tokens"          | at the request rate           |

Lengths are in tokens, of the tokenizer that `texts` measures with.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trunkline.bench.texts import Texts
from trunkline.bench.workloads import Turn
from trunkline.errors import ConfigError, shown
from trunkline.traces import TraceRow, read_trace

DATASETS = ("random", "prefix_repetition", "trace", "custom")
SMALLEST_PIECE = 8  # tokens; of less no text can be made for sure


class Timed(NamedTuple):
    """A request, and when it is sent: seconds after the first."""

    arrival: float
    turn: Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is sent.

    dataset      one of DATASETS
    num_prompts  requests; of a file the first so many
    input_len    tokens of each prompt's own, prefix_len of what it shares, output_len to be written
    range_ratio  from 0 to 1: own and output lengths vary by so much around these, evenly
    num_prefixes different ones
    path         the file, of trace and custom
    block_tokens what a block of a trace (512 or 16 tokens there) has here: less makes all prompts shorter, in the same tree
    chat         as a message to /v1/chat/completions, not as text to /v1/completions
    ignore_eos   write all of output_len
    seed         of the texts and of when they come
    """

    dataset: str = "random"
    num_prompts: int = 100
    input_len: int = 1024
    prefix_len: int = 0
    output_len: int = 128
    range_ratio: float = 0.0
    num_prefixes: int = 1
    path: str | None = None
    block_tokens: int | None = None
    chat: bool = False
    ignore_eos: bool = True
    seed: int = 0


def make_load(shape: Shape, texts: Texts, *, rate: float, burstiness: float, speed: float) -> list[Timed]:
    """The requests in order of arrival. The same seed gives the same bytes at the same times.

    rate        requests a second; inf: all at once. None of a trace, which has its own times, if it is inf
    burstiness  of the gaps (a gamma distribution's shape): 1 is a Poisson process, less comes in bursts, more evenly
    speed       of a trace without a rate: so many times as fast as recorded

    Raises ConfigError for a file that cannot be read.
    """
    if shape.dataset == "trace":
        rows = read_trace(_path(shape), limit=shape.num_prompts)
        turns = _of_trace(shape, texts, rows)
        if math.isinf(rate):
            return [Timed((row.arrival - rows[0].arrival) / speed, turn) for row, turn in zip(rows, turns, strict=True)]
    elif shape.dataset == "custom":
        turns = _of_file(shape, texts)
    else:
        turns = _made_up(shape, texts)
    times = arrivals(len(turns), rate=rate, burstiness=burstiness, seed=shape.seed)
    return [Timed(at, turn) for at, turn in zip(times, turns, strict=True)]


def arrivals(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the first request: gaps with the mean 1 / rate."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def _made_up(shape: Shape, texts: Texts) -> list[Turn]:
    num_prefixes = shape.num_prefixes if shape.dataset == "prefix_repetition" else 1
    prefixes = [
        texts.piece(shape.prefix_len, random.Random(f"{shape.seed}/prefix {number}"), first=True)
        for number in range(num_prefixes if shape.prefix_len else 0)
    ]
    turns = []
    for number in range(shape.num_prompts):
        rng = random.Random(f"{shape.seed}/prompt {number}")
        own, output = (
            _varied(shape.input_len, shape.range_ratio, rng),
            _varied(shape.output_len, shape.range_ratio, rng),
        )
        own = max(own, SMALLEST_PIECE)
        if prefixes:
            prefix = prefixes[number % num_prefixes]
            prompt = texts.join((prefix, shape.prefix_len), (texts.piece(own, rng), own))
        else:
            prompt = texts.piece(own, rng, first=True)
        turns.append(_turn(shape, prompt, shape.prefix_len + own, output))
    if shape.dataset == "prefix_repetition":
        random.Random(f"{shape.seed}/order").shuffle(turns)
    return turns


def _varied(length: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def _of_trace(shape: Shape, texts: Texts, rows: Sequence[TraceRow]) -> list[Turn]:
    pieces: dict[tuple[int, int, bool], str] = {}
    turns = []
    for row in rows:
        size = shape.block_tokens or row.block_size
        tokens = max(SMALLEST_PIECE, row.num_prompt * size // row.block_size)
        prompt = ""
        for at, block in enumerate(row.blocks.tolist()):
            length = min(size, tokens - at * size)
            if length >= SMALLEST_PIECE:
                key = (block, length, at == 0)
                if key not in pieces:
                    pieces[key] = texts.piece(length, random.Random(f"{shape.seed}/block {block}"), first=at == 0)
                prompt += pieces[key]
        turns.append(_turn(shape, prompt, tokens, max(1, row.num_output * size // row.block_size)))
    return turns


def _of_file(shape: Shape, texts: Texts) -> list[Turn]:
    path = _path(shape)
    turns: list[Turn] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and len(turns) < shape.num_prompts:
                    turns.append(_of_line(shape, texts, line, f"{Path(path).name}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--dataset-path is {shown(path)}, which cannot be read: {reason}.") from None
    if not turns:
        raise ConfigError(f"--dataset-path is {shown(path)}, which holds no prompt.")
    return turns


def _of_line(shape: Shape, texts: Texts, line: str, where: str) -> Turn:
    try:
        row = json.loads(line)
        prompt, output = row["prompt"], row.get("output_tokens", shape.output_len)
    except (ValueError, KeyError, TypeError, AttributeError):
        prompt = output = None
    if not isinstance(prompt, str) or not prompt or type(output) is not int or output < 1:
        raise ConfigError(f'{where} is no prompt; write {{"prompt": "…"}}, maybe with "output_tokens", at least 1.')
    return _turn(shape, prompt, texts.count(prompt), output)


def _turn(shape: Shape, prompt: str, prompt_tokens: int, max_tokens: int) -> Turn:
    settings = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "ignore_eos": shape.ignore_eos}
    if shape.chat:
        return Turn(messages=({"role": "user", "content": prompt},), **settings)  # type: ignore[arg-type]
    return Turn(prompt=prompt, **settings)  # type: ignore[arg-type]


def _path(shape: Shape) -> str:
    if shape.path is None:
        raise ConfigError(f"--dataset-name is {shape.dataset}, which is a file; name it with --dataset-path.")
    return shape.path
