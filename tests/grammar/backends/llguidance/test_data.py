"""Schemas of the corpora, from their text to masks: nothing invalid is accepted, nor written; and most of what is valid is taken.

Values are given with their keys in the order of the schema's properties, since that is the order in which they are written.
"""

import json
from collections import Counter

import jsonschema
import numpy as np
import pytest

from tests.data import grammar_rows
from tests.grammar.matching import small_vocabulary, takes
from tests.grammar.schemas import forms_of
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.accepts import in_order
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import load_tokenizer

SMALL = small_vocabulary()


def judge(name: str, backend: LlguidanceBackend) -> tuple[Counter[str], list[str]]:
    """Counts of schemas and instances, and what was accepted that is not valid."""
    counts: Counter[str] = Counter()
    wrong = []
    for row in grammar_rows(name):
        schema = row["schema"]
        if row.get("category", "").startswith("draft7") and isinstance(schema, dict):
            schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
        counts["schemas"] += row.get("category") != "Synthesized"
        try:
            forms = forms_of(schema)
            compiled = backend.compile(emit(forms, compact=False))
        except (Unsupported, InvalidSchema):
            continue
        counts["compiled"] += row.get("category") != "Synthesized"
        for test in row["tests"]:
            for separators in (None, (",", ":")):
                value = in_order(forms, test["data"])
                taken = takes(compiled, SMALL, json.dumps(value, ensure_ascii=False, separators=separators))
                counts["valid"] += test["valid"]
                counts["valid and taken"] += test["valid"] and taken
                if taken and not test["valid"]:
                    wrong.append(f"{row['id']}: {value}")
    return counts, wrong


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(SMALL)


@pytest.mark.slow
def test_probes(backend):
    counts, wrong = judge("keyword_probes", backend)
    assert wrong == []
    assert counts["compiled"] >= 132
    assert counts["valid and taken"] >= 0.985 * counts["valid"]


@pytest.mark.slow
def test_official_suite(backend):
    counts, wrong = judge("json_schema_test_suite", backend)
    assert wrong == []
    assert counts["compiled"] >= 600
    assert counts["valid and taken"] >= 0.89 * counts["valid"]


@pytest.mark.slow
def test_real_schemas(backend):
    counts, wrong = judge("jsonschemabench_sample", backend)
    assert wrong == []
    assert counts["compiled"] >= 0.97 * counts["schemas"]
    assert counts["valid and taken"] >= 0.99 * counts["valid"]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_random_texts_of_real_schemas_are_valid():
    """Tokens are drawn from the masks. Three in ten are drawn among those that may end a string, list or object, since of 49,152
    tokens only a few hundred do: drawn evenly, a string would have some 250 tokens."""
    tokenizer = load_tokenizer(builtin_model())
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    backend = LlguidanceBackend(vocabulary)
    rng = np.random.default_rng(0)
    closes = np.array([any(byte in token for byte in b'"}]') for token in vocabulary.tokens])
    row = np.zeros(vocabulary.num_words, np.int32)
    counts: Counter[str] = Counter()
    for entry in grammar_rows("jsonschemabench_sample")[::3]:
        schema = entry["schema"]
        try:
            compiled = backend.compile(emit(forms_of(schema), compact=False))
        except (Unsupported, InvalidSchema):
            continue
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        for _ in range(4):
            matcher, text = compiled.matcher(), b""
            for _ in range(600):
                matcher.fill(row)
                ids = np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]
                closing = ids[closes[ids]]
                token = int(rng.choice(closing if len(closing) and rng.random() < 0.3 else ids))
                if token in vocabulary.eos_token_ids:
                    counts["ended"] += 1
                    assert validator.is_valid(json.loads(text)), f"{entry['id']}: {text!r}"
                    break
                assert matcher.accept(token)
                text += vocabulary.tokens[token]
            counts["begun"] += 1
    assert counts["ended"] > 0.9 * counts["begun"]
