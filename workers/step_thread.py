"""The thread that a worker runs its steps on, in the order in which they are submitted, and the count of those under way."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from trunkline.step import Plan

T = TypeVar("T")


class StepThread(Generic[T]):
    """Runs one step after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trunkline-worker")
        self._unfinished: set[Future[T]] = set()

    def submit(self, run: Callable[[Plan], T], plan: Plan, *, depth: int, when_asked: bool = False) -> Future[T]:
        """Call `run(plan)` on the thread, now or behind the step that runs.

        depth       steps that may be unfinished besides this one
        when_asked  not on the thread, but on the one that asks for the result, and only then: two hand-overs less

        Raises ValueError if there are more.
        """
        if len(self._unfinished) > depth:
            raise ValueError(f"Step {plan.step} is one too many: at most {depth + 1} may be unfinished.")
        assert not (when_asked and self._unfinished), "steps keep their order"
        handle = _RunWhenAsked(run, plan) if when_asked else self._executor.submit(run, plan)
        self._unfinished.add(handle)
        return handle

    def finished(self, handle: Future[T]) -> None:
        """The step's result was taken, or it failed: another one may be submitted. Idempotent."""
        self._unfinished.discard(handle)

    def close(self) -> None:
        """Let the step that runs end, and drop the others."""
        self._executor.shutdown(cancel_futures=True)


class _RunWhenAsked(Future[T]):
    """A step that runs in `result`. Interrupted (Ctrl-C), it runs again when it is asked for again: what it has written, it writes again."""

    def __init__(self, run: Callable[[Plan], T], plan: Plan) -> None:
        super().__init__()
        self._run = run
        self._plan = plan

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            try:
                self.set_result(self._run(self._plan))
            except Exception as error:  # noqa: BLE001 (raised below, again and again)
                self.set_exception(error)
        return super().result(timeout)
