"""POST /v1/chat/completions.

    body ──► ChatRequest ──► template ──► token ids ──► engine ──► deltas ──► one answer, or chunks

Start reading here to follow a request through Trunkline: next come api/client.py and trunkline/messages.py.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import trunkline
from trunkline.api.body import read_json
from trunkline.api.errors import json_response
from trunkline.api.generation import Delta, Generation, Usage
from trunkline.api.protocol import ChatRequest
from trunkline.api.service import Service
from trunkline.api.sse import EventStream, finish_or_disconnect
from trunkline.api.template import ChatTemplate
from trunkline.errors import InvalidParameter
from trunkline.outputs import Candidate, PositionLogprobs

FINGERPRINT = f"trunkline-{trunkline.__version__}"


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_ready()
    chat = ChatRequest.parse(await read_json(request, service.config.max_body_bytes))
    model = service.served_model(chat.model)
    sampling = chat.sampling(service.sampling_defaults)
    if service.llm.template is None:
        raise InvalidParameter("The model has no chat template; use /v1/completions, or serve it with --chat-template.")
    token_ids = await service.llm.encode(
        render(service.llm.template, chat), add_special_tokens=bool(chat.add_special_tokens), what="messages"
    )
    answer = ChatAnswer(chat, model, f"chatcmpl-{uuid.uuid4().hex}")
    generation = service.llm.submit(
        [token_ids],
        sampling,
        request_id=answer.id,
        priority=chat.priority or 0,
        salt=chat.cache_salt or "",
        what="messages",
        observer=service.observe(),
    )
    if chat.stream:
        return EventStream(generation, answer.chunks(generation), on_error=service.count_failure)
    if not await finish_or_disconnect(generation, request.receive):
        raise ClientDisconnect
    return json_response(answer.whole(generation))


def render(template: ChatTemplate, chat: ChatRequest) -> str:
    """The prompt. A template that refuses several system messages, or one that is not the first, gets one in front."""
    messages = chat.conversation()
    continued = bool(chat.continue_final_message)
    options: dict[str, Any] = {
        "add_generation_prompt": not continued if chat.add_generation_prompt is None else chat.add_generation_prompt,
        "continue_final_message": continued,
        "tools": chat.tools,
        "chat_template_kwargs": chat.chat_template_kwargs,
    }
    try:
        return template.render(messages, **options)
    except InvalidParameter:
        merged = _system_in_front(messages)
        if merged == messages:
            raise
        return template.render(merged, **options)


def _system_in_front(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [message for message in messages if message["role"] in ("system", "developer")]
    if not system or not all(isinstance(message["content"], str) for message in system):
        return messages
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(message["content"] for message in system)}, *others]


class ChatAnswer:
    """The wire format of one answer. What every chunk has in common is encoded once."""

    def __init__(self, chat: ChatRequest, model: str, answer_id: str) -> None:
        self.id = answer_id
        self._chat = chat
        self._common = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        common = msgspec.json.encode({**self._common, "object": "chat.completion.chunk"})
        self._head = b"data: " + common[:-1] + b',"choices":['
        self._with_logprobs = bool(chat.logprobs)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for choice in generation.choices:
            body: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._chat.return_token_ids:
                body["token_ids"] = choice.token_ids
            choices.append(body)
        answer = {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_body(generation.usage),
        }
        if self._chat.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0]
        return answer

    async def chunks(self, generation: Generation) -> AsyncGenerator[Iterable[bytes], None]:
        """Frames: the role of each choice, its text, its end, and at last the usage if asked for."""
        opening: list[bytes] = []
        for choice in generation.choices:
            extra = b""
            if self._chat.return_token_ids and choice.index == 0:
                extra = b',"prompt_token_ids":' + msgspec.json.encode(generation.prompts[0])
            opening.append(
                self._frame(generation, choice.index, b'{"role":"assistant","content":""}', b"null", b"null", extra)
            )
        async for deltas in generation:
            frames = opening
            for delta in deltas:
                frames += self._of(generation, delta)
            yield frames
            opening = []
        if self._chat.includes_usage:
            yield [self._head + b'],"usage":' + msgspec.json.encode(usage_body(generation.usage)) + b"}\n\n"]

    def _of(self, generation: Generation, delta: Delta) -> list[bytes]:
        """Chunks of what was added: the text, and the end in a chunk of its own."""
        frames = []
        if delta.text or delta.logprobs or (self._chat.return_token_ids and delta.token_ids):
            logprobs = b"null"
            if self._with_logprobs and delta.logprobs is not None:
                logprobs = msgspec.json.encode(chat_logprobs(delta.logprobs))
            content = b'{"content":' + msgspec.json.encode(delta.text) + b"}"
            frames.append(self._frame(generation, delta.index, content, logprobs, b"null", b"", delta))
        if delta.finish_reason is not None:
            reason = msgspec.json.encode(delta.finish_reason)
            stop = b',"stop_reason":' + msgspec.json.encode(delta.stop_reason)
            frames.append(self._frame(generation, delta.index, b"{}", b"null", reason + stop))
        return frames

    def _frame(
        self,
        generation: Generation,
        index: int,
        delta: bytes,
        logprobs: bytes,
        finish_reason: bytes,
        extra: bytes = b"",
        gained: Delta | None = None,
    ) -> bytes:
        """One chunk of one choice, from parts that are JSON already."""
        token_ids = b""
        if gained is not None and self._chat.return_token_ids:
            token_ids = b',"token_ids":' + msgspec.json.encode(gained.token_ids)
        usage = b""
        if self._chat.continuous_usage:
            usage = b',"usage":' + msgspec.json.encode(usage_body(generation.usage))
        elif self._chat.includes_usage:
            usage = b',"usage":null'
        return b"".join(
            (
                self._head,
                b'{"index":%d,"delta":' % index,
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish_reason,
                token_ids,
                b"}]",
                usage,
                extra,
                b"}\n\n",
            )
        )


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`; the cached tokens always."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """One entry per token; `top_logprobs` sorted, likeliest first."""
    return {
        "content": [
            {**_scored(position.chosen), "top_logprobs": [_scored(candidate) for candidate in position.top]}
            for position in positions
        ],
        "refusal": None,
    }


def _scored(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": candidate.text,
        "logprob": candidate.logprob,
        "bytes": list(candidate.data),
    }
