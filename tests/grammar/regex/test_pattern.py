"""Regular expressions: what they mean, against `re`; how they are written; what is refused."""

import json
import re
import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, settings

from tests.grammar.regexes import looking, sources, texts
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import ast, characters, pattern
from trunkline.grammar.regex.automaton import matches


def search(source: str, text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return re.search(source, text) is not None


def check_meaning(source: str, text: str) -> None:
    """Narrow within `re` within wide; and whatever is written or made of the narrow one means the same."""
    narrow, wide = pattern.normalize(source), pattern.normalize(source, wide=True)
    found, ours = search(source, text), matches(narrow, text)
    assert found or not ours
    assert matches(wide, text) or not found
    if text.isascii() and not re.search(r"[\n\x1c-\x1f]", text):  # where ECMA-262 and re agree
        assert ours == found
        assert "$" in source or matches(wide, text) == found
    assert pattern.normalize(narrow) == narrow
    assert search(pattern.write(pattern.parse(source), "python"), text) == ours
    whole = pattern.whole_tree(source)
    assert not whole.has_anchor
    assert (re.fullmatch(pattern.write(whole), text) is not None) == ours
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    assert (re.fullmatch(pattern.write(pattern.json_tree(source)), inside) is not None) == ours


@settings(max_examples=120)
@given(sources(), texts)
@example("(^a|b$|-)*", "-b")
@example("(^|-)a($|-)", "b-a")
@example("(a|$){2}", "ba")
@example("a^b|a$b|-", "ab")
@example("a?^b*$-?", "b")
@example("[\\s\\S]", "\u2028")
@example("a|\\d$^", "\n")
def test_expressions_mean_what_re_says(source, text):
    check_meaning(source, text)


@pytest.mark.slow
@settings(max_examples=600)
@given(sources(3), texts)
def test_many_expressions_mean_what_re_says(source, text):
    check_meaning(source, text)


@given(texts)
def test_any_character_of_a_json_string(text):
    unit = pattern.json_unit()
    assert re.fullmatch(f"{unit}{{{len(text)}}}", json.dumps(text, ensure_ascii=False)[1:-1])
    for wrong in ('"', "\\", "\n", "\\u00e9", "\\u000a", "\\/", "\\ud83d"):
        assert not re.fullmatch(unit, wrong)


def says(parts: tuple[tuple[str, ...], tuple[str, ...]], text: str) -> bool:
    found, missed = parts
    return all(matches(one, text) for one in found) and not any(matches(one, text) for one in missed)


def check_split(source: str, text: str) -> None:
    try:
        parts = pattern.split(source)
    except Unsupported:
        assume(False)
    ours = says(parts, text)
    # Before 3.14, Python sees no \B in an empty text; nor do we.
    assert ours == search(source, text) or (not text and "\\B" in source and not ours)


plain_texts = texts.filter(lambda text: text.isascii() and "\n" not in text)


@settings(max_examples=120)
@given(looking(), plain_texts)
@example("^(?=.*b)(?!.*a)[ab-]+$", "b-")
@example("^((?!-)[a-]{1,3}(?<!-)b)+$", "a-abab")
@example("\\ba\\b|-", " a ")
@example("(?:(?=a)|-)a", "-a")
@example("^(?:a(?!b)|b)+$", "ab")
@example("^(?:(?<!a)b|a)+$", "ab")
@example("^a(?!b).*|-$", "ab")
def test_a_split_says_what_the_lookarounds_say(source, text):
    check_split(source, text)


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=[HealthCheck.filter_too_much])
@given(looking(), plain_texts)
def test_many_splits_say_what_the_lookarounds_say(source, text):
    check_split(source, text)


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        (r"^(?=.*[A-Z])(?=.*[0-9]).+$", "a1B", "a1b"),
        (r"^(?!foo$|bar$)[a-z]+$", "food", "foo"),
        (r"^((?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)+[A-Za-z]{2,6}$", "a-b.co", "a-.co"),
        (r"^(?!.*(\{x\}|[\"<>*?:/\\])).*\.[bB][lL][fF]$", "a.blf", "a{x}.blf"),
        (r"^[a-z-]+(?<!-)$", "a-b", "a-"),
        (r"\bfoo\b", "a foo.", "food"),
        (r"^((?!foo).)*$", "fo-o", "a foo"),
        (r"^ab(?!c|d)[a-z]", "abe", "abc"),
    ],
)
def test_usual_lookarounds_are_followed(source, yes, no):
    parts = pattern.split(source)
    assert says(parts, yes) and not says(parts, no)


@pytest.mark.parametrize(
    ("source", "normal"),
    [
        (r"^\d{3}-\w+$", r"^[0-9]{3}-[0-9A-Z_a-z]+$"),
        (r"a|b|c", "[a-c]"),
        (r"\/\_\-\@", "/_-@"),
        (r"{a}]", r"\{a\}\]"),
        (r"[a-z0-9-_.]", r"[\-.0-9_a-z]"),
        (r"[\w-.]", r"[\-.0-9A-Z_a-z]"),
        (r"[[a-z]*", r"[\[a-z]*"),
        (r"(?P<year>\d)(?<m>x)(?:y)", "[0-9]xy"),
        (r"\Aab\Z", "^ab$"),
        (r"(?i)ab[^c]", r"[Aa][Bb][^Cc]"),
        (r"(?i:a)b(?s:.)", "[Aa]b[\\x00-\U0010ffff]"),
        (r"(?s).", "[\\x00-\U0010ffff]"),
        (r"a{,3}", "a{0,3}"),
        (r"a{2}?b*?", "a{2}b*"),
        (r"\x41A\u{1F600}😀\cJ\0", "AA😀😀\\n\\x00"),
        (r"[\ud800-\udfff]", "[^\\x00-\U0010ffff]"),
        (r"[^]", "[\\x00-\U0010ffff]"),
        (r"\p{Nd}+", None),
        (r"(a*)*", "a*"),
        (r"^$|^a$", "^$|^a$"),
        ("\u2028\n\r\t\x7f", "\u2028\\n\\r\\t\\x7f"),
    ],
)
def test_normal_spelling(source, normal):
    found = pattern.normalize(source)
    assert normal is None or found == normal
    assert pattern.normalize(found) == found


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("^(abc", "a ( is not closed (at character 2)"),
        ("abc)", "closes no group (at character 4)"),
        ("[abc", "a [ is not closed"),
        ("[z-a]", "the wrong order"),
        ("a{5,2}", "the wrong order"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a{2}{3}", "nothing to repeat"),
        ("|+", "nothing to repeat"),
        ("a\\", "ends with a backslash"),
        (r"\u12", "no code"),
        (r"\u{110000}", "no code"),
        (r"\xg0", "no code"),
        (r"\pL", r"\p is followed by no {name}"),
        ("(?<1>a)", "no proper name"),
        ("(?", "no kind of group"),
    ],
)
def test_what_is_no_expression_is_invalid(source, reason):
    with pytest.raises(InvalidSchema) as caught:
        pattern.normalize(source, pointer="/properties/a", keyword="pattern")
    assert caught.value.finding[:2] == ("/properties/a", "pattern")
    assert reason in caught.value.finding.reason
    with pytest.raises(InvalidSchema):
        pattern.check(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (r"(a)\1", "references"),
        (r"(?P<n>a)(?P=n)", "references"),
        (r"\k<n>", "references"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("(?x)a b", "flag x"),
        ("(?m)^a", "flag m"),
        ("a(?i)b", "at the very beginning"),
        ("[]a]", "different things"),
        (r"\e", "different things"),
        (r"\p{Script=Greek}", "general categories"),
        ("(?=a)*", "repeated lookaround"),
        ("(?!ab)[a-c]+", "lookaround"),
        ("^(x*(?!ab)c)+$", "lookaround"),
        ("(a{1,1000}){1,1001}", "1001000 characters"),
        ("a{1,9999999}", "repetitions"),
        ("(" * 60 + "a" + ")" * 60, "more than 50 groups"),
        ("a" * 100_001, "100001 characters"),
        (r"[\W]" * 1000, "ranges"),
        ("(?=a)" * 100 + "a", "so many"),
        ("(^a|b){5}", "anchor"),
    ],
)
def test_what_cannot_be_followed_is_unsupported(source, reason):
    pattern.check(source)
    with pytest.raises(Unsupported) as caught:
        pattern.whole_tree(source, pointer="/p", keyword="k")
    assert caught.value.finding[:2] == ("/p", "k")
    assert reason in caught.value.finding.reason
    assert len(str(caught.value)) < 150


def test_a_dollar_is_only_the_end():
    assert not matches("^a$", "a\n")
    assert matches(pattern.normalize("^a$", wide=True), "a\n")


def test_dialects_spell_the_end_their_way():
    tree = pattern.parse("^a$")
    assert [pattern.write(tree, dialect) for dialect in ("common", "python", "rust")] == ["^a$", r"^a\Z", r"^a\z"]
    with pytest.raises(ValueError, match="anchors"):
        pattern.write(tree, "xgrammar")
    with pytest.raises(ValueError, match="dialect"):
        pattern.write(tree, "perl")


def test_sizes_and_lengths():
    tree = pattern.parse("(ab|c){2,3}d?")
    assert (tree.size, ast.lengths(tree)) == (10, (2, 7))
    assert ast.lengths(pattern.parse("a*b")) == (1, None)


def test_unanchored_searches_take_in_what_stands_beside():
    assert pattern.write(pattern.whole_tree("x*ab+y?")) == "[\\x00-\U0010ffff]*ab[\\x00-\U0010ffff]*"
    assert pattern.whole_tree("a*") == ast.ANY_TEXT


@pytest.mark.parametrize("wide", [False, True])
def test_named_sets_hold_what_they_say(wide):
    assert characters.contains(characters.digits(wide), ord("٣")) == wide
    assert characters.contains(characters.word(wide), ord("é")) == wide
    assert characters.contains(characters.space(wide), 0xA0) == wide
    assert characters.contains(characters.fold(characters.of("k"), wide), 0x212A) == wide


@pytest.mark.parametrize("ranges", [characters.ALL, characters.NONE, characters.WORD, characters.WIDE_SPACE])
def test_sets_and_their_complements(ranges):
    others = characters.complement(ranges)
    assert characters.complement(others) == ranges
    assert characters.intersection(ranges, others) == characters.NONE
    assert characters.union(ranges, others) == characters.ALL
    assert characters.count(ranges) + characters.count(others) == characters.count(characters.ALL)
