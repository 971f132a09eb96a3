"""Tokens a second of a batch whose prompts share a prefix: cold, and once more when all of it is cached. Knows no engine: it is given
a function that generates.

Prompts are random token ids, so no tokenizer counts. The second time the cache has all prompts, and the answers as well, from which
drafts come (docs/speculation.md): that is what asking again costs.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trunkline.outputs import RequestOutput

Generate = Callable[[Sequence[list[int]]], list[RequestOutput]]
FIRST_TOKEN = 10  # below are special tokens, mostly


class Round(NamedTuple):
    """One time the whole batch was generated."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self.prompt_tokens / self.seconds

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds


def make_prompts(*, count: int, prefix_len: int, input_len: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `prefix_len` tokens that all share and `input_len` of their own."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]

    prefix = tokens(prefix_len)
    return [prefix + tokens(input_len) for _ in range(count)]


def measure(
    prompts: Sequence[list[int]], generate: Generate, clock: Callable[[], float] = time.perf_counter
) -> tuple[Round, Round]:
    """The batch cold, and warm."""
    return _round(prompts, generate, clock), _round(prompts, generate, clock)


def _round(prompts: Sequence[list[int]], generate: Generate, clock: Callable[[], float]) -> Round:
    started = clock()
    outputs = generate(prompts)
    return Round(
        seconds=clock() - started,
        prompt_tokens=sum(map(len, prompts)),
        cached_tokens=sum(output.cached_tokens for output in outputs),
        output_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
    )
