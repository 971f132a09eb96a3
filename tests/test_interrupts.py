"""Ctrl-C is held back, and takes effect where it is let through."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from trunkline.interrupts import interrupts_held


def test_it_takes_effect_where_it_is_let_through() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held() as let_interrupt:
        let_interrupt()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("the piece")
        let_interrupt()
        done.append("too much")
    assert done == ["the piece"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_comes_last_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)


def test_the_handler_of_the_program_is_kept() -> None:
    seen: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held() as let_interrupt:
            signal.raise_signal(signal.SIGINT)
            assert seen == []
            let_interrupt()
            assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_holds_nothing() -> None:
    held: list[Callable[[], None]] = []

    def run() -> None:
        with interrupts_held() as let_interrupt:
            let_interrupt()
            held.append(let_interrupt)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert held
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
