"""Constrained requests at random: late and refused grammars, groups, drafts, little memory, steps in flight or lost, aborts.

Whatever happens, a request that ends has exactly the tokens it has alone, token by token under its masks.
"""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import EOS, Driver, generate, make_engine, plant_drafts
from tests.stub import StubWorker, continuation
from tests.tiny_grammars import TinyCompilation, TinyCompiler, constrained_continuation, ids, lark, text_of
from trunkline.constraint import Grammar
from trunkline.messages import Abort
from trunkline.scheduler.engine import Engine
from trunkline.step import Plan, StepResult

GRAMMARS = [
    lark(r"""start: "{\"name\":\"" /[a-z]{1,6}/ "\",\"age\":" /[1-9][0-9]?/ "}" """),
    lark("start: /[a-d]{3,20}/"),
    lark('start: "the cab" | "the age"'),
    lark('start: "' + "the cab " * 9 + '" /[a-c]+/'),
    lark('start: "[" ("true" | "null") ("," ("true" | "null"))* "]"'),
    lark('start: ""'),
]
CLOSED = lark(
    r"""start: "[" item ("," item)* "]"
item: "{\"age\":" /[1-9]{1,3}/ "}" """,
    close_on_length=True,
)
REFUSED = lark("start: nothing_of_the_kind")
STOPS = [(), (), (ids("b")[0],), (ids("9")[0], ids(",")[0])]


class Patchy(TinyCompiler):
    """Some grammars are late: each compilation is done when chance says so."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def submit(self, grammar: Grammar) -> TinyCompilation:
        compilation = Patient(self, grammar)
        compilation.late = self.rng.random() < 0.5
        return compilation


class Patient(TinyCompilation):
    late = False

    @property
    def done(self) -> bool:
        assert isinstance(self.compiler, Patchy)
        self.late = self.late and self.compiler.rng.random() < 0.8
        return not self.late


class LostStep(RuntimeError):
    """What the worker raises now and then."""


class Unreliable(StubWorker):
    def __init__(self, rng: random.Random, lost: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.rng, self.lost = rng, lost

    def submit(self, plan: Plan) -> int:
        self._lose()
        return super().submit(plan)

    def wait(self, handle: int) -> StepResult:
        result = super().wait(handle)
        self._lose()
        return result

    def _lose(self) -> None:
        if self.rng.random() < self.lost:
            raise LostStep


def make_random_engine(rng: random.Random) -> Engine:
    engine = make_engine(
        num_pages=rng.randint(24, 48),
        page_size=rng.choice([1, 2, 4]),
        depth=(depth := rng.randint(0, 1)),
        caching=rng.random() < 0.8,
        grammars=Patchy(rng),
        forced_tokens=rng.random() < 0.7,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 40),
        max_model_len=rng.choice([4096, 30]),
        num_speculative_tokens=rng.choice([0, 3, 8]),
        target_token_seconds=rng.choice([None, 0.001]),
    )
    old = engine.worker
    lost = rng.choice([0.0, 0.0, 0.0, 0.03])
    engine.worker = Unreliable(rng, lost, num_pages=old.num_pages, page_size=old.page_size, depth=depth)
    if rng.random() < 0.6:
        plant_drafts(engine, rng.choice([0.0, 0.5, 1.0]), seed=rng.randrange(100))
    return engine


class Life:
    """One engine: who asked for what, and who need not get it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.driver = Driver(make_random_engine(rng))
        self.engine = self.driver.engine
        self.asked: dict[str, tuple[list[int], Grammar | None, dict[str, Any]]] = {}
        self.gone: set[str] = set()

    def act(self) -> None:
        action = self.rng.choice(["arrive", "arrive", "group", *["step"] * 6, "abort"])
        if action == "abort" and self.engine.scheduler.requests:
            self.gone.add(name := self.rng.choice(sorted(self.engine.scheduler.requests)))
            self.driver.send(Abort(request_id=name))
        elif action in ("arrive", "group"):
            self._arrive(action)
        else:
            self.step()

    def _arrive(self, action: str) -> None:
        rng, number = self.rng, len(self.asked)
        prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 14))]
        grammar = rng.choice([*GRAMMARS, *GRAMMARS, CLOSED, CLOSED, REFUSED, None, None])
        group = f"group {number}" if action == "group" else ""
        for at in range(rng.randint(2, 4) if group else 1):
            sampling: dict[str, Any] = {
                "max_tokens": rng.randint(1, 24),
                "ignore_eos": rng.random() < 0.4,
                "stop_token_ids": rng.choice(STOPS),
            }
            if rng.random() < 0.3:
                sampling["min_tokens"] = rng.randint(0, sampling["max_tokens"])
            if rng.random() < 0.2:
                sampling["logprobs"] = 0
            if rng.random() < 0.1:
                sampling["prompt_logprobs"] = 0
            if rng.random() < 0.1 and group:
                grammar = rng.choice(GRAMMARS)
            name = f"r{number + at}"
            self.asked[name] = (prompt, grammar, sampling)
            self.driver.send(generate(name, prompt, grammar=grammar, group=group, **sampling))

    def step(self) -> None:
        try:
            self.driver.step()
        except LostStep:
            self.engine.scheduler.check()
            ended = {name for name, outcome in self.driver.outcomes.items() if outcome.finished or outcome.failed}
            self.gone |= self.asked.keys() - ended - self.engine.scheduler.requests.keys()

    def end(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        stats = self.engine.stats()
        assert stats["grammar_running"] == stats["grammar_waiting"] == 0
        assert stats["pages"]["free"] + stats["pages"]["tree"] == self.engine.worker.num_pages
        for name in self.asked.keys() - self.gone:
            self._check(name)

    def _check(self, name: str) -> None:
        prompt, grammar, sampling = self.asked[name]
        outcome = self.driver.outcomes[name]
        if grammar is REFUSED:
            assert outcome.failed is not None and outcome.failed.code == "unsupported_grammar"
            return
        if grammar is CLOSED:
            self._check_closed(name)
            return
        assert outcome.finished is not None, (name, outcome.failed)
        room = self.engine.scheduler.max_tokens_per_request - len(prompt)
        max_tokens, stops = min(sampling["max_tokens"], room), sampling["stop_token_ids"]
        min_tokens, ignore_eos = sampling.get("min_tokens", 0), sampling["ignore_eos"]
        if grammar is None:
            ends = {*stops, *(() if ignore_eos else (EOS,))}
            wanted: list[int] = []
            for token in continuation(prompt, max_tokens):
                wanted.append(token)
                if token in ends and len(wanted) >= min_tokens:
                    break
            assert outcome.tokens == wanted, name
            return
        expected = constrained_continuation(
            prompt, grammar, max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_ids=stops
        )
        assert (outcome.tokens, outcome.finished.reason) == expected, (name, self.asked[name])

    def _check_closed(self, name: str) -> None:
        """It is whole, unless a stop id of the request's own has cut it; or there was no room for any."""
        prompt, _, sampling = self.asked[name]
        outcome, least = self.driver.outcomes[name], len(TinyCompiler().submit(CLOSED).ending or ())
        most = min(sampling["max_tokens"], self.engine.scheduler.max_tokens_per_request - len(prompt))
        if most < least:
            assert outcome.failed is not None and outcome.failed.param == "max_tokens"
            return
        assert outcome.finished is not None and len(outcome.tokens) <= most, (name, outcome.failed)
        if outcome.finished.stop_token_id in (None, EOS):
            assert json.loads(text_of(outcome.tokens)), name


@given(st.integers(0, 2**32))
@settings(max_examples=12)
def test_everything_at_once(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(rng)
    for _ in range(rng.randint(3, 40)):
        life.act()
    life.end()


@pytest.mark.slow
def test_a_long_life() -> None:
    for seed in range(400):
        test_everything_at_once.hypothesis.inner_test(seed)  # type: ignore[attr-defined]
