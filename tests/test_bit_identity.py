"""The same tokens give the same logits, bit for bit, on the CPU: whoever else is in the batch, whatever was cached, however it was cut.

Every row of logits of every step is compared, as raw bytes, with the first that were computed behind the same tokens
(tests/workers/recorder.py). The ways below are what steps can differ by; each must have happened, or the test fails. The first,
alone and cold, records every position, so that each later row of a text has something to differ from.

That covers whole texts, too: a request's text never changes with its neighbours, in any format, since a token is chosen from its
row of logits alone (tests/workers/test_sampler.py). No expected values are stored: one machine and one build are compared with
themselves.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.scheduler.factories import Clock, generate
from tests.tiny import tiny_gguf, tiny_model
from tests.workers.recorder import Recorder, key_of
from trunkline.bench.texts import words
from trunkline.config import EngineFlags, engine_config
from trunkline.messages import Failed, Generate, Tokens
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.scheduler.engine import Engine
from trunkline.step import SPLIT, Int32, Plan
from trunkline.workers.runner import ModelRunner
from trunkline.workers.worker import LocalWorker, load_worker

CHUNK = 24  # tokens of a step, where prompts are read in small chunks
FEW_TOKENS, MORE_TOKENS = 4, 18  # of output; the long prompts and as many short ones get more
LONGEST = 700  # tokens of a prompt
NUM_LONG = 3  # so many readers make a split of attention worth sharing
# For requests that are to be preempted: of the short ones some are admitted, and grow; of the long ones two fit, but not what they write.
SMALL_PAGE, PAGES_FOR_SHORT, PAGES_FOR_LONG = 8, 24, 131
PAGES_TO_EVICT, PAGES_TO_SWAP = 92, 68  # the same for all of them, and for two, where they share pages
NUM_PREEMPTED = 40  # at most, of the short ones

# What can be asked for on a CPU: how weights are stored; then, beside the default's weights, keys and values. The default is a GGUF file's
# packed blocks, as "gguf" would have them, with keys and values in float16.
FORMATS: dict[str, EngineFlags] = {
    "float32": {"quantization": "none", "dtype": "float32"},
    "float16": {"quantization": "none", "dtype": "float16"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "KV float32": {"kv_cache_dtype": "float32"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
}


class Asked(NamedTuple):
    """A request: greedy, or with a seed at temperature 1."""

    prompt: list[int]
    max_tokens: int
    temperature: float

    def message(self, name: str) -> Generate:
        return generate(name, self.prompt, max_tokens=self.max_tokens, temperature=self.temperature, seed=7)


def make_requests(tokenizer: Tokenizer, num: int) -> list[Asked]:
    """Prompts of 5 to LONGEST tokens of shipped words. The last NUM_LONG share more than a split of attention; of the others, every
    second shares its beginning with some.
    """
    rng = random.Random(num)

    def some(length: int) -> list[int]:
        return tokenizer.encode(" ".join(rng.choices(words(), k=length)), add_special_tokens=False)[:length]

    stem = some(LONGEST)
    long = [stem[: SPLIT + 1], stem[:SPLIT] + some(5), stem]
    short = [stem[: 8 * rng.randrange(8) * (i % 2)] + some(rng.randrange(5, 40)) for i in range(num - NUM_LONG)]
    return [
        Asked(prompt, MORE_TOKENS if i >= num - 2 * NUM_LONG else FEW_TOKENS, temperature=i % 3 // 2)
        for i, prompt in enumerate([*short, *long])
    ]


class Way:
    """An engine of its own, over pages of its own, around a runner that all ways of a format have in common."""

    def __init__(
        self,
        runner: ModelRunner,
        known: dict[bytes, bytes],
        *,
        num_pages: int = 1024,
        page_size: int = 16,
        num_host_slots: int = 0,
        everywhere: bool = False,
        **flags: Any,
    ) -> None:
        self.recorder = Recorder(
            runner,
            known,
            num_pages=num_pages,
            page_size=page_size,
            num_host_slots=num_host_slots,
            everywhere=everywhere,
        )
        recorder: Any = self.recorder
        worker = LocalWorker(
            recorder,
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=num_pages * page_size,
            num_host_slots=num_host_slots,
        )
        self.engine = Engine(
            engine_config("unused", host_cache_memory=num_host_slots or None, **flags),
            worker,
            eos_token_ids=(),
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            clock=Clock(),  # so that nothing depends on how fast this machine is
        )
        self.counters = self.engine.scheduler.counters

    def run(self, asked: Sequence[Asked]) -> list[list[int]]:
        """What is written. Every token of it was chosen from a row that was recorded."""
        texts: dict[str, list[int]] = {f"{i}": [] for i in range(len(asked))}
        messages = [
            one for name, request in zip(texts, asked, strict=True) for one in self.engine.handle(request.message(name))
        ]
        while self.engine.has_work:
            messages += self.engine.step()
        for message in messages:
            assert not isinstance(message, Failed), message
            if isinstance(message, Tokens):
                texts[message.request_id] += message.token_ids
        self.engine.scheduler.check()
        for request, text in zip(asked, texts.values(), strict=True):
            assert len(text) == request.max_tokens
            for end in range(len(text)):
                assert key_of(request.prompt + text[:end]) in self.recorder.scored
        return list(texts.values())


@contextmanager
def way(runner: ModelRunner, known: dict[bytes, bytes], **settings: Any) -> Iterator[Way]:
    one = Way(runner, known, **settings)
    try:
        yield one
    finally:
        one.engine.close()


def check(runner: ModelRunner, asked: Sequence[Asked]) -> int:
    """Write all texts in all ways; returns how many rows of logits were compared."""
    known: dict[bytes, bytes] = {}
    num_tokens = sum(request.max_tokens for request in asked)
    compared = 0
    with way(
        runner, known, max_num_seqs=1, enable_prefix_caching=False, num_speculative_tokens=0, everywhere=True
    ) as alone:
        expected = alone.run(asked)  # cold, in chunks of 512 tokens, flat, without drafts
        assert alone.recorder.widest == 1 and alone.recorder.shared == 0
        assert alone.counters.prefix_cache_hits == sum(alone.counters.draft_tokens.values()) == 0
        assert len(known) > sum(len(request.prompt) for request in asked[-1:])
    with way(runner, known, max_num_seqs=8) as batched:
        assert batched.run(asked) == expected
        assert batched.recorder.widest == 8
        cold = batched.counters.prefix_cache_hits
        assert batched.run(asked) == expected  # warm: drafts are what was written then
        assert batched.counters.prefix_cache_hits - cold > sum(len(one.prompt) for one in asked) / 2
        assert batched.counters.accepted_tokens["tree"] > 0 and batched.recorder.verified > 0
        assert batched.recorder.shared > 0
        assert batched.recorder.compared >= 2 * num_tokens
        compared += batched.recorder.compared
    with way(runner, known, max_num_seqs=8, max_num_batched_tokens=CHUNK) as chunked:
        assert chunked.run(asked) == expected
        assert chunked.recorder.chunks > LONGEST / CHUNK and chunked.recorder.largest <= CHUNK
        compared += chunked.recorder.compared
    short, long = slice(-NUM_LONG - NUM_PREEMPTED, -NUM_LONG), slice(-NUM_LONG, -1)
    for num_pages, some in ((PAGES_FOR_SHORT, short), (PAGES_FOR_LONG, long)):
        with way(runner, known, num_pages=num_pages, page_size=SMALL_PAGE, enable_prefix_caching=False) as preempted:
            assert preempted.run(asked[some]) == expected[some]
            compared += preempted.recorder.compared
    assert preempted.counters.preemptions > 0, "of the long ones; of some others, too, if there are enough of them"
    return compared


def check_host_memory(runner: ModelRunner, asked: Sequence[Asked]) -> None:
    """The same with pages that were copied to host memory and back."""
    known: dict[bytes, bytes] = {}
    with way(runner, known, enable_prefix_caching=False) as cold:
        expected = cold.run(asked)
    host: dict[str, Any] = {"page_size": SMALL_PAGE, "num_host_slots": 512, "preemption_mode": "swap"}
    with way(runner, known, num_pages=PAGES_TO_EVICT, **host) as evicted:
        assert evicted.run(asked) == evicted.run(asked) == expected
        assert evicted.counters.hits_by_tier["host"] > 0
    with way(runner, known, num_pages=PAGES_TO_SWAP, **host) as swapped:
        assert swapped.run(asked[-NUM_LONG:-1]) == expected[-NUM_LONG:-1]
        assert swapped.counters.preemptions_by_way["swap"] > 0


def load(model: Path | str, **flags: Any) -> ModelRunner:
    """The runner that a server with these flags would have."""
    worker = load_worker(engine_config(str(model), device="cpu", num_pages=1024, max_model_len=1024, **flags))
    assert isinstance(worker, LocalWorker) and worker._runner is not None
    runner = worker._runner
    worker.close()
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("form", ["default", *FORMATS])
def test_a_tiny_model(tmp_path: Path, form: str) -> None:
    """20 prompts in each format; the blocks of the file are those of Q8_0."""
    model = tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0", max_position_embeddings=1024)
    runner, asked = load(model, threads=2, **FORMATS.get(form, {})), make_requests(load_tokenizer(str(model)), 20)
    check(runner, asked)
    check_host_memory(runner, asked)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("form", ["default", *FORMATS])
def test_the_built_in_model(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """200 prompts in the default format, 20 in each other: some four minutes on two cores."""
    model = builtin_model()
    asked = make_requests(load_tokenizer(model), 200 if form == "default" else 20)
    runner = load(model, **FORMATS.get(form, {}))
    assert ("kept packed" in runner.dtype) == (form == "default" or form.startswith("KV")), runner.dtype
    compared = check(runner, asked)
    with capsys.disabled():
        print(f"\n{form}: {len(asked)} prompts, {compared:,} rows of logits the same as before, in five ways")


def test_one_bit_is_noticed(tmp_path: Path) -> None:
    """Wrong only beside others, and only in the last bit of one number."""

    class Wrong(ModelRunner):
        def forward(self, plan: Plan, token_ids: Int32) -> torch.Tensor:
            logits = super().forward(plan, token_ids)
            if plan.num_requests > 1:
                logits[-1, -1:].view(torch.int32).bitwise_xor_(1)
            return logits

    model = tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    runner = load(model, dtype="float32", threads=1)
    runner.__class__ = Wrong
    with pytest.raises(AssertionError, match="are not those that the same tokens gave before"):
        check(runner, make_requests(load_tokenizer(str(model)), 20))
