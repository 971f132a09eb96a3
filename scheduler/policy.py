"""Queue orders: which waiting request is admitted next. Pure functions of the request; the smallest key goes first.

fcfs      order of arrival
lpm       longest prefix match first (SGLang's; can starve a request whose prompt is cold)
priority  the request's own priority, then arrival
window    key = arrival + min(W, gamma · uncached tokens · seconds per token): least uncached work first, and nobody is
          overtaken by a request that arrived more than W later, since every key lies between arrival and arrival + W
"""

from collections.abc import Callable

from trunkline.config import POLICIES, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.scheduler.request import Request

Key = tuple[float, int]


class QueueOrder:
    """The key of a waiting request under the configured policy.

    `seconds_per_token` is what computing one prompt token costs here; the engine keeps it up to date.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if config.policy not in POLICIES:
            raise ConfigError(f"The scheduling policy is {config.policy!r}; choose one of {', '.join(POLICIES)}.")
        self.window = config.window_seconds
        self.gamma = config.window_gamma
        self.seconds_per_token = 0.0
        by_name: dict[str, Callable[[Request], Key]] = {
            "fcfs": self.fcfs,
            "lpm": self.lpm,
            "priority": self.by_priority,
            "window": self.bounded_window,
        }
        self.key = by_name[config.policy]

    def fcfs(self, request: Request) -> Key:
        return 0.0, request.order

    def lpm(self, request: Request) -> Key:
        return -float(_matched(request)), request.order

    def by_priority(self, request: Request) -> Key:
        return float(request.priority), request.order

    def bounded_window(self, request: Request) -> Key:
        uncached_seconds = (request.num_tokens - _matched(request)) * self.seconds_per_token
        return request.arrival + min(self.window, self.gamma * uncached_seconds), request.order

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step that computed `num_tokens` took `seconds`. Steps of few tokens cost mostly their overhead and say little."""
        if num_tokens >= 64:
            sample = seconds / num_tokens
            self.seconds_per_token += (sample - self.seconds_per_token) * (0.2 if self.seconds_per_token else 1.0)


def _matched(request: Request) -> int:
    return request.match.num_tokens if request.match is not None else 0
