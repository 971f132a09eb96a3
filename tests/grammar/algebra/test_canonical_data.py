"""Forms of real schemas, of the official test suite, and of our probes: no instance that is not valid is accepted."""

from collections import Counter

import pytest

from tests.data import grammar_rows
from tests.grammar.schemas import forms_of
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.accepts import accepts

pytestmark = pytest.mark.slow


def judge(name: str, *, without: str = "") -> tuple[Counter[str], list[str]]:
    """Counts of schemas (seen, taken) and instances (valid, accepted), and the ids of schemas that accept what is not valid."""
    counts: Counter[str] = Counter()
    wrong = []
    for row in grammar_rows(name):
        if without and row.get("category") == without:
            continue
        counts["seen"] += 1
        schema = row["schema"]
        if row.get("category", "").startswith("draft7") and isinstance(schema, dict):
            schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema  # the suite's folder says it
        try:
            forms = forms_of(schema)
        except (Unsupported, InvalidSchema):
            continue
        counts["taken"] += 1
        for test in row["tests"]:
            accepted = accepts(forms, test["data"])
            counts["valid"] += test["valid"]
            counts["accepted"] += test["valid"] and accepted
            if accepted and not test["valid"]:
                wrong.append(row["id"])
    return counts, wrong


def test_probes() -> None:
    counts, wrong = judge("keyword_probes")
    assert not wrong
    assert counts["accepted"] == counts["valid"] and counts["taken"] >= 130


def test_real_schemas() -> None:
    counts, wrong = judge("jsonschemabench_sample", without="Synthesized")
    assert not wrong
    assert counts["taken"] / counts["seen"] >= 0.98
    assert counts["accepted"] / counts["valid"] >= 0.99


def test_official_suite() -> None:
    counts, wrong = judge("json_schema_test_suite")
    assert not wrong
    assert counts["taken"] / counts["seen"] >= 0.85
