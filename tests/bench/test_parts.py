"""What `bench step`, `quality`, `offline` and `grammar` measure, with stand-ins for the clock and the real parts for the rest."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.stub import StubWorker
from tests.tiny import tiny_model
from trunkline.bench import offline, quality, steps
from trunkline.bench.grammar import Compiler, Schema, measure, read_schemas
from trunkline.errors import ConfigError
from trunkline.outputs import Candidate, CompletionOutput, PositionLogprobs, RequestOutput


class TickingClock:
    """A second passes between two looks at it."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._ticks))


# ---------------------------------------------------------------- steps


def make_stepper(num_pages: int = 32) -> tuple[steps.Stepper, StubWorker]:
    worker = StubWorker(num_pages=num_pages, page_size=4)
    return steps.Stepper(worker, max_model_len=64, clock=TickingClock()), worker


def test_steps_are_what_they_say() -> None:
    stepper, worker = make_stepper()
    found = stepper.time(batch=3, tokens=1, context=10, repeat=2)
    assert found == steps.StepTime(batch=3, tokens=1, context=10, seconds=1.0, fastest=1.0)
    plans = [plan for plan in worker.plans if plan.num_requests == 3]
    assert len(plans) == steps.WARM_UPS + 2
    for plan in plans:
        assert (plan.num_tokens, plan.context_len.tolist(), plan.positions.tolist()) == (3, [10] * 3, [9] * 3)
        assert len(np.unique(plan.page_table)) == plan.page_table.size == 9, "nobody shares a page"
        assert [row.at for row in plan.rows] == [0, 1, 2]
    assert [plan.step for plan in worker.plans] == list(range(1, len(worker.plans) + 1))


def test_a_chunk_is_read_behind_what_is_cached() -> None:
    stepper, worker = make_stepper()
    stepper.time(batch=1, tokens=6, context=10, repeat=1)
    plan = worker.plans[-1]
    assert (plan.positions.tolist(), plan.query_start.tolist(), plan.rows[0].at) == ([4, 5, 6, 7, 8, 9], [0, 6], 5)


def test_what_does_not_fit_is_not_run() -> None:
    stepper, worker = make_stepper(num_pages=8)
    assert stepper.time(batch=4, tokens=1, context=12, repeat=1).seconds is None
    assert not worker.plans
    with pytest.raises(ConfigError, match="A context of 65 tokens is more than the model's 64"):
        stepper.time(batch=1, tokens=1, context=65, repeat=1)


def test_every_combination_is_measured_once() -> None:
    stepper, _ = make_stepper()
    decode, prefill = steps.measure(stepper, batches=[1, 2], contexts=[4, 16], chunks=[8], repeat=1)
    assert [(one.batch, one.context) for one in decode] == [(1, 4), (1, 16), (2, 4), (2, 16)]
    assert [(one.tokens, one.context) for one in prefill] == [(8, 8), (8, 16)]


def test_a_context_that_is_too_long_is_found_first() -> None:
    stepper, worker = make_stepper()
    with pytest.raises(ConfigError, match="A context of 65 tokens is more than the model's 64"):
        steps.measure(stepper, batches=[1], contexts=[4, 65], chunks=[8], repeat=1)
    assert not worker.plans


# ---------------------------------------------------------------- quality


def position(token_id: int, logprob: float, likeliest: int) -> PositionLogprobs:
    def candidate(token_id: int) -> Candidate:
        return Candidate(token_id=token_id, text="", data=b"", logprob=logprob)

    return PositionLogprobs(chosen=candidate(token_id), rank=1, top=(candidate(likeliest),))


def test_a_text_is_cut_into_whole_windows() -> None:
    assert quality.windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert quality.windows(range(10), 4, most=1) == [[0, 1, 2, 3]]
    assert quality.windows(range(3), 4) == [[0, 1, 2]]
    with pytest.raises(ConfigError, match="The text has 1 tokens"):
        quality.windows([7], 4)


def test_perplexity_and_what_two_settings_differ_by() -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    one = quality.score([[1, 2, 3]], lambda pieces: [(position(2, half, 2), position(3, quarter, 9))])
    other = quality.score([[1, 2, 3]], lambda pieces: [(position(2, half, 2), position(3, half, 3))])
    assert one.perplexity == pytest.approx(math.sqrt(8)) and other.perplexity == pytest.approx(2)
    assert one.standard_error == pytest.approx(one.perplexity * math.log(2) / 2)
    difference = quality.compare(one, other)
    assert difference.perplexity_ratio == pytest.approx(math.sqrt(2))
    assert difference.mean_logprob == pytest.approx(-math.log(2) / 2)
    assert difference.mean_absolute == pytest.approx(math.log(2) / 2)
    assert difference.same_likeliest == 0.5


# ---------------------------------------------------------------- offline


def test_a_batch_is_generated_cold_and_warm() -> None:
    prompts = offline.make_prompts(count=3, prefix_len=5, input_len=2, vocab_size=97, seed=1)
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prompts[0][:5])} and len(
        {tuple(p) for p in prompts}
    ) == 3
    assert all(10 <= token < 97 for prompt in prompts for token in prompt)
    calls = []

    def generate(batch):
        calls.append(batch)
        cached = 0 if len(calls) == 1 else 6
        done = CompletionOutput(index=0, text="", token_ids=(1, 2), finish_reason="length")
        return [
            RequestOutput(
                request_id="",
                prompt=None,
                prompt_token_ids=tuple(p),
                cached_tokens=cached,
                outputs=(done,),
                finished=True,
            )
            for p in batch
        ]

    cold, warm = offline.measure(prompts, generate, TickingClock())
    assert calls == [prompts, prompts]
    assert cold == offline.Round(seconds=1.0, prompt_tokens=21, cached_tokens=0, output_tokens=6)
    assert (warm.cached_tokens, warm.prompt_rate, warm.output_rate) == (18, 21, 6)


# ---------------------------------------------------------------- grammar


def test_schemas_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.json").write_text('{"type": "integer"}')
    (tmp_path / "b.jsonl").write_text('{"id": "x", "schema": true}\n\n{"schema": {"const": 1}}\n')
    (tmp_path / "notes.txt").write_text("not a schema")
    found = {schema.name: schema.schema for schema in read_schemas(tmp_path)}
    assert found == {"a.json": {"type": "integer"}, "b.jsonl: x": True, "b.jsonl: 3": {"const": 1}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "a.json is not JSON"),
        ("a.jsonl", "{}\n{\n", "a.jsonl, line 1 has no schema"),
        ("a.jsonl", '{"schema": 1}\n{\n', "a.jsonl, line 2 is not JSON"),
        ("a.json", None, "cannot be read: No such file"),
        (".", None, r"holds no file that ends in .json or .jsonl"),
    ],
)
def test_what_holds_no_schema(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        list(read_schemas(tmp_path / name))


@pytest.mark.slow
def test_what_a_schema_costs(tmp_path: Path) -> None:
    compiler = Compiler(str(tiny_model(tmp_path / "tiny")))
    try:
        schema = Schema("s", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        cost = measure(compiler, schema, "llguidance", walks=2, most=20, seed=0)
        assert (cost.refused, cost.backend) == (None, "llguidance")
        assert cost.compile_seconds > 0 and 2 <= len(cost.mask_seconds) <= 2 * 21
        refused = measure(
            compiler, Schema("r", {"type": "string", "format": "no-such"}), "outlines", walks=1, most=9, seed=0
        )
        wrong = measure(compiler, Schema("w", {"type": "number-ish"}), "auto", walks=1, most=9, seed=0)
        assert wrong.refused is not None and "number-ish" in wrong.refused and not wrong.mask_seconds
        assert json.dumps(vars(refused))
    finally:
        compiler.close()
