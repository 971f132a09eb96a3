"""Schemas with instances that must be taken and instances that must be refused, and a way to put them to a grammar.

    corpus = load(data / "jsonschemabench_sample.jsonl")
    tester = Tester(model)
    outcome = tester.try_case(corpus[0], WAYS[0])              # Outcome(refused=None, accepted_valid=2, …)

An instance is put to a grammar as a model would write it: token by token, each looked up in the mask before it is
accepted, and at the end of the text an end-of-text token must be allowed. Where a grammar keeps the order of the schema's
keys, so must the instance: then its keys are put in that order, whether it is valid or not.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.json_lines import read_rows
from trunkline.bench.grammar import CompileCost, Compiler
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.constraint import Constraint
from trunkline.grammar.algebra import canonical
from trunkline.grammar.interface import CompiledGrammar, MatcherFailed
from trunkline.grammar.schema import meta, normalize
from trunkline.grammar.schema.accepts import in_order

# Categories of the official test suite whose schemas leave their draft to the folder they stand in.
DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#"}
REQUIRED_DRAFTS = ("draft2020-12", "draft7")  # of the suite; the rest of its groups are optional
SYNTHESIZED = "Synthesized"  # the category of JSONSchemaBench's schemas that no person wrote


class Way(NamedTuple):
    """How a schema is followed, and how that is called in tables."""

    title: str
    backend: str
    key_order: str = "schema"

    def constraint(self, schema: Any) -> Constraint:
        text = json.dumps(schema, ensure_ascii=False)
        return Constraint(json_schema=text, backend=self.backend, key_order=self.key_order)


WAYS = (
    *(Way(backend, backend) for backend in GRAMMAR_BACKENDS),
    Way("auto, keys in any order", "auto", key_order="any"),
)


PATIENCE = 120.0  # seconds for one grammar: what is counted may not depend on how busy the machine is


class Instance(NamedTuple):
    """A JSON text, and whether the schema allows it."""

    text: str
    valid: bool


class Case(NamedTuple):
    """A schema of a corpus."""

    name: str
    category: str
    schema: Any
    instances: list[Instance]


def corpora(data: Path) -> dict[str, list[Case]]:
    """The schemas in the folder `data`, by the names under which they are reported."""
    sample, suite = load(data / "jsonschemabench_sample.jsonl"), load(data / "json_schema_test_suite.jsonl")
    return {
        "JSONSchemaBench": [case for case in sample if case.category != SYNTHESIZED],
        "JSONSchemaBench, synthesized": [case for case in sample if case.category == SYNTHESIZED],
        "Keyword probes": load(data / "keyword_probes.jsonl"),
        "JSON Schema Test Suite, required": [case for case in suite if case.category in REQUIRED_DRAFTS],
        "JSON Schema Test Suite, optional": [case for case in suite if case.category not in REQUIRED_DRAFTS],
    }


def load(file: Path) -> list[Case]:
    """The schemas of a file of JSON lines: `id`, `category` or `keyword`, `schema`, `tests` of `data` and `valid`."""
    return list(_cases(file))


def _cases(file: Path) -> Iterator[Case]:
    for row in read_rows(file):
        instances = [Instance(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in row["tests"]]
        category, schema = row.get("category", row.get("keyword", "")), row["schema"]
        if category in DRAFTS and isinstance(schema, dict):
            schema = {"$schema": DRAFTS[category], **schema}
        yield Case(row["id"], category, schema, instances)


@dataclass(kw_only=True)
class Outcome(CompileCost):
    """What became of one schema.

    wrong  valid instances that were refused, invalid ones that were accepted
    """

    name: str
    category: str
    accepted_valid: int = 0
    num_valid: int = 0
    refused_invalid: int = 0
    num_invalid: int = 0
    wrong: list[Instance] = field(default_factory=list)

    @property
    def is_over_permissive(self) -> bool:
        """An invalid instance was accepted."""
        return any(not instance.valid for instance in self.wrong)


def figures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """What is counted of a corpus: the instances are those of the schemas that were compiled."""
    compiled = [outcome for outcome in outcomes if outcome.refused is None]
    return {
        "schemas": len(outcomes),
        "compiled": len(compiled),
        "valid": sum(outcome.num_valid for outcome in compiled),
        "accepted_valid": sum(outcome.accepted_valid for outcome in compiled),
        "invalid": sum(outcome.num_invalid for outcome in compiled),
        "refused_invalid": sum(outcome.refused_invalid for outcome in compiled),
        "over_permissive": sum(outcome.is_over_permissive for outcome in compiled),
    }


def _in_order(case: Case) -> list[Instance]:
    """The instances with their keys in the schema's order. The schema must be one that is taken."""
    schema = meta.check(json.dumps(case.schema, ensure_ascii=False))
    forms = canonical.canonicalize(normalize.normalize(schema)).forms
    return [
        instance._replace(text=json.dumps(in_order(forms, json.loads(instance.text)), ensure_ascii=False))
        for instance in case.instances
    ]


class Tester(Compiler):
    """Puts cases to grammars that are compiled for one model's vocabulary."""

    def __init__(self, model: str) -> None:
        """`model` is a checkpoint's path; only its tokenizer is read."""
        super().__init__(model, compile_seconds=PATIENCE)

    def try_case(self, case: Case, way: Way) -> Outcome:
        """Compile the schema in one way, and put each instance to it."""
        outcome = Outcome(name=case.name, category=case.category)
        compiled = self.compile_timed(lambda: way.constraint(case.schema), outcome)
        if compiled is None:
            return outcome
        instances = case.instances if way.key_order == "any" else _in_order(case)
        for instance in instances:
            accepted = self.accepts(compiled, instance.text, outcome.mask_seconds)
            outcome.num_valid += instance.valid
            outcome.num_invalid += not instance.valid
            outcome.accepted_valid += accepted and instance.valid
            outcome.refused_invalid += not accepted and not instance.valid
            if accepted != instance.valid:
                outcome.wrong.append(instance)
        return outcome

    def accepts(self, compiled: CompiledGrammar, text: str, mask_seconds: list[float] | None = None) -> bool:
        """True if the grammar lets a model write `text` and end there."""
        matcher = compiled.matcher()
        for token_id in self.tokenizer.encode(text, add_special_tokens=False, parse_special=False):
            try:
                begin = time.process_time()
                matcher.fill(self._row)
            except MatcherFailed:
                return False
            if mask_seconds is not None:
                mask_seconds.append(time.process_time() - begin)
            if not self._allows(token_id):
                return False
            assert matcher.accept(token_id), f"{token_id} is in the mask, and was not accepted"
        return matcher.is_complete

    def _allows(self, token_id: int) -> bool:
        return bool(int(self._row[token_id // 32]) >> (token_id % 32) & 1)
