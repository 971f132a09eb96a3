"""What a step costs: learned from steps, and right about those to come."""

import random
from collections.abc import Callable

import pytest

from trunkline.scheduler.pace import Pace, context_of

Cost = Callable[[int, int], float]


def linear(base: float, per_prompt_token: float, per_sequence: float) -> Cost:
    return lambda prompt, generating: base + per_prompt_token * prompt + per_sequence * generating


def taught(cost: Cost, steps: list[tuple[int, int]], *, noise: float = 0.0) -> Pace:
    pace, rng = Pace(), random.Random(1)
    for prompt, generating in steps:
        pace.observe(prompt, generating, cost(prompt, generating) * rng.uniform(1 - noise, 1 + noise))
    return pace


def mixed(num_steps: int) -> list[tuple[int, int]]:
    rng = random.Random(2)
    return [(rng.choice((0, 0, 16, 100, 512)), rng.randint(1, 32)) for _ in range(num_steps)]


def test_seconds_per_token_follows_steps_that_read_much() -> None:
    pace = Pace()
    pace.observe(6, 2, 1.0)
    pace.observe(0, 100, 1.0)
    assert pace.seconds_per_token == 0.0
    pace = Pace()
    pace.observe(100, 0, 1.0)
    assert pace.seconds_per_token == pytest.approx(0.01)
    pace.observe(100, 0, 2.0)
    assert pace.seconds_per_token == pytest.approx(0.012)


def test_what_streams_cost_is_not_put_down_to_the_prompt_beside_them() -> None:
    cost = linear(0.01, 20e-6, 0.001)
    pace = taught(cost, [*mixed(200), *[(2000, 100)] * 30])
    assert pace.seconds_per_token == pytest.approx(20e-6 + 0.01 / 2000, rel=0.1)


def test_nothing_is_known_at_the_start() -> None:
    pace = Pace()
    assert (pace.seconds(512, 8), pace.chunk(8, within=1.0), tuple(pace.coefficients)) == (0.0, 0, (0.0,) * 4)


@pytest.mark.parametrize("scale", (1e-3, 1.0, 30.0))
def test_a_linear_cost_is_learned_whatever_its_size(scale: float) -> None:
    cost = linear(0.01 * scale, 0.0002 * scale, 0.001 * scale)
    pace = taught(cost, mixed(200))
    for prompt, generating in ((0, 4), (256, 1), (512, 32), (64, 0)):
        assert pace.seconds(prompt, generating) == pytest.approx(cost(prompt, generating), rel=0.05)
    base, per_prompt_token, per_sequence, _ = pace.coefficients
    assert base + 16 * per_sequence + 256 * per_prompt_token == pytest.approx(cost(256, 16), rel=0.05)


def test_noise_of_a_fifth_moves_the_expectation_by_less_than_a_tenth() -> None:
    cost = linear(0.01, 0.0002, 0.001)
    pace = taught(cost, mixed(300), noise=0.2)
    for prompt, generating in ((0, 16), (100, 8), (512, 16)):
        assert pace.seconds(prompt, generating) == pytest.approx(cost(prompt, generating), rel=0.1)


def test_one_stall_is_not_taken_for_the_rule() -> None:
    cost = linear(0.01, 0.0002, 0.001)
    pace = taught(cost, mixed(200))
    pace.observe(100, 8, 5.0)  # somebody else had the machine
    assert pace.seconds(100, 8) < 1.5 * cost(100, 8)


def test_a_machine_that_slows_down_is_followed() -> None:
    pace = taught(linear(0.01, 0.0002, 0.001), mixed(200))
    slower = linear(0.03, 0.0006, 0.003)
    for prompt, generating in mixed(60):
        pace.observe(prompt, generating, slower(prompt, generating))
    assert pace.seconds(100, 8) == pytest.approx(slower(100, 8), rel=0.1)


def test_what_recent_steps_say_nothing_about_is_not_forgotten() -> None:
    cost = linear(0.01, 0.0002, 0.001)
    pace = taught(cost, mixed(200) + [(512, 8)] * 300)  # a long prompt, always in the same chunks
    assert pace.seconds(0, 8) == pytest.approx(cost(0, 8), rel=0.1)


def test_a_chunk_fits_into_the_time_and_grows_by_at_most_double() -> None:
    cost = linear(0.01, 0.0002, 0.001)
    pace = taught(cost, [(0, 2)] * 5 + [(16, 2)] * 5)
    assert pace.chunk(2, within=10.0) == 32
    pace = taught(cost, mixed(200))
    chunk = pace.chunk(4, within=0.05)
    assert cost(chunk, 4) == pytest.approx(0.05, rel=0.05)
    assert pace.chunk(4, within=0.005) == 0  # such a step is too long even without a prompt


def test_steps_that_took_no_time_teach_nothing() -> None:
    pace = Pace()
    pace.observe(100, 1, 0.0)
    pace.observe(0, 0, 1.0)
    pace.observe(100, 1, float("inf"))
    assert pace.seconds(100, 1) == 0.0 and pace.seconds_per_token == 0.0


# ---- the context of prompts

CPU, SLOW_CPU, GPU = (0.0112, 1.2e-3, 1.2e-3, 0.4e-6), (0.03, 3.7e-3, 3e-3, 1.8e-6), (0.01, 20e-6, 60e-6, 20e-6 / 65536)
LENGTHS = (60, 150, 400, 1200, 2500, 4000)
CHUNK = 512


def cost_of(machine: tuple[float, ...], num_prompt: int, num_generating: int, context: float) -> float:
    base, per_prompt_token, per_sequence, per_context_token = machine
    return base + per_prompt_token * num_prompt + per_sequence * num_generating + per_context_token * context


def life_of(machine: tuple[float, ...], num_steps: int, *, noise: float, seed: int, lengths: tuple[int, ...]) -> Pace:
    """Prompts of all lengths are read in chunks, and a few steps that only generate come between them."""
    pace, rng = Pace(), random.Random(seed)

    def step(num_prompt: int, num_generating: int, context: float) -> None:
        seconds = cost_of(machine, num_prompt, num_generating, context) * rng.uniform(1 - noise, 1 + noise)
        pace.observe(num_prompt, num_generating, seconds, context)

    while num_steps > 0:
        length, start, streams = rng.choice(lengths), 0, rng.randint(0, 6)
        while start < length:
            chunk = min(CHUNK - streams, length - start)
            step(chunk, streams, context_of(start, chunk))
            start += chunk
            num_steps -= 1
        for _ in range(rng.randint(0, 20)):
            step(0, rng.randint(1, 6), 0.0)
            num_steps -= 1
    return pace


@pytest.mark.parametrize("machine", (CPU, SLOW_CPU, GPU))
@pytest.mark.parametrize("seed", range(3))
def test_the_context_of_prompts_is_learned_from_some_hundred_steps(machine: tuple[float, ...], seed: int) -> None:
    pace = life_of(machine, 300, noise=0.1, seed=seed, lengths=LENGTHS)
    for length in (100, 400, 1200, 2500, 4000):
        starts = range(0, length, CHUNK)
        pieces = [(start, min(CHUNK, length - start)) for start in starts]
        really = sum(cost_of(machine, num, 0, context_of(start, num)) for start, num in pieces)
        expected = pace.seconds(length, 0, context_of(0, length), num_steps=len(pieces))
        assert expected == pytest.approx(really, rel=0.1), length
        assert sum(pace.seconds(num, 0, context_of(start, num)) for start, num in pieces) == pytest.approx(expected)


def test_a_first_long_prompt_teaches_what_short_ones_cannot() -> None:
    """However long only short ones came before, and however little their steps took."""
    pace = life_of(CPU, 500, noise=0.1, seed=1, lengths=(60, 100))
    for start in range(0, 4096, CHUNK):
        context = context_of(start, CHUNK)
        pace.observe(CHUNK, 0, cost_of(CPU, CHUNK, 0, context), context)
    for start in (0, 1024, 4096):
        context = context_of(start, CHUNK)
        assert pace.seconds(CHUNK, 0, context) == pytest.approx(cost_of(CPU, CHUNK, 0, context), rel=0.1)
    assert pace.seconds(0, 4) == pytest.approx(cost_of(CPU, 0, 4, 0.0), rel=0.15)


def test_a_chunk_far_into_its_prompt_is_smaller() -> None:
    pace = life_of(CPU, 300, noise=0.0, seed=2, lengths=LENGTHS)
    for start in (0, 1000, 4000):
        chunk = pace.chunk(4, within=0.2, start=start)
        assert cost_of(CPU, chunk, 4, context_of(start, chunk)) == pytest.approx(0.2, rel=0.05)
    assert pace.chunk(4, within=0.2, start=4000) < pace.chunk(4, within=0.2) / 2


def test_context_of() -> None:
    assert context_of(10, 4) == 10 + 11 + 12 + 13
    assert context_of(7, 0) == 0
