"""The masks of a step: which rows name one, what becomes of one that cannot be filled, and those of rows after drafts."""

from typing import Any

import numpy as np
import pytest

from tests.scheduler.factories import ask, generate, make_engine, plans, plant_drafts, run
from tests.scheduler.test_grammar import GRAMMARS, LETTERS
from tests.stub import VOCAB_SIZE, StubWorker, continuation
from tests.tiny_grammars import TinyCompiler, constrained_continuation, ids, tiny_backend

# ---------------------------------------------------------------- masks


def test_rows_without_a_grammar_name_no_mask() -> None:
    engine = make_engine(grammars=TinyCompiler())
    run(engine, generate("free", [1, 2, 3]), ask("r", [4, 5], LETTERS))
    for plan in plans(engine):
        named = [row.mask for row in plan.rows if row.mask >= 0]
        assert (plan.masks is None) == (not named)
        assert sorted(named) == list(range(len(named)))
    assert any(len({row.mask >= 0 for row in plan.rows}) == 2 for plan in plans(engine))


class Faulty:
    """A backend whose masks fail after so many rows."""

    def __init__(self, after: int, how: str) -> None:
        self.inner, self.left, self.how = tiny_backend(), after, how
        self.name, self.version = self.inner.name, self.inner.version

    def compile(self, source: Any) -> Any:
        return self.inner.compile(source)

    def fill_batch(self, matchers: Any, rows: Any) -> dict[int, str]:
        failed = self.inner.fill_batch(matchers, rows)
        self.left -= 1
        if self.left >= 0:
            return failed
        if self.how == "raises":
            raise RuntimeError("broken")
        if self.how == "empty":
            rows[0][:] = 0
            return failed
        return {0: "too much"}


@pytest.mark.parametrize(
    ("how", "says"), [("fails", "too much"), ("empty", "No token is left"), ("raises", "log says why")]
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_that_cannot_be_filled_fails_its_request_alone(how: str, says: str, depth: int) -> None:
    engine = make_engine(depth=depth, grammars=TinyCompiler(backend=Faulty(2, how)))
    outcomes = run(engine, generate("free", [1, 2, 3]), ask("r", [4, 5], LETTERS, max_tokens=20))
    assert outcomes["free"].tokens == continuation([1, 2, 3], 8)
    failed = outcomes["r"].failed
    assert failed is not None and says in failed.message
    assert outcomes["r"].tokens == constrained_continuation([4, 5], LETTERS, 20)[0][:2]


class Refusing(StubWorker):
    """Takes no step."""

    def submit(self, plan: Any) -> int:
        super().submit(plan)
        self.in_flight.pop()
        raise RuntimeError("no")


def test_who_waits_for_the_masks_of_a_step_that_is_lost_finds_them_empty() -> None:
    engine = make_engine(grammars=TinyCompiler())
    engine.worker = Refusing()
    engine.handle(ask("r", [4, 5], LETTERS))
    with pytest.raises(RuntimeError):
        engine.step()
    masks = engine.worker.plans[0].masks
    assert masks is not None and not masks.wait().any()
    engine.scheduler.check()
    assert not engine.has_work and engine.stats()["grammar_running"] == 0


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("forced_tokens", [True, False])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_drafts_are_cut_where_the_grammar_refuses_and_change_nothing(right: float, forced_tokens: bool) -> None:
    engine = make_engine(grammars=TinyCompiler(), forced_tokens=forced_tokens, num_pages=128)
    plant_drafts(engine, 0.0)
    find = engine.scheduler.drafter.sources["tree"]
    rng = np.random.default_rng(5)
    texts = {name: ([at + 3, 7], grammar) for at, (name, grammar) in enumerate(zip("abcd", GRAMMARS, strict=True))}
    expected = {name: constrained_continuation(prompt, grammar, 24)[0] for name, (prompt, grammar) in texts.items()}

    def oracle(request: Any, length: int) -> bytes:
        so_far = request.token_ids(request.num_prompt, request.num_tokens).tolist()
        future = expected[request.request_id][len(so_far) :][:length]
        if not future:
            return find(request, length)
        return np.array([t if rng.random() < right else rng.integers(VOCAB_SIZE) for t in future], "<i4").tobytes()

    engine.scheduler.drafter.sources = {"tree": oracle}
    outcomes = run(
        engine,
        *(ask(name, prompt, grammar, max_tokens=24) for name, (prompt, grammar) in texts.items()),
    )
    for name in texts:
        assert outcomes[name].tokens == expected[name], name
    if right == 1.0:
        assert engine.stats()["spec_decode_num_accepted_tokens_total"]["tree"] >= 5
    for plan in plans(engine):
        assert all(row.mask >= 0 for row in plan.rows if row.sampling is not None)


class FailsOnDrafts(Faulty):
    """Fills the first mask of each text in a step, and no other."""

    def __init__(self) -> None:
        super().__init__(10**9, "fails")
        self.engine: Any = None
        self.last_plan = -1

    def fill_batch(self, matchers: Any, rows: Any) -> dict[int, str]:
        failed = super().fill_batch(matchers, rows)
        first, self.last_plan = len(plans(self.engine)) > self.last_plan, len(plans(self.engine))
        return failed if first else dict.fromkeys(range(len(matchers)), "too much")


def test_a_mask_that_fails_after_a_draft_is_nobodys_business_if_the_draft_is_wrong() -> None:
    backend = FailsOnDrafts()
    engine = backend.engine = make_engine(grammars=TinyCompiler(backend=backend), forced_tokens=False)
    expected = constrained_continuation([9, 9], LETTERS, 12)[0]

    def wrong(request: Any, length: int) -> bytes:
        following = [ids("a")[0], ids("b")[0]]
        following.remove(expected[request.num_output]) if expected[request.num_output] in following else None
        return np.array(following[:1] * 2, "<i4").tobytes()

    engine.scheduler.drafter.sources = {"tree": wrong}
    outcome = run(engine, ask("r", [9, 9], LETTERS, max_tokens=12))["r"]
    assert outcome.tokens == expected and outcome.failed is None
    assert engine.stats()["spec_decode_num_draft_tokens_total"]["tree"] > 0


def test_the_same_request_again_is_drafted_from_the_tree() -> None:
    engine = make_engine(grammars=TinyCompiler(), forced_tokens=False, page_size=4)
    steps = []
    for name in ("first", "again"):
        before = len(plans(engine))
        outcome = run(engine, ask(name, range(1, 9), LETTERS, max_tokens=20))[name]
        assert outcome.tokens == constrained_continuation(list(range(1, 9)), LETTERS, 20)[0]
        steps.append(len(plans(engine)) - before)
    assert steps[1] < steps[0]


def test_drafts_that_the_grammar_refuses_are_not_computed() -> None:
    engine = make_engine(grammars=TinyCompiler(), forced_tokens=False)
    refused = np.array([ids("a")[0], ids("x")[0], ids("a")[0]], "<i4")
    engine.scheduler.drafter.sources = {"tree": lambda request, length: refused[:length].tobytes()}
    run(engine, ask("r", [9, 9], LETTERS, max_tokens=12))
    drafts = [plan.token_ids.tolist()[1:] for plan in plans(engine)[1:]]
    assert any(drafts) and all(tokens in ([], [ids("a")[0]]) for tokens in drafts)
