"""Preemption: who gives its pages back when those that run need more than there are. Decides, and changes nothing."""

from collections.abc import Callable

from trunkline.scheduler.request import Request

# A request preempted this often is no longer chosen as a victim while another can be.
MAX_PREEMPTIONS = 3

Urgency = tuple[int, int]  # priority, order of arrival: smaller is more urgent


def choose_victim(
    running: list[Request], needy: Request, urgency: Callable[[Request], Urgency], window: float, page_size: int
) -> Request:
    """Whom to preempt so that `needy`, one of `running`, can go on; `needy` itself if there is nobody else.

    1. Of those less urgent than `needy`: the one that loses least work, among those of the lowest priority that arrived
       less than `window` seconds before the latest of them. Within the window the order is free to serve the whole.
    2. Nobody is: itself. So the most urgent request always goes on.
    3. Who was preempted often enough is left out, as long as any other can go: even a more urgent one.
    """
    spared = [request for request in running if request.num_preemptions >= MAX_PREEMPTIONS]
    may_go = [request for request in running if request not in spared]
    less_urgent = [request for request in may_go if urgency(request) > urgency(needy)]
    if less_urgent:  # (1)
        last = max(less_urgent, key=urgency)
        equals = [
            request
            for request in less_urgent
            if urgency(request)[0] == urgency(last)[0] and request.arrival > last.arrival - window
        ]
        return min(equals or [last], key=lambda request: (num_lost(request, page_size), -request.order))
    return max(may_go or spared, key=urgency)  # (2), (3)


def num_lost(request: Request, page_size: int) -> int:
    """Computed tokens that are not sure to be found again: all but the pages that others hold, too."""
    lease = request.lease
    if lease is None:
        return 0
    node = lease.node
    while node.depth and node.locks == 1:  # held by this request alone
        node = node.parent
    return request.num_computed - node.depth * page_size
