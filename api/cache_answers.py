"""What the routes of the cache and the queue answer: the shapes, which OpenAPI shows too, made from the engine's replies.

The engine speaks token ids; here they become text. What it tells beyond these fields is left out.
"""

from typing import Any

import msgspec

from trunkline.api.cache_report import ids_of, readable
from trunkline.models.tokenizer import Tokenizer


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


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of cached tokens, which continues that of the node above.

    text                  the first of its tokens; a byte that is no whole character is written as \\xe2
    references            running requests that use it
    hits                  requests that found it cached
    tokens_saved          hits times num_tokens
    last_use_seconds_ago  since it was last found, or else computed
    left_out              children that are not shown
    """

    text: str
    num_tokens: int
    references: int
    hits: int
    tokens_saved: int
    last_use_seconds_ago: float
    tier: str
    pinned: bool
    children: list["TreeNode"]
    left_out: int


class TreeRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a tree is: what one tenant has cached under one salt and adapter."""

    tenant: str
    salt: str
    adapter: str
    children: list[TreeNode]
    left_out: int


class TopPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Everything from the first token of a prompt to the end of a node; fields as of a node."""

    tenant: str
    salt: str
    adapter: str
    text: str
    ends_with: str
    num_tokens: int
    references: int
    hits: int
    tokens_saved: int
    last_use_seconds_ago: float
    tier: str
    pinned: bool


class ReusePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Of all prompt tokens that came, `hit_rate` would have been found by a cache of `num_tokens`, `times` the memory there is."""

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
    """A prompt that is computed and stays cached. id: of the pin. expires_at: Unix time, seconds."""

    id: int | None
    pinned_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttl: int
    expires_at: float


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that stays cached until it expires."""

    id: int
    tenant: str
    salt: str
    num_tokens: int
    expires_in_seconds: float


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


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the queue. seconds: how long already; why: what it waits for."""

    request_id: str
    tenant: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    why: str


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the batch. seconds: since it arrived; prompt_tokens_computed: those that were cached count, too."""

    request_id: str
    tenant: str
    seconds: float
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
    roots = [{**root, "children": _children(root, tokenizer)} for root in reply["namespaces"]]
    top = [{**_with_text(prefix, tokenizer)} for prefix in reply["top"]]
    return msgspec.convert({**reply, "namespaces": roots, "top": top}, Tree)


def _children(entry: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [{**_with_text(child, tokenizer), "children": _children(child, tokenizer)} for child in entry["children"]]


def _with_text(entry: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    texts = {"text": readable(ids_of(entry["tokens"]), tokenizer)}
    if "ends_with" in entry:
        texts["ends_with"] = readable(ids_of(entry["ends_with"]), tokenizer)
    return {**entry, **texts}
