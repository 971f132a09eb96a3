"""How the tokens of a step are shared out: how many it may have, and which running request computes how many of them.

Requests that generate come first: one token for each, then what a grammar forced after it. Prompts get what is left.
Decides; changes nothing.
"""

from collections.abc import Callable
from typing import Any

from trunkline.config import SchedulerConfig
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.request import Request

# Of the wanted time between tokens, what a step is planned to take: what is expected of steps is right on average.
AIM = 0.9


class Shares:
    """Of one step.

    generating      running requests that read no prompt, in the order in which they are served
    reading         the others, served after them
    num_new         tokens of each
    num_generating  requests that get their next token in this step, of those whose texts have begun
    left            tokens that nobody takes
    """

    def __init__(self, running: list[Request], most: int, turn: Callable[[Request], Any]) -> None:
        """`running`: the most urgent first. `turn` orders the prompts; less goes first."""
        self.generating: list[Request] = []
        self.reading: list[Request] = []
        self.num_new: dict[Request, int] = {}
        self.num_generating = 0
        self.left = most
        more: dict[Request, int] = {}  # what they could compute beyond one token
        for request in running:
            wanted = request.num_to_plan
            generates = request.would_generate(wanted)
            if wanted > 1 and not generates:
                self.reading.append(request)
                continue
            self.generating.append(request)
            self.num_new[request] = given = 1 if wanted > 0 and self.left else 0
            self.left -= given
            if wanted > 1:
                more[request] = wanted - given
            else:
                self.num_generating += generates and given == wanted
        self.reading.sort(key=turn)
        for request, num in more.items():
            self.num_generating += self._give(request, num) == num
        for request in self.reading:
            self.num_new[request] = 0
            self._give(request, request.num_to_plan)

    def _give(self, request: Request, most: int) -> int:
        num = min(most, self.left)
        self.num_new[request] += num
        self.left -= num
        return num

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new.values())


def completes(request: Request, num_new: int) -> bool:
    """True if the text has begun, and computing `num_new` tokens chooses what follows."""
    return request.generates and num_new == request.num_to_plan


def max_step_tokens(
    config: SchedulerConfig, pace: Pace, running: list[Request], waiting: list[Request], page_size: int
) -> int:
    """Tokens of the next step: as many as are allowed, and no more than running streams can wait for.

    A page of prompts at least, so that they are read to the end whatever the target.
    """
    most, target = config.max_num_batched_tokens, config.target_token_seconds
    if target is None:
        return most
    generating = [request.num_to_plan for request in running if request.generates]
    if not generating:
        return most
    num_generating, num_forced = len(generating), sum(generating) - len(generating)
    chunk = pace.chunk(num_generating, within=AIM * target, start=_next_position(running, waiting))
    # What was forced costs what a prompt's tokens do.
    return min(most, num_generating + max(num_forced + page_size, chunk))


def _next_position(running: list[Request], waiting: list[Request]) -> int:
    """Where prompts are read next: the furthest of those under way, or else of the request that waits first."""
    reading = [request.num_planned for request in running if request.reads]
    if not reading and waiting:
        return waiting[0].num_tokens - waiting[0].num_uncached
    return max(reading, default=0)
