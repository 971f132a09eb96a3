"""Prompts that are to stay cached for a while: a request's pin is made when its prompt is computed. Token ids only.

    what is asked for      pin_seconds = 600, pin_tokens = 40        the first 40 tokens, for ten minutes from then on
    what is pinned         whole pages: 32 tokens                    (pages of 16)
    what the caller hears  Finished.pinned_tokens = 32, and pin_id

If the tenant's share does not allow it, an ordinary request is served all the same, and nothing is pinned. A request
that only warms the cache (max_tokens = 0) fails with the sentence that says so.
"""

from trunkline.errors import PinRefused
from trunkline.radix.cache import Lease, Match, PrefixCache
from trunkline.scheduler.request import Request
from trunkline.scheduler.tiering import Tiering


def check_pin(cache: PrefixCache, request: Request) -> None:
    """Raises PinRefused if the request is there for its pin alone, and can't get it."""
    if request.warms and not cache.enabled:
        raise PinRefused(
            "Prefix caching is off (--no-enable-prefix-caching), so there is nothing to keep; start without that flag."
        )


def pin_prompt(cache: PrefixCache, tiering: Tiering, request: Request, now: float) -> PinRefused | None:
    """Make the pin that a running request asked for, once its prompt is computed and its whole pages are in the tree.

    With a disk tier it is written there, too: the pin ends with the process, what it held can be found again.

    Returns why not, if the request has failed with that: it wanted nothing else.
    """
    seconds, request.pin_seconds = request.pin_seconds, 0.0
    if seconds <= 0:
        return None
    assert request.lease is not None
    prefix: Lease | Match = request.lease
    if request.pin_tokens is not None and request.pin_tokens < request.num_prompt:
        limit = request.pin_tokens
        prefix = cache.match(request.namespace, bytes(request.tokens), request.num_tokens, limit=limit)
    try:
        request.pin = cache.pin(prefix, now + seconds)
        tiering.keep(request.pin.node)
    except PinRefused as error:
        return error if request.warms else None
    return None
