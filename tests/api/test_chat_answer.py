"""ChatAnswer without an engine: the texts are given. Chunks add up to the answer in one piece, however the tokens arrive."""

import asyncio
import json
import random
from typing import Any

import pytest

from tests.api.serving import sse_events
from tests.api.test_tools import added_up, dialect_of, named, tool, without_ids
from tests.tiny import EOS, TOKEN_IDS
from trunkline.api.chat_answer import ChatAnswer
from trunkline.api.constrained import Constrained
from trunkline.api.generation import Generation, OutputProcessor
from trunkline.api.protocol import ChatRequest
from trunkline.messages import Finished, TokenLogprobs, Tokens
from trunkline.models.tokenizer import Tokenizer

END = TOKEN_IDS[EOS]
CALLS = '<tool_call>[{"name": "weather", "arguments": {"place": "Köln", "x": [1]}}, {"name": "rain"}]</tool_call>'
TEXTS = [f"I look.\n\n{CALLS}", "It rains in Köln. ", "", CALLS[:50], f"<tool_call>no</tool_call> {CALLS} Done.\n"]
Message = Tokens | Finished


class GivenInbox:
    """Hands out messages in batches of any size."""

    def __init__(self, messages: list[Message], cuts: random.Random) -> None:
        self._messages = messages
        self._cuts = cuts

    async def get(self) -> list[Message]:
        count = self._cuts.randint(1, 3)
        batch, self._messages = self._messages[:count], self._messages[count:]
        return batch

    def abort(self, request_id: str) -> None:
        self._messages = [message for message in self._messages if message.request_id != request_id]

    def close(self, error: Exception | None = None) -> None:
        self._messages = []


class Case:
    """A request, and the texts of its choices."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], reason: str = "stop", **fields: Any) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        fields = {"tools": [tool(), tool("rain")], "n": len(texts), **fields}
        self.chat = ChatRequest.parse({"messages": messages, **fields})
        self._dialect = dialect_of(tokenizer)
        self._tokenizer = tokenizer
        self._texts = texts
        self._reason = reason

    def whole(self) -> dict[str, Any]:
        async def run() -> dict[str, Any]:
            generation, answer = self._start(random.Random(0))
            await generation.finish()
            return await answer.whole(generation)

        return asyncio.run(run())

    def chunks(self, seed: int) -> list[dict[str, Any]]:
        async def run() -> str:
            generation, answer = self._start(random.Random(seed))
            return b"".join([frame async for frames in answer.chunks(generation) for frame in frames]).decode()

        return [json.loads(event) for event in sse_events(asyncio.run(run()))]

    def _start(self, cuts: random.Random) -> tuple[Generation, ChatAnswer]:
        use = self.chat.tool_use()
        plan = self._dialect.plan(use, response=None, prompt="")
        sampling = self.chat.sampling({}, service_defaults())
        choices = {
            f"r-{index}": OutputProcessor(
                self._tokenizer, sampling, eos_token_ids=[END], index=index, shown_ids=plan.shown_ids
            )
            for index in range(len(self._texts))
        }
        inbox: Any = GivenInbox(self._messages(cuts), cuts)
        generation = Generation(inbox, choices, prompts=[[1, 2, 3]], n=len(choices))
        constrained = Constrained(None, None, None)  # type: ignore[arg-type]  # without a constraint nobody is told of one
        return generation, ChatAnswer(self.chat, "tiny", "chatcmpl-1", plan, constrained)

    def _messages(self, cuts: random.Random) -> list[Message]:
        """Those of the choices take turns."""
        left: dict[str, list[Message]] = {}
        for index, text in enumerate(self._texts):
            name, ids = f"r-{index}", [*text.encode(), *([END] if self._reason == "stop" else [])]
            left[name] = []
            while ids:
                count = cuts.randint(1, 9)
                some, ids = ids[:count], ids[count:]
                scores = [TokenLogprobs([token_id], [-1.0], 1) for token_id in some]
                left[name].append(Tokens(request_id=name, token_ids=some, logprobs=scores))
            end = END if self._reason == "stop" else None
            left[name].append(
                Finished(
                    request_id=name,
                    reason=self._reason,
                    stop_token_id=end,
                    prompt_tokens=3,
                    cached_tokens=0,
                    completion_tokens=1,
                )
            )
        messages = []
        while left:
            name = cuts.choice(sorted(left))
            messages.append(left[name].pop(0))
            if not left[name]:
                del left[name]
        return messages


def service_defaults() -> Any:
    from trunkline.api.response_format import GrammarDefaults

    return GrammarDefaults()


def put_together(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A choice of a stream, as a client puts it together; asserts that its parts come in their order."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    first, *middle, last = own
    assert first["delta"]["role"] == "assistant"
    assert all(choice["finish_reason"] is None for choice in own[:-1])
    assert last["delta"] == {}
    for choice in middle:
        assert len(choice["delta"]) <= 1, "text and calls come in chunks of their own"
    message = added_up([choice["delta"] for choice in middle if choice["delta"]])
    together: dict[str, Any] = {"message": without_ids(message), "finish_reason": last["finish_reason"]}
    together["logprobs"] = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    together["token_ids"] = [token_id for choice in own for token_id in choice.get("token_ids", [])]
    return together


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["auto", "required", named("weather")], ids=["auto", "required", "named"])
def test_chunks_add_up_to_the_answer(tokenizer: Tokenizer, choice: Any, seed: int) -> None:
    case = Case(tokenizer, TEXTS, tool_choice=choice, logprobs=True, return_token_ids=True)
    chunks = case.chunks(seed)
    for body in case.whole()["choices"]:
        together = put_together(chunks, body["index"])
        assert together["message"] == without_ids(body["message"])
        assert together["finish_reason"] == body["finish_reason"]
        assert together["logprobs"] == body["logprobs"]["content"]
        assert together["token_ids"] == body["token_ids"]


def test_reasons(tokenizer: Tokenizer) -> None:
    def reasons(reason: str = "stop", **fields: Any) -> list[str]:
        return [choice["finish_reason"] for choice in Case(tokenizer, TEXTS, reason, **fields).whole()["choices"]]

    assert reasons() == ["tool_calls", "stop", "stop", "stop", "tool_calls"]
    assert reasons("length") == ["length"] * 5
    assert reasons(tool_choice=named("weather")) == ["stop"] * 5
    assert reasons(tool_choice="none") == ["stop"] * 5


def test_calls_are_text_if_nothing_may_be_called(tokenizer: Tokenizer) -> None:
    choices = Case(tokenizer, TEXTS, tool_choice="none").whole()["choices"]
    assert [choice["message"]["content"] for choice in choices] == TEXTS


def test_a_stop_string_ends_a_call(tokenizer: Tokenizer) -> None:
    """What came of it is delivered, but it is no reason to call."""
    case = Case(tokenizer, [CALLS], stop="Kö")
    (choice,) = case.whole()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"place": "'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Kö")
    assert put_together(case.chunks(1), 0)["message"] == without_ids(choice["message"])


def test_content_is_null_beside_calls_and_never_empty_text(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, [CALLS])
    assert case.whole()["choices"][0]["message"]["content"] is None
    chunks = case.chunks(0)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all("content" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
