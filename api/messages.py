"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

body ──► MessagesRequest ──► ChatRequest ──► as a chat (chat.py) ──► Generation ──► a message, or events
         (messages_protocol.py)                                                    (messages_answer.py)
"""

import uuid

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.api.answer_shapes import AnthropicError, Message, MessageEvent
from trunkline.api.chat import start_chat
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.messages_answer import MessageAnswer
from trunkline.api.messages_errors import PATH, MessageStream
from trunkline.api.messages_protocol import CountTokensRequest, MessagesRequest, renamed
from trunkline.api.openapi import Route
from trunkline.api.prompt import read_chat
from trunkline.api.service import open_json
from trunkline.api.sse import finish_or_disconnect
from trunkline.errors import RequestError


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service, given = await open_json(request)
    body = MessagesRequest.parse(given, strict=service.config.strict_params)
    chat, origins = body.chat(can_think=service.dialect.reasoning is not None)
    answer_id = f"msg_{uuid.uuid4().hex}"
    try:
        started = await start_chat(request, chat, answer_id)
    except RequestError as error:
        raise renamed(error, origins) from None
    generation = started.generation
    answer = MessageAnswer(answer_id, started)
    if body.stream:
        return MessageStream(generation, answer.events(generation), on_error=service.count_failure)
    if not await finish_or_disconnect(generation, request):
        raise ClientDisconnect
    return json_response(await answer.whole(generation))


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt, cached or not."""

    input_tokens: int


async def count_tokens(request: Request) -> Response:
    """How long the prompt of a conversation is."""
    service, given = await open_json(request)
    body = CountTokensRequest.parse(given, strict=service.config.strict_params)
    service.served_model(body.model)
    chat, origins = body.chat(can_think=service.dialect.reasoning is not None)
    try:
        prompt = await read_chat(service.llm, chat, tenant=caller_of(request).tenant, is_sent=False)
    except RequestError as error:
        raise renamed(error, origins) from None
    return json_response(TokenCount(input_tokens=len(prompt.token_ids)))


_EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
ROUTES = (
    Route(
        "POST",
        PATH,
        messages,
        Message,
        (MessagesRequest,),
        event=MessageEvent,
        errors=(AnthropicError,),
        generates=True,
        example={**_EXAMPLE, "max_tokens": 32},
    ),
    Route(
        "POST",
        f"{PATH}/count_tokens",
        count_tokens,
        TokenCount,
        (CountTokensRequest,),
        errors=(AnthropicError,),
        example=_EXAMPLE,
    ),
)
