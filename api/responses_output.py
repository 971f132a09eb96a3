"""The items of a response, and the events of their making: what was thought, said and called, in its order.

    deltas of an AnswerReader ──► OutputItems.push ──► output_item.added, content_part.added, output_text.delta, …
                                  OutputItems.close ──► output_text.done, content_part.done, output_item.done
                                  OutputItems.items ──► reasoning, message, function_call

A response in one piece has the items that its stream has, since both are made here. Knows no HTTP and no engine.
"""

from collections.abc import Sequence
from typing import Any

from trunkline.api.answer_reader import AnswerReader
from trunkline.api.chat_answer import chat_logprobs
from trunkline.api.generation import OutputProcessor
from trunkline.api.responses_items import Item, new_id
from trunkline.outputs import PositionLogprobs

Event = dict[str, Any]
"""`type` and the rest, but for its sequence_number."""


class OutputItems:
    """Those of one choice.

    reader  has read what comes in here: it knows which calls are complete
    choice  knows the tokens of the text
    """

    def __init__(self, reader: AnswerReader, choice: OutputProcessor) -> None:
        self.items: list[Item] = []
        self.reader = reader
        self._choice = choice
        self._kind = ""  # of the item that is being written; "": none is
        self._pieces: list[str] = []  # of its text, or of its arguments
        self._num_calls = 0  # that have begun
        self._num_searched = 0  # bytes of the tokens' text in which messages were found

    def push(self, deltas: Sequence[dict[str, Any]], logprobs: Sequence[PositionLogprobs] | None = None) -> list[Event]:
        """More of the answer. Its tokens' scores go with the first text, where all tokens are text."""
        events: list[Event] = []
        scores = chat_logprobs(logprobs)["content"] if logprobs and self.reader.is_plain else []
        if scores and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            match delta:
                case {"reasoning_content": str(text)}:
                    self._text("reasoning", text, [], events)
                case {"content": str(text)}:
                    self._text("message", text, scores, events)
                    scores = []
                case {"tool_calls": [{"id": str(call_id), "function": {"name": str(name)}}]}:
                    self._end("completed", events)
                    item = {"call_id": call_id, "name": name, "arguments": ""}
                    self._begin("function_call", item, events)
                    self._num_calls += 1
                case {"tool_calls": [{"function": {"arguments": str(fragment)}}]}:
                    self._pieces.append(fragment)
                    events.append(self._event("response.function_call_arguments.delta", delta=fragment))
        return events

    def close(self, *, is_cut: bool, has_text: bool) -> list[Event]:
        """The end of the answer.

        is_cut    by its length
        has_text  there is a message, if only an empty one, where there would be no item
        """
        events: list[Event] = []
        if not self.items and has_text:
            self._text("message", "", [], events)
        self._end("incomplete" if is_cut else "completed", events)
        return events

    def _text(self, kind: str, text: str, scores: list[Any], events: list[Event]) -> None:
        if self._kind != kind:
            self._end("completed", events)
            fields: Item = {"content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
            self._begin(kind, {"summary": [], **fields} if kind == "reasoning" else fields, events)
            events.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._pieces.append(text)
        if kind == "reasoning":
            events.append(self._event("response.reasoning_text.delta", content_index=0, delta=text))
        else:
            events.append(self._event("response.output_text.delta", content_index=0, delta=text, logprobs=scores))

    def _begin(self, kind: str, fields: Item, events: list[Event]) -> None:
        item = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._kind, self._pieces = kind, []
        self.items.append(item)
        events.append(_added_or_done("added", len(self.items) - 1, item))

    def _end(self, status: str, events: list[Event]) -> None:
        """Of the item that is being written, if one is."""
        if not self._kind:
            return
        kind, self._kind = self._kind, ""
        text = "".join(self._pieces)
        if kind == "function_call":
            # One that is not complete was cut off, by whatever.
            status = "completed" if self.reader.calls[self._num_calls - 1].is_complete else "incomplete"
            more = {"arguments": text}
            events.append(self._event("response.function_call_arguments.done", name=self.items[-1]["name"], **more))
        else:
            part = _part(kind, text, self._scores(text) if kind == "message" else [])
            more = {"content": [part]}  # type: ignore[dict-item]
            if kind == "reasoning":
                events.append(self._event("response.reasoning_text.done", content_index=0, text=text))
            else:
                scores = part["logprobs"]
                events.append(self._event("response.output_text.done", content_index=0, text=text, logprobs=scores))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        item = {**self.items[-1], "status": status, **more}
        self.items[-1] = item
        events.append(_added_or_done("done", len(self.items) - 1, item))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _scores(self, text: str) -> list[dict[str, Any]]:
        """One entry for each token of a message: of all tokens, those that it is found in. Blanks around calls are layout, and may
        have come from elsewhere."""
        positions = self._choice.logprobs
        if positions is None:
            return []
        if not self.reader.is_plain:
            ends = [0]
            for position in positions:
                ends.append(ends[-1] + len(position.chosen.data))
            everything, said = b"".join(position.chosen.data for position in positions), text.strip().encode()
            begin = everything.find(said, self._num_searched)
            if begin < 0 or not said:
                return []
            self._num_searched = begin + len(said)
            positions = [
                position
                for position, start, end in zip(positions, ends, ends[1:], strict=False)
                if start < self._num_searched and end > begin
            ]
        scores: list[dict[str, Any]] = chat_logprobs(positions)["content"]
        return scores


def _added_or_done(which: str, index: int, item: Item) -> Event:
    return {"type": f"response.output_item.{which}", "output_index": index, "item": item}


def _part(kind: str, text: str, scores: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}
