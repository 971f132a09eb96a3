"""The mark before a constrained text, byte by byte against a naive search."""

import random

import pytest

from trunkline.grammar.mark import Mark

TOKENS = [
    b"a",
    b"b",
    b"ab",
    b"aab",
    b"ba",
    b"abaab",
    b" ",
    b"\n",
    b"b\n",
    b"b{",
    b"aab ",
    b"aab{",
    b"",
    b"baabx",
    b"xaab",
]


@pytest.mark.parametrize("mark", [b"a", b"ab", b"aab", b"aabaaab", b"abab", b"bbb"])
def test_against_a_search_in_the_whole_text(mark: bytes) -> None:
    rng = random.Random(3)
    found = Mark(mark, TOKENS)
    for _ in range(300):
        text, state = b"", 0
        while mark not in text and len(text) < 40:
            token = rng.choice(TOKENS)
            spills = mark in text + token and bool((text + token).split(mark, 1)[1].strip())
            assert (TOKENS.index(token) in found.spilling(state)) == spills, (text, token)
            if spills:
                break
            text, state = text + token, found.follow(state, token)
            whole = max(n for n in range(len(mark) + 1) if text.endswith(mark[:n]))
            assert state == (len(mark) if mark in text else whole)


def test_the_rest_is_spelled_with_the_longest_tokens() -> None:
    mark = Mark(b"aabaab", TOKENS)
    assert [TOKENS[token_id] for token_id in mark.spelling(0)] == [b"aab", b"aab"]
    assert [TOKENS[token_id] for token_id in mark.spelling(1)] == [b"abaab"]
    assert mark.spelling(6) == ()
    with pytest.raises(ValueError, match="no token"):
        Mark(b"aaz", TOKENS).spelling(0)
