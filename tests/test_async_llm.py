"""AsyncLLM with a real engine process and the tiny model: it streams, it aborts, and it leaves nothing behind."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.stub import make_ready
from tests.tiny import VOCAB_SIZE, tiny_model
from trunkline import AsyncLLM, Constraint, SamplingParams
from trunkline.api.client import CallFailed
from trunkline.api.engine_process import EngineFailedToStart
from trunkline.config import engine_config
from trunkline.errors import ConfigError, ContextLengthExceeded, InvalidParameter, ModelError, Overloaded
from trunkline.grammar.interface import GrammarRefused
from trunkline.inputs import Prompt
from trunkline.outputs import RequestOutput

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(model: str) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(model, kv_cache_memory=2**22, threads=1) as llm:
        yield llm


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        final = output
    return final


async def idle(llm: AsyncLLM) -> dict[str, Any]:
    while (stats := await llm.call("stats"))["running"] or stats["waiting"]:
        pass
    assert await llm.call("check") == {"ok": True}
    return stats


async def test_outputs_grow_to_the_whole(llm: AsyncLLM) -> None:
    text, num_outputs = "", 0
    sampling = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)  # too many to arrive all at once
    async for output in llm.generate("hello world", sampling):
        (completion,) = output.outputs
        text += completion.delta
        num_outputs += 1
        assert completion.text == text
        assert output.prompt == "hello world"
        assert output.prompt_token_ids == tuple(llm.tokenizer.encode("hello world"))
    assert output.finished
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 2000)
    assert num_outputs > 1, "it streams"


async def test_prompts_of_all_kinds_are_the_same(llm: AsyncLLM) -> None:
    ids = llm.tokenizer.encode("hello world")
    prompts: list[Prompt] = ["hello world", ids, {"prompt_token_ids": ids}]
    texts = {(await last(llm.generate(prompt, GREEDY))).text for prompt in prompts}
    assert len(texts) == 1


async def test_chat_uses_the_template(llm: AsyncLLM) -> None:
    output = await last(llm.chat(HELLO, GREEDY))
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    again = await last(llm.chat(HELLO, GREEDY))
    assert again.text == output.text
    assert again.cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16


async def test_many_at_once_are_each_as_alone(llm: AsyncLLM) -> None:
    prompts = [f"number {number} of several" for number in range(12)]
    alone = [(await last(llm.generate(prompt, GREEDY))).text for prompt in prompts]
    together = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in prompts))
    assert [output.text for output in together] == alone


async def test_seed_and_n(llm: AsyncLLM) -> None:
    sampling = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    first, second = [await last(llm.generate("hello", sampling)) for _ in range(2)]
    texts = [completion.text for completion in first.outputs]
    assert [completion.text for completion in second.outputs] == texts
    assert len(set(texts)) == 3
    alone = await last(llm.generate("hello", SamplingParams(seed=13, max_tokens=12, ignore_eos=True)))
    assert alone.text == texts[2]


async def test_n_continuations_read_their_prompt_once(llm: AsyncLLM) -> None:
    before = (await llm.call("stats"))["prompt_tokens_computed_total"]
    output = await last(llm.generate("one two three one two four", SamplingParams(n=4, seed=5, max_tokens=6)))
    assert len(output.prompt_token_ids) % 16 and output.cached_tokens == 0
    assert (await llm.call("stats"))["prompt_tokens_computed_total"] - before == len(output.prompt_token_ids)


async def test_logprobs(llm: AsyncLLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = await last(llm.generate("hello world and", sampling))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert output.prompt_logprobs is not None
    assert [position.chosen.token_id for position in logprobs] == list(output.outputs[0].token_ids)
    assert [position.rank for position in logprobs] == [1, 1, 1]
    assert [position.chosen.token_id for position in output.prompt_logprobs] == list(output.prompt_token_ids[1:])
    assert all(len(position.top) == 2 for position in logprobs)


async def test_stop_string_ends_the_request_in_the_engine_too(llm: AsyncLLM) -> None:
    text = (await last(llm.generate("hello", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)))).text
    stop = text[10:12]
    before = (await idle(llm))["generation_tokens_total"]
    output = await last(
        llm.generate("hello", SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True, stop=(stop,)))
    )
    assert output.text == text[: text.index(stop)]
    assert output.outputs[0].stop_reason == stop
    assert (await idle(llm))["generation_tokens_total"] - before < 1000


async def test_explain(llm: AsyncLLM) -> None:
    prompt = "a prompt to explain, long enough for a page"
    assert (await llm.explain(prompt)).cached_tokens == 0
    await last(llm.generate(prompt, GREEDY, cache_salt="s"))
    explained = await llm.explain(prompt, cache_salt="s")
    assert (explained.reason, explained.cached_tokens) == ("complete", 32)
    assert await llm.explain(llm.tokenizer.encode(prompt), cache_salt="s") == explained
    assert (await llm.explain(prompt)).reason == "namespace"
    with pytest.raises(InvalidParameter, match="The prompt is empty"):
        await llm.explain("")


async def test_leaving_the_loop_aborts(llm: AsyncLLM) -> None:
    async for _ in llm.generate("hello", ENDLESS):
        break
    stats = await idle(llm)
    assert stats["pages"]["lease"] == 0


async def test_cancelling_the_task_aborts(llm: AsyncLLM) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("hello", ENDLESS):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(llm)


async def test_abort_by_id(llm: AsyncLLM) -> None:
    outputs = llm.generate("hello", ENDLESS, request_id="mine")
    await anext(outputs)
    with pytest.raises(InvalidParameter, match="request_id"):
        await last(llm.generate("hello", GREEDY, request_id="mine"))
    llm.abort("mine")
    output = await last(outputs)
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    llm.abort("unknown")
    await idle(llm)
    assert (await last(llm.generate("hello", GREEDY, request_id="mine"))).outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], GREEDY, InvalidParameter),
        ([VOCAB_SIZE], GREEDY, InvalidParameter),
        ([-1], GREEDY, InvalidParameter),
        ("half \ud800", GREEDY, InvalidParameter),
        ("hello", SamplingParams(stop_token_ids=(VOCAB_SIZE,)), InvalidParameter),
        ("hello", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), InvalidParameter),
        ([5] * 8192, GREEDY, ContextLengthExceeded),
        ("x" * 2_000_000, GREEDY, ContextLengthExceeded),
    ],
)
async def test_bad_request_fails_alone(
    llm: AsyncLLM, prompt: Any, sampling: SamplingParams, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await last(llm.generate(prompt, sampling))
    assert len((await last(llm.generate("hello", GREEDY))).outputs[0].token_ids) == 8


async def test_unknown_call_is_answered_with_words(llm: AsyncLLM) -> None:
    with pytest.raises(CallFailed, match="There is no method"):
        await llm.call("no such method")


async def test_prompt_longer_than_the_whole_cache_names_the_cache(model: str) -> None:
    llm = AsyncLLM(model)
    llm.ready, llm.client = make_ready(num_pages=4, vocab_size=VOCAB_SIZE), object()  # type: ignore[assignment]
    with pytest.raises(
        ContextLengthExceeded, match=r"context length is 64 tokens.*in 70 tokens.*whole KV cache holds 64"
    ):
        llm.check_prompt([5] * 70, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {}),
        ({}, {}),
        ([1.5], {}),
        ("hello", {"sampling_params": {"temperature": 0}}),
        ("hello", {"cache_salt": 5}),
        ("hello", {"cache_salt": "\ud800"}),
        ("hello", {"priority": "high"}),
        ("hello", {"priority": 2**70}),
        ("hello", {"request_id": "\ud800"}),
    ],
)
async def test_what_makes_no_sense_is_refused_in_a_sentence(
    llm: AsyncLLM, prompt: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter, match="allowed is"):
        await last(llm.generate(prompt, **options))
    assert (await last(llm.generate("hello", GREEDY))).finished
    await idle(llm)


async def test_before_start_and_after_shutdown(model: str) -> None:
    llm = AsyncLLM(model)
    with pytest.raises(Overloaded):
        llm.submit([[5]], GREEDY, request_id="r")
    await llm.shutdown()
    await llm.shutdown()


async def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        await AsyncLLM(str(tmp_path / "none")).start()


async def test_flag_that_does_not_exist(model: str) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        AsyncLLM(model, max_num_seq=3)  # type: ignore[call-arg]


@pytest.mark.slow
async def test_engine_that_cannot_start_says_why(model: str) -> None:
    with pytest.raises(EngineFailedToStart, match=r"^The KV cache holds"):
        await AsyncLLM(model, kv_cache_memory=2**16).start()


@pytest.mark.slow
async def test_shutdown_fails_what_is_under_way(model: str) -> None:
    llm = await AsyncLLM.of(engine_config(model, kv_cache_memory=2**22, threads=1)).start()
    with pytest.raises(Overloaded, match="shutting down"):
        async for _ in llm.generate("hello", ENDLESS):
            await llm.shutdown()


@pytest.mark.slow
async def test_shutdown_while_it_starts(model: str) -> None:
    llm = AsyncLLM(model, kv_cache_memory=2**22, threads=1)
    starting = asyncio.create_task(llm.start())
    while llm.process is None:
        await asyncio.sleep(0)
    await llm.shutdown()
    with pytest.raises(EngineFailedToStart, match="before it was ready"):
        await starting
    assert llm.process is None


SIZE = {
    "type": "object",
    "properties": {"kind": {"enum": ["cm", "inch"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


async def test_texts_follow_what_they_must(llm: AsyncLLM) -> None:
    sampling = SamplingParams(constraint=Constraint(json_schema=SIZE), n=3, max_tokens=64, temperature=1, seed=2)
    outputs = [output async for output in llm.generate("hello", sampling)]
    assert [choice.valid for choice in outputs[-1].outputs] == [True] * 3
    assert all(json.loads(choice.text)["kind"] in ("cm", "inch") for choice in outputs[-1].outputs)
    sampling = SamplingParams(constraint=Constraint(regex="[ab]{4}"), max_tokens=64, temperature=1)
    chatted = await last(llm.chat(HELLO, sampling))
    assert re.fullmatch("[ab]{4}", chatted.text)
    assert chatted.outputs[0].valid is None, "there is no schema to check it with"
    await idle(llm)


async def test_what_cannot_be_followed_is_refused(llm: AsyncLLM) -> None:
    long = {"properties": {f"p{i}": {"type": "string"} for i in range(200)}, "required": 5}  # is read in a thread
    for constraint in (Constraint(json_schema=long), Constraint(json_schema={"pattern": r"^(a|b)\1$"})):
        with pytest.raises(GrammarRefused, match="Invalid schema"):
            await last(llm.generate("hello", SamplingParams(constraint=constraint)))
    await idle(llm)
