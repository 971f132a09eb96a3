import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from trunkline.bench.client import EventParser, Outcome

BODY = (
    ": a comment, as some proxies send to keep a connection open\r\n\r\n"
    'event: message\r\nid: 7\r\ndata: {"text": "Grüße, 世界 🌍"}\r\n\r\n'
    "data:no space\n\n"
    "data: two\ndata: lines\n\n"
    "data: carriage returns\r\r"
    "data: [DONE]\n\n"
    "data: never finished"
).encode()
EVENTS = ['{"text": "Grüße, 世界 🌍"}', "no space", "two\nlines", "carriage returns", "[DONE]"]


def test_whole_body() -> None:
    assert EventParser().feed(BODY) == EVENTS


def test_byte_by_byte() -> None:
    stream = EventParser()
    assert [event for byte in BODY for event in stream.feed(bytes([byte]))] == EVENTS


@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    stream = EventParser()
    at = [0, *sorted(cuts), len(BODY)]
    events = [event for start, end in itertools.pairwise(at) for event in stream.feed(BODY[start:end])]
    assert events == EVENTS
    assert json.loads(events[0])["text"] == "Grüße, 世界 🌍"


def test_time_per_output_token_counts_the_gaps() -> None:
    outcome = Outcome(started=10.0, first=10.5, last=11.5, completion_tokens=5)
    assert outcome.time_to_first_token == 0.5
    assert outcome.time_per_output_token == 0.25


def test_one_token_has_no_pace() -> None:
    assert Outcome(started=10.0, first=10.5, last=10.5, completion_tokens=1).time_per_output_token is None
    assert Outcome(started=10.0).time_to_first_token is None
