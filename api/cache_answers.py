"""What the routes of the cache and the queue answer: the shapes, for OpenAPI too, made from the engine's replies.

The engine speaks token ids; here they become text. What it tells beyond these fields is left out.
"""

from typing import Any

import msgspec

from trunkline.api.cache_report import ids_of, readable
from trunkline.models.tokenizer import Tokenizer

DIGITS = 6  # of seconds and rates


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would find, and how long its first token would take, if it came now.

    tokens_to_compute      of the prompt
    expected_ttft_seconds  the two that follow, together; null until the engine has measured its speed, as they are then
    queue_seconds          until it is admitted
    prefill_seconds        from there to its first token
    """

    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    tokens_to_compute: int
    expected_ttft_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are cached, and what came of it.

    text                  the first 64 of them, and "…" if there are more; a byte that is no whole character is written
                          as \\xe2
    references            running requests that use it
    hits                  requests that found it cached
    tokens_saved          hits times num_tokens
    last_use_seconds_ago  since it was last found, or else computed
    copies                the tiers behind `tier` that have its end, too
    """

    text: str
    num_tokens: int
    references: int
    hits: int
    tokens_saved: int
    last_use_seconds_ago: float
    tier: str
    copies: list[str]
    pinned: bool


class TreeNode(Cached, frozen=True, kw_only=True):
    """A run of cached tokens, which continues that of the node above.

    left_out  children that are not shown
    """

    children: list["TreeNode"]
    left_out: int


class TreeRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a tree is: what one tenant has cached under one cache_salt and adapter."""

    tenant: str
    cache_salt: str
    adapter: str
    children: list[TreeNode]
    left_out: int


class TopPrefix(Cached, frozen=True, kw_only=True):
    """Everything from the first token of a prompt to the end of a node; hits and so on are that node's.

    ends_with  the last 64 tokens, behind "…" if there are more
    """

    tenant: str
    cache_salt: str
    adapter: str
    ends_with: str


class ReusePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Of all prompt tokens that came, `hit_rate` would have been found by a cache of `num_tokens`, `times` the memory
    there is."""

    times: float
    num_tokens: int
    hit_rate: float


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix tree.

    top          prefixes that saved most
    reuse_curve  what less and more memory would have brought; for all tenants together only
    """

    namespaces: list[TreeRoot]
    top: list[TopPrefix]
    reuse_curve: list[ReusePoint]


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is computed and stays cached.

    id             of the pin
    pinned_tokens  of the prompt: its whole pages
    expires_at     Unix time, seconds
    """

    id: int | None
    cache_salt: str
    pinned_tokens: int
    prompt_tokens: int
    cached_tokens: int
    expires_in_seconds: float
    expires_at: float


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that stays cached until it expires; text and ends_with as of a top prefix."""

    id: int
    tenant: str
    cache_salt: str
    text: str
    ends_with: str
    pinned_tokens: int
    expires_in_seconds: float
    expires_at: float


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first."""

    data: list[Pin]
    object: str = "list"


class PinDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What it held stays cached as long as the place is not needed."""

    id: int
    deleted: bool = True


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What left the device, and the tiers behind it. What running requests use stays, and so does what is pinned."""

    flushed_pages: int
    flushed_tokens: int
    flushed_tier_pages: int


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Whose cache and turns are whose.

    tenant         its name; the log shows the first 8 characters, which name it, too
    keys           whose keys stand for it, by the flags and their places: "--api-key 2" is the second of --api-key
    is_own         True: the key of this request is one of them
    cached_tokens  in the tree, on the device
    requests       that run or wait
    """

    tenant: str
    keys: list[str]
    is_own: bool
    cached_tokens: int
    requests: int


class Tenants(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of the keys."""

    data: list[Tenant]
    object: str = "list"


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the queue. seconds: how long already; why: what it waits for."""

    request_id: str
    tenant: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    why: str


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the batch.

    seconds                 since it arrived
    queue_seconds           from then until it was admitted
    prompt_tokens_computed  those that were cached count, too
    """

    request_id: str
    tenant: str
    seconds: float
    queue_seconds: float
    prompt_tokens: int
    cached_tokens: int
    prompt_tokens_computed: int
    generated_tokens: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they will be admitted, as it looks now."""

    waiting: list[Waiting]
    running: list[Running]


def tree_of(reply: dict[str, Any], tokenizer: Tokenizer) -> Tree:
    """The engine's reply to the call "tree", with text in the place of tokens."""
    roots = [
        {**root, "cache_salt": root["salt"], "children": _children(root, tokenizer)} for root in reply["namespaces"]
    ]
    top = [_with_text(prefix, tokenizer) for prefix in reply["top"]]
    return msgspec.convert({**reply, "namespaces": roots, "top": top}, Tree)


def _children(entry: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [{**_with_text(child, tokenizer), "children": _children(child, tokenizer)} for child in entry["children"]]


def pins_of(reply: list[dict[str, Any]], tokenizer: Tokenizer, now: float) -> Pins:
    """The engine's reply to the call "pins". now: Unix time, seconds."""
    pins = [
        _with_text(pin, tokenizer)
        | {"pinned_tokens": pin["num_tokens"], "expires_at": round(now + pin["expires_in_seconds"], DIGITS)}
        for pin in reply
    ]
    return Pins(data=msgspec.convert(pins, list[Pin]))


def rounded(reply: Any) -> Any:
    """With all floats to DIGITS: seconds to microseconds."""
    match reply:
        case float():
            return round(reply, DIGITS)
        case dict():
            return {name: rounded(value) for name, value in reply.items()}
        case list():
            return [rounded(value) for value in reply]
    return reply


def _with_text(entry: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    first = ids_of(entry["tokens"])
    cut = "…" if entry["num_tokens"] > len(first) else ""
    told = {**entry, "text": readable(first, tokenizer) + cut}
    if "ends_with" in entry:
        told["ends_with"] = cut + readable(ids_of(entry["ends_with"]), tokenizer)
    if "salt" in entry:
        told["cache_salt"] = entry["salt"]
    return told
