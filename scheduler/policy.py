"""Queue orders: which waiting request is admitted next. Functions of the requests alone; nothing is looked up here.

fcfs        order of arrival
lpm         longest prefix match first (SGLang's; can starve a request whose prompt is cold). Also called throughput
dfs-weight  depth first through the tree, the subtree where most requests wait first (SGLang's; it can starve, too)
shortest    least uncached tokens first (can starve a long prompt). Also called latency
priority    the request's own priority, then arrival
window      key = arrival + min(W, gamma · uncached tokens · seconds per token): least uncached work first, and nobody
            is overtaken by a request that arrived W later or more, since every key lies between arrival and arrival + W

Whoever was preempted had its turn already, and goes ahead of all that arrived later; under `priority`, of its own
priority.
"""

from collections.abc import Callable

from trunkline.config import POLICIES, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.radix.node import Node
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.request import Request

Rank = tuple[float, ...]


class QueueOrder:
    """The configured policy.

    order = QueueOrder(config, pace)
    order.sort(waiting)       # in place, most urgent first; O(n log n)
    rank = order.rank()       # rank(a) < rank(b): a goes first, waiting or running
    """

    def __init__(self, config: SchedulerConfig, pace: Pace) -> None:
        """Raises ConfigError for a policy that there is not."""
        if config.policy not in POLICIES:
            raise ConfigError(f"The scheduling policy is {config.policy!r}; choose one of {', '.join(POLICIES)}.")
        self.policy = config.policy
        self.window = config.window_seconds
        self.gamma = config.window_gamma
        self.pace = pace

    def sort(self, requests: list[Request]) -> None:
        """Order waiting requests, most urgent first."""
        match self.policy:
            case "lpm" | "throughput":
                requests.sort(key=_matched)
            case "dfs-weight":
                _sort_depth_first(requests)
            case _:
                requests.sort(key=self.rank())

    def rank(self) -> Callable[[Request], Rank]:
        """How urgent requests are as things are now; less is more. By what is left to compute, where that counts.

        lpm and dfs-weight compare waiting requests only: there every rank is (), and whoever runs already goes first.
        """
        match self.policy:
            case "window":
                return self._window()
            case "fcfs":
                return _arrival
            case "shortest" | "latency":
                return _uncached
            case "priority":
                return _priority
            case _:
                return lambda request: ()

    def _window(self) -> Callable[[Request], Rank]:
        window, seconds = self.window, self.gamma * self.pace.seconds_per_token

        def rank(request: Request) -> Rank:
            if request.num_preemptions:
                return request.arrival, request.order
            return request.arrival + min(window, seconds * request.num_uncached), request.order

        return rank


def _arrival(request: Request) -> Rank:
    return (request.order,)


def _priority(request: Request) -> Rank:
    return request.priority, request.order


def _matched(request: Request) -> Rank:
    return not request.num_preemptions, request.num_uncached - request.num_tokens, request.order


def _uncached(request: Request) -> Rank:
    return not request.num_preemptions, request.num_uncached, request.order


class _Subtree:
    """Waiting requests by where their cached prefixes end.

    here      those that end at this very node
    below     the subtrees in which others end
    weight    how many end here or below
    first     the earliest of them in order of arrival, which decides between equal weights
    """

    __slots__ = ("below", "first", "here", "weight")

    def __init__(self) -> None:
        self.here: list[Request] = []
        self.below: list[_Subtree] = []
        self.weight = 0
        self.first = 0


def _sort_depth_first(requests: list[Request]) -> None:
    """Order the whole list by one walk through the part of the tree that the requests match.

    At every node the subtree with the most requests goes first, and whoever matches no further than the node goes last:
    cold requests after all others. Each node on a path is visited once, so it takes O(n log n + nodes).
    """
    requests.sort(key=_arrival)
    preempted = [request for request in requests if request.num_preemptions]
    subtrees: dict[Node, _Subtree] = {}
    top = _Subtree()  # above the roots of all namespaces
    for request in requests:
        if request.num_preemptions:
            continue
        assert request.match is not None
        node: Node = request.match.node
        subtree = subtrees.get(node)
        if subtree is None:
            subtree = subtrees[node] = _Subtree()
            below = subtree
            while node.depth and (parent := node.parent) not in subtrees:
                above = subtrees[parent] = _Subtree()
                above.below.append(below)
                node, below = parent, above
            (subtrees[node.parent] if node.depth else top).below.append(below)
        subtree.here.append(request)
    requests[:] = preempted + _flatten(top)


def _flatten(top: _Subtree) -> list[Request]:
    """Weigh the subtrees, then walk them. Without recursion: a path may be longer than Python's stack."""
    walk = [top]
    for subtree in walk:  # grows as it goes: parents before children
        walk += subtree.below
    for subtree in reversed(walk):
        subtree.weight = len(subtree.here) + sum(child.weight for child in subtree.below)
        orders = [child.first for child in subtree.below] + [request.order for request in subtree.here[:1]]
        subtree.first = min(orders, default=0)
        subtree.below.sort(key=lambda child: (child.weight, -child.first))
    ordered: list[Request] = []
    stack = [top]
    while stack:  # from the back to the front: here, then the lightest subtree, …
        subtree = stack.pop()
        ordered += reversed(subtree.here)
        stack += reversed(subtree.below)
    ordered.reverse()
    return ordered
