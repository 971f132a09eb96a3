"""Formats: nothing that is invalid matches, and the usual valid texts do."""

import re
from collections.abc import Iterator

import pytest

from tests.data import grammar_rows
from trunkline.grammar.regex import automaton, dfa, pattern
from trunkline.grammar.schema import formats

VALID = {
    "date-time": ["2024-01-02T03:04:05Z", "2024-02-29T23:59:59.123+02:00"],
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["03:04:05Z", "23:59:59.5-08:00"],
    "duration": ["P1DT2H", "P4Y", "PT0S", "P2W", "P1Y2M3DT4H5M6S"],
    "email": ["a@b.co", "joe.bloggs+x@example.com", "x@localhost"],
    "idn-email": ["ü@example.com", "a@b.co"],
    "hostname": ["a.example.com", "localhost", "1and1.de", "a-b-c.d", "x" * 63, "a.b.c.d.e.f.g"],
    "idn-hostname": ["example.com"],
    "ipv4": ["127.0.0.1", "255.249.199.99"],
    "ipv6": ["::1", "::", "2001:db8::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::8"],
    "uri": ["https://a.b/c?d=e#f", "urn:x:y", "mailto:a@b.co", "ldap://[2001:db8::7]/c=GB?a?b", "http://x:80/%20"],
    "uri-reference": ["/a/b", "http://x", "", "#f", "../a?b", "//x/y"],
    "iri": ["http://ex.com/é", "http://例え.jp/"],
    "iri-reference": ["/é", "é"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-426614174000"],
    "uri-template": ["/a/{b}{?c,d*}", "{+x:3}", "http://x/~{user}"],
    "json-pointer": ["", "/a/b", "/~0~1", "/"],
    "relative-json-pointer": ["0", "1/a", "2#", "10"],
    "regex": ["[a-z]+", "^a.b$", "(a|b)*\\d{2}", ""],
}
INVALID = {
    "date-time": [
        "2024-01-02",
        "2024-01-02T03:04:05",
        "2024-13-02T03:04:05Z",
        "2024-01-02T24:00:00Z",
        "2024-01-02 03:04:05Z",
    ],
    "date": [
        "2023-02-29",
        "1900-02-29",
        "2024-04-31",
        "24-1-1",
        "2024-00-01",
        "0000-01-01",
        "2024-01-01\n",
        "２024-01-01",
    ],
    "time": ["25:00:00Z", "12:60:00Z", "12:00:61Z", "12:00:00", "12:00Z", "12:00:00+24:00"],
    "duration": ["1 day", "P", "PT", "P1YT", "P1H", "P2D1Y", "P1W2D", "PT1D", "P1Y4D"],
    "email": ["a.b.co", "@", "a@", ".a@b", "a.@b", "a..b@c", "a@-b", "a b@c", "a" * 65 + "@b.co"],
    "idn-email": ["x", "é@", "é" * 33 + "@b.co"],
    "hostname": ["-a-.b", "a b", "", ".", "a..b", "a.", "a_b", "x" * 64, ".".join(["x" * 60] * 5), "xn--x", "é.de"],
    "idn-hostname": ["-a", "a b", "〮a"],
    "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5", "1.2.3.4/8"],
    "ipv6": ["zz::1", "1.2.3.4", ":::", "1::2::3", "12345::", "1:2:3:4:5:6:7", "fe80::1%eth0", "::1:2:3:4:5:6:7:8"],
    "uri": [
        "not a uri",
        "//x",
        "/a",
        "a",
        "http://a b",
        "http://[::1",
        "http:// x",
        ":x",
        "http://x/%2",
        "1a:b",
        "http://é",
    ],
    "uri-reference": ["a b\\", "\\\\W", "#a#b", "a:b:c d", "1a:b"],
    "iri": ["x y", "/é", "é"],
    "iri-reference": ["\\é", "#é#"],
    "uuid": ["123e4567", "123e4567e89b12d3a456426614174000", "g23e4567-e89b-12d3-a456-426614174000"],
    "uri-template": ["{", "}", "{a", "{a b}", "a b", "{a:0}", "%2"],
    "json-pointer": ["a/b", "/~", "/~2", "#/a"],
    "relative-json-pointer": ["/a", "-1", "01", "0##", "", "1a"],
    "regex": ["[", "(", ")", "*", "a**", "a{", "[z-a]", "\\", "a)("],
}


def test_every_format_of_the_draft_is_known():
    assert formats.KNOWN.keys() == VALID.keys() == INVALID.keys()


@pytest.mark.parametrize("name", formats.KNOWN)
def test_what_matches_is_valid(name):
    source = formats.KNOWN[name]
    assert [text for text in VALID[name] if not automaton.matches(source, text)] == []
    assert [text for text in INVALID[name] if automaton.matches(source, text)] == []
    assert pattern.normalize(source) == source, "not in the syntax that is promised"


def short_texts(source: str, most: int) -> Iterator[str]:
    """One text for each way through the states, of at most so many characters: the first that leads there."""
    machine = automaton.Automaton(pattern.whole_tree(source), automaton.Budget())
    layer = {machine.start: ""}
    for _ in range(most):
        layer = {to: text + chr(first) for state, text in layer.items() for first, _, to in machine.moves(state)}
        yield from (text for state, text in layer.items() if machine.accepts(state))


def test_simple_expressions_compile():
    """Texts that the format `regex` allows are expressions for `re` and for us."""
    for source in VALID["regex"]:
        re.compile(source)
        normal = pattern.normalize(source)
        assert pattern.normalize(normal) == normal
    made = list(short_texts(formats.KNOWN["regex"], 8))
    assert len(made) > 20
    for text in made:
        re.compile(text)


def test_the_official_suite():
    """Not one text that the suite calls invalid matches."""
    seen = set()
    for row in grammar_rows("json_schema_test_suite"):
        name = row["schema"].get("format") if isinstance(row["schema"], dict) else None
        if name not in formats.KNOWN or "/optional/" not in row["id"]:
            continue
        seen.add(name)
        for test in row["tests"]:
            if isinstance(test["data"], str):
                found = automaton.matches(formats.KNOWN[name], test["data"])
                assert test["valid"] or not found, (name, test)
    assert len(seen) > 15


@pytest.mark.parametrize("name", formats.KNOWN)
def test_formats_are_small_automata(name):
    assert dfa.build([pattern.whole_tree(formats.KNOWN[name])], limit=2500)
