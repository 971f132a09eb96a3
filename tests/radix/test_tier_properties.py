"""The tiers through random lives (tier_machine.py): few of them by default, many in the slow run; and planted bugs."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.radix.tier_machine import LIFE, TierMachine
from trunkline.radix.host_tier import Entry, HostTier
from trunkline.radix.tiers import Tiers


def test_what_is_loaded_is_what_was_asked_for() -> None:
    """The same lives every time."""
    run_state_machine_as_test(TierMachine, settings=settings(LIFE, max_examples=100, derandomize=True))


@pytest.mark.slow
def test_what_is_loaded_is_what_was_asked_for_at_length() -> None:
    run_state_machine_as_test(TierMachine, settings=settings(LIFE, max_examples=1000, print_blob=True))


def trust_lost_steps(tiers: Tiers, step: int) -> None:
    tiers.step_done(step)


def reuse_pinned_slots(tier: HostTier, entry: Entry) -> None:
    """Free at once, whoever still reads or writes it."""
    if not entry.dropped:
        entry.dropped = True
        del tier._entries[entry.prefix_hash]
        if not entry.pins:
            del tier._queue(entry)[entry]
        tier._free.append(entry.slot)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a lost step's copies are trusted": (Tiers, "step_lost", trust_lost_steps),
    "a pinned slot is free at once": (HostTier, "drop", reuse_pinned_slots),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, planted = PLANTED[bug]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        run_state_machine_as_test(
            TierMachine, settings=settings(LIFE, max_examples=500, derandomize=True, phases=[Phase.generate])
        )
