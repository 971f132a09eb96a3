"""Backends by name, imported late."""

import subprocess
import sys

import pytest

from tests.grammar.matching import small_vocabulary
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.grammar.backends import registry


def test_every_backend_of_the_configuration_can_be_made() -> None:
    assert set(registry.MAKERS) == set(GRAMMAR_BACKENDS) - {"auto"}


@pytest.mark.parametrize("name", ["llguidance", "outlines", pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_a_backend_says_who_it_is(name: str) -> None:
    backend = registry.make(name, small_vocabulary())
    assert backend.name == name
    assert backend.version[0].isdigit()


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = (
        "import sys\nfrom trunkline.grammar import backends\n"
        "print([m for m in ('llguidance', 'xgrammar', 'outlines_core', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
