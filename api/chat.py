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
from trunkline.api.cache_report import CacheReports
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.generation import Delta, Generation, Usage
from trunkline.api.prompt import read_chat
from trunkline.api.protocol import ChatRequest
from trunkline.api.service import Service
from trunkline.api.sse import EventStream, finish_or_disconnect
from trunkline.outputs import Candidate, PositionLogprobs

FINGERPRINT = f"trunkline-{trunkline.__version__}"


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_ready()
    chat = ChatRequest.parse(await read_json(request, service.config.max_body_bytes))
    model = service.served_model(chat.model)
    sampling, pin, caller = chat.sampling(service.sampling_defaults), chat.pin(), caller_of(request)
    prompt = await read_chat(service.llm, chat, tenant=caller.tenant)
    reports = CacheReports([prompt], service.page_size) if chat.cache_report else None
    answer = ChatAnswer(chat, model, f"chatcmpl-{uuid.uuid4().hex}", reports, prompt.documents_order)
    generation = service.llm.submit(
        [prompt.token_ids],
        sampling,
        request_id=answer.id,
        priority=chat.priority or 0,
        tenant=caller.tenant,
        salt=chat.cache_salt or "",
        pin_seconds=pin.seconds if pin else 0.0,
        pin_tokens=prompt.num_tokens_until(pin.message) if pin and pin.message is not None else None,
        what="messages",
        observer=service.observe(request, answer.id),
    )
    if chat.stream:
        return EventStream(generation, answer.chunks(generation), on_error=service.count_failure)
    if not await finish_or_disconnect(generation, request.receive):
        raise ClientDisconnect
    return json_response(answer.whole(generation))


class ChatAnswer:
    """The wire format of one answer. What every chunk has in common is encoded once.

    reports          explains what was cached; None: nobody asked
    documents_order  in which the prompt shows the request's documents; None: it has none
    """

    def __init__(
        self,
        chat: ChatRequest,
        model: str,
        answer_id: str,
        reports: CacheReports | None = None,
        documents_order: list[int] | None = None,
    ) -> None:
        self.id = answer_id
        self._chat = chat
        self._reports = reports
        self._documents_order = documents_order
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
        if self._documents_order is not None:
            answer["documents_order"] = self._documents_order
        if self._reports is not None:
            answer["cache_report"] = self._reports.of(generation)
        return answer

    async def chunks(self, generation: Generation) -> AsyncGenerator[Iterable[bytes], None]:
        """Frames: the role of each choice, its text, its end, and at last usage and cache report if asked for."""
        opening: list[bytes] = []
        for choice in generation.choices:
            extra = b""
            if choice.index == 0 and self._documents_order is not None:
                extra += b',"documents_order":' + msgspec.json.encode(self._documents_order)
            if choice.index == 0 and self._chat.return_token_ids:
                extra += b',"prompt_token_ids":' + msgspec.json.encode(generation.prompts[0])
            opening.append(
                self._frame(generation, choice.index, b'{"role":"assistant","content":""}', b"null", b"null", extra)
            )
        async for deltas in generation:
            frames = opening
            for delta in deltas:
                frames += self._of(generation, delta)
            yield frames
            opening = []
        if last := last_chunk(generation, includes_usage=self._chat.includes_usage, reports=self._reports):
            yield [self._head + b"]" + last + b"}\n\n"]

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
    """OpenAI's `usage`; the cached tokens always, the pinned ones if a pin was asked for."""
    details = {"cached_tokens": usage.cached_tokens}
    if usage.pinned_tokens is not None:
        details["pinned_tokens"] = usage.pinned_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
    }


def last_chunk(generation: Generation, *, includes_usage: bool, reports: CacheReports | None) -> bytes:
    """The fields of the chunk after the last text, each with a comma before it; b"" if nobody wants any."""
    fields: dict[str, Any] = {}
    if includes_usage:
        fields["usage"] = usage_body(generation.usage)
    if reports is not None:
        fields["cache_report"] = reports.of(generation)
    return b"," + msgspec.json.encode(fields)[1:-1] if fields else b""


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
