"""`close_on_length` over schemas that people wrote: whatever a model chooses, and wherever its tokens end, the text is whole.

Everything is real but the model: the schema's way to a grammar, compiling it, the scheduler. In the model's place somebody chooses
who means harm.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.data import grammar_rows
from tests.grammar.matching import small_vocabulary
from tests.scheduler.factories import Outcome, ask
from tests.stub import StubWorker, next_allowed
from trunkline.api.answer_reader import AnswerReader
from trunkline.api.tool_parsers.smollm import SmolLMParser
from trunkline.api.tools import read_tools
from trunkline.config import EngineConfig, GrammarConfig, ModelSource, SchedulerConfig
from trunkline.constraint import Constraint, Grammar
from trunkline.grammar.prepare import prepare
from trunkline.grammar.service import CompileService
from trunkline.messages import Failed, Finished, Tokens
from trunkline.scheduler.engine import Engine

pytestmark = pytest.mark.slow

WORDS = ('{"', '": ', '": "', '", "', '"}', '":', '","', "true", "null", "12", "name", "type", '"]', "}}", "[]", "{}")
VOCABULARY = small_vocabulary(words=WORDS)
MORE = range(41)  # tokens beyond the fewest that a whole text has
EACH = {"BFCL": 20, "Glaiveai2K": 10, "Github_easy": 10}  # schemas of each corpus


def opens(read: np.ndarray, mask: np.ndarray, vocab_size: int) -> int | None:
    """The worst: begin something new wherever that is possible, and end nothing as long as anything else may come."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
    return int(np.argmax(np.where(bits, HARM, -1))) if bits.any() else None


def _harm(token: bytes) -> int:
    if not token or b"\n" in token:
        return 0
    opened = 8 * (token.count(b"{") + token.count(b"[")) + 4 * token.count(b",")
    return max(1, 3 + opened - 4 * (token.count(b"}") + token.count(b"]")) - token.count(b'"'))


HARM = np.array([_harm(token) for token in VOCABULARY.tokens] + [0] * (VOCABULARY.num_logits - len(VOCABULARY.tokens)))


def schemas() -> Iterator[Any]:
    """As many of each corpus as EACH says."""
    for tools in _spread(grammar_rows("bfcl_sample"), "tools_openai", EACH["BFCL"]):
        yield tools[0]["function"]["parameters"]
    sample = grammar_rows("jsonschemabench_sample")
    for corpus in ("Glaiveai2K", "Github_easy"):
        yield from _spread([row for row in sample if row["category"] == corpus], "schema", EACH[corpus])


def _spread(rows: list[Any], field: str, number: int) -> list[Any]:
    return [row[field] for row in rows[:: len(rows) // number]][:number]


@pytest.fixture(scope="module")
def service() -> Iterator[CompileService]:
    service = CompileService(lambda: VOCABULARY, GrammarConfig())
    yield service
    service.close()


def make_engine(service: CompileService, choose: Callable[..., int | None]) -> Engine:
    config = EngineConfig(
        model=ModelSource(path="stub"), scheduler=SchedulerConfig(max_num_seqs=64), grammar=GrammarConfig()
    )
    worker = StubWorker(num_pages=4096, page_size=16, vocab_size=VOCABULARY.num_logits, choose=choose)
    return Engine(
        config,
        worker,
        eos_token_ids=VOCABULARY.eos_token_ids,
        max_model_len=4096,
        vocab_size=VOCABULARY.num_logits,
        grammars=service,
    )


def run(engine: Engine, messages: list[Any]) -> dict[str, Outcome]:
    """Until nothing is left. (The audits after every step are other tests' affair.)"""
    outcomes: dict[str, Outcome] = {message.request_id: Outcome() for message in messages}
    said = [answer for message in messages for answer in engine.handle(message)]
    while engine.has_work:
        said += engine.step()
    for message in said:
        assert isinstance(message, Tokens | Finished | Failed)
        outcomes[message.request_id].add(message)
    return outcomes


def fewest_tokens(service: CompileService, grammar: Grammar) -> int:
    compilation = service.submit(grammar)
    while not compilation.done:
        service.wait(1.0)
    assert compilation.ending is not None
    return len(compilation.ending)


def close_at_all(service: CompileService, grammar: Grammar, choose: Callable[..., int | None], seed: int) -> list[str]:
    """Texts of the least and of up to 40 tokens more, each of which was closed or ended by itself."""
    least = fewest_tokens(service, grammar)
    limits = [least + more for more in MORE]
    engine = make_engine(service, choose)
    outcomes = run(engine, [ask(str(limit), [seed + 1, limit], grammar, max_tokens=limit) for limit in limits])
    texts = []
    for limit in limits:
        finished, tokens = outcomes[str(limit)].finished, outcomes[str(limit)].tokens
        assert finished is not None, outcomes[str(limit)].failed
        assert len(tokens) <= limit
        assert finished.reason == ("length" if finished.closed else "stop")
        ends = VOCABULARY.eos_token_ids
        texts.append(b"".join(VOCABULARY.tokens[token] for token in tokens if token not in ends).decode())
    closed = sum(outcome.finished.closed for outcome in outcomes.values() if outcome.finished is not None)
    assert closed or choose is next_allowed or len(set(texts)) == 1  # harm is cut short, unless there is but one text
    refused = run(engine, [ask("less", [1], grammar, max_tokens=least - 1)])["less"].failed if least > 1 else None
    assert least == 1 or (refused is not None and (refused.status, refused.param) == (400, "max_tokens"))
    return texts


@pytest.mark.parametrize("choose", [next_allowed, opens])
def test_json_is_whole_at_every_limit(service: CompileService, choose: Callable[..., int | None]) -> None:
    """40 schemas, and every max_tokens from the least to 40 more."""
    tried = 0
    for number, schema in enumerate(schemas()):
        constraint = Constraint(json_schema=json.dumps(schema), close_on_length=True)
        validator = jsonschema.Draft202012Validator(schema)
        for text in close_at_all(service, prepare(constraint).grammar, choose, number):
            validator.validate(json.loads(text))
        tried += 1
    assert tried == sum(EACH.values())


@pytest.mark.parametrize("choose", [next_allowed, opens])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_are_whole_at_every_limit(
    service: CompileService, choose: Callable[..., int | None], choice: str
) -> None:
    """The same for what calls functions: all calls that were begun are complete, and valid."""
    rows, calls = grammar_rows("bfcl_sample")[::17], 0
    for number, row in enumerate(rows):
        named = {"type": "function", "function": {"name": row["tools_openai"][0]["function"]["name"]}}
        use = read_tools(row["tools_openai"], named if choice == "named" else choice, None)
        assert use is not None
        grammar = prepare(Constraint(tags=use.tags(SmolLMParser.form), close_on_length=True)).grammar
        for text in close_at_all(service, grammar, choose, number):
            reader = AnswerReader(SmolLMParser(use.names), only_calls=True)
            reader.push(text)
            reader.finish("stop")
            assert reader.calls and (choice == "required" or len(reader.calls) == 1)
            for call in reader.calls:
                assert call.is_complete
                jsonschema.Draft202012Validator(use.names.parameters[call.name]).validate(json.loads(call.arguments))
            calls += len(reader.calls)
    assert calls >= len(rows) * len(MORE)
