"""Constraints are prepared one after the other, on a thread of their own: one may take seconds, and tokenizing must not wait for it.

    preparing = Preparing(PreparedCache())
    prepared = await preparing.prepare(constraint)

Who sends a flood of heavy ones waits, and makes others wait who bring new ones; so the line is bounded, in number and in time.
What is known already passes it.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from trunkline.constraint import Constraint
from trunkline.errors import Overloaded
from trunkline.grammar.prepare import Prepared
from trunkline.grammar.prepared_cache import PreparedCache

MOST_WAITING = 256  # constraints in line,
WAITING_SECONDS = 30.0  # and for how long, the preparing included
RETRY_SECONDS = 5.0  # after which a caller may come again


class Preparing:
    """The line and its thread. Belongs to one event loop."""

    def __init__(self, cache: PreparedCache) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, "trunkline-prepare")
        self._num_waiting = 0

    async def prepare(self, constraint: Constraint) -> Prepared:
        """As `grammar.prepare.prepare`. Raises GrammarRefused, and Overloaded if too many wait or it takes too long."""
        if self._cache.is_known(constraint):
            return self._cache.prepare(constraint)
        if self._num_waiting >= MOST_WAITING:
            raise _overloaded(
                f"{self._num_waiting} grammars and schemas wait to be prepared, which is the most that may."
            )
        self._num_waiting += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._cache.prepare, constraint)
            return await asyncio.wait_for(work, WAITING_SECONDS)
        except TimeoutError:
            raise _overloaded(f"'{constraint.where}' was not prepared within {WAITING_SECONDS:g} seconds.") from None
        finally:
            self._num_waiting -= 1


def _overloaded(why: str) -> Overloaded:
    error = Overloaded(f"{why} Please try again in {RETRY_SECONDS:g} seconds.", code="grammar_overloaded")
    error.retry_after = RETRY_SECONDS
    return error
