"""The libraries that compile grammars, by name. Each is imported when it is first asked for: some take seconds."""

from collections.abc import Callable

from trunkline.grammar.interface import Backend
from trunkline.grammar.vocabulary import Vocabulary


def _llguidance(vocabulary: Vocabulary) -> Backend:
    from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary)


def _xgrammar(vocabulary: Vocabulary) -> Backend:
    from trunkline.grammar.backends.xgrammar.backend import XgrammarBackend

    return XgrammarBackend(vocabulary)


def _outlines(vocabulary: Vocabulary) -> Backend:
    from trunkline.grammar.backends.outlines.backend import OutlinesBackend

    return OutlinesBackend(vocabulary)


MAKERS: dict[str, Callable[[Vocabulary], Backend]] = {
    "llguidance": _llguidance,
    "xgrammar": _xgrammar,
    "outlines": _outlines,
}


def make(name: str, vocabulary: Vocabulary) -> Backend:
    """A backend for one vocabulary; `name` is one of MAKERS. Takes seconds the first time."""
    return MAKERS[name](vocabulary)
