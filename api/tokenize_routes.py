"""POST /tokenize and /detokenize: the tokens of a text or of a conversation, and the text of tokens. Shapes as in vLLM.

    {"messages": […]} ──► the prompt that a chat would have ──► {"count": 35, "max_model_len": 8192, "tokens": [1, 9690, …]}
    {"tokens": […]}   ──► {"prompt": "<|im_start|>user…"}

Nothing is generated. Both also lie under /v1.
"""

import asyncio
from typing import Any, Self

import msgspec
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.fields import is_chat, treat_unknown, validated
from trunkline.api.openapi import Route
from trunkline.api.prompt import read_chat
from trunkline.api.protocol import ChatRequest, TokenIds
from trunkline.api.service import open_json
from trunkline.errors import InvalidParameter

MANY_TOKENS = 5_000  # their text is put together in a thread, so that other requests' tokens keep flowing meanwhile


class _PlainRequest(BaseModel):
    """A body that is no conversation."""

    model_config = ConfigDict(strict=True)

    model: str | None = None

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        """Raises InvalidParameter, naming the parameter."""
        parsed = validated(cls, body)
        treat_unknown(body.keys() - cls.model_fields.keys(), cls.model_fields, strict=strict)
        return parsed


class TokenizeTextRequest(_PlainRequest):
    """A text, as /v1/completions reads it."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation, as /v1/chat/completions reads it, with any of its fields."""

    return_token_strs: bool | None = None


class DetokenizeRequest(_PlainRequest):
    """Token ids of the model."""

    tokens: TokenIds


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt.

    count          how many
    max_model_len  how many the model can read and write in one request
    tokens         their ids
    token_strs     the text of each, as lists of log-probabilities show it; null if nobody asked
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, special ones included; bytes that are no UTF-8 are U+FFFD."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation's prompt."""
    service, body = await open_json(request)
    asked: TokenizeChatRequest | TokenizeTextRequest
    if is_chat(body):
        asked = TokenizeChatRequest.parse(body, strict=service.config.strict_params)
        service.served_model(asked.model)
        token_ids = (await read_chat(service.llm, asked, tenant=caller_of(request).tenant, is_sent=False)).token_ids
    else:
        asked = TokenizeTextRequest.parse(body, strict=service.config.strict_params)
        service.served_model(asked.model)
        token_ids = await service.llm.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    assert service.llm.ready is not None, "it was ready a moment ago"
    token_text = service.llm.tokenizer.token_text
    return json_response(
        Tokenized(
            count=len(token_ids),
            max_model_len=service.llm.ready.max_model_len,
            tokens=token_ids,
            token_strs=[token_text(token_id) for token_id in token_ids] if asked.return_token_strs else None,
        )
    )


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    service, body = await open_json(request)
    asked = DetokenizeRequest.parse(body, strict=service.config.strict_params)
    service.served_model(asked.model)
    assert service.llm.ready is not None, "it was ready a moment ago"
    vocab_size = service.llm.ready.vocab_size
    if (largest := max(asked.tokens, default=0)) >= vocab_size:
        raise InvalidParameter.of("tokens", largest, f"token ids from 0 to {vocab_size - 1}")
    decode = service.llm.tokenizer.decode
    if len(asked.tokens) < MANY_TOKENS:
        text = decode(asked.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(decode, asked.tokens, skip_special_tokens=False)
    return json_response(Detokenized(prompt=text))


ROUTES = tuple(
    route
    for prefix in ("", "/v1")
    for route in (
        Route("POST", f"{prefix}/tokenize", tokenize, Tokenized, (TokenizeTextRequest, TokenizeChatRequest)),
        Route("POST", f"{prefix}/detokenize", detokenize, Detokenized, (DetokenizeRequest,)),
    )
)
