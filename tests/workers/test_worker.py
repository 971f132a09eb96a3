"""The worker: steps on a real tiny model, and tokens still unknown to a plan on a runner that only counts."""

import threading
import time
from concurrent.futures import wait as wait_for_any
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import EOS, IM_END, TOKEN_IDS, VOCAB_SIZE, tiny_gguf, tiny_model
from trunkline.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, WorkerConfig
from trunkline.errors import ConfigError, ModelError
from trunkline.models.tokenizer import load_tokenizer
from trunkline.sampling import SamplingParams
from trunkline.step import CopyKind, LogitsRow, PageCopy, Plan, StepResult
from trunkline.workers.runner import load_runner
from trunkline.workers.worker import SHORT_STEP, LocalWorker, load_worker, resolve_futures

GREEDY = SamplingParams(temperature=0)
PAGE_SIZE = 16


@dataclass
class Request:
    """Tokens known, of which `computed` are in `pages`."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0


def make_plan(*work: tuple[Request, int], step: int = 0) -> Plan:
    """The next n tokens of each request; its last known token gets a row of logits, greedy."""
    counts = [count for _, count in work]
    starts = np.cumsum([0, *counts])
    table = np.zeros((len(work), max(len(request.pages) for request, _ in work)), dtype=np.int32)
    for index, (request, _) in enumerate(work):
        table[index, : len(request.pages)] = request.pages
    ends = [request.computed + count for request, count in work]
    rows = [
        LogitsRow(request=index, at=int(starts[index + 1]) - 1, position=ends[index], sampling=GREEDY, logprobs=2)
        for index, (request, _) in enumerate(work)
        if ends[index] == len(request.tokens)
    ]
    tokens = [token for request, count in work for token in request.tokens[request.computed : request.computed + count]]
    positions = [request.computed + i for request, count in work for i in range(count)]
    return Plan(
        step=step,
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        query_start=starts.astype(np.int32),
        context_len=np.array(ends, dtype=np.int32),
        page_table=table,
        rows=tuple(rows),
    )


def run(worker: LocalWorker, *work: tuple[Request, int]) -> StepResult:
    """One step; its tokens are appended to the requests."""
    plan = make_plan(*work)
    result = worker.wait(worker.submit(plan))
    for request, count in work:
        request.computed += count
    for row, token in zip(plan.rows, result.token_ids, strict=True):
        work[row.request][0].tokens.append(int(token))
    return result


# A real model.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def make_config(model: str, *, device="auto", max_model_len=None, max_num_seqs=256, **cache) -> EngineConfig:
    return EngineConfig(
        model=ModelSource(path=model, dtype="float32", max_model_len=max_model_len),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        worker=WorkerConfig(device=device, threads=1),
    )


@pytest.fixture(scope="module")
def worker(model):
    worker = load_worker(make_config(model, num_pages=40))
    yield worker
    worker.close()


def test_it_says_what_it_is(worker):
    assert (worker.num_pages, worker.page_size, worker.depth) == (40, 16, 0)
    assert (worker.vocab_size, worker.max_model_len, worker.dtype) == (VOCAB_SIZE, 512, "float32")
    assert worker.eos_token_ids[0] == TOKEN_IDS["<|eos|>"]
    assert worker.device.startswith("cpu (")


def test_it_says_how_far_it_was_when(worker):
    before = time.perf_counter()
    result = run(worker, (Request([104, 101], pages=[5]), 2))
    assert result.marks is not None
    times = [before, *result.marks, time.perf_counter()]
    assert times == sorted(times)


def test_two_requests_in_mixed_steps_equal_each_alone(worker):
    """One prompt in two chunks, the other joining in the middle, against each prompt in one step."""
    long, short = list(range(60, 97)), [104, 101, 108, 108, 111]

    alone = []
    for prompt in (long, short):
        request = Request(list(prompt), pages=[5, 2, 9])
        run(worker, (request, len(prompt)))
        for _ in range(7):
            run(worker, (request, 1))
        alone.append(request.tokens)

    a, b = Request(list(long), pages=[1, 30, 7]), Request(list(short), pages=[11, 4])
    assert run(worker, (a, 20)).token_ids.shape == (0,)
    run(worker, (a, 17), (b, 5))
    for _ in range(7):
        run(worker, (b, 1), (a, 1))
    assert [a.tokens, b.tokens] == alone
    assert len(set(alone[0][37:])) > 1, "the tiny model should say something"


def test_a_step_in_flight_changes_nothing(model, worker):
    """With depth 1 every decode names its token before it is chosen."""
    request = Request([72, 105, 33], pages=[3, 4])
    run(worker, (request, 3))
    for _ in range(6):
        run(worker, (request, 1))

    ahead = load_worker(make_config(model, num_pages=40))
    ahead.depth = 1
    again = Request([72, 105, 33], pages=[3, 4])
    plan = make_plan((again, 3))
    handles = [ahead.submit(plan)]
    tokens = []
    for step in range(6):
        again.computed = len(again.tokens)
        again.tokens.append(-1)  # row 0 of the step in flight
        handles.append(ahead.submit(make_plan((again, 1), step=step)))
        tokens += ahead.wait(handles.pop(0)).token_ids.tolist()
    tokens += ahead.wait(handles.pop()).token_ids.tolist()
    ahead.close()
    assert tokens == request.tokens[3:]


def test_progress_is_told(model):
    seen = []
    load_worker(make_config(model, num_pages=40), lambda done, total: seen.append((done, total))).close()
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


def test_the_pool_is_sized_from_the_models_pages(model):
    """2 layers of 2 heads of 16 numbers, keys and values, float32: 8 KiB for a page of 16 tokens."""
    worker = load_worker(make_config(model, kv_cache_memory=40 * 8192 + 8191))
    assert worker.num_pages == 40
    worker.close()


def test_max_model_len_may_be_shorter_than_the_models(model):
    worker = load_worker(make_config(model, max_model_len=100, num_pages=8))
    assert (worker.max_model_len, worker.num_pages) == (100, 8)
    worker.close()


def test_a_text_ends_where_config_or_vocabulary_say_so(tmp_path):
    """A GGUF file names one end of text; the mark that closes a chat turn is found in its vocabulary."""
    worker = load_worker(make_config(str(tiny_gguf(tmp_path / "tiny.gguf")), num_pages=40))
    assert worker.eos_token_ids == (TOKEN_IDS[EOS], TOKEN_IDS[IM_END])
    worker.close()


def test_a_tokenizer_that_was_read_already_is_not_read_again(model, monkeypatch):
    tokenizer = load_tokenizer(model)
    monkeypatch.setattr("trunkline.workers.worker.load_tokenizer", lambda path: pytest.fail("it was"))
    worker = load_worker(make_config(model, num_pages=40), tokenizer=tokenizer)
    assert worker.tokenizer is tokenizer
    worker.close()


@pytest.mark.parametrize("max_model_len", [513, 0])
def test_max_model_len_longer_than_the_models_is_refused(model, max_model_len):
    with pytest.raises(ConfigError, match=f"--max-model-len is {max_model_len}; allowed is 1 to 512"):
        load_worker(make_config(model, max_model_len=max_model_len))


def test_a_pool_too_small_for_the_model_is_refused(model):
    with pytest.raises(ConfigError, match="The KV cache holds 512 tokens"):
        load_worker(make_config(model, num_pages=32))


def test_pages_take_what_the_weights_have_left(model, monkeypatch):
    left = {"left": 2**30}

    def load(*args, **options):
        left["left"] = 2**20  # weights lie in memory of the process's own
        return load_runner(*args, **options)

    monkeypatch.setattr("trunkline.workers.worker.load_runner", load)
    monkeypatch.setattr("trunkline.workers.worker.available_memory", lambda: left["left"])
    with pytest.raises(ConfigError, match=r"only 1\.0 MiB of memory is available"):
        load_worker(make_config(model, kv_cache_memory=2**29))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused(model, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"'cuda', but torch .* finds no GPU"):
        load_worker(make_config(model, device="cuda"))


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(ModelError):
        load_worker(make_config(str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_table", [[5, 40]]),
        ("page_table", [[-1, 2]]),
        ("page_table", [[5]]),
        ("positions", [16, 17, 19]),
        ("positions", [-1, 0, 1]),
        ("query_start", [0, 2]),
        ("token_ids", [1, 2, VOCAB_SIZE]),
        ("token_ids", [1, 2, -1]),
    ],
)
def test_a_plan_that_leaves_the_storage_is_an_error(model, field, value):
    """In a worker of its own: after such an error it counts as lost."""
    worker = load_worker(make_config(model, num_pages=40))
    good = make_plan((Request(list(range(19)), pages=[5, 6], computed=16), 3))
    fields = {name: getattr(good, name) for name in Plan.__slots__} | {field: np.array(value, dtype=np.int32)}
    handle = worker.submit(Plan(**fields))
    with pytest.raises((ValueError, IndexError)):
        worker.wait(handle)
    worker.close()


# A runner that counts: after token t comes t + 1. It has no pages.

POISON = 13


class CountingRunner:
    """Logits that point at the next number; NaN after POISON."""

    dtype, device = "float32", "cpu"
    config = SimpleNamespace(vocab_size=20, eos_token_ids=())

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def page_bytes(self, page_size: int) -> int:
        return page_size

    def forward(self, plan: Plan, token_ids) -> torch.Tensor:
        self.read.append(token_ids.tolist())
        assert token_ids.min() >= 0
        last = token_ids[[row.at for row in plan.rows]]
        logits = torch.nn.functional.one_hot(torch.from_numpy(last).long() + 1, 20).float()
        logits[torch.from_numpy(last == POISON)] = torch.nan
        return logits


def make_counter(depth=1):
    return LocalWorker(CountingRunner(), num_pages=8, page_size=PAGE_SIZE, max_model_len=64, depth=depth)


def decode(*tokens: int, step: int = 0) -> Plan:
    """A step in which each request reads one token; -1 - r is what row r of the step in flight chooses."""
    return make_plan(*((Request([token], pages=[index]), 1) for index, token in enumerate(tokens)), step=step)


def test_tokens_in_flight_are_filled_in():
    worker = make_counter()
    first = worker.submit(decode(3, 8, step=1))
    second = worker.submit(decode(-2, 5, -1, -2, step=2))
    assert worker.wait(first).token_ids.tolist() == [4, 9]
    third = worker.submit(decode(-4, step=3))
    result = worker.wait(second)
    assert result.step == 2 and result.token_ids.tolist() == [10, 6, 5, 10]
    assert worker.wait(third).token_ids.tolist() == [11]
    worker.close()


def test_who_builds_on_a_failed_row_fails_too_and_nobody_else():
    worker = make_counter()
    handles = [worker.submit(decode(3, POISON, 7, step=1)), worker.submit(decode(-3, -2, -1, step=2))]
    first, second = (worker.wait(handle) for handle in handles)
    assert first.token_ids.tolist() == [4, -1, 8] and list(first.failed) == [1]
    assert second.token_ids.tolist() == [9, -1, 5] and second.failed == {1: first.failed[1]}
    assert second.logprobs[1] is None and second.logprobs[0] is not None
    third = worker.wait(worker.submit(decode(-1, -2, step=3)))
    assert third.token_ids.tolist() == [10, -1] and third.failed == {1: first.failed[1]}
    worker.close()


def test_output_in_flight_is_filled_in():
    """The presence penalty must meet the token of the step in flight, and leave the plan as it was."""
    penalized = SamplingParams(temperature=0, presence_penalty=2)
    row = LogitsRow(
        request=0,
        at=0,
        position=1,
        sampling=penalized,
        prompt=np.array([6], dtype=np.int32),
        output=np.array([5, -1], dtype=np.int32),
    )
    previous = StepResult(step=0, token_ids=np.array([4], dtype=np.int32), logprobs=(None,))
    plan = make_plan((Request([-1], pages=[0]), 1))
    plan = Plan(**{name: getattr(plan, name) for name in Plan.__slots__} | {"rows": (row,)})
    resolved = resolve_futures(plan, previous)
    assert resolved.plan.token_ids.tolist() == [4] and not resolved.orphans
    assert resolved.plan.rows[0].output.tolist() == [5, 4]
    assert plan.token_ids.tolist() == [-1] and row.output.tolist() == [5, -1]


def test_a_plan_without_futures_is_passed_on_as_it_is():
    plan = decode(1, 2)
    assert resolve_futures(plan, None).plan is plan


def test_futures_of_a_step_that_is_not_there_are_an_error():
    worker = make_counter()
    with pytest.raises(ValueError, match="did not end well"):
        worker.wait(worker.submit(decode(-1)))
    worker.close()


def test_a_step_that_builds_on_an_error_is_an_error():
    worker = make_counter()
    worker.wait(worker.submit(decode(4)))
    handles = [worker.submit(decode(-5, step=1)), worker.submit(decode(-1, step=2))]
    with pytest.raises(IndexError):
        worker.wait(handles[0])
    with pytest.raises(ValueError, match="did not end well"):
        worker.wait(handles[1])
    worker.close()


@pytest.mark.parametrize("wrong", [{"request": 2}, {"request": -1}, {"at": 1}, {"at": -1}])
def test_logits_of_anothers_row_are_an_error(wrong):
    worker = make_counter()
    plan = decode(3, 4)
    row = LogitsRow(**{"request": 0, "at": 0, "position": 1, "sampling": GREEDY} | wrong)
    handle = worker.submit(Plan(**{name: getattr(plan, name) for name in Plan.__slots__} | {"rows": (row,)}))
    with pytest.raises(ValueError, match="wants logits"):
        worker.wait(handle)
    worker.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_steps_in_flight_than_agreed(depth):
    worker = make_counter(depth)
    handles = [worker.submit(decode(3)) for _ in range(depth + 1)]
    with pytest.raises(ValueError, match="one too many"):
        worker.submit(decode(3))
    for handle in handles:
        worker.wait(handle)
    worker.wait(worker.submit(decode(3)))
    worker.close()


def test_close_is_idempotent_and_final():
    worker = make_counter()
    worker.submit(decode(3))
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError):
        worker.submit(decode(3))


def test_a_step_that_raised_is_no_longer_in_flight():
    worker = make_counter()
    for _ in range(2):
        handle = worker.submit(decode(-1))  # builds on a step that there is not
        with pytest.raises(ValueError, match="did not end well"):
            worker.wait(handle)
    worker.wait(worker.submit(decode(3)))
    worker.close()


def test_a_wait_that_was_interrupted_can_be_repeated():
    worker = make_counter()
    handle = worker.submit(decode(3))
    assert [worker.wait(handle).token_ids.tolist() for _ in range(2)] == [[4], [4]]
    worker.wait(worker.submit(decode(3)))
    worker.close()


COPY = PageCopy(CopyKind.FORK, source=np.array([6], np.int32), target=np.array([7], np.int32))


class ThreadRunner(CountingRunner):
    """Notes on which threads it runs; is interrupted there as often as `interruptions` says."""

    def __init__(self, interruptions: int = 0) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.interruptions = interruptions

    def copy_pages(self, copy: PageCopy, host_pages: Any) -> None:
        """Nothing is stored here."""

    def forward(self, plan: Plan, token_ids) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        return super().forward(plan, token_ids)


def make_thread_worker(runner, depth=0, *, starts_at_once=False):
    return LocalWorker(
        runner, num_pages=8, page_size=PAGE_SIZE, max_model_len=64, depth=depth, starts_at_once=starts_at_once
    )


@pytest.mark.parametrize(
    ("depth", "num_tokens", "also", "on_a_thread"),
    [
        (0, 1, {}, False),
        (0, SHORT_STEP, {}, False),
        (0, SHORT_STEP + 1, {}, True),  # whoever waits long must be able to stop waiting
        (
            0,
            1,
            {"masks": SimpleNamespace(wait=lambda: np.full((1, 1), -1, np.int32))},
            True,
        ),  # they are filled meanwhile
        (
            0,
            1,
            {"copies": (COPY,)},
            True,
        ),  # if it was interrupted and ran again, the copy would be of what was written since
        (1, 1, {}, True),  # the next step is planned meanwhile
    ],
)
def test_a_short_step_that_nothing_goes_on_beside_runs_where_it_is_waited_for(
    depth: int, num_tokens: int, also: dict[str, Any], on_a_thread: bool
) -> None:
    runner = ThreadRunner()
    worker = make_thread_worker(runner, depth)
    plan = replace(make_plan((Request([3] * num_tokens, pages=list(range(8))), num_tokens)), **also)
    handle = worker.submit(plan)
    worker.wait(handle)
    assert [thread is not threading.current_thread() for thread in runner.threads] == [on_a_thread]
    worker.close()


def test_a_step_that_others_compute_too_starts_at_once() -> None:
    runner = ThreadRunner()
    worker = make_thread_worker(runner, starts_at_once=True)
    assert wait_for_any([worker.submit(decode(3))]).done, "nobody has asked for it"
    worker.close()


def test_a_step_that_was_interrupted_where_it_is_waited_for_runs_again() -> None:
    runner = ThreadRunner(interruptions=1)
    worker = make_thread_worker(runner)
    handle = worker.submit(decode(3))
    with pytest.raises(KeyboardInterrupt):
        worker.wait(handle)
    with pytest.raises(ValueError, match="one too many"):
        worker.submit(decode(5))
    assert worker.wait(handle).token_ids.tolist() == [4]
    assert worker.wait(worker.submit(decode(5))).token_ids.tolist() == [6]
    worker.close()
