"""The sampler against a naive one in float64, row by row and in batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from trunkline.sampling import SamplingParams
from trunkline.step import LogitsRow
from trunkline.workers.noise import gumbel_of_all
from trunkline.workers.sampler import MIN_LOGPROB, sample


def make_row(*, position=5, seed=7, logprobs=None, prompt=(), output=(), banned=(), target=-1, **sampling) -> LogitsRow:
    """A row that chooses; keyword arguments it doesn't know are SamplingParams'."""
    params = SamplingParams(**sampling)
    return LogitsRow(
        request=0,
        at=0,
        position=position,
        sampling=params,
        seed=seed,
        target=target,
        logprobs=logprobs,
        prompt=np.array(prompt, dtype=np.int32) if params.penalizes else None,
        output=np.array(output, dtype=np.int32) if params.penalizes else None,
        banned=tuple(banned),
    )


def choose(logits, **row) -> int:
    """The token one row chooses."""
    samples = sample(torch.tensor([logits], dtype=torch.float32), [make_row(**row)])
    assert not samples.failed
    return int(samples.token_ids[0])


def failure(logits, **row) -> str:
    """Why one row fails."""
    samples = sample(torch.tensor([logits], dtype=torch.float32), [make_row(**row)])
    assert samples.token_ids.tolist() == [-1] and samples.logprobs == (None,)
    return samples.failed[0]


# The naive sampler: float64, one token at a time, everything sorted.


def naive_candidates(logits, row: LogitsRow) -> dict[int, float]:
    """Token id -> adjusted logit of every token that may be chosen, likeliest first."""
    params = row.sampling
    assert params is not None
    prompt = [] if row.prompt is None else row.prompt.tolist()
    output = [] if row.output is None else row.output.tolist()
    adjusted = [float(logit) for logit in logits]
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        adjusted[token] = adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
    for token in output:
        adjusted[token] -= params.frequency_penalty
    for token in set(output):
        adjusted[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    for token in row.banned:
        adjusted[token] = -math.inf
    order = sorted(range(len(adjusted)), key=lambda token: (-adjusted[token], token))
    order = [token for token in order if adjusted[token] > -math.inf]
    if params.greedy:
        order = order[:1]
    else:
        weights = {token: math.exp((adjusted[token] - adjusted[order[0]]) / params.temperature) for token in order}
        order = [token for token in order if weights[token] >= params.min_p]
        if params.top_k > 0:
            order = order[: params.top_k]
        total, mass = math.fsum(weights[token] for token in order), 0.0
        for index, token in enumerate(order):
            mass += weights[token]
            if mass >= params.top_p * total:
                order = order[: index + 1]
                break
    return {token: adjusted[token] for token in order}


def naive_choice(logits, row):
    candidates = naive_candidates(logits, row)
    assert row.sampling is not None
    noise = gumbel_of_all(row.seed, row.position, len(logits))
    return max(sorted(candidates), key=lambda token: candidates[token] + row.sampling.temperature * noise[token])


# Numbers with few bits, so that float32 makes no rounding errors and equal logits are common; no top_p that a few equal
# weights could hit exactly.
eighths = st.sampled_from([8, 24, 160]).map(lambda spread: st.integers(-spread, spread).map(lambda n: n / 8))
top_ps = st.sampled_from([0, 0.013, 0.137, 0.333, 0.513, 0.777, 0.951, 0.9999, 1])
penalties = st.sampled_from([-2, -0.5, 0, 0.25, 2])


@st.composite
def rows_with_logits(draw):
    """Logits of one row, float32 [V], and the row."""
    vocab_size = draw(st.integers(1, 40))
    logits = draw(st.lists(draw(eighths) | st.just(-math.inf), min_size=vocab_size, max_size=vocab_size))
    assume(max(logits) > -math.inf)
    token_id = st.integers(0, vocab_size - 1)
    row = make_row(
        position=draw(st.integers(0, 2**31)),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt=draw(st.lists(token_id, max_size=8)),
        output=draw(st.lists(token_id, max_size=8)),
        banned=draw(st.sets(token_id, max_size=2)),
        temperature=draw(st.sampled_from([0, 1e-3, 0.25, 0.7, 1, 1.5, 2])),
        top_k=draw(st.sampled_from([-1, 0, 0, 1, 2, 3, 5, 12, 45])),
        top_p=draw(top_ps),
        min_p=draw(st.sampled_from([0, 0, 1e-6, 0.05, 0.3, 1])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        repetition_penalty=draw(st.sampled_from([0.5, 1, 1, 2, 4])),
        logit_bias=draw(st.dictionaries(token_id, st.sampled_from([-100, -1.5, 3, 100]), max_size=3)),
    )
    return np.array(logits, dtype=np.float32), row


@given(rows_with_logits())
def test_chooses_what_the_naive_sampler_chooses(case):
    logits, row = case
    assume(naive_candidates(logits, row))
    rows = [replace(row, position=row.position + i) for i in range(8)]
    samples = sample(torch.from_numpy(logits).repeat(len(rows), 1), rows)
    assert not samples.failed
    assert samples.token_ids.tolist() == [naive_choice(logits, row) for row in rows]


def test_chooses_what_the_naive_sampler_chooses_from_a_large_vocabulary():
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal(9001) * 3).astype(np.float32)
    settings = [
        {},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999, "temperature": 2},
        {"top_k": 50},
        {"top_k": 6000},
        {"top_k": 200, "top_p": 0.5},
        {"min_p": 0.01},
        {"min_p": 1e-8, "top_k": 400, "top_p": 0.8},
    ]
    rows = [make_row(seed=seed, position=seed, **setting) for seed, setting in enumerate(settings)]
    samples = sample(torch.from_numpy(logits).repeat(len(rows), 1), rows)
    assert samples.token_ids.tolist() == [naive_choice(logits, row) for row in rows]


@given(st.lists(rows_with_logits(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_and_in_any_batch(cases, random):
    vocab_size = max(len(logits) for logits, _ in cases)
    padded = [np.pad(logits, (0, vocab_size - len(logits)), constant_values=-np.inf) for logits, _ in cases]
    rows = [row for _, row in cases]
    alone = [sample(torch.from_numpy(logits[None]), [row]) for logits, row in zip(padded, rows, strict=True)]
    order = random.choices(range(len(cases)), k=8)
    batch = sample(torch.from_numpy(np.stack([padded[i] for i in order])), [rows[i] for i in order])
    for index, i in enumerate(order):
        assert batch.token_ids[index] == alone[i].token_ids[0]
        assert batch.failed.get(index) == alone[i].failed.get(0)
        one, other = batch.logprobs[index], alone[i].logprobs[0]
        assert (one is None) == (other is None)
        if one is not None:
            assert one.rank == other.rank
            assert one.token_ids.tobytes() == other.token_ids.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()


@given(rows_with_logits(), st.integers(0, 20))
def test_logprobs_are_the_models_own(case, num_alternatives):
    logits, row = case
    samples = sample(torch.from_numpy(logits[None]), [replace(row, logprobs=num_alternatives)])
    assume(not samples.failed)
    (report,) = samples.logprobs
    log_total = np.logaddexp.reduce(logits.astype(np.float64))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    expected_ids = [int(samples.token_ids[0]), *order[:num_alternatives]]
    assert report.token_ids.tolist() == expected_ids and report.token_ids.dtype == np.int32
    expected = [max(float(logits[token]) - log_total, MIN_LOGPROB) for token in expected_ids]
    np.testing.assert_allclose(report.logprobs, expected, rtol=1e-6, atol=1e-6)
    assert report.logprobs.dtype == np.float32 and np.isfinite(report.logprobs).all()
    assert report.rank == 1 + order.index(expected_ids[0])


# The distribution.


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 9},
        {"top_p": 0.8},
        {"min_p": 0.08, "logit_bias": {3: 1.5}},
        {"presence_penalty": 1.5, "output": [1, 1]},
    ],
)
def test_frequencies_follow_the_softmax(setting):
    """Chi-square over 2,500 positions; the limits are the 99.9 % points for 0 … 15 degrees of freedom."""
    limits = [0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3, 32.9, 34.5, 36.1, 37.7]
    logits = np.linspace(-1, 1.5, 16, dtype=np.float32)
    rows = [make_row(position=position, seed=11, **setting) for position in range(2500)]
    samples = sample(torch.from_numpy(logits).expand(len(rows), -1), rows)
    counts = np.bincount(samples.token_ids, minlength=16)
    candidates = naive_candidates(logits, rows[0])
    weights = np.exp(np.array(list(candidates.values())) / setting.get("temperature", 1))
    expected = weights / weights.sum() * len(rows)
    observed = counts[list(candidates)]
    assert observed.sum() == len(rows), "a token outside the filter was chosen"
    assert ((observed - expected) ** 2 / expected).sum() < limits[len(candidates) - 1]


def test_consecutive_tokens_are_independent():
    rows = [make_row(position=position) for position in range(4000)]
    chosen = sample(torch.zeros(len(rows), 4), rows).token_ids
    pairs = np.bincount(chosen[:-1] * 4 + chosen[1:], minlength=16)
    expected = (len(rows) - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7


def test_seed_and_position_alone_decide_the_noise():
    logits = [0.0] * 1000
    assert choose(logits, seed=1, position=3) == choose(logits, seed=1, position=3)
    assert choose(logits, seed=-1, position=3) == choose(logits, seed=2**64 - 1, position=3)
    assert len({choose(logits, seed=seed, position=3) for seed in range(20)}) > 15
    assert len({choose(logits, seed=1, position=position) for position in range(20)}) > 15


# Cases that people ask for by name.


def test_greedy_takes_the_lowest_id_of_equals():
    assert choose([1.0, 3.0, 2.0, 3.0], temperature=0) == 1
    assert choose([1.0, 3.0, 2.0, 3.0], top_k=1, seed=99) == 1


def test_greedy_obeys_penalties_bias_and_bans():
    logits = [1.0, 3.0, 2.5, 0.0]
    assert choose(logits, temperature=0, presence_penalty=1, output=[1]) == 2
    assert choose(logits, temperature=0, presence_penalty=0.4, output=[1, 1, 1, 1]) == 1, "presence counts once"
    assert choose(logits, temperature=0, frequency_penalty=0.4, output=[1, 1, 2]) == 1
    assert choose(logits, temperature=0, repetition_penalty=2, prompt=[1]) == 2
    assert choose(logits, temperature=0, presence_penalty=2, prompt=[1]) == 1, "presence looks at the output only"
    assert choose(logits, temperature=0, logit_bias={3: 3.5}) == 3
    assert choose(logits, temperature=0, banned=[1]) == 2


def test_repetition_penalty_makes_negative_logits_more_negative():
    assert choose([-1.0, -1.5], temperature=0, repetition_penalty=2, prompt=[0]) == 1


def test_bias_of_100_bans_or_forces():
    logits = [20.0, 10.0, 0.0]
    assert {choose(logits, seed=seed, logit_bias={2: 100}) for seed in range(50)} == {2}
    assert {choose(logits, seed=seed, logit_bias={0: -100}) for seed in range(50)} == {1}


def test_banned_ids_outside_the_vocabulary_do_no_harm():
    assert choose([1.0, 2.0], temperature=0, banned=[2, 2**31 - 1]) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-9])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    for setting in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}):
        assert choose([3.0e38, 1.0, -3.0e38, -math.inf], temperature=temperature, **setting) == 0


def test_top_k_leaves_exactly_k_of_equal_tokens():
    assert {choose([0.0] * 8, seed=seed, top_k=3) for seed in range(100)} == {0, 1, 2}


def test_top_p_of_zero_leaves_the_likeliest():
    assert {choose([0.0, 1.0, 1.0], seed=seed, top_p=0) for seed in range(30)} == {1}


def test_a_prompt_token_is_scored_and_nothing_is_chosen():
    row = LogitsRow(request=0, at=0, position=1, sampling=None, target=2, logprobs=1)
    samples = sample(torch.tensor([[0.0, 1.0, -1.0]]), [row])
    assert samples.token_ids.tolist() == [-1] and not samples.failed
    assert samples.logprobs[0].token_ids.tolist() == [2, 1]
    np.testing.assert_allclose(samples.logprobs[0].logprobs, torch.log_softmax(torch.tensor([0.0, 1, -1]), 0)[[2, 1]])
    assert samples.logprobs[0].rank == 3
    assert sample(torch.zeros(1, 3), [replace(row, target=-1)]).logprobs == (None,)
    assert "token id 3" in sample(torch.zeros(1, 3), [replace(row, target=3)]).failed[0]


def test_equal_tokens_rank_by_id():
    report = sample(
        torch.tensor([[2.0, 3.0, 2.0, 2.0]]), [make_row(temperature=0, banned=[0, 1], logprobs=3)]
    ).logprobs[0]
    assert report.token_ids.tolist() == [2, 1, 0, 2]
    assert report.rank == 3


def test_impossible_tokens_have_finite_logprobs():
    report = sample(torch.tensor([[-math.inf, 0.0, -math.inf]]), [make_row(logprobs=3)]).logprobs[0]
    assert report.token_ids.tolist() == [1, 1, 0, 2]
    assert report.logprobs.tolist() == [0, 0, MIN_LOGPROB, MIN_LOGPROB]


def test_the_logits_are_left_as_they_were():
    logits = torch.arange(12.0).reshape(2, 6)
    rows = [make_row(banned=[0], logit_bias={1: 5}), make_row(repetition_penalty=2, output=[3])]
    sample(logits, rows)
    assert torch.equal(logits, torch.arange(12.0).reshape(2, 6))


def test_no_rows():
    assert sample(torch.zeros(0, 5), []).token_ids.shape == (0,)


# A row fails alone.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_row_with_nan_or_infinity_fails_alone(bad, at):
    logits = torch.tensor([[0.0, 1, 2, 3, 4]] * 3)
    logits[1, at] = bad
    for setting in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}):
        samples = sample(logits, [make_row(**setting)] * 3)
        assert list(samples.failed) == [1] and "finite" in samples.failed[1]
        assert samples.token_ids[1] == -1 and samples.logprobs[1] is None
        assert samples.token_ids[0] == samples.token_ids[2] >= 0


def test_a_row_without_any_possible_token_fails():
    assert "finite" in failure([-math.inf, -math.inf])
    assert "min_tokens" in failure([-math.inf, 1.0], banned=[1])
    assert "min_tokens" in failure([0.0, 1.0], banned=[0, 1], temperature=0)


def test_a_bias_outside_the_vocabulary_fails_its_row():
    assert "'logit_bias' names token id 2; the model's ids are 0 to 1." in failure([0.0, 1.0], logit_bias={0: 1, 2: 1})


def test_penalized_ids_outside_the_vocabulary_fail_their_row():
    assert "token id 7" in failure([0.0, 1.0], presence_penalty=1, prompt=[7])
    assert "token id -1" in failure([0.0, 1.0], presence_penalty=1, output=[-1])


def test_penalties_that_overflow_fail_their_row():
    assert "milder" in failure([3e38, 1.0], repetition_penalty=0.01, prompt=[0])
