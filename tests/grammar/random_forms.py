"""Forms and values at random, of few parts, so that they meet. grammar/schema/accepts.py says whether a value satisfies forms.

forms = random_forms(rng)
value = random_value(rng, forms, forms.root)      satisfies them rather often; keys are in the order of `properties`
write(value, SEPARATORS[0])                       as JSON
shuffled(rng, value)                              with the keys in any order
with_a_key_twice(rng, forms, value, …)            as JSON that no alternative may take
"""

import json
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests.grammar.matching import accepts, random_text
from trunkline.grammar.algebra.simplify import simplify
from trunkline.grammar.interface import CompiledGrammar, InvalidSchema, Unsupported
from trunkline.grammar.schema.accepts import accepts as satisfies
from trunkline.grammar.schema.forms import (
    ANY,
    NEVER,
    Arrays,
    Contains,
    Form,
    Forms,
    Name,
    Numbers,
    Objects,
    Strings,
    Values,
)
from trunkline.grammar.vocabulary import Vocabulary

SEPARATORS = ((", ", ": "), (",", ":"))
TEXTS = ("", "a", "ab", "b", "x-1", 'q"\\', "é\n", "abc", "😀", "\x7f\x01")
PATTERNS = ("^a", "b$", "^[a-c]*$", "x-", "^.{2}$", '"', "^(a|é)")
KEYS = ("a", "b", "ab", "x-1", 'q"')
NUMBERS = (0, 1, 2, 3, -1, 5, 10, Decimal("0.5"), Decimal("1.5"), Decimal("-2.25"), 100)
LEAVES = ('"a"', '"ab"', "1", "2", "true", "null", '[1,"a"]', '{"a":1}', "[]", "0.5")


def random_forms(rng: random.Random) -> Forms:
    """Up to five definitions of up to three alternatives; they may lead to one another, and need not be satisfiable."""
    names = [f"d{number}" for number in range(rng.randint(1, 5))]
    definitions = {name: tuple(_form(rng, names) for _ in range(rng.randint(1, 3))) for name in names}
    return Forms(definitions=definitions, root=names[0])


def _some(rng: random.Random, pool: tuple[Any, ...], most: int) -> tuple[Any, ...]:
    return tuple(rng.sample(pool, rng.choice([0, 0, *range(most + 1)])))


def _maybe(rng: random.Random, *values: Any) -> Any:
    return rng.choice([None, None, *values])


def _form(rng: random.Random, names: list[Name]) -> Form:
    reference = rng.choice([*names, *names, ANY])
    match rng.randrange(7):
        case 0:
            return Values(values=tuple(rng.sample(LEAVES, rng.randint(1, 5))))
        case 1:
            return Strings(
                min_length=rng.choice([0, 0, 1, 2]),
                max_length=_maybe(rng, 2, 4),
                patterns=_some(rng, PATTERNS, 2),
                not_patterns=_some(rng, PATTERNS, 1),
                excluded=_some(rng, TEXTS, 3),
            )
        case 2:
            return Numbers(
                integer=rng.random() < 0.5,
                minimum=_maybe(rng, Fraction(0), Fraction(-5), Fraction(1, 2)),
                maximum=_maybe(rng, Fraction(10), Fraction(2), Fraction(3, 2)),
                exclusive_minimum=rng.random() < 0.3,
                exclusive_maximum=rng.random() < 0.3,
                multiple_of=_maybe(rng, Fraction(1), Fraction(1, 2), Fraction(3), Fraction(1, 4)),
                excluded=_some(rng, (Fraction(0), Fraction(1), Fraction(1, 2)), 2),
            )
        case 3 | 4:
            return Arrays(
                prefix=tuple(rng.choice([*names, ANY]) for _ in range(rng.choice([0, 0, 1, 2]))),
                rest=rng.choice([reference, reference, NEVER]),
                min_items=rng.choice([0, 0, 1, 2]),
                max_items=_maybe(rng, 1, 2, 3),
                unique=rng.random() < 0.25,
                contains=tuple(
                    Contains(item=rng.choice(names), least=rng.choice([0, 1, 2]), most=None) for _ in range(1)
                )
                if reference == ANY and rng.random() < 0.5
                else (),
            )
    keys = rng.sample(KEYS, rng.randint(0, 4))
    return Objects(
        properties=tuple((key, rng.choice([*names, ANY, NEVER])) for key in keys),
        required=frozenset(key for key in keys if rng.random() < 0.4),
        patterns=tuple((pattern, rng.choice([*names, NEVER])) for pattern in _some(rng, PATTERNS, 2)),
        additional=rng.choice([reference, NEVER]),
        min_properties=rng.choice([0, 0, 1, 2]),
        max_properties=_maybe(rng, 1, 2, 3),
    )


def random_value(rng: random.Random, forms: Forms, name: Name, depth: int = 0) -> Any:
    """A value that satisfies the definition rather often, with keys in the order of its properties."""
    alternatives = forms.definitions.get(name, ())
    if not alternatives or depth > 4 or rng.random() < 0.05:
        return rng.choice([*TEXTS, *NUMBERS, True, False, None, [], {}])
    match rng.choice(alternatives):
        case Values(values=values):
            return json.loads(rng.choice(values), parse_float=Decimal)
        case Strings():
            return "".join(rng.choice(TEXTS) for _ in range(rng.choice([1, 1, 2])))
        case Numbers():
            return rng.choice(NUMBERS)
        case Arrays() as form:
            length = rng.randint(form.min_items, max(form.min_items, form.max_items or form.min_items + 3))
            names = [*form.prefix, *[form.rest] * length, *[one.item for one in form.contains]]
            return [random_value(rng, forms, rng.choice([one, *names[-1:]]), depth + 1) for one in names[:length]]
        case Objects() as form:
            members = [(key, one) for key, one in form.properties if key in form.required or rng.random() < 0.5]
            members += [(key, form.additional) for key in rng.sample(KEYS + TEXTS, rng.choice([0, 0, 1, 2]))]
            return {key: random_value(rng, forms, one, depth + 1) for key, one in members}


def shuffled(rng: random.Random, value: Any) -> Any:
    """The same value with the keys of all its objects in any order."""
    if isinstance(value, list):
        return [shuffled(rng, item) for item in value]
    if isinstance(value, dict):
        return {key: shuffled(rng, value[key]) for key in rng.sample(list(value), len(value))}
    return value


def with_a_key_twice(rng: random.Random, forms: Forms, value: Any, separators: tuple[str, str]) -> str | None:
    """The object as JSON, in which a key that all objects of the root declare stands a second time, with the same value, anywhere.
    None if there is no such key."""
    if not isinstance(value, dict):
        return None
    declared = [dict(form.properties) for form in forms.definitions[forms.root] if isinstance(form, Objects)]
    keys = [key for key in value if all(key in one for one in declared)]
    if not keys:
        return None
    comma, colon = separators
    members = list(value.items())
    key = rng.choice(keys)
    members.insert(rng.randint(0, len(members)), (key, value[key]))
    return "{" + comma.join(f"{write(key, separators)}{colon}{write(one, separators)}" for key, one in members) + "}"


def write(value: Any, separators: tuple[str, str]) -> str:
    """JSON; numbers as they are, without a float in between."""
    comma, colon = separators
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{comma.join(write(item, separators) for item in value)}]"
    if isinstance(value, dict):
        return (
            "{"
            + comma.join(f"{write(key, separators)}{colon}{write(one, separators)}" for key, one in value.items())
            + "}"
        )
    return json.dumps(value, ensure_ascii=False)


def hold_to_forms(
    compiled_of: Callable[[Forms, bool], CompiledGrammar],
    vocabulary: Vocabulary,
    num_forms: int,
    *,
    turns: int,
    most: int,
) -> int:
    """Fail if a backend writes, or takes, what random forms do not allow. How many values it took.

    compiled_of  of forms, compact or not; raises Unsupported, InvalidSchema
    turns        texts and values for each of the forms
    most         tokens of a text
    """
    taken = 0
    for seed in range(num_forms):
        rng = random.Random(seed)
        forms = simplify(random_forms(rng))
        try:
            compiled = compiled_of(forms, seed % 2 == 0)
        except (Unsupported, InvalidSchema):
            continue
        for turn in range(turns):
            text = random_text(compiled, vocabulary, seed * 10 + turn, most=most)
            if text is not None:
                assert satisfies(forms, json.loads(text, parse_float=Decimal)), text
            value = random_value(rng, forms, forms.root)
            is_taken = accepts(compiled, vocabulary, write(value, SEPARATORS[1]))
            assert satisfies(forms, value) or not is_taken, value
            taken += is_taken
    return taken
