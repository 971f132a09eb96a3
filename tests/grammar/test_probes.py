"""One keyword or combination at a time: 141 small schemas, through each backend and through `auto`.

    exact     every instance is told right
    narrower  some valid ones are not taken
    refused   400, with the reason

No invalid instance is ever accepted, and no fewer probes are exact than in baselines/probes.json, which is of the library
versions that it names. To write it again:  python -m tests.grammar.test_probes
"""

import json
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.data import grammar_rows
from tests.grammar.matching import accepts, small_vocabulary
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.constraint import Constraint
from trunkline.grammar.backends import registry
from trunkline.grammar.interface import Backend, GrammarRefused
from trunkline.grammar.prepare import prepare

BASELINE = Path(__file__).parent / "baselines" / "probes.json"
VOCABULARY = small_vocabulary()
STYLES = ((", ", ": "), (",", ":"))

pytestmark = pytest.mark.slow


@cache
def make(name: str) -> Backend:
    return registry.make(name, VOCABULARY)


def probes() -> list[dict[str, Any]]:
    return grammar_rows("keyword_probes")


def judge(probe: dict[str, Any], backend: str) -> tuple[str, list[str]]:
    """("exact", "narrower" or "refused"; texts that are not valid and were accepted)."""
    try:
        prepared = prepare(Constraint(json_schema=probe["schema"], backend=backend))
    except GrammarRefused:
        return "refused", []
    source = prepared.grammar.sources[0]
    compiled = make(source.backend).compile(source)
    wrong, is_exact = [], True
    for test in probe["tests"]:
        for style in STYLES:
            text = json.dumps(test["data"], ensure_ascii=False, separators=style)
            is_accepted = accepts(compiled, VOCABULARY, text)
            if is_accepted and not test["valid"]:
                wrong.append(text)
            is_exact &= is_accepted == test["valid"]
    return "exact" if is_exact else "narrower", wrong


def table() -> dict[str, dict[str, int]]:
    return {
        backend: dict(sorted(Counter(judge(probe, backend)[0] for probe in probes()).items()))
        for backend in GRAMMAR_BACKENDS
    }


def libraries() -> dict[str, str]:
    return {name: version(name) for name in ("llguidance", "xgrammar", "outlines_core")}


@pytest.mark.parametrize("backend", GRAMMAR_BACKENDS)
def test_no_backend_accepts_what_is_invalid_and_none_is_less_exact_than_before(backend: str) -> None:
    counts: Counter[str] = Counter()
    wrong = {}
    for probe in probes():
        verdict, texts = judge(probe, backend)
        counts[verdict] += 1
        if texts:
            wrong[probe["id"]] = texts
    assert not wrong
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    if baseline["libraries"] == libraries():
        before = baseline["probes"][backend]
        assert counts["exact"] >= before["exact"], counts
        assert counts["refused"] <= before["refused"], counts


def test_a_refusal_names_a_place_and_a_reason() -> None:
    for probe in probes():
        try:
            prepare(Constraint(json_schema=probe["schema"], where="response_format", name="probe"))
        except GrammarRefused as refused:
            assert refused.status == 400 and refused.param == "response_format"
            assert refused.message.startswith("Invalid schema for response_format 'probe': In context=(")
            assert refused.findings and refused.findings[0].reason


if __name__ == "__main__":
    BASELINE.write_text(json.dumps({"libraries": libraries(), "probes": table()}, indent=1) + "\n", encoding="utf-8")
