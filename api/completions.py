"""POST /v1/completions: text or token ids in, their continuation out. No chat template.

Many prompts make one answer: continuation i of prompt p is choice p * n + i. With `best_of` more are generated than
returned.
"""

import codecs
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.api.answer_shapes import TextCompletion
from trunkline.api.cache_report import CacheReports
from trunkline.api.chat_answer import FINGERPRINT, last_chunk, usage_body
from trunkline.api.constrained import Constrained
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.generation import Delta, Generation, OutputProcessor
from trunkline.api.openapi import Route
from trunkline.api.prompt_logprobs import prompt_logprobs
from trunkline.api.prompt_map import ReadPrompt
from trunkline.api.protocol import CompletionRequest
from trunkline.api.service import open_json
from trunkline.api.sse import EventStream, finish_or_disconnect
from trunkline.async_llm import AsyncLLM
from trunkline.models.tokenizer import Tokenizer
from trunkline.outputs import PositionLogprobs


async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service, body = await open_json(request)
    completion = CompletionRequest.parse(body, strict=service.config.strict_params)
    model = service.served_model(completion.model)
    sampling = completion.sampling(service.sampling_defaults, service.grammar_defaults)
    pin, caller = completion.pin(), caller_of(request)
    constrained = await Constrained.of(service, sampling.constraint)
    prompts = await read_prompts(service.llm, completion)
    reports = CacheReports(prompts, service.page_size) if completion.cache_report else None
    answer_id = f"cmpl-{secrets.token_hex(16)}"
    answer = CompletionAnswer(completion, model, answer_id, service.llm.tokenizer, constrained, prompts, reports)
    generation = service.llm.submit(
        [prompt.token_ids for prompt in prompts],
        sampling,
        grammar=constrained.grammar,
        request_id=answer.id,
        priority=completion.priority or 0,
        tenant=caller.tenant,
        salt=completion.cache_salt or "",
        pin_seconds=pin.seconds if pin else 0.0,
        observer=service.observe(request, answer.id),
    )
    if completion.stream:
        return EventStream(generation, answer.chunks(generation), on_error=service.count_failure)
    if not await finish_or_disconnect(generation, request):
        raise ClientDisconnect
    return json_response(await answer.whole(generation))


async def read_prompts(llm: AsyncLLM, completion: CompletionRequest) -> list[ReadPrompt]:
    """The prompts as the model reads them."""
    longest = completion.longest_prompt(llm.max_tokens_per_request)
    return [
        ReadPrompt(await _token_ids(llm, completion, prompt), llm.tokenizer, longest=longest)
        for prompt in completion.prompts()
    ]


async def _token_ids(llm: AsyncLLM, completion: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    add_special_tokens = completion.add_special_tokens is not False
    may_be_cut = completion.truncate_prompt_tokens is not None
    return await llm.encode(prompt, add_special_tokens=add_special_tokens, may_be_cut=may_be_cut)


class LegacyLogprobs:
    """The four parallel lists of the completions API, built up over the stream of one choice.

    tokens          text of each token
    token_logprobs  null for the first token of an echoed prompt, which nothing predicts
    top_logprobs    text -> logprob of the likeliest tokens and of the chosen one
    text_offset     where each token begins, in characters of the choice's whole text
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def unscored(self, tokenizer: Tokenizer, token_id: int, text: str) -> dict[str, list[Any]]:
        """The first token of a prompt. A begin token that the tokenizer put before `text` takes no room in it."""
        token, data = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        if token_id in tokenizer.special_ids and not text.startswith(token):
            data = b""
        return {
            "tokens": [token],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(data)],
        }

    def scored(self, positions: Sequence[PositionLogprobs]) -> dict[str, list[Any]]:
        """Further tokens."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position in positions:
            lists["tokens"].append(position.chosen.text)
            lists["token_logprobs"].append(position.chosen.logprob)
            shown = (*position.top, position.chosen)
            lists["top_logprobs"].append({candidate.text: candidate.logprob for candidate in shown})
            lists["text_offset"].append(self._advance(position.chosen.data))
        return lists

    def _advance(self, data: bytes) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(data))
        return offset


class CompletionAnswer:
    """The wire format of one answer.

    constrained  what its texts must follow
    prompts      what was read
    reports      explains what was cached; None: nobody asked
    """

    def __init__(
        self,
        completion: CompletionRequest,
        model: str,
        answer_id: str,
        tokenizer: Tokenizer,
        constrained: Constrained,
        prompts: Sequence[ReadPrompt],
        reports: CacheReports | None = None,
    ) -> None:
        self.id = answer_id
        self._completion = completion
        self._tokenizer = tokenizer
        self._constrained = constrained
        self._reports = reports
        self._common = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + msgspec.json.encode(self._common)[:-1] + b',"choices":['
        self._prompts = prompts  # for the echo
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by choice

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece. Raises GrammarBroken."""
        choices = []
        for index, choice in enumerate(self._returned(generation)):
            echo, lists = self._echo(generation, choice)
            positions = None if self._completion.logprobs is None else choice.logprobs
            body = self._choice(choice, echo + choice.text, lists, choice.token_ids, positions, generation)
            if (num := self._completion.prompt_logprobs) is not None:
                body["prompt_logprobs"] = prompt_logprobs(choice, num)
            choices.append({**body, **await self._found(choice), "index": index})
        answer = {**self._common, "choices": choices, "usage": usage_body(generation.usage)}
        if self._reports is not None:
            answer["cache_report"] = self._reports.of(generation)
        return answer

    async def chunks(self, generation: Generation) -> AsyncGenerator[Iterable[bytes], None]:
        """Frames: of each choice its text, the echoed prompt first, the end with the last; then usage and report if
        asked for. Raises GrammarBroken in place of the end of a choice."""
        opened: set[int] = set()
        async for deltas in generation:
            frames = []
            for delta in deltas:
                echo, lists = "", None
                if delta.index not in opened:
                    opened.add(delta.index)
                    echo, lists = self._echo(generation, generation.choices[delta.index])
                body = self._choice(delta, echo + delta.text, lists, delta.token_ids, delta.logprobs, generation)
                if delta.finish_reason is not None:
                    body |= await self._found(generation.choices[delta.index])
                frames.append(self._frame(generation, body))
            yield frames
        usage = usage_body(generation.usage) if self._completion.includes_usage else None
        if last := last_chunk(generation, usage=usage, reports=self._reports):
            yield [self._head + b"]" + last + b"}\n\n"]

    async def _found(self, choice: OutputProcessor) -> dict[str, Any]:
        """What a choice that has ended says of its constraint."""
        return self._constrained.fields(await self._constrained.verdict(choice))

    def _returned(self, generation: Generation) -> list[OutputProcessor]:
        """All choices; with `best_of`, of each prompt the `n` likeliest, likeliest first."""
        if not self._completion.picks:
            return generation.choices
        best = []
        for first in range(0, len(generation.choices), generation.n):
            candidates = generation.choices[first : first + generation.n]
            best += sorted(candidates, key=mean_logprob, reverse=True)[: self._completion.n or 1]
        return best

    def _echo(self, generation: Generation, choice: OutputProcessor) -> tuple[str, dict[str, list[Any]] | None]:
        """The prompt's text, and its logprobs if asked for."""
        if not self._completion.echo:
            return "", None
        at = choice.index // generation.n
        prompt, token_ids = self._completion.prompts()[at], generation.prompts[at]
        if isinstance(prompt, str) and not self._prompts[at].num_cut:
            text = prompt
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if self._completion.logprobs is None:
            return text, None
        logprobs = self._logprobs_of(choice.index)
        first = logprobs.unscored(self._tokenizer, token_ids[0], text)
        # There may be more alternatives than are shown here, for prompt_logprobs.
        shown = [
            PositionLogprobs(position.chosen, position.rank, position.top[: self._completion.logprobs])
            for position in choice.prompt_logprobs or ()
        ]
        return text, _joined(first, logprobs.scored(shown))

    def _choice(
        self,
        state: OutputProcessor | Delta,
        text: str,
        lists: dict[str, list[Any]] | None,
        token_ids: list[int],
        positions: list[PositionLogprobs] | None,
        generation: Generation,
    ) -> dict[str, Any]:
        if positions is not None:
            own = self._logprobs_of(state.index).scored(positions)
            lists = own if lists is None else _joined(lists, own)
        body = {
            "index": state.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._completion.return_token_ids:
            body["token_ids"] = token_ids
            body["prompt_token_ids"] = generation.prompts[state.index // generation.n]
        return body

    def _frame(self, generation: Generation, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self._completion.continuous_usage:
            usage = b',"usage":' + msgspec.json.encode(usage_body(generation.usage))
        elif self._completion.includes_usage:
            usage = b',"usage":null'
        return b"".join((self._head, msgspec.json.encode(choice), b"]", usage, b"}\n\n"))

    def _logprobs_of(self, index: int) -> LegacyLogprobs:
        return self._logprobs.setdefault(index, LegacyLogprobs())


def mean_logprob(choice: OutputProcessor) -> float:
    """Of the tokens generated: what OpenAI's `best_of` goes by. 0 without any."""
    positions = choice.logprobs or ()
    return sum(position.chosen.logprob for position in positions) / len(positions) if positions else 0.0


def _joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: first[name] + second[name] for name in first}


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        TextCompletion,
        (CompletionRequest,),
        event=TextCompletion,
        done="[DONE]",
        generates=True,
        example={"prompt": "The capital of France is", "max_tokens": 8},
    ),
)
