"""What is taken can be followed to the end, within the library's limits; what may come to them is refused, or tried out first."""

from fractions import Fraction
from itertools import product

import pytest

from tests.grammar.matching import accepts, random_text, small_vocabulary
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.schema.forms import Forms, Numbers, Strings

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)


def multiples(*divisors: int) -> Forms:
    """Within bounds that need many states for each divisor."""
    numbers = tuple(
        Numbers(
            integer=True,
            multiple_of=Fraction(divisor),
            minimum=Fraction(-5_000_000),
            maximum=Fraction(1),
            pointer=f"/{divisor}",
        )
        for divisor in divisors
    )
    return Forms(definitions={"root": numbers}, root="root")


@pytest.mark.parametrize("divisors", [(4999,), (2503, 2477), (998, 997, 996, 995, 994)])
def test_multiples_that_are_taken_can_be_followed(divisors: tuple[int, ...]) -> None:
    for seed in range(5):
        text = random_text(BACKEND.compile(emit(multiples(*divisors), compact=False)), VOCABULARY, seed)
        assert text is not None and any(int(text) % divisor == 0 for divisor in divisors)


@pytest.mark.parametrize("divisors", [(9001,), (2503, 2477, 2473)])
def test_multiples_that_are_too_many_together_are_refused(divisors: tuple[int, ...]) -> None:
    """The library would give up in the middle of a text."""
    with pytest.raises(Unsupported) as error:
        emit(multiples(*divisors), compact=False)
    assert error.value.finding[:2] == (f"/{divisors[-1]}", "multipleOf")


def test_a_password_of_four_kinds_of_characters_can_be_followed() -> None:
    """With long tokens its first mask takes much of the library's work: as much as a pattern with lookaheads gives."""
    vocabulary = small_vocabulary(words=["".join(letters) for letters in product("aZ5!", repeat=6)])
    patterns = ("[A-Z]", "[a-z]", "[0-9]", "[!@#]", "^.{8,16}$")
    given = Forms(definitions={"root": (Strings(patterns=patterns),)}, root="root")
    password = LlguidanceBackend(vocabulary).compile(emit(given, compact=False))
    texts = '"aB3!aB3!"', '"!3Ba    x"', '"aB3aB3aB3"', '"aB3!"'
    assert [accepts(password, vocabulary, text) for text in texts] == [True, True, False, False]
