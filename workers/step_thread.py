"""The thread that a worker runs its steps on, in the order in which they are submitted, and the count of those under way."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from trunkline.step import Plan

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A step that was submitted; a Future is one."""

    def done(self) -> bool:
        """Nothing more will happen: it has ended, well or not."""

    def result(self) -> T_co:
        """What it came to, once it has ended. Raises what it raised."""


class StepThread(Generic[T]):
    """Runs one step after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trunkline-worker")
        self._unfinished: set[Handle[T]] = set()

    def submit(self, run: Callable[[Plan], T], plan: Plan, *, depth: int, when_asked: bool = False) -> Handle[T]:
        """Call `run(plan)` on the thread, now or behind the step that runs.

        depth       steps that may be unfinished besides this one
        when_asked  not on the thread, but on the one that asks for the result, and only then: two hand-overs less

        Raises ValueError if there are more.
        """
        if len(self._unfinished) > depth:
            raise ValueError(f"Step {plan.step} is one too many: at most {depth + 1} may be unfinished.")
        assert not (when_asked and self._unfinished), "steps keep their order"
        handle: Handle[T] = _RunWhenAsked(run, plan) if when_asked else self._executor.submit(run, plan)
        self._unfinished.add(handle)
        return handle

    def finished(self, handle: Handle[T]) -> None:
        """The step's result was taken, or it failed: another one may be submitted. Idempotent."""
        self._unfinished.discard(handle)

    def close(self) -> None:
        """Let the step that runs end, and drop the others."""
        self._executor.shutdown(cancel_futures=True)


class _RunWhenAsked(Generic[T]):
    """A step that runs in `result`. Interrupted (Ctrl-C), it runs again when it is asked for again: what it has written, it writes again."""

    def __init__(self, run: Callable[[Plan], T], plan: Plan) -> None:
        self._run = run
        self._plan = plan
        self._is_done = False
        self._result: T
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._is_done

    def result(self) -> T:
        if not self._is_done:
            try:
                self._result = self._run(self._plan)
            except Exception as error:  # noqa: BLE001 (raised below, as often as it is asked for)
                self._error = error
            self._is_done = True
        if self._error is not None:
            raise self._error
        return self._result
