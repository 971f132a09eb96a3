"""The GPU worker on a fake device that works late and in odd orders: plans one by one."""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.workers.fake_device import (
    VOCAB_SIZE,
    FakeDevice,
    HashKernels,
    HashModel,
    HashSampler,
    TorchPages,
    next_token,
)
from tests.workers.plans import Chunk, make_plan
from trunkline.kernels.triton import pages
from trunkline.sampling import SamplingParams
from trunkline.step import CopyKind, PageCopy, Plan
from trunkline.workers import gpu_runner
from trunkline.workers.gpu_runner import GpuRunner, Room
from trunkline.workers.gpu_worker import GpuWorker

PAGE_SIZE, MAX_MODEL_LEN = 4, 48


def make_worker(*, seed=0, num_pages=24, depth=1, graphs=True, slots=4, device=None, **room) -> GpuWorker:
    device = device or FakeDevice(seed)
    sizes = {"requests": 6, "rows": 32, "max_model_len": MAX_MODEL_LEN} | room
    kernels: Any = HashKernels()
    runner = GpuRunner(HashModel(), kernels, torch.float32, device, Room(**sizes))
    runner.allocate(num_pages, PAGE_SIZE)
    if graphs:
        runner.capture()
    return GpuWorker(
        runner,
        HashSampler(),
        device,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        depth=depth,
        num_host_slots=slots,
    )


@pytest.fixture(autouse=True, scope="module")
def fast_pages():
    """Copies in torch: the kernels take a while in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_runner, "pages", TorchPages)
        yield


@pytest.fixture
def worker():
    worker = make_worker()
    yield worker
    worker.close()


def change(plan: Plan, **fields) -> Plan:
    return Plan(**{name: getattr(plan, name) for name in Plan.__slots__} | fields)


def decode(*requests: tuple[list[int], list[int]], step: int = 0) -> Plan:
    """One token each: the last of (tokens, pages). -1 - r is what row r of the step in flight chooses."""
    return change(make_plan([Chunk(known, len(known) - 1, len(known), pages) for known, pages in requests]), step=step)


def continuation(prompt: list[int], num: int) -> list[int]:
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known))
    return known[len(prompt) :]


PROMPT = [72, 5, 33, 90, 11]


def test_it_says_what_it_is(worker):
    assert (worker.num_pages, worker.page_size, worker.page_bytes, worker.depth) == (24, 4, 64, 1)
    assert (worker.vocab_size, worker.max_model_len, worker.dtype) == (VOCAB_SIZE, MAX_MODEL_LEN, "float32")
    assert worker.device == "cuda (fake, hash)"
    assert worker.host_pages.shape == (4, 64)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("graphs", [True, False])
def test_with_a_step_in_flight_a_text_is_what_it_is_without(seed, graphs):
    """Every decode names a token that is not chosen yet, in three requests at once."""
    worker = make_worker(seed=seed, graphs=graphs)
    prompts = [PROMPT, [9], [1, 2, 3, 4, 5, 6, 7]]
    pages = [[0, 1, 2, 3], [4, 5, 6], [9, 8, 7, 10]]
    known = [list(prompt) for prompt in prompts]
    handles = [worker.submit(make_plan([Chunk(p, 0, len(p), where) for p, where in zip(prompts, pages, strict=True)]))]
    chosen = []
    for step in range(1, 7):
        for row, tokens in enumerate(known):
            tokens.append(-1 - row)
        handles.append(worker.submit(decode(*zip(known, pages, strict=True), step=step)))
        chosen.append(worker.wait(handles.pop(0)).token_ids.tolist())
    chosen.append(worker.wait(handles.pop()).token_ids.tolist())
    assert np.transpose(chosen).tolist() == [continuation(prompt, 7) for prompt in prompts]
    worker.close()


def test_submit_and_forward_do_not_wait_for_masks():
    """The masks of a step are filled by whoever submitted it, after that."""

    class Masks:
        def __init__(self, *rows):
            self.filled = threading.Event()
            self.rows = np.array(rows, np.int32)

        def wait(self):
            self.filled.wait()
            return self.rows

    def only(token):
        words = np.zeros(4, np.uint32)
        words[token // 32] = 1 << token % 32
        return words.view(np.int32)

    worker = make_worker(device=FakeDevice(eager=1.0))
    plan = make_plan([Chunk(PROMPT, 0, 5, [0, 1]), Chunk(PROMPT, 0, 5, [2, 3]), Chunk([9], 0, 1, [4])])
    rows = [msgspec.structs.replace(row, mask=mask) for row, mask in zip(plan.rows, (1, -1, 0), strict=True)]
    masks = Masks(only(17), only(96))
    first = worker.submit(change(plan, rows=tuple(rows), masks=masks))
    assert not first.done()
    masks.filled.set()
    other = Masks(only(3))
    other.filled.set()
    second = worker.submit(
        change(decode(([9, -3], [4])), rows=(msgspec.structs.replace(plan.rows[0], at=0, mask=0),), masks=other)
    )
    assert worker.wait(first).token_ids.tolist() == [96, next_token(PROMPT), 17]
    assert worker.wait(second).token_ids.tolist() == [3]
    worker.close()


@pytest.mark.parametrize("seed", range(20))
def test_masks_of_two_steps_do_not_meet(seed):
    worker = make_worker(seed=seed)

    class Filled:
        def __init__(self, token):
            words = np.zeros((1, 4), np.uint32)
            words[0, token // 32] = 1 << token % 32
            self.rows = words.view(np.int32)

        def wait(self):
            return self.rows

    def step(token):
        plan = decode(([7], [token % 8]))
        return change(plan, rows=(msgspec.structs.replace(plan.rows[0], mask=0),), masks=Filled(token))

    handles = [worker.submit(step(0))]
    for token in range(1, 8):
        handles.append(worker.submit(step(token)))
        assert worker.wait(handles.pop(0)).token_ids.tolist() == [token - 1]
    worker.close()


def test_a_token_row_may_choose_for_many(worker):
    """As when a group forks: there is room for a row of logits of each token row, and for one of each request."""
    plan = make_plan([Chunk([7] * 32, 0, 32, list(range(8)))], all_rows=True)
    result = worker.wait(worker.submit(change(plan, rows=(*plan.rows, *[plan.rows[-1]] * 6))))
    assert len(result.token_ids) == 38 and set(result.token_ids[31:].tolist()) == {next_token([7] * 32)}
    known = ([*[7] * 32, -38], list(range(9)))
    assert worker.wait(worker.submit(decode(known))).token_ids.tolist() == continuation([7] * 32, 2)[1:]
    with pytest.raises(ValueError, match="wants 39 rows of logits; there is room for 38"):
        worker.wait(worker.submit(change(plan, rows=(*plan.rows, *[plan.rows[-1]] * 7))))


def test_output_in_flight_is_known_to_penalties(worker):
    """The token that row 0 of the step in flight chooses is banned by a penalty in the next."""
    chosen = continuation(PROMPT, 2)
    first = worker.submit(make_plan([Chunk(PROMPT, 0, 5, [0, 1])]))
    plan = decode(([*PROMPT, -1], [0, 1]))
    wish = SamplingParams(temperature=0, logit_bias={chosen[0]: 100.0}, presence_penalty=2.0)
    row = msgspec.structs.replace(
        plan.rows[0], sampling=wish, prompt=np.array(PROMPT, np.int32), output=np.array([-1], np.int32)
    )
    second = worker.submit(change(plan, rows=(row,)))
    assert worker.wait(first).token_ids.tolist() == chosen[:1]
    assert worker.wait(second).failed == {} and worker.wait(second).token_ids.tolist() == [chosen[0]]


# Errors.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_table", [[5, 40]]),
        ("page_table", [[-1, 2]]),
        ("page_table", [[5]]),
        ("positions", [4, 5, 7]),
        ("positions", [-1, 0, 1]),
        ("query_start", [0, 2]),
        ("token_ids", [1, 2, VOCAB_SIZE]),
        ("token_ids", [1, 2, -1]),
        ("context_len", [49]),
    ],
)
def test_a_plan_that_contradicts_itself_is_an_error_and_the_next_is_not(worker, field, value):
    plan = make_plan([Chunk(list(range(7)), 4, 7, [5, 6])])
    handle = worker.submit(change(plan, **{field: np.array(value, np.int32)}))
    with pytest.raises((ValueError, IndexError)):
        worker.wait(handle)
    assert worker.wait(worker.submit(make_plan([Chunk([9], 0, 1, [4])]))).token_ids.tolist() == [next_token([9])]


@pytest.mark.parametrize("wrong", [{"request": 2}, {"request": -1}, {"at": 1}, {"at": -1}])
def test_logits_of_anothers_row_are_an_error(worker, wrong):
    plan = decode(([3], [0]), ([4], [1]))
    row = msgspec.structs.replace(plan.rows[0], **wrong)
    with pytest.raises(ValueError, match="wants logits"):
        worker.wait(worker.submit(change(plan, rows=(row,))))


def test_a_step_that_builds_on_an_error_is_an_error(worker):
    worker.wait(worker.submit(decode(([5], [0]))))
    handles = [worker.submit(decode(([VOCAB_SIZE], [0]))), worker.submit(decode(([5, -1], [0])))]
    with pytest.raises(ValueError, match="vocabulary"):
        worker.wait(handles[0])
    with pytest.raises(ValueError, match="did not end well"):
        worker.wait(handles[1])


def test_a_row_that_reads_a_nan_fails_alone_and_so_does_who_builds_on_it(worker):
    """Page 3 was never written: the second request reads NaN there."""
    first = worker.submit(make_plan([Chunk(PROMPT, 0, 5, [0, 1]), Chunk(PROMPT, 4, 5, [3, 4]), Chunk([9], 0, 1, [5])]))
    second = worker.submit(decode(([*PROMPT, -1], [0, 1]), ([*PROMPT, -2], [3, 4]), ([9, -3], [5])))
    third = None
    one = worker.wait(first)
    assert list(one.failed) == [1] and "finite" in one.failed[1]
    assert one.token_ids.tolist() == [*continuation(PROMPT, 1), -1, next_token([9])]
    third = worker.submit(decode(([9, 1, -3], [5]), ([*PROMPT, 0, -2], [3, 4])))
    two = worker.wait(second)
    assert two.token_ids[[0, 2]].tolist() == [continuation(PROMPT, 2)[1], continuation([9], 2)[1]]
    assert two.token_ids[1] == -1 and two.failed == {1: one.failed[1]}
    three = worker.wait(third)
    assert three.failed == {1: one.failed[1]} and three.token_ids[0] >= 0


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_steps_in_flight_than_agreed(depth):
    worker = make_worker(depth=depth)
    plan = decode(([3], [0]))
    handles = [worker.submit(plan) for _ in range(depth + 1)]
    with pytest.raises(ValueError, match="one too many"):
        worker.submit(plan)
    for handle in handles:
        assert worker.wait(handle) is worker.wait(handle), "an interrupted wait may be repeated"
    worker.wait(worker.submit(plan))
    worker.close()


def test_results_may_be_waited_for_late(worker):
    handles = [worker.submit(decode(([3], [0]))), worker.submit(decode(([3, -1], [0])))]
    assert worker.wait(handles[1]).token_ids.tolist() == [continuation([3], 2)[1]]
    assert worker.wait(handles[0]).token_ids.tolist() == [continuation([3], 1)[0]]


def test_close_is_idempotent_and_final():
    worker = make_worker()
    worker.submit(decode(([3], [0])))
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError):
        worker.submit(decode(([3], [0])))


# Copies.


def copies(*parts: tuple[CopyKind, list[int], list[int]]) -> tuple[PageCopy, ...]:
    return tuple(PageCopy(kind, np.array(source, np.int32), np.array(to, np.int32)) for kind, source, to in parts)


def copy_plan(*parts) -> Plan:
    none = np.empty(0, np.int32)
    return Plan(
        step=1,
        token_ids=none,
        positions=none,
        query_start=np.zeros(1, np.int32),
        context_len=none,
        page_table=np.empty((0, 0), np.int32),
        rows=(),
        copies=copies(*parts),
    )


@pytest.mark.parametrize("implementation", [pages, TorchPages])
@pytest.mark.parametrize("seed", range(3))
def test_pages_go_to_host_slots_and_come_back(seed, implementation, monkeypatch):
    monkeypatch.setattr(gpu_runner, "pages", implementation)
    worker = make_worker(seed=seed)
    worker.wait(worker.submit(make_plan([Chunk(list(range(20, 32)), 0, 12, [3, 7, 9])])))
    stored = worker.wait(worker.submit(copy_plan((CopyKind.STORE, [3, 7, 9], [2, 3, 0]))))
    assert stored.copy_seconds > 0 and stored.token_ids.shape == (0,)
    slots = worker.host_pages.view(np.float32)  # keys of 4 tokens of 2 numbers, then their values
    assert slots[[2, 3, 0], 0:8:2].ravel().tolist() == list(range(20, 32))
    back = change(
        decode(([*range(20, 32), 5], [12, 13, 14, 15])),
        copies=copies((CopyKind.LOAD, [2, 3, 0], [12, 13, 11]), (CopyKind.FORK, [11], [14])),
    )
    result = worker.wait(worker.submit(back))
    assert result.token_ids.tolist() == [next_token([*range(20, 32), 5])]
    worker.close()


@pytest.mark.parametrize(
    "wrong", [(CopyKind.STORE, [24], [0]), (CopyKind.LOAD, [4], [0]), (CopyKind.FORK, [0, 1], [2])]
)
def test_a_copy_that_leads_outside_is_an_error(worker, wrong):
    with pytest.raises(ValueError, match="A copy of kind"):
        worker.wait(worker.submit(copy_plan(wrong)))
