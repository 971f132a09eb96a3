"""The wire format of a chat's answer: in one piece, or as chunks.

    Delta ──► AnswerReader ──► role, thoughts, text, calls, end ──► frames

Knows no prompt and no engine.
"""

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec

import trunkline
from trunkline.api.answer_reader import AnswerReader
from trunkline.api.cache_report import CacheReports
from trunkline.api.constrained import Constrained
from trunkline.api.dialect import Plan
from trunkline.api.generation import Delta, Generation, OutputProcessor, Usage
from trunkline.api.prompt_logprobs import prompt_logprobs
from trunkline.api.protocol import ChatRequest
from trunkline.outputs import Candidate, PositionLogprobs

FINGERPRINT = f"trunkline-{trunkline.__version__}"


class ChatAnswer:
    """One answer. What every chunk has in common is encoded once.

    plan             who reads its texts
    constrained      what they must follow
    reports          explains what was cached; None: nobody asked
    documents_order  in which the prompt shows the request's documents; None: it has none
    """

    def __init__(
        self,
        chat: ChatRequest,
        model: str,
        answer_id: str,
        plan: Plan,
        constrained: Constrained,
        reports: CacheReports | None = None,
        documents_order: list[int] | None = None,
    ) -> None:
        self.id = answer_id
        self._chat = chat
        self._plan = plan
        self._constrained = constrained
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
        self._with_token_ids = bool(chat.return_token_ids)
        self._with_usage = chat.continuous_usage  # in every chunk
        self._no_usage = b',"usage":null' if chat.includes_usage else b""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece. Raises GrammarBroken."""
        choices = []
        readers = [self._plan.read(choice) for choice in generation.choices]
        for choice, reader in zip(generation.choices, readers, strict=True):
            assert choice.finish_reason is not None
            body: dict[str, Any] = {
                "index": choice.index,
                "message": reader.message(),
                "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
                "finish_reason": reader.finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
                **await self._found(choice, reader),
            }
            if self._chat.return_token_ids:
                body["token_ids"] = choice.token_ids
            choices.append(body)
        answer = {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(generation, readers),
        }
        if self._chat.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0]
        if self._chat.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(generation.choices[0], self._chat.prompt_logprobs)
        if self._documents_order is not None:
            answer["documents_order"] = self._documents_order
        if self._reports is not None:
            answer["cache_report"] = self._reports.of(generation)
        return answer

    async def chunks(self, generation: Generation) -> AsyncGenerator[Iterable[bytes], None]:
        """Frames: the role of each choice, its deltas, its end, and at last usage and cache report if asked for.

        Raises GrammarBroken, before the end of a choice.
        """
        readers = [self._plan.reader() for _ in generation.choices]
        frames = [self._opening(generation, index, reader) for index, reader in enumerate(readers)]
        async for deltas in generation:
            for delta in deltas:
                frames += self._of(generation, delta, readers[delta.index])
                if delta.finish_reason is not None:
                    choice, reader = generation.choices[delta.index], readers[delta.index]
                    frames.append(self._end(generation, delta, reader, await self._found(choice, reader)))
            yield frames
            frames = []
        usage = self._usage(generation, readers) if self._chat.includes_usage else None
        if last := last_chunk(generation, usage=usage, reports=self._reports):
            yield [self._head + b"]" + last + b"}\n\n"]

    def _opening(self, generation: Generation, index: int, reader: AnswerReader) -> bytes:
        """The role. `content` is null where it may stay so."""
        extra = b""
        if index == 0 and self._documents_order is not None:
            extra += b',"documents_order":' + msgspec.json.encode(self._documents_order)
        if index == 0 and self._chat.return_token_ids:
            extra += b',"prompt_token_ids":' + msgspec.json.encode(generation.prompts[0])
        role = {"role": "assistant", "content": "" if reader.is_plain else None}
        return self._frame(generation, index, msgspec.json.encode(role), b"null", b"null", extra)

    def _of(self, generation: Generation, delta: Delta, reader: AnswerReader) -> list[bytes]:
        """Chunks of what was added. Tokens and logprobs go with the first: how much of a text is held back is the reader's
        affair, and a chunk may have them alone."""
        deltas = reader.push(delta.text)
        if delta.finish_reason is not None:
            deltas += reader.finish(delta.finish_reason)
        if not deltas and (delta.logprobs or (self._with_token_ids and delta.token_ids)):
            deltas = [{"content": ""} if reader.is_plain else {}]
        frames = []
        for number, added in enumerate(deltas):
            logprobs = b"null"
            if number == 0 and self._with_logprobs and delta.logprobs is not None:
                logprobs = msgspec.json.encode(chat_logprobs(delta.logprobs))
            token_ids = delta.token_ids if number == 0 else []
            frames.append(
                self._frame(generation, delta.index, msgspec.json.encode(added), logprobs, b"null", b"", token_ids)
            )
        return frames

    def _end(self, generation: Generation, delta: Delta, reader: AnswerReader, found: dict[str, Any]) -> bytes:
        """The chunk that ends a choice, with what was found of the whole."""
        assert delta.finish_reason is not None
        reason = msgspec.json.encode(reader.finish_reason(delta.finish_reason))
        more = b"," + msgspec.json.encode({"stop_reason": delta.stop_reason, **found})[1:-1]
        return self._frame(generation, delta.index, b"{}", b"null", reason + more)

    def _usage(self, generation: Generation, readers: list[AnswerReader]) -> dict[str, Any]:
        """Once all is there: with the tokens that were thought, by models that think."""
        usage = usage_body(generation.usage)
        both = zip(generation.choices, readers, strict=True)
        thought = [self._plan.reasoning_tokens(choice, reader) for choice, reader in both]
        if None not in thought:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(filter(None, thought))}
        return usage

    async def _found(self, choice: OutputProcessor, reader: AnswerReader) -> dict[str, Any]:
        """What a choice that has ended says of its constraint."""
        calls = self._plan.checked_calls(reader)
        verdict = await self._constrained.verdict(choice, text=reader.content, calls=calls)
        return self._constrained.fields(verdict)

    def _frame(
        self,
        generation: Generation,
        index: int,
        delta: bytes,
        logprobs: bytes,
        finish_reason: bytes,
        extra: bytes = b"",
        gained: list[int] | None = None,
    ) -> bytes:
        """One chunk of one choice, from parts that are JSON already; `gained` are its tokens."""
        token_ids = b""
        if gained is not None and self._with_token_ids:
            token_ids = b',"token_ids":' + msgspec.json.encode(gained)
        usage = self._no_usage
        if self._with_usage:
            usage = b',"usage":' + msgspec.json.encode(usage_body(generation.usage))
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


def last_chunk(generation: Generation, *, usage: dict[str, Any] | None, reports: CacheReports | None) -> bytes:
    """The fields of the chunk after the last text, each with a comma before it; b"" if nobody wants any."""
    fields: dict[str, Any] = {}
    if usage is not None:
        fields["usage"] = usage
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
