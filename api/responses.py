"""OpenAI's Responses API: a translation into a chat, and a store of what was answered.

POST   /v1/responses                   body ──► ResponsesRequest ──► items ──► ChatRequest ──► start_chat ──► events
GET    /v1/responses/{id}              one that was kept
DELETE /v1/responses/{id}              no longer
POST   /v1/responses/{id}/cancel       refused: nothing is made in the background
GET    /v1/responses/{id}/input_items  what was sent for it
"""

import uuid
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.api.cache_protocol import query_number
from trunkline.api.chat import StartedChat, start_chat
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.response_store import ResponseStore
from trunkline.api.responses_answer import (
    ResponseAnswer,
    ResponseBody,
    ResponseEvent,
    ResponseStream,
    response_body,
)
from trunkline.api.responses_items import Conversation, Item, Placed, converse, read_input
from trunkline.api.responses_protocol import ResponsesRequest, in_own_words
from trunkline.api.service import Service, open_json
from trunkline.api.sse import finish_or_disconnect
from trunkline.errors import ContextLengthExceeded, InvalidParameter

MAX_LISTED, DEFAULT_LISTED = 100, 20  # items of one page
MAX_TRIES = 8  # to find out how much of a conversation fits
KEPT_SHARE = 0.75  # of the context, that a conversation has once something of it must go: the rest is room to go on
DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 1.0, 1.0  # of SamplingParams


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """One that is kept no longer."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, frozen=True, kw_only=True):
    """A page of what was sent for a response, without what that continues."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def create_response(request: Request) -> Response:
    """Answer."""
    service, given = await open_json(request)
    wanted = ResponsesRequest.parse(given, strict=service.config.strict_params)
    owner, response_id = caller_of(request).owner, f"resp_{uuid.uuid4().hex}"
    items = read_input(wanted.input)
    conversation = converse(wanted.instructions, [*_history(service, owner, wanted), *_placed(wanted, items)])
    with in_own_words(conversation.places):
        started, conversation = await _start(request, wanted, conversation, response_id)
    body = response_body(
        wanted,
        response_id=response_id,
        model=started.model,
        temperature=_used(service, "temperature", wanted.temperature, DEFAULT_TEMPERATURE),
        top_p=_used(service, "top_p", wanted.top_p, DEFAULT_TOP_P),
    )
    keep = partial(_keep, service.responses, owner, items)
    answer = ResponseAnswer(body, started, places=conversation.places, keep=keep)
    if wanted.stream:
        return ResponseStream(answer, started.generation, on_error=service.count_failure)
    with in_own_words(conversation.places):
        if not await finish_or_disconnect(started.generation, request):
            raise ClientDisconnect
        return json_response(await answer.whole())


async def get_response(request: Request) -> Response:
    """One that was kept."""
    service: Service = request.app.state.service
    if (stream := request.query_params.get("stream", "false")) != "false":
        raise InvalidParameter.of("stream", stream, "false: a response that has ended is read in one piece")
    kept = service.responses.get(caller_of(request).owner, request.path_params["response_id"])
    return Response(kept.response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Keep it no longer. What continues it, can't be continued any more."""
    service: Service = request.app.state.service
    response_id = request.path_params["response_id"]
    service.responses.delete(caller_of(request).owner, response_id)
    return json_response(ResponseDeleted(id=response_id))


async def cancel_response(request: Request) -> Response:
    """Refused, as OpenAI refuses it for a response that is not made in the background: none is here."""
    service: Service = request.app.state.service
    caller, response_id = caller_of(request), request.path_params["response_id"]
    if not service.running.holds(response_id, caller):
        service.responses.get(caller.owner, response_id)  # or it is not found
    raise InvalidParameter(
        "Cannot cancel a synchronous response: only those with 'background' true can be, which this server does not make. End the"
        " stream by closing its connection; or send the id to POST /v1/requests/{id}/cancel while it runs.",
        param="response_id",
    )


async def list_input_items(request: Request) -> Response:
    """What was sent for a response; without an `order`, the last item first."""
    service: Service = request.app.state.service
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter.of("order", order, '"asc" or "desc"')
    limit = query_number(request, "limit", default=DEFAULT_LISTED, least=1, most=MAX_LISTED)
    kept = service.responses.get(caller_of(request).owner, request.path_params["response_id"])
    items: list[Item] = msgspec.json.decode(kept.items)
    if order == "desc":
        items.reverse()
    if (after := request.query_params.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidParameter.of("after", after, "the id of an input item of this response")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > limit))


def _history(service: Service, owner: str, wanted: ResponsesRequest) -> list[Placed]:
    """Items of what the request continues. Instructions are none of them."""
    if wanted.previous_response_id is None:
        return []
    chain = service.responses.chain(owner, wanted.previous_response_id, max_bytes=service.config.max_body_bytes)
    items: list[Item] = []
    for kept in chain:
        items += msgspec.json.decode(kept.items)
        items += msgspec.json.decode(kept.response)["output"]
    return [Placed("previous_response_id", item) for item in items]


def _placed(wanted: ResponsesRequest, items: list[Item]) -> list[Placed]:
    if isinstance(wanted.input, str):
        return [Placed("input", item) for item in items]
    return [Placed(f"input[{index}]", item) for index, item in enumerate(items)]


async def _start(
    request: Request, wanted: ResponsesRequest, conversation: Conversation, response_id: str
) -> tuple[StartedChat, Conversation]:
    """Send it to the engine; with `truncation` "auto", without its oldest turns if it is too long."""
    for _ in range(MAX_TRIES):
        try:
            return await start_chat(request, wanted.chat(conversation), response_id), conversation
        except ContextLengthExceeded as error:
            shorter = _without_oldest(conversation, KEPT_SHARE * error.limit / error.seen)
            if wanted.truncation != "auto" or shorter is None:
                raise
            conversation = shorter
    return await start_chat(request, wanted.chat(conversation), response_id), conversation


def _without_oldest(conversation: Conversation, share: float) -> Conversation | None:
    """Without its oldest turns, so that about this share of its text is left. A turn begins with a message of the user; the
    last one stays, and so do system messages. None: there is nothing that can go."""
    messages = conversation.messages
    begins = [index for index, message in enumerate(messages) if message["role"] == "user"]
    sizes = [len(str(message)) for message in messages]
    excess = (1 - share) * sum(sizes)
    gone: set[int] = set()
    for begin in begins[1:]:
        if excess <= 0:
            break
        turn = {at for at in range(begin) if messages[at]["role"] not in ("system", "developer")} - gone
        excess -= sum(sizes[at] for at in turn)
        gone |= turn
    if not gone:
        return None
    left = [at for at in range(len(messages)) if at not in gone]
    return Conversation([messages[at] for at in left], [conversation.places[at] for at in left])


def _used(service: Service, name: str, given: float | None, otherwise: float) -> float:
    default: float = service.sampling_defaults.get(name, otherwise)
    return default if given is None else given


def _keep(store: ResponseStore, owner: str, items: list[Item], body: ResponseBody) -> None:
    if body.store:
        store.put(
            owner,
            body.id,
            response=msgspec.json.encode(body),
            items=msgspec.json.encode(items),
            previous=body.previous_response_id,
        )


_ONE = "/v1/responses/{response_id}"
ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        ResponseBody,
        (ResponsesRequest,),
        event=ResponseEvent,
        generates=True,
        example={"input": "What is the capital of France?", "max_output_tokens": 32},
    ),
    Route("GET", _ONE, get_response, ResponseBody, query=(("stream", "false, the default; it is not streamed again"),)),
    Route("DELETE", _ONE, delete_response, ResponseDeleted),
    Route("POST", f"{_ONE}/cancel", cancel_response, ResponseBody, statuses=(400,)),
    Route(
        "GET",
        f"{_ONE}/input_items",
        list_input_items,
        InputItems,
        query=(
            ("after", "the item before the page"),
            ("limit", f"1 to {MAX_LISTED} items, {DEFAULT_LISTED} by default"),
            ("order", "asc or desc, which is the default"),
        ),
    ),
)
