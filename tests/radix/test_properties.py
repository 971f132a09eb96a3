"""The prefix cache through random lives (machine.py): few of them by default, many in the slow run."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.radix.machine import LIFE, CacheMachine
from tests.radix.scenes import SCENES, Scene


def test_equals_a_naive_cache() -> None:
    """The same hundred lives every time."""
    run_state_machine_as_test(CacheMachine, settings=settings(LIFE, max_examples=100, derandomize=True))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_written_life(scene: Scene) -> None:
    life = CacheMachine()
    scene(life)
    life.teardown()


@pytest.mark.slow
def test_equals_a_naive_cache_at_length() -> None:
    """A thousand new lives. A failure prints the shortest life that shows it."""
    run_state_machine_as_test(CacheMachine, settings=settings(LIFE, max_examples=1000, print_blob=True))
