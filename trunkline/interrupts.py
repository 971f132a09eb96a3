"""Ctrl-C between two pieces of work, never in the middle of one. Knows no engine."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back; the function it gives lets one that has arrived meanwhile take its ordinary effect.

    with interrupts_held() as let_interrupt:
        while work:
            do_a_piece()
            let_interrupt()     # raises KeyboardInterrupt, unless the program has a handler of its own

    Changes nothing outside the main thread, where no signal is handled, and where SIGINT has no handler in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def let_interrupt() -> None:
        if held:
            number, frame = held.pop()
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield let_interrupt
    finally:
        signal.signal(signal.SIGINT, handler)
        let_interrupt()
