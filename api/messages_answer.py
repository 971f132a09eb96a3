"""The wire format of Anthropic's answers: a message in one piece, or as events.

    Delta ──► AnswerReader ──► Blocks ──► content_block_start, content_block_delta, …, content_block_stop
                                   └────► the content of the whole message

Both come from the same blocks, so the events add up to the message. Knows no prompt and no engine.
"""

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from pydantic_core import from_json

from trunkline.api.answer_reader import AnswerReader
from trunkline.api.chat import StartedChat
from trunkline.api.generation import Generation, OutputProcessor

# Thoughts are not signed here, and none that comes back is checked; clients want a text.
SIGNATURE = "unsigned"


def event(name: str, **fields: Any) -> bytes:
    """One frame."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


class Blocks:
    """The content of one answer, as it comes.

    blocks = Blocks()
    blocks.add({"content": "Hi"})     # the frames that tell of it: a block starts, and gets its text
    blocks.end()                      # the last one stops
    blocks.content()                  # [{"type": "text", "text": "Hi"}]
    """

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []  # the input of a call is still text
        self._of_call: dict[int, int] = {}  # its place here

    def add(self, delta: dict[str, Any]) -> list[bytes]:
        """What an AnswerReader has read."""
        match delta:
            case {"content": str(text)}:
                return self._grow("text", text)
            case {"reasoning_content": str(text)}:
                return self._grow("thinking", text)
            case {"tool_calls": [{"index": index, "id": call_id, "function": {"name": name}}]}:
                self._of_call[index] = len(self._blocks)
                return self._start({"type": "tool_use", "id": call_id, "name": name, "input": ""})
            case {"tool_calls": [{"index": index, "function": {"arguments": text}}]}:
                return [self._delta(self._of_call[index], "input", "input_json_delta", "partial_json", text)]
        raise AssertionError(delta)

    def end(self) -> list[bytes]:
        """No more comes."""
        if not self._blocks:
            return []
        last = len(self._blocks) - 1
        frames = []
        if self._blocks[last]["type"] == "thinking":
            frames.append(self._delta(last, "signature", "signature_delta", "signature", SIGNATURE))
        return [*frames, event("content_block_stop", index=last)]

    def content(self) -> list[dict[str, Any]]:
        """All that was added."""
        return [
            {**block, "input": _read_arguments(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]

    def _grow(self, kind: str, text: str) -> list[bytes]:
        frames = []
        if not self._blocks or self._blocks[-1]["type"] != kind:
            frames = self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        return [*frames, self._delta(len(self._blocks) - 1, kind, f"{kind}_delta", kind, text)]

    def _start(self, block: dict[str, Any]) -> list[bytes]:
        frames = self.end()
        self._blocks.append(block)
        told = {**block, "input": {}} if block["type"] == "tool_use" else block
        return [*frames, event("content_block_start", index=len(self._blocks) - 1, content_block=told)]

    def _delta(self, index: int, field: str, kind: str, name: str, text: str) -> bytes:
        self._blocks[index][field] += text
        return event("content_block_delta", index=index, delta={"type": kind, name: text})


def _read_arguments(text: str) -> dict[str, Any]:
    """As far as they came: clients read those of a stream that was cut off in the same way."""
    read = from_json(text, allow_partial=True) if text else {}
    return read if isinstance(read, dict) else {}


class MessageAnswer:
    """One answer."""

    def __init__(self, answer_id: str, started: StartedChat) -> None:
        self._id = answer_id
        self._started = started

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece. Raises GrammarBroken."""
        (choice,) = generation.choices
        reader, blocks = self._started.plan.reader(), Blocks()
        for delta in reader.push(choice.text) + reader.finish(choice.finish_reason):
            blocks.add(delta)
        blocks.end()
        return {
            **self._message(),
            "content": blocks.content(),
            **_stop(choice, reader),
            "usage": self._usage(generation, reader),
            **await self._found(generation, reader),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[Iterable[bytes], None]:
        """Frames. Raises GrammarBroken, before the end."""
        (choice,) = generation.choices
        reader, blocks = self._started.plan.reader(), Blocks()
        frames: list[bytes] = []
        is_open = False
        async for deltas in generation:
            frames = [] if is_open else self._opening(generation)
            is_open = True
            for delta in deltas:
                read = reader.push(delta.text)
                if delta.finish_reason is not None:
                    read += reader.finish(delta.finish_reason)
                frames += [frame for added in read for frame in blocks.add(added)]
            if choice.finished:
                break
            if frames:
                yield frames
        if not choice.finished:
            return  # the client went away
        frames += blocks.end()
        found = await self._found(generation, reader)
        usage = self._usage(generation, reader)
        frames.append(event("message_delta", delta=_stop(choice, reader), usage=usage, **found))
        yield [*frames, event("message_stop")]

    def _opening(self, generation: Generation) -> list[bytes]:
        """What is known at the first token: how much was cached, but not yet how much is kept."""
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
        return [event("message_start", message={**message, "usage": self._usage(generation, None)})]

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._started.model}

    def _usage(self, generation: Generation, reader: AnswerReader | None) -> dict[str, Any]:
        """Every token of the prompt is counted once: found in the cache, kept there from now on, or neither. `reader`: at
        the end."""
        usage = generation.usage
        created = max(0, (usage.pinned_tokens or 0) - usage.cached_tokens)
        counts: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if reader is not None:
            thought = self._started.plan.reasoning_tokens(generation.choices[0], reader)
            if thought is not None:
                counts["output_tokens_details"] = {"thinking_tokens": thought}
        return counts

    async def _found(self, generation: Generation, reader: AnswerReader) -> dict[str, Any]:
        """What was found of the whole: its constraint, and how much of the prompt was cached, if somebody asked."""
        _, _, plan, constrained, reports, _ = self._started
        (choice,) = generation.choices
        verdict = await constrained.verdict(choice, text=reader.content, calls=plan.checked_calls(reader))
        report = {} if reports is None else {"cache_report": reports.of(generation)}
        return {**constrained.fields(verdict), **report}


def _stop(choice: OutputProcessor, reader: AnswerReader) -> dict[str, Any]:
    """Why an answer ended, in Anthropic's words."""
    reason, sequence = "end_turn", None
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif isinstance(choice.stop_reason, str):
        reason, sequence = "stop_sequence", choice.stop_reason
    elif reader.calls and all(call.is_complete for call in reader.calls):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}
