"""Whether grammars are true to their schemas, on schemas and instances from outside: no invalid instance is ever
accepted, and no fewer schemas and valid instances than before.

What was reached before is in baselines/truth.json; `python -m benchmarks.grammar --baselines FILE` writes it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import grammar_corpus
from benchmarks.grammar import library_versions
from benchmarks.grammar_corpus import WAYS, Way, corpora, figures
from tests.data import data_file
from trunkline.models.checkpoint import builtin_model

BASELINES = json.loads((Path(__file__).parent / "baselines" / "truth.json").read_text(encoding="utf-8"))
LEAST_COMPILED = {"JSONSchemaBench": 0.92, "JSON Schema Test Suite, required": 0.55}  # of the schemas, by `auto`
LEAST_ACCEPTED = {"JSONSchemaBench": 0.99}  # of the valid instances of these

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tester() -> Iterator[grammar_corpus.Tester]:
    tester = grammar_corpus.Tester(builtin_model())
    yield tester
    tester.close()


@pytest.mark.parametrize("corpus", BASELINES["ways"]["auto"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
def test_no_invalid_instance_is_accepted_and_no_less_is_compiled_than_before(
    tester: grammar_corpus.Tester, way: Way, corpus: str
) -> None:
    cases = corpora(data_file("grammar/keyword_probes.jsonl").parent)[corpus]
    outcomes = [tester.try_case(case, way) for case in cases]
    assert not [(outcome.name, outcome.wrong) for outcome in outcomes if outcome.is_over_permissive]
    now, before = figures(outcomes), BASELINES["ways"][way.title][corpus]
    if BASELINES["libraries"] != library_versions():
        pytest.skip(f"the counts to compare with are of {BASELINES['libraries']}; installed are {library_versions()}")
    for count in ("compiled", "accepted_valid"):
        assert now[count] >= before[count], f"{count}: {now} is less than {before}"
    if way.backend == "auto":
        assert now["compiled"] >= LEAST_COMPILED.get(corpus, 0) * now["schemas"]
        assert now["accepted_valid"] >= LEAST_ACCEPTED.get(corpus, 0) * now["valid"]


def test_what_is_refused_names_its_place(tester: grammar_corpus.Tester) -> None:
    cases = corpora(data_file("grammar/keyword_probes.jsonl").parent)["JSONSchemaBench"]
    refusals = [why for case in cases if (why := tester.try_case(case._replace(instances=[]), WAYS[0]).refused)]
    assert refusals
    assert all("In context=(" in why for why in refusals)
