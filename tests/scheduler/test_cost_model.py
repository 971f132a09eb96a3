"""What a step costs, worked out by hand."""

import numpy as np
import pytest

from trunkline.errors import ConfigError
from trunkline.scheduler.cost_model import PROFILES, CostModel, profile
from trunkline.step import Plan

COST = CostModel(
    step=1.0,
    prompt_token=0.01,
    far_context=100,
    sequence=0.1,
    context_token=0.001,
    kv_bytes_per_token=1,
    max_num_batched_tokens=64,
)


def plan(*pieces: tuple[int, int]) -> Plan:
    """A step of pieces [start, end)."""
    num_new = [end - start for start, end in pieces]
    return Plan(
        step=1,
        token_ids=np.zeros(sum(num_new), np.int32),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in pieces]),
        query_start=np.array([0, *np.cumsum(num_new)], np.int32),
        context_len=np.array([end for _, end in pieces], np.int32),
        page_table=np.zeros((len(pieces), 1), np.int32),
        rows=(),
    )


def test_a_sequence_that_generates_pays_for_its_context() -> None:
    assert COST.seconds(plan((49, 50))) == pytest.approx(1.0 + 0.1 + 50 * 0.001)


def test_a_prompts_token_costs_more_the_more_comes_before_it() -> None:
    assert COST.seconds(plan((0, 20))) == pytest.approx(1.0 + 20 * 0.01 * (1 + 10 / 100))
    assert COST.seconds(plan((80, 100))) == pytest.approx(1.0 + 20 * 0.01 * (1 + 90 / 100))


def test_a_step_costs_the_sum_of_its_parts() -> None:
    parts = [COST.seconds(plan(piece)) - COST.step for piece in ((49, 50), (0, 20), (9, 10))]
    assert COST.seconds(plan((49, 50), (0, 20), (9, 10))) == pytest.approx(COST.step + sum(parts))


def test_profiles_are_found_by_name() -> None:
    assert profile("h100-llama8b") is PROFILES["h100-llama8b"]
    with pytest.raises(ConfigError, match=r"^--profile is 'h200'; allowed is one of h100-llama8b, cpu-smollm2\.$"):
        profile("h200")
