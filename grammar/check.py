"""What a grammar would cost, asked before it is used: POST /v1/grammar/check. Compiles it and fills some masks; no text."""

import threading
import time
from collections.abc import Callable
from typing import Any

from trunkline.errors import RequestError
from trunkline.grammar.interface import Compilation, CompiledGrammar, MatcherFailed
from trunkline.grammar.measure import MaskCost, measure_masks
from trunkline.grammar.vocabulary import Vocabulary


class Check:
    """One such question, answered some time later. For the engine's thread.

    compilation  of the grammar, with its ending
    vocabulary   asked for once it is compiled
    notify       called in another thread when everything is known
    """

    def __init__(
        self, compilation: Compilation, vocabulary: Callable[[], Vocabulary], notify: Callable[["Check"], None]
    ) -> None:
        self._compilation = compilation
        self._vocabulary = vocabulary
        self._notify = notify
        self._thread: threading.Thread | None = None
        self._is_measured = threading.Event()
        self._cost: MaskCost | None = None
        self._error: str | None = None

    @property
    def done(self) -> bool:
        """`result` can be asked."""
        if self._thread is None and self._compilation.done:
            self._thread = threading.Thread(target=self._measure, name="trunkline-grammar-check", daemon=True)
            self._thread.start()
        return self._is_measured.is_set()

    def result(self) -> dict[str, Any]:
        """Fields of the answer, plain; `error` is None if the grammar would be taken, and then the rest is known.

        compile_ms       wall time of compiling it, maybe for another request before
        mask_us          of one mask: the median of some along random texts; mask_us_max: the slowest
        shortest_tokens  of the shortest whole text that was found; None: none was
        """
        try:
            compiled, ending, seconds = self._compilation.result(), self._compilation.ending, self._compilation.seconds
        except RequestError as refused:
            return {"backend": None, "error": str(refused)}
        if self._error is not None:
            return {"backend": None, "error": self._error}
        cost = self._cost
        return {
            "backend": compiled.backend,
            "error": None,
            "compile_ms": round(seconds * 1e3, 3),
            "mask_us": None if cost is None else round(cost.median * 1e6, 3),
            "mask_us_max": None if cost is None else round(cost.worst * 1e6, 3),
            "num_bytes": compiled.num_bytes,
            "shortest_tokens": None if ending is None else len(ending),
        }

    def _measure(self) -> None:
        try:
            self._fill_masks(self._compilation.result())
        except RequestError:  # `result` tells
            pass
        finally:
            self._is_measured.set()
            self._notify(self)

    def _fill_masks(self, compiled: CompiledGrammar) -> None:
        try:
            self._cost = measure_masks(compiled, self._vocabulary(), time.perf_counter)
        except MatcherFailed as error:
            self._error = f"The grammar compiles, but fails on a text that it should allow: {error}"
