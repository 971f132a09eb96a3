"""The sampler on the device against the one on the CPU: the same tokens, the same sentences, and nothing that waits.

Both count in float64, so tokens are compared without any tolerance; where a GPU's exp and log round otherwise, two scores would have
to be equal to 1e-12 to be told apart.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.test_sampler import make_row, rows_with_logits
from tests.workers.test_sampler_masks import mask_of
from trunkline.kernels.triton import filters, interpreter
from trunkline.step import Int32
from trunkline.workers.device_sampler import DeviceSampler
from trunkline.workers.sampler import Samples, sample

DEVICE = torch.device("cpu" if interpreter.is_on() else "cuda")
WORDS = 4  # of masks in these tests: more than the vocabulary needs


def sample_on_device(logits, rows, masks: Int32 | None = None, previous=None, *, sampler=None) -> Samples:
    """prepare, sample and fetch, as a worker does it. The logits are left as they were."""
    logits = torch.as_tensor(logits, dtype=torch.float32, device=DEVICE)
    before = logits.clone()
    sampler = sampler or DeviceSampler(logits.shape[1], len(rows), DEVICE)
    prepared = sampler.prepare(rows, num_previous=0 if previous is None else len(previous))
    with np.errstate(over="ignore", invalid="ignore"):  # of the interpreter; as the CPU's sampler
        samples = sampler.sample(
            logits,
            prepared,
            None if masks is None else torch.from_numpy(masks).to(DEVICE),
            None if previous is None else torch.tensor(previous, dtype=torch.int32, device=DEVICE),
        )
    host = sampler.to_host(samples)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert logits.view(torch.int32).equal(before.view(torch.int32))
    return sampler.fetch(host)


def assert_same(seen: Samples, expected: Samples) -> None:
    assert seen.failed == expected.failed
    assert seen.token_ids.tolist() == expected.token_ids.tolist() and seen.token_ids.dtype == np.int32
    assert seen.fallback_logprobs.keys() == expected.fallback_logprobs.keys()
    reports = [*zip(seen.logprobs, expected.logprobs, strict=True)]
    reports += [(seen.fallback_logprobs[row], expected.fallback_logprobs[row]) for row in expected.fallback_logprobs]
    for one, other in reports:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.rank == other.rank
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.token_ids.dtype == np.int32
            assert one.logprobs.dtype == np.float32
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def assert_samples_like_the_cpu(logits, rows, masks: Int32 | None = None) -> Samples:
    expected = sample(torch.as_tensor(logits, dtype=torch.float32), rows, masks)
    assert_same(sample_on_device(logits, rows, masks), expected)
    return expected


@st.composite
def batches(draw):
    """Logits float32 [L, V], their rows, and masks: of all kinds, also those that fail."""
    cases = draw(st.lists(rows_with_logits(), min_size=1, max_size=4))
    vocab_size = max(len(logits) for logits, _ in cases)
    logits = np.stack([np.pad(one, (0, vocab_size - len(one)), constant_values=-np.inf) for one, _ in cases])
    masks = np.stack([mask_of(draw(st.sets(st.integers(0, 32 * WORDS - 1))), WORDS) for _ in range(2)])
    rows = []
    for index, (_, row) in enumerate(cases):
        changes = draw(
            st.sampled_from(
                ["nothing", "nothing", "mask", "one", "fallback", "target", "ids", "bias", "poison", "greedy"]
            )
        )
        token_id = draw(st.integers(0, vocab_size - 1))
        match changes:
            case "mask":
                row = replace(row, mask=draw(st.integers(0, 1)))
            case "one":
                masks[0] = mask_of({token_id, vocab_size}, WORDS)
                row = replace(row, mask=0)
            case "fallback":
                row = replace(row, fallback=token_id, mask=draw(st.integers(-1, 1)))
            case "target":
                row = replace(row, sampling=None, target=draw(st.sampled_from([-1, token_id, vocab_size])))
            case "ids" if row.output is not None:
                row = replace(row, output=np.array([0, vocab_size], np.int32), mask=draw(st.integers(-1, 1)))
            case "bias":
                params = replace(row.sampling, logit_bias={vocab_size: 1})
                row = replace(row, sampling=params)
            case "poison":
                logits[index, token_id] = draw(st.sampled_from([math.nan, -math.nan, math.inf, 3e38]))
            case "greedy":
                row = make_row(temperature=0, logprobs=row.logprobs)
        rows.append(row)
    return logits, rows, masks


@pytest.mark.slow
@settings(max_examples=40)
@given(batches())
def test_samples_like_the_cpu(batch) -> None:
    logits, rows, masks = batch
    assert_samples_like_the_cpu(logits, rows, masks)


SETTINGS: list[dict] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3, "logprobs": 20},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 2},
    {"top_k": 50},
    {"top_k": 60, "top_p": 0.5},
    {"min_p": 0.01},
    {"min_p": 1e-8, "top_k": 40, "top_p": 0.8, "logprobs": 3},
    {"repetition_penalty": 1.3, "prompt": [1, 2, 3], "output": [5, 5, 7], "presence_penalty": 0.3, "top_p": 0.95},
]


@pytest.mark.parametrize("vocab_size", [1, 97])
def test_odd_vocabularies(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    rows = [make_row(seed=seed, position=seed, **setting) for seed, setting in enumerate(SETTINGS[:-1])]
    rows += [make_row(temperature=0, banned=[2, 10**6], logit_bias={0: 2.5}, logprobs=0)]
    assert_samples_like_the_cpu(generator.standard_normal((len(rows), vocab_size)) * 3, rows)


@pytest.mark.slow
def test_rows_of_several_blocks() -> None:
    """With what is too much for a list: nearly equal logits, and equal ones in all blocks."""
    vocab_size, generator = 9001, np.random.default_rng(0)
    logits = (generator.standard_normal((8, vocab_size)) * 3).astype(np.float32)
    logits[4:6] /= 100
    logits[6:] = generator.integers(0, 3, vocab_size)
    masks = generator.integers(-(2**31), 2**31, (1, -(-vocab_size // 32))).astype(np.int32)
    rows = [
        make_row(temperature=0, logprobs=20),
        make_row(seed=1),
        replace(make_row(top_p=0.9), mask=0),
        replace(make_row(top_k=50, top_p=0.5, repetition_penalty=1.3, prompt=[4, 9000], output=[5000]), mask=0),
        make_row(top_p=0.95),
        make_row(top_k=8900, top_p=0.9),
        make_row(top_k=8600, seed=5),
        replace(make_row(temperature=0, logprobs=2), mask=0),
    ]
    assert_samples_like_the_cpu(logits, rows, masks)


@pytest.mark.slow
def test_a_real_vocabulary(monkeypatch) -> None:
    """In blocks as large as the interpreter likes them."""
    for name in ("BOUND", "SEARCH"):
        config = getattr(filters, name)
        monkeypatch.setattr(filters, name, config._replace(blocks={**config.blocks, "BLOCK": 16_384}))
    vocab_size, generator = 49_152, np.random.default_rng(1)
    logits = (generator.standard_normal((5, vocab_size)) * 3).astype(np.float32)
    rows = [
        make_row(temperature=0),
        make_row(temperature=0.8, top_k=50, top_p=0.9, logprobs=3),
        make_row(top_p=0.95),
        make_row(min_p=0.02, seed=3),
        make_row(temperature=2, top_p=0.9999, presence_penalty=1, output=[7]),
    ]
    assert_samples_like_the_cpu(logits, rows)


@pytest.mark.parametrize(
    "setting", [{"top_k": 3}, {"top_k": 7, "top_p": 0.513}, {"top_p": 0.333}, {"top_p": 0}], ids=str
)
def test_of_equal_logits_the_lowest_ids_stay(setting) -> None:
    """One row for each token that is left: a seed that draws it."""
    logits = torch.tensor([1.0, 0.0, -0.0, 1.0] * 3)
    rows = [make_row(seed=seed, temperature=2, **setting) for seed in range(300)]
    drawn = sample(logits.repeat(len(rows), 1), rows).token_ids
    _, firsts = np.unique(drawn, return_index=True)
    assert_samples_like_the_cpu(logits.repeat(len(firsts), 1), [rows[first] for first in firsts])


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    rows = [make_row(temperature=temperature, **setting) for setting in ({}, {"top_p": 0.9}, {"min_p": 0.1})]
    samples = assert_samples_like_the_cpu([[3.0e38, 1.0, -3.0e38, -math.inf]] * 3, rows)
    assert samples.token_ids.tolist() == [0, 0, 0]


def test_rows_fail_alone_and_say_why() -> None:
    logits = np.zeros((9, 5), np.float32)
    logits[0, 3], logits[1, 2], logits[2] = math.nan, math.inf, -math.inf
    logits[8, :2] = -math.inf
    rows = [
        make_row(position=2),
        replace(make_row(temperature=0), sampling=None, target=1),
        make_row(),
        make_row(banned=range(5), logprobs=2),
        make_row(temperature=0, logprobs=1),
        make_row(presence_penalty=1, prompt=[7]),
        replace(make_row(), mask=0),
        make_row(logit_bias={5: 1}, temperature=0),
        replace(make_row(), mask=1),
    ]
    logits[5, 0] = 1
    samples = assert_samples_like_the_cpu(logits, rows, np.stack([mask_of({99}, WORDS), mask_of({0, 1}, WORDS)]))
    assert sorted(samples.failed) == [0, 1, 2, 3, 5, 6, 7, 8] and samples.token_ids[4] == 0


def test_penalties_that_overflow_fail_their_row() -> None:
    rows = [make_row(repetition_penalty=0.01, prompt=[0], temperature=temperature) for temperature in (0, 1)]
    assert "milder" in assert_samples_like_the_cpu([[3e38, 1.0]] * 2, rows).failed[1]


def test_tokens_of_the_step_before_are_known_on_the_device_alone() -> None:
    """An output's -1 - r stands for what row r chose; for a row that failed, for token 0, as in the CPU's worker."""
    logits = [[1.0, 3.0, 2.5, 0.0]] * 3
    outputs = [[-2], [2, -3, -2], [-1]]
    rows = [make_row(temperature=0, presence_penalty=1, output=output) for output in outputs]
    seen = sample_on_device(logits, rows, previous=[-1, 1, 2])
    known = [[1], [2, 2, 1], [0]]
    expected = sample(
        torch.tensor(logits),
        [replace(row, output=np.array(ids, np.int32)) for row, ids in zip(rows, known, strict=True)],
    )
    assert_same(seen, expected)
    assert (
        "token id -4;"
        in sample_on_device(logits[:1], [replace(rows[0], output=np.array([-4]))], previous=[0, 0, 0]).failed[0]
    )
    sampler = DeviceSampler(4, 1, DEVICE)
    with pytest.raises(ValueError, match="previous"):
        sampler.sample(torch.tensor(logits[:1]), sampler.prepare(rows[:1], num_previous=2))


def test_rows_of_logits_may_be_further_apart() -> None:
    padded = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    rows = [make_row(temperature=0, logprobs=2), make_row(top_k=3), make_row(banned=[1]), make_row(top_p=0.5)]
    assert_same(sample_on_device(padded[:, :19], rows), sample(padded[:, :19], rows))


def test_what_a_step_made_outlives_the_next_two() -> None:
    sampler = DeviceSampler(50, 4, DEVICE)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for step in range(6):
        logits = torch.randn(1 + step % 4, 50, generator=generator)
        rows = [
            make_row(seed=step, position=row, logprobs=1, output=[step] * 9, frequency_penalty=0.5)
            for row in range(len(logits))
        ]
        prepared = sampler.prepare(rows)
        host = sampler.to_host(sampler.sample(logits.to(DEVICE), prepared))
        steps.append((host, sample(logits, rows)))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        for one, expected in steps[-3:]:
            assert_same(sampler.fetch(one), expected)


def test_long_prompts_make_room_for_themselves() -> None:
    prompt = np.arange(40_000) % 31
    rows = [make_row(temperature=0, repetition_penalty=1.5, prompt=prompt, output=[31, 32])] * 2
    assert_samples_like_the_cpu(torch.randn(2, 40, generator=torch.Generator().manual_seed(2)), rows)


class NoWaiting(TorchDispatchMode):
    """Raises where the host would wait for the device, or the shape of a tensor would depend on what is in another."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "_to_copy",
        "copy_",
        "item",
        "equal",
        "is_nonzero",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.add(name)
        # The interpreter copies what it was given onto itself.
        is_interpreters = name == "copy_" and args[0].data_ptr() == args[1].data_ptr()
        forbidden = any(name.startswith(one) for one in self.FORBIDDEN)
        assert is_interpreters or not forbidden, f"{name} waits for the device"
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rows = [
        make_row(temperature=0),
        replace(make_row(top_p=0.9, top_k=9, logprobs=5), mask=0, fallback=3),
        make_row(output=[-1, -2], presence_penalty=1, logit_bias={1: 1}, banned=[2]),
        make_row(min_p=0.1),
        replace(make_row(logprobs=1), sampling=None, target=4),
    ]
    sampler = DeviceSampler(40, 5, DEVICE)
    masks = torch.from_numpy(mask_of({1, 5, 30, 39}, 2)[None]).to(DEVICE)
    previous = torch.tensor([4, 5], dtype=torch.int32, device=DEVICE)
    prepared = sampler.prepare(rows, num_previous=2)
    with NoWaiting() as mode:
        sampler.sample(logits, prepared, masks, previous)
    assert "view" in mode.seen, "the test sees nothing"
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        logits[0, 0].item()


def test_misfits_are_refused() -> None:
    sampler = DeviceSampler(40, 2, DEVICE)
    prepared = sampler.prepare([make_row()])
    with pytest.raises(AssertionError, match="for 1 rows"):
        sampler.sample(torch.zeros(2, 40), prepared)
    with pytest.raises(AssertionError, match="for 40 tokens"):
        sampler.sample(torch.zeros(1, 40), prepared, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="at most 2"):
        sampler.prepare([make_row()] * 3)
    assert sampler.fetch(sampler.to_host(sampler.sample(torch.zeros(0, 40), sampler.prepare([])))).token_ids.shape == (
        0,
    )
