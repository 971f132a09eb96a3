"""Why a prompt was not found in the cache, in words. The engine speaks token ids; here they become text and places in
messages.

    explain(report, prompt, page_size=16).sentence

    48 of the 120 prompt tokens are cached. The nearest cached prompt is the same for 57 tokens; then, at character 40
    of messages[1] (user), it has ' 3rd of May' where this one has ' 4th of May'.

No engine, no HTTP. A report speaks of the caller's own tenant only, so no foreign text can get in here.
"""

from array import array
from collections.abc import Sequence

import msgspec

from trunkline.api.generation import Generation
from trunkline.api.prompt_map import ReadPrompt
from trunkline.errors import shown
from trunkline.messages import CacheReport
from trunkline.models.tokenizer import Tokenizer

SHOWN_TOKENS = 8  # of a difference, on either side

_TIERS = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
_CAUSES = {
    "admission": "was evicted {ago} to make room for another prompt",
    "growth": "was evicted {ago} to make room for what running requests generate",
    "quota": "was evicted {ago} since this tenant had more than its share of the cache (--tenant-cache-share)",
    "flush": "was flushed {ago}",
}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where the nearest cached prompt goes on with other tokens.

    token      how many tokens are the same: the index of the first that differs
    cached     text that is cached from there on; a byte that is no whole character is written as \\xe2
    sent       text of this prompt from there on
    place      where that is, for people; null if the prompt has no messages, or the template rewrites them
    message    index in `messages`; null outside of their text
    document   index in `documents` as they were sent; null outside of their titles and texts
    role       of that message
    character  of that message's or document's text, or title, at which the token begins
    """

    token: int
    cached: str
    sent: str
    place: str | None = None
    message: int | None = None
    document: int | None = None
    role: str | None = None
    character: int | None = None


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a prefix that was cached."""

    seconds_ago: float
    cause: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is cached, and why not more: `reason` as in CacheReport, and `sentence`, which says it."""

    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    reason: str
    sentence: str
    difference: Difference | None = None
    eviction: Eviction | None = None


def explain(report: CacheReport, prompt: ReadPrompt, *, page_size: int) -> Explanation:
    """The report in words.

    prompt     the prompt that the report is about
    page_size  tokens per page
    """
    difference = _difference(report, prompt) if report.position is not None else None
    eviction = None
    if report.seconds_ago is not None:
        eviction = Eviction(seconds_ago=round(report.seconds_ago, 6), cause=report.cause)
    return Explanation(
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        cached_by_tier=report.cached_by_tier,
        reason=report.reason,
        sentence=_sentence(report, difference, page_size),
        difference=difference,
        eviction=eviction,
    )


class CacheReports:
    """The reports on the prompts of one request.

    prompts    in the order of the request
    page_size  tokens per page
    """

    def __init__(self, prompts: Sequence[ReadPrompt], page_size: int) -> None:
        self._prompts = prompts
        self._page_size = page_size

    def of(self, generation: Generation) -> Explanation | list[Explanation | None] | None:
        """One explanation, or of several prompts a list of them. None where the engine has not told."""
        explanations = [
            explain(report, prompt, page_size=self._page_size) if report else None
            for report, prompt in zip(generation.cache_reports, self._prompts, strict=True)
        ]
        return explanations[0] if len(explanations) == 1 else explanations


def readable(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of tokens from the middle of a prompt, special ones included; a byte that is no whole character as \\xe2."""
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "backslashreplace")


def ids_of(tokens: bytes) -> list[int]:
    """Token ids of the engine's int32 bytes."""
    return array("i", tokens).tolist()


def ago(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 1:
        return "less than a second ago"
    for unit, length in (("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= (2 * length if length > 1 else 1):
            number = int(seconds / length)
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    raise AssertionError("at least a second")


def _difference(report: CacheReport, prompt: ReadPrompt) -> Difference:
    assert report.position is not None
    place = prompt.place(report.position)
    source = place.source if place else None
    return Difference(
        token=report.position,
        cached=readable(ids_of(report.expected)[:SHOWN_TOKENS], prompt.tokenizer),
        sent=readable(prompt.token_ids[report.position : report.position + SHOWN_TOKENS], prompt.tokenizer),
        place=place.words if place else None,
        message=source.message if source else None,
        document=source.document if source else None,
        role=source.role if source else None,
        character=place.character if place and source else None,
    )


def _sentence(report: CacheReport, difference: Difference | None, page_size: int) -> str:
    match report.reason:
        case "disabled":
            return f"Prefix caching is off (--no-enable-prefix-caching): {_all_of(report)} computed."
        case "prompt_logprobs":
            return (
                f"The log-probabilities of the prompt are wanted, and the cache holds none: {_all_of(report)} computed."
            )
        case "pooling":
            return f"The mean of all hidden states is wanted, and the cache holds none: {_all_of(report)} computed."
        case "complete" if report.cached_tokens == report.prompt_tokens:
            return f"{_found(report)}."
        case "complete":
            return (
                f"{_found(report)}, which is all that can be: whole pages of {page_size} tokens that end before the last prompt"
                " token, which is always computed."
            )
        case "short":
            return f"{_found(report)}, and can't be: only whole pages of {page_size} tokens that end before the last one are kept."
        case "differs":
            return f"{_found(report)}. {_differs(difference)}"
        case "evicted":
            words = _CAUSES.get(report.cause, "was evicted {ago}").format(ago=ago(report.seconds_ago or 0.0))
            return f"{_found(report)}. {_next_page(report)} {words}."
        case "computing":
            return f"{_found(report)}. {_next_page(report)} is being computed by another request right now."
        case "namespace":
            return f"{_found(report)}. {_next_page(report)} is cached under another cache_salt or adapter, and these never share."
    if report.cached_tokens:
        return f"{_found(report)}. What comes after them was not read here before, or too long ago to remember."
    return f"{_found(report)}. Nothing that begins like this was read here before, or it is too long ago to remember."


def _all_of(report: CacheReport) -> str:
    num = report.prompt_tokens
    return "the prompt's one token is" if num == 1 else f"all {num} prompt tokens are"


def _found(report: CacheReport) -> str:
    num, num_all = report.cached_tokens, report.prompt_tokens
    if num == 0:
        return (
            "The prompt's one token is not cached" if num_all == 1 else f"None of the {num_all} prompt tokens is cached"
        )
    where = ""
    if report.cached_by_tier.keys() - {"device"}:
        where = f" ({', '.join(f'{n} {_TIERS.get(tier, tier)}' for tier, n in report.cached_by_tier.items())})"
    return f"{num} of the {num_all} prompt tokens {'is' if num == 1 else 'are'} cached{where}"


def _next_page(report: CacheReport) -> str:
    return "What comes after them" if report.cached_tokens else "The beginning"


def _differs(difference: Difference | None) -> str:
    assert difference is not None, "a difference has a position"
    same = "token" if difference.token == 1 else "tokens"
    place = ""
    if difference.place is not None:
        place = f", {'in' if difference.character is None else 'at'} {difference.place},"
    return (
        f"The nearest cached prompt is the same for {difference.token} {same}; then{place} it has {shown(difference.cached)}"
        f" where this one has {shown(difference.sent)}."
    )
