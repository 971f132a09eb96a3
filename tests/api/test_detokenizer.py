"""The detokenizer against a naive one that decodes everything from the start after each token."""

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trunkline.api.detokenizer import Detokenizer, StopMatcher, TextDelta
from trunkline.models.tokenizer import Tokenizer

EURO = "€".encode()
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b" b",
    "é".encode(),
    EURO,
    EURO[:1],
    EURO[1:],
    EURO[2:],
    b"\xff",
    b"",
    b"<a>",
]
SPECIAL = len(PIECES) - 1
A, B, AB = 0, 1, 2


class PiecesTokenizer(Tokenizer):
    """Token i is `pieces[i]`."""

    def __init__(self, pieces: Sequence[bytes], special_ids: Sequence[int] = ()) -> None:
        super().__init__(
            vocab_size=len(pieces),
            special_ids=special_ids,
            bos_token_id=None,
            eos_token_ids=(),
            special_tokens={},
            chat_template=None,
            strips_leading_space=False,
        )
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError


TOKENIZER = PiecesTokenizer(PIECES, [SPECIAL])


def decode_prefix(token_ids: list[int], hidden: frozenset[int], *, final: bool) -> str:
    """All text of the tokens; without `final`, without a character whose bytes are not all there."""
    data = b"".join(PIECES[token_id] for token_id in token_ids if token_id not in hidden)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def naive(token_ids: list[int], stops: list[str], *, include: bool, skip: bool, min_tokens: int) -> TextDelta:
    """Look for a stop string at every character, in the order in which characters are complete."""
    hidden = TOKENIZER.special_ids if skip else frozenset()
    seen = 0
    for used in range(1, len(token_ids) + 2):  # the last round is the flush
        final = used > len(token_ids)
        text = decode_prefix(token_ids[:used], hidden, final=final)
        for end in range(seen + 1, len(text) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if text[:end].endswith(stop) and min(used, len(token_ids)) > min_tokens:
                    kept = end if include else end - len(stop)
                    return TextDelta(text[:kept], stop, min(used, len(token_ids)))
        seen = len(text)
    return TextDelta(decode_prefix(token_ids, hidden, final=True), None, len(token_ids))


def run(detokenizer: Detokenizer, chunks: list[list[int]]) -> TextDelta:
    deltas = [detokenizer.push(chunk) for chunk in chunks]
    deltas.append(detokenizer.flush())
    return TextDelta("".join(d.text for d in deltas), deltas[-1].stopped, sum(d.tokens_used for d in deltas))


token_lists = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
stop_lists = st.lists(st.text("ab€�<> é", min_size=1, max_size=4), max_size=4)
options = st.fixed_dictionaries({"include": st.booleans(), "skip": st.booleans(), "min_tokens": st.integers(0, 6)})


@given(token_lists, stop_lists, options, st.data())
@example([A, B], ["abab", "b"], {"include": False, "skip": True, "min_tokens": 0}, None)
@example([8, 7], ["�"], {"include": False, "skip": True, "min_tokens": 0}, None)
def test_any_chunking_gives_the_naive_text(token_ids, stops, options, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(token_ids))))) if data else []
    bounds = [0, *cuts, len(token_ids)]
    chunks = [token_ids[start:end] for start, end in pairwise(bounds)]
    detokenizer = Detokenizer(
        TOKENIZER,
        stop=stops,
        include_stop=options["include"],
        skip_special=options["skip"],
        min_tokens=options["min_tokens"],
    )
    assert run(detokenizer, chunks) == naive(token_ids, stops, **options)


@given(token_lists, stop_lists)
def test_what_is_held_back_is_the_start_of_a_stop_string_and_no_more(token_ids, stops):
    detokenizer = Detokenizer(TOKENIZER, stop=stops)
    given_out = ""
    for used, token_id in enumerate(token_ids, start=1):
        delta = detokenizer.push([token_id])
        given_out += delta.text
        if delta.stopped is not None:
            break
        text = decode_prefix(token_ids[:used], TOKENIZER.special_ids, final=False)
        starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((start for start in starts if text.endswith(start)), key=len, default="")
        assert given_out == text.removesuffix(held)


@given(st.binary(max_size=60), st.data())
def test_random_bytes_decode_like_python(data_bytes, data):
    tokenizer = PiecesTokenizer([bytes([byte]) for byte in range(256)])
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([byte]).text for byte in data_bytes]
    assert "".join(pieces) + detokenizer.flush().text == data_bytes.decode("utf-8", "replace")


def test_a_character_waits_for_its_last_byte():
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push([8]).text == ""  # first byte of €
    assert detokenizer.push([9]).text == "€"
    assert detokenizer.push([8]).text == ""
    assert detokenizer.flush().text == "�"


def test_a_stop_string_over_several_tokens_never_leaks():
    detokenizer = Detokenizer(TOKENIZER, stop=["aba€"])
    assert [detokenizer.push([t]).text for t in (B, A, B, A)] == ["b", "", "", ""]
    assert detokenizer.push([B]).text == "ab"  # "abab": only its second half may still become the stop string
    assert detokenizer.push([A, 7, A, A]) == TextDelta("", "aba€", tokens_used=2)
    assert detokenizer.num_tokens == 7


def test_after_the_end_nothing_is_used():
    detokenizer = Detokenizer(TOKENIZER, stop=["b"])
    assert detokenizer.push([A, B, A]) == TextDelta("a", "b", tokens_used=2)
    assert detokenizer.push([A]) == TextDelta("", "b", tokens_used=0)
    assert detokenizer.flush() == TextDelta("", "b", tokens_used=0)


def test_the_stop_string_is_kept_on_request_but_not_what_follows_it_in_the_token():
    detokenizer = Detokenizer(TOKENIZER, stop=["a"], include_stop=True)
    assert detokenizer.push([B, AB]) == TextDelta("ba", "a", tokens_used=2)


def test_held_text_comes_out_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, stop=["abb"])
    assert detokenizer.push([B, AB]).text == "b"
    assert detokenizer.flush() == TextDelta("ab", None, tokens_used=0)
    assert detokenizer.flush().text == ""


@pytest.mark.parametrize(
    ("stops", "token_ids", "expected"),
    [
        (["abab", "ba"], [A, B, A, B], TextDelta("a", "ba", 3)),  # complete first, though it starts later
        (["b", "ab"], [A, B], TextDelta("", "ab", 2)),  # complete at the same character: the longer
        (["ab", "aba"], [AB, A], TextDelta("", "ab", 1)),
    ],
)
def test_of_several_stop_strings_the_first_complete_wins(stops, token_ids, expected):
    assert Detokenizer(TOKENIZER, stop=stops).push(token_ids) == expected


def test_special_tokens_are_seen_by_stop_strings_only_if_they_are_shown():
    assert run(Detokenizer(TOKENIZER, stop=["a>"]), [[B, SPECIAL, B]]) == TextDelta("bb", None, 3)
    shown = Detokenizer(TOKENIZER, stop=["a>"], skip_special=False)
    assert run(shown, [[B, SPECIAL, B]]) == TextDelta("b<", "a>", 2)


def test_stop_strings_within_min_tokens_are_text():
    detokenizer = Detokenizer(TOKENIZER, stop=["b", "ab"], min_tokens=2)
    assert detokenizer.push([A, B]).text == "ab"
    assert detokenizer.push([A, B, B]) == TextDelta("", "ab", 2)


def test_many_long_stop_strings_cost_a_few_steps_a_character():
    """A search that looks back would take minutes: 64 strings of 1,024 characters, and the text keeps to the first 960 of each."""
    matcher = StopMatcher("a" * 960 + chr(0x100 + number) * 64 for number in range(64))
    for _ in range(5_000):
        assert matcher.advance("a") is None
    assert matcher.pending == 960


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_matcher_finds_what_the_text_ends_in(text, strings):
    matcher = StopMatcher(strings)
    for end in range(1, len(text) + 1):
        seen = text[:end]
        assert matcher.advance(seen[-1]) == max(filter(seen.endswith, strings), key=len, default=None)
        starts = (string[:length] for string in strings for length in range(len(string)))
        assert matcher.pending == max(len(start) for start in starts if seen.endswith(start))
