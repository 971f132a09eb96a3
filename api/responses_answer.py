"""The wire format of a response: in one piece, or as events.

    response.created, response.in_progress, … the items …, response.completed (or incomplete, or failed)

Every event has a sequence_number, from 0 without gaps, and `event:` says its type again. Knows no prompt and no engine.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec

from trunkline.api.answer_shapes import ScoredToken
from trunkline.api.chat import StartedChat
from trunkline.api.generation import Generation
from trunkline.api.responses_items import Item
from trunkline.api.responses_output import Event, OutputItems
from trunkline.api.responses_protocol import ResponsesRequest, in_own_words, own_words
from trunkline.api.sse import EventStream
from trunkline.errors import RequestError

RATE_LIMITED = 429


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. `cache_write_tokens` is always 0: writing into the cache costs nothing here."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's response object. What was not sent has the value that was used in its place."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None

    # Ours
    valid: bool | msgspec.UnsetType | None = msgspec.UNSET
    validation_error: str | msgspec.UnsetType = msgspec.UNSET
    cache_report: Any = msgspec.UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of a response: which of the fields it has, `type` says."""

    type: str
    sequence_number: int
    response: ResponseBody | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ScoredToken] | msgspec.UnsetType = msgspec.UNSET


def response_body(
    wanted: ResponsesRequest, *, response_id: str, model: str, temperature: float, top_p: float
) -> ResponseBody:
    """Of a response that has just begun."""
    text, reasoning = wanted.text, wanted.reasoning
    return ResponseBody(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=wanted.instructions,
        max_output_tokens=wanted.max_output_tokens,
        max_tool_calls=wanted.max_tool_calls,
        metadata=wanted.metadata or {},
        model=model,
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        previous_response_id=wanted.previous_response_id,
        prompt_cache_key=wanted.prompt_cache_key,
        reasoning={
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        safety_identifier=wanted.safety_identifier,
        store=wanted.is_kept,
        temperature=temperature,
        text={
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        tool_choice=wanted.tool_choice or "auto",
        tools=[{"parameters": None, "strict": False, **tool} for tool in wanted.tools or ()],
        top_logprobs=wanted.top_logprobs or 0,
        top_p=top_p,
        truncation=wanted.truncation or "disabled",
        user=wanted.user,
    )


class ResponseAnswer:
    """One response.

    body    as it has begun
    places  where each message of its chat came from: for errors
    keep    is told the response once it has ended, before the client is
    """

    def __init__(
        self,
        body: ResponseBody,
        started: StartedChat,
        *,
        places: Sequence[str],
        keep: Callable[[ResponseBody], None],
    ) -> None:
        self._body = body
        self._started = started
        self._places = places
        self._keep = keep
        self._reader = started.plan.reader()
        self._items = OutputItems(self._reader, started.generation.choices[0])
        self._num_events = 0  # that were written

    async def whole(self) -> ResponseBody:
        """The response in one piece, of a generation that has ended. Raises GrammarBroken."""
        (choice,) = self._started.generation.choices
        self._items.push(self._reader.push(choice.text) + self._reader.finish(choice.finish_reason))
        found = await self._found()
        self._close()
        return self._ended(found)

    async def frames(self) -> AsyncGenerator[Iterable[bytes], None]:
        """Its events, as frames. Raises what ends it early."""
        (choice,) = self._started.generation.choices
        events = self._begin()
        with in_own_words(self._places):
            async for deltas in self._started.generation:
                for delta in deltas:
                    added = self._reader.push(delta.text)
                    if delta.finish_reason is not None:
                        added += self._reader.finish(delta.finish_reason)
                    events += self._items.push(added, delta.logprobs)
                if choice.finished:
                    found = await self._found()
                    events += self._close()
                    body = self._ended(found)
                    events.append(_about(f"response.{body.status}", body))
                yield [self._frame(event) for event in events]
                events = []

    def failed(self, error: RequestError) -> bytes:
        """The event that ends it, if something else was sent before."""
        code = "rate_limit_exceeded" if error.status == RATE_LIMITED else "server_error"
        told = {"code": code, "message": own_words(error.message, self._places)}
        self._items.close(is_cut=True, has_text=False)
        body = msgspec.structs.replace(
            self._body, status="failed", error=told, output=self._items.items, usage=self._usage(0)
        )
        self._keep(body)
        before = self._begin() if self._num_events == 0 else []  # a ping can be all that was sent
        return b"".join(map(self._frame, [*before, _about("response.failed", body)]))

    def _begin(self) -> list[Event]:
        return [_about("response.created", self._body), _about("response.in_progress", self._body)]

    async def _found(self) -> dict[str, Any]:
        """What a text that has ended is found to be. Raises GrammarBroken."""
        (choice,) = self._started.generation.choices
        calls, constrained = self._started.plan.checked_calls(self._reader), self._started.constrained
        return constrained.fields(await constrained.verdict(choice, text=self._reader.content, calls=calls))

    def _close(self) -> list[Event]:
        (choice,) = self._started.generation.choices
        use = self._started.plan.use
        return self._items.close(is_cut=choice.finish_reason == "length", has_text=use is None or not use.is_forced)

    def _ended(self, found: dict[str, Any]) -> ResponseBody:
        generation, reports = self._started.generation, self._started.reports
        (choice,) = generation.choices
        is_cut = choice.finish_reason == "length"
        body = msgspec.structs.replace(
            self._body,
            status="incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=self._items.items,
            usage=self._usage(self._started.plan.reasoning_tokens(choice, self._reader) or 0),
            **found,
            **({} if reports is None else {"cache_report": reports.of(generation)}),
        )
        self._keep(body)
        return body

    def _usage(self, reasoning_tokens: int) -> ResponseUsage:
        usage = self._started.generation.usage
        details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
        if usage.pinned_tokens is not None:
            details["pinned_tokens"] = usage.pinned_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=details,
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": reasoning_tokens},
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def _frame(self, event: Event) -> bytes:
        kind = event["type"]
        event = {"type": kind, "sequence_number": self._num_events, **event}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(event))


def _about(kind: str, body: ResponseBody) -> Event:
    return {"type": kind, "response": body}


class ResponseStream(EventStream):
    """The events of a response. Its own last event is the end."""

    done = b""

    def __init__(
        self, answer: ResponseAnswer, generation: Generation, *, on_error: Callable[[RequestError], None]
    ) -> None:
        super().__init__(generation, answer.frames(), on_error=on_error)
        self._answer = answer

    def error_event(self, error: RequestError) -> bytes:
        return self._answer.failed(error)
