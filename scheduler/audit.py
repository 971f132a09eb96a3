"""What is true of a scheduler between any two calls. Looks, and changes nothing."""

from trunkline.radix.cache import PrefixCache
from trunkline.scheduler.request import Request, State


def audit_request(request: Request, page_size: int) -> None:
    """Raise AssertionError if what a request says of its tokens, its pages and its text does not fit together."""
    name = request.request_id
    held = request.lease is not None and not request.lease.released
    assert held == (request.state is State.RUNNING), f"{name} is {request.state} with lease {request.lease}"
    assert (request.match is not None) == (request.state is State.WAITING), f"{name}: no look-up"
    assert request.num_computed <= request.num_planned <= request.num_tokens + request.num_in_flight
    if request.lease is not None:
        shared, room = (n * page_size for n in (request.lease.num_shared, request.lease.num_pages))
        assert shared <= request.num_computed and request.num_planned <= room, (
            f"{name} has {shared} tokens shared, {request.num_computed} computed, {request.num_planned} planned,"
            f" and pages for {room}"
        )
    if request.awaits_grammar:
        assert request.num_planned < request.num_prompt and not request.num_output, (
            f"{name} did not wait for its grammar"
        )
    if request.text is not None:
        assert request.text.num_tokens == request.num_output, (
            f"{name} has {request.num_output} tokens of output, and its grammar took {request.text.num_tokens}"
        )


def audit_idle(cache: PrefixCache) -> None:
    """Raise AssertionError if pages are held though nobody is there to hold them."""
    stats = cache.stats()
    pages = (stats.leased, stats.tree_locked - stats.pinned, stats.in_flight)
    assert pages == (0, 0, 0), f"idle, yet pages are held: {stats}"
