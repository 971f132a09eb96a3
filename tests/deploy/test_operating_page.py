"""docs/operating.md says what is there: metrics, alerts, attributes of traces, fields of the log."""

import re
from pathlib import Path

import pytest

from tests.api.metric_names import TABLE
from tests.deploy.promql import problems

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
API = Path(__file__).parents[2] / "api"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def codes(text: str) -> list[str]:
    """What stands in `code`, outside of blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


METRICS = {codes(name)[0]: (kind, codes(labels)) for name, kind, labels, _ in rows("Metrics")}


def test_every_metric_is_in_the_table_and_no_other() -> None:
    assert {name: kind for name, (kind, _) in METRICS.items()} == {name: row.kind for name, row in TABLE.items()}


@pytest.mark.parametrize("name", TABLE)
def test_labels_are_those_that_there_are(name: str) -> None:
    _, told = METRICS[name]
    known = TABLE[name].labels
    assert told[: len(known)] == list(known)
    values = set(told[len(known) :])
    allowed = set().union(*(each for each in known.values() if each))
    assert values <= allowed, "a value that never is"
    # Lists that stand on another page are not repeated.
    assert values in (set(), allowed) or name == "trunkline:prefix_cache_queries_total"


def test_queries_on_the_page() -> None:
    found = re.findall(r"```promql\n(.+?)\n```", PAGE, flags=re.DOTALL)
    assert found
    for query in found:
        assert problems(query) == []


def test_every_attribute_of_a_span_is_told() -> None:
    source = (API / "tracing.py").read_text(encoding="utf-8")
    attributes = set(re.findall(r'"((?:gen_ai|http|trunkline|error)\.(?!api)[\w.]+)"', source))
    assert len(attributes) > 15
    assert attributes - set(codes(PAGE)) == set()


def test_every_field_of_the_log_is_told() -> None:
    source = (API / "request_log.py").read_text(encoding="utf-8")
    fields = set(re.findall(r'"(\w+_(?:tokens|seconds|reasons|by_tier|id))":', source)) | {
        "route",
        "status",
        "tenant",
        "error",
    }
    assert len(fields) > 8
    assert fields - set(codes(PAGE)) == set()
