import json

import pytest

from tests.bench.test_texts import by_words
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import NAMES, SCHEMA, Workload, make_workloads, warm_up

TEXTS = Texts(by_words)


def make(name: str, seed: int = 0) -> Workload:
    return make_workloads(name, TEXTS, seed)[0]


def prompts(workload: Workload) -> list[str]:
    """All texts of a workload, one string a turn."""
    said = (turn.prompt or json.dumps(turn.messages) for session in workload.sessions for turn in session)
    return list(said)


# name: sessions, turns of each, tokens in of the first turn, tokens out, at a time
SHAPES = {
    "W1": (3, 1, 128, 128, 1),
    "W2": (32, 1, 1024 + 128 + 24, 64, 8),
    "W3": (8, 4, 128 + 32, 64, 8),
    "W5": (16, 1, 512, 64, 8),
    "W6": (256, 1, 64, 64, 256),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    sessions, turns, prompt_tokens, max_tokens, concurrency = SHAPES[name]
    workload = make(name)
    assert workload.concurrency == concurrency
    assert [len(session) for session in workload.sessions] == [turns] * sessions
    for session in workload.sessions:
        assert session[0].prompt_tokens == prompt_tokens
        assert all(turn.max_tokens == max_tokens and turn.ignore_eos and turn.schema is None for turn in session)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_exact(name: str) -> None:
    for workload in make_workloads(name, TEXTS, 5):
        for session in workload.sessions:
            for turn in session:
                texts = [turn.prompt] if turn.prompt is not None else [message["content"] for message in turn.messages]
                assert sum(len(by_words(text)) for text in texts) == turn.prompt_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(name: str) -> None:
    assert make_workloads(name, Texts(by_words), 3) == make_workloads(name, Texts(by_words), 3)
    assert not set(prompts(make(name, 3))) & set(prompts(make(name, 4)))


def test_rag_shares_one_system_prompt_and_eight_documents() -> None:
    tokens = [by_words(prompt) for prompt in prompts(make("W2"))]
    assert len({tuple(ids[:1024]) for ids in tokens}) == 1
    documents = [tuple(ids[: 1024 + 128]) for ids in tokens]
    assert sorted(documents.count(document) for document in set(documents)) == [4] * 8
    assert len({tuple(ids) for ids in tokens}) == 32


@pytest.mark.parametrize("name", ["W1", "W5", "W6"])
def test_cold_prompts_share_not_even_a_page(name: str) -> None:
    starts = [tuple(by_words(prompt)[:8]) for prompt in prompts(make(name))]
    assert len(set(starts)) == len(starts)


def test_chats_share_the_system_message_and_add_one_user_message_a_turn() -> None:
    workload = make("W3")
    assert len({session[0].messages[0]["content"] for session in workload.sessions}) == 1
    for session in workload.sessions:
        roles = [[message["role"] for message in turn.messages] for turn in session]
        assert roles == [["system", "user"], ["user"], ["user"], ["user"]]


def test_tickets_with_and_without_schema_differ_in_the_first_word_only() -> None:
    constrained, free = make_workloads("W4", TEXTS, 0)
    assert (constrained.name, free.name) == ("W4", "W4u")
    for (one,), (other,) in zip(constrained.sessions, free.sessions, strict=True):
        assert one.schema is SCHEMA and other.schema is None
        assert not one.ignore_eos and not other.ignore_eos
        assert one.max_tokens == other.max_tokens == 128
        assert one.messages[1] == other.messages[1]
        words = [turn.messages[0]["content"].split() for turn in (one, other)]
        assert words[0][0] != words[1][0] and words[0][1:] == words[1][1:]


def test_the_schema_is_one_and_an_example_meets_it() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    place = {"town": "Bath", "floor": 3}
    ticket = {"title": "Cold room", "kind": "fault", "urgency": 4, "open": True, "place": place, "tags": ["heat"]}
    jsonschema.validate(ticket, SCHEMA)
    assert len(json.dumps(ticket)) < 3 * 128  # fits into 128 tokens, of three characters at least


def test_warm_up_shares_no_prompt_with_its_workload() -> None:
    for name in NAMES:
        workload = make(name)
        warm = warm_up(workload, TEXTS, 0, 2)
        assert len(warm.sessions) == 2
        assert warm.sessions[0][0].path == workload.sessions[0][0].path
        assert not set(prompts(warm)) & set(prompts(workload))


def test_bodies() -> None:
    body = make("W1").sessions[0][0].body("m", [])
    assert body["temperature"] == 0 and body["ignore_eos"] is True and body["max_tokens"] == 128
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert isinstance(body["prompt"], str) and "messages" not in body

    constrained, free = (workload.sessions[0][0] for workload in make_workloads("W4", TEXTS, 0))
    body = constrained.body("m", list(constrained.messages))
    assert body["response_format"]["json_schema"]["schema"] is SCHEMA
    assert "ignore_eos" not in body and "prompt" not in body
    assert "response_format" not in free.body("m", list(free.messages))
