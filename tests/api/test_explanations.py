"""Each cause of a miss, built with a real engine and the tiny model, and its explanation word for word. The test owns the clock.

In chats, over sockets and between tenants: test_cache_live.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tiny import VOCAB_SIZE
from trunkline import LLM, SamplingParams
from trunkline.api.cache_report import Explanation, explain
from trunkline.api.prompt_map import ReadPrompt
from trunkline.config import engine_config
from trunkline.messages import CacheReport, Call, Failed, Finished, FromEngine, Generate, Reply, Tokens
from trunkline.scheduler.engine import Engine

NUM_PAGES = 16
PAGE = "0123456789abcdef"  # a token for each character
PROMPT = PAGE * 3 + "the end"

ONE = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True)


class Caller:
    """Sends prompts as one process with an engine does."""

    def __init__(self, llm: LLM, **flags: Any) -> None:
        self.now = 1000.0
        self.tokenizer = llm.tokenizer
        worker = llm.engine.worker
        self.engine = Engine(
            engine_config("tiny", num_speculative_tokens=0, **flags),
            worker,
            eos_token_ids=(),
            max_model_len=240,
            vocab_size=VOCAB_SIZE,
            clock=lambda: self.now,
        )
        self.reports: dict[str, CacheReport] = {}

    def read(self, text: str) -> ReadPrompt:
        return ReadPrompt(self.tokenizer.encode(text), self.tokenizer)

    def start(self, text: str, *, sampling: SamplingParams = ONE, **fields: Any) -> str:
        name = f"r{len(self.reports)}"
        self.reports[name] = CacheReport(prompt_tokens=0, cached_tokens=0)
        assert not self.engine.handle(
            Generate(request_id=name, prompt=self.read(text).to_bytes(), sampling=sampling, **fields)
        )
        return name

    def step(self) -> None:
        self._take(self.engine.step())

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def send(self, text: str, **fields: Any) -> str:
        """Run a request to its end; returns the explanation that came with its first token."""
        name = self.start(text, **fields)
        self.finish()
        return explain(self.reports[name], self.read(text), page_size=16).sentence

    def explained(self, text: str, *, tenant: str = "", salt: str = "") -> Explanation:
        prompt = self.read(text)
        args = {"tenant": tenant, "salt": salt, "prompt": prompt.to_bytes()}
        (reply,) = self.engine.handle(Call(call_id=1, method="explain", args=args))
        assert isinstance(reply, Reply)
        assert reply.error is None
        return explain(msgspec.convert(reply.result, CacheReport), prompt, page_size=16)

    def why(self, text: str, **whose: str) -> str:
        return self.explained(text, **whose).sentence

    def call(self, method: str, **args: Any) -> Any:
        (reply,) = self.engine.handle(Call(call_id=1, method=method, args=args))
        assert isinstance(reply, Reply)
        return reply.result

    def _take(self, messages: list[FromEngine]) -> None:
        for message in messages:
            assert not isinstance(message, Failed), message
            if isinstance(message, Tokens) and message.cache_report is not None:
                self.reports[message.request_id] = message.cache_report
            elif isinstance(message, Finished):
                assert message.cached_tokens == self.reports[message.request_id].cached_tokens


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), num_pages=NUM_PAGES, max_model_len=240, threads=1) as llm:
        yield llm


@pytest.fixture
def caller(llm: LLM) -> Caller:
    return Caller(llm)


@pytest.fixture
def make_caller(llm: LLM) -> Callable[..., Caller]:
    return lambda **flags: Caller(llm, **flags)


def test_unseen(caller: Caller) -> None:
    nothing = (
        "None of the 54 prompt tokens is cached. Nothing that begins like this was read here before, or it is too long ago to"
        " remember."
    )
    assert caller.why(PROMPT) == nothing
    assert caller.send(PROMPT) == nothing
    assert caller.why("xyz" + PROMPT).startswith(
        "None of the 57 prompt tokens is cached. Nothing that begins like this"
    )


def test_complete(caller: Caller) -> None:
    caller.send(PROMPT)
    complete = (
        "48 of the 54 prompt tokens are cached, which is all that can be: whole pages of 16 tokens that end before the last prompt"
        " token, which is always computed."
    )
    assert caller.why(PROMPT) == complete
    assert caller.send(PROMPT) == complete
    assert caller.why(PAGE * 3) == complete.replace("48 of the 54", "32 of the 48")


def test_short(caller: Caller) -> None:
    caller.send(PROMPT)
    assert caller.why(PAGE) == (
        "None of the 16 prompt tokens is cached, and can't be: only whole pages of 16 tokens that end before the last one are"
        " kept."
    )


def test_differs(caller: Caller) -> None:
    caller.send(PROMPT)
    assert caller.why(PAGE + "0123456 but not this one") == (
        "16 of the 37 prompt tokens are cached. The nearest cached prompt is the same for 23 tokens; then it has '789abcde' where"
        " this one has ' but not'."
    )
    assert caller.send(PAGE + "0123456 but not this one") == (
        "16 of the 37 prompt tokens are cached. The nearest cached prompt is the same for 23 tokens; then it has '789abcde' where"
        " this one has ' but not'."
    )


def test_evicted_by_admission(caller: Caller) -> None:
    caller.send(PROMPT)
    caller.now += 5
    caller.send("x" * 230)
    caller.now += 7.5
    assert caller.why(PROMPT) == (
        "16 of the 54 prompt tokens are cached. What comes after them was evicted 7 seconds ago to make room for another prompt."
    )


def test_evicted_by_growth(caller: Caller) -> None:
    caller.send("y" * 16 * (NUM_PAGES - 4) + "!")
    caller.now += 1
    caller.send("xyz", sampling=msgspec.structs.replace(ONE, max_tokens=16 * (NUM_PAGES - 2)))
    caller.now += 180
    words = caller.why("y" * 16 * (NUM_PAGES - 4) + "!")
    assert words.endswith(
        "What comes after them was evicted 3 minutes ago to make room for what running requests generate."
    )


def test_evicted_by_quota(make_caller: Callable[..., Caller]) -> None:
    caller = make_caller(tenant_cache_share=0.25)
    caller.send(PROMPT, tenant="acme")
    caller.now += 3
    caller.send("z" * 80, tenant="acme")
    assert caller.why(PROMPT, tenant="acme") == (
        "None of the 54 prompt tokens is cached. The beginning was evicted less than a second ago since this tenant had more than"
        " its share of the cache (--tenant-cache-share)."
    )


def test_flushed(caller: Caller) -> None:
    caller.send(PROMPT)
    caller.now += 1
    assert caller.call("flush", tenant="")["pages"] == 3
    caller.now += 7200
    assert caller.why(PROMPT) == "None of the 54 prompt tokens is cached. The beginning was flushed 2 hours ago."


def test_computing(make_caller: Callable[..., Caller]) -> None:
    caller = make_caller(max_num_batched_tokens=16)
    caller.start(PROMPT)
    caller.step()
    assert caller.why(PROMPT) == (
        "16 of the 54 prompt tokens are cached. What comes after them is being computed by another request right now."
    )
    caller.finish()
    assert caller.explained(PROMPT).reason == "complete"


def test_namespace(caller: Caller) -> None:
    caller.send(PROMPT, salt="one")
    caller.send(PAGE + "!", salt="two")
    assert caller.why(PROMPT, salt="two") == (
        "16 of the 54 prompt tokens are cached. What comes after them is cached under another cache_salt or adapter, and these"
        " never share."
    )
    assert caller.why(PROMPT, salt="three") == (
        "None of the 54 prompt tokens is cached. The beginning is cached under another cache_salt or adapter, and these never"
        " share."
    )


def test_prompt_logprobs(caller: Caller) -> None:
    caller.send(PROMPT)
    assert caller.send(PROMPT, sampling=msgspec.structs.replace(ONE, prompt_logprobs=0)) == (
        "The log-probabilities of the prompt are wanted, and the cache holds none: all 54 prompt tokens are computed."
    )


def test_disabled(make_caller: Callable[..., Caller]) -> None:
    caller = make_caller(enable_prefix_caching=False)
    caller.send(PROMPT)
    off = "Prefix caching is off (--no-enable-prefix-caching): all 54 prompt tokens are computed."
    assert caller.why(PROMPT) == off
    assert caller.send(PROMPT) == off


def test_another_tenant_is_never_mentioned(caller: Caller) -> None:
    """Whatever another tenant does with the very same prompt, the words are those of a prompt that nobody has sent."""
    unseen = caller.explained(PROMPT, tenant="me")
    assert unseen.reason == "unseen"
    caller.send(PROMPT, tenant="you")
    assert caller.explained(PROMPT, tenant="me") == unseen
    caller.send(PAGE + "our secret is safe here", tenant="you", salt="s")
    assert caller.explained(PROMPT, tenant="me", salt="s") == unseen
    caller.start("again " + PROMPT, tenant="you")
    caller.step()
    assert caller.explained("again " + PROMPT, tenant="me").reason == "unseen"
    caller.finish()
    caller.call("flush", tenant="you")
    assert caller.explained(PROMPT, tenant="you").reason == "evicted"
    assert caller.explained(PROMPT, tenant="me") == unseen


def test_llm_explains(llm: LLM) -> None:
    llm.generate(PROMPT, ONE, use_tqdm=False)
    explained = llm.explain(PROMPT)
    assert (explained.reason, explained.cached_tokens) == ("complete", 48)
    assert llm.explain(llm.tokenizer.encode(PROMPT)) == explained
