"""Random forms: no text that the grammar can write, and no value that it takes, is invalid; and it takes nearly all that is valid."""

import json
import random
from collections import Counter
from decimal import Decimal

import pytest

from tests.grammar.matching import accepts, random_text, small_vocabulary
from tests.grammar.random_forms import SEPARATORS, random_forms, random_value, shuffled, with_a_key_twice, write
from trunkline.constraint import KEY_ORDERS
from trunkline.grammar.algebra.simplify import simplify
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit
from trunkline.grammar.interface import InvalidSchema, MatcherFailed, Unsupported
from trunkline.grammar.schema.accepts import accepts as is_valid
from trunkline.grammar.schema.forms import ANY, NEVER

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)


def judge(seeds: range, key_order: str = "schema") -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        forms = simplify(random_forms(rng))
        if forms.root in (ANY, NEVER):
            continue
        try:
            source = emit(forms, compact=False, key_order=key_order)
        except Unsupported:
            counts["refused"] += 1
            continue
        except InvalidSchema:
            counts["impossible"] += 1
            for value in (random_value(rng, forms, forms.root) for _ in range(6)):
                assert not is_valid(forms, value), f"seed {seed}: {value!r} is valid, and nothing is said to be"
            continue
        compiled = BACKEND.compile(source)
        try:
            texts = [random_text(compiled, VOCABULARY, rng.randrange(1 << 30), most=80) for _ in range(4)]
            for text in texts:
                if text is not None:
                    counts["texts"] += 1
                    value = json.loads(text, parse_float=Decimal)
                    assert is_valid(forms, value), f"seed {seed}: {text!r} is written, and is not valid"
            for _ in range(6):
                value = random_value(rng, forms, forms.root)
                if key_order == "any":
                    value = shuffled(rng, value)
                valid, taken = (
                    is_valid(forms, value),
                    accepts(compiled, VOCABULARY, write(value, rng.choice(SEPARATORS))),
                )
                assert valid or not taken, f"seed {seed}: {value} is taken, and is not valid"
                twice = with_a_key_twice(rng, forms, value, rng.choice(SEPARATORS))
                if twice is not None:
                    assert not accepts(compiled, VOCABULARY, twice), f"seed {seed}: {twice} is taken"
                    counts["twice"] += valid
                counts["valid"] += valid
                counts["taken"] += taken
        except MatcherFailed:  # ambiguous beyond the library's limits
            counts["failed"] += 1
    return counts


def test_some_random_forms():
    counts = judge(range(60))
    assert counts["texts"] > 100
    assert counts["taken"] > 0.98 * counts["valid"] > 60


def test_some_random_forms_with_keys_in_any_order():
    counts = judge(range(100, 140), "any")
    assert counts["taken"] > 0.98 * counts["valid"] > 40
    assert counts["twice"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("key_order", KEY_ORDERS)
def test_many_random_forms(key_order):
    counts = judge(range(1000, 1750), key_order)
    assert counts["twice"] > 100
    assert counts["taken"] > 0.99 * counts["valid"] > 1000
    assert counts["refused"] < 200
    assert counts["failed"] <= 2
