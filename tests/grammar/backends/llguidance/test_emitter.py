"""JSON that follows forms, one field of a form after the other: what is written, what is not, what is refused."""

import json
from fractions import Fraction
from typing import Any

import pytest

from tests.grammar.matching import accepts, allowed, follow, random_text, small_vocabulary
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit, emit_choice, emit_regex
from trunkline.grammar.interface import CompiledGrammar, InvalidSchema, Unsupported
from trunkline.grammar.schema.forms import ANY, NEVER, Arrays, Contains, Form, Forms, Numbers, Objects, Strings, Values

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)

INTEGER, STRING = (Numbers(integer=True),), (Strings(),)
ABC = (Values(values=('"a"', '"b"', '"c"')),)


def forms(*root: Form, **definitions: tuple[Form, ...]) -> Forms:
    return Forms(definitions={"root": root, **definitions}, root="root")


def compiled(given: Forms, compact: bool = False) -> CompiledGrammar:
    return BACKEND.compile(emit(given, compact=compact))


def takes(given: Forms, *texts: str) -> list[bool]:
    grammar = compiled(given)
    return [accepts(grammar, VOCABULARY, text) for text in texts]


def is_impossible(given: Forms) -> bool:
    with pytest.raises(InvalidSchema, match="nothing satisfies"):
        emit(given, compact=False)
    return True


def refused(given: Forms) -> tuple[str, str]:
    """Pointer and keyword."""
    with pytest.raises(Unsupported) as error:
        emit(given, compact=False)
    return error.value.finding[:2]


# styles

PERSON = forms(
    Objects(properties=(("name", "s"), ("tags", "l")), required=frozenset({"name"}), additional=NEVER),
    s=STRING,
    l=(Arrays(rest="s"),),
)
PERSON_VALUE = {"name": "x", "tags": ["a", "b", "c"]}


def test_a_text_keeps_to_its_style():
    dense, loose = json.dumps(PERSON_VALUE, separators=(",", ":")), json.dumps(PERSON_VALUE)
    assert takes(PERSON, dense, loose) == [True, True]
    mixed = [loose.replace('": ', '":', 1), loose.replace('", "', '","', 1), dense.replace('":', '": ', 1)]
    assert takes(PERSON, *mixed) == [False] * 3
    grammar = compiled(PERSON, compact=True)
    assert accepts(grammar, VOCABULARY, dense)
    assert not accepts(grammar, VOCABULARY, loose)


@pytest.mark.parametrize("space", [" ", "\n", "  "])
def test_there_is_no_other_whitespace(space):
    loose = json.dumps(PERSON_VALUE)
    for place in ("{", "}", "[", "]"):
        assert takes(PERSON, loose.replace(place, space + place), loose.replace(place, place + space)) == [False, False]


def test_any_value_keeps_to_the_style_too():
    everything: dict[str, Any] = {
        "a": [1, -2.5e-3, True, False, None, "x", [], {}, [[{"b": {"c": []}}]]],
        "": "é😀\n\x00",
    }
    given = forms(Objects(required=frozenset()))
    for value in (everything, {}, {"a": everything, "b": everything}):
        text, dense = (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        )
        assert takes(given, text, dense) == [True, True]
    assert takes(given, '{"a": [1,2]}', '{"a":{"b": 1}}', "{ }", '{"a": [ ]}') == [False] * 4


def test_listed_arrays_and_objects_are_written_in_the_style():
    given = forms(
        Values(values=('{"a":[1,2],"b":",:"}', "[]", "1")),
        Objects(additional=NEVER, properties=(("a", "i"),)),
        i=INTEGER,
    )
    assert takes(given, '{"a": [1, 2], "b": ",:"}', '{"a":[1,2],"b":",:"}', "[]", "1", '{"a": 3}', "{}") == [True] * 6
    assert takes(given, '{"a": [1,2],"b": ",:"}', '{"a": [1, 2]}', "2", "[1]") == [False] * 4


def test_what_is_between_two_values_is_forced():
    matcher = compiled(PERSON).matcher()
    forced = b"".join(VOCABULARY.tokens[token] for token in matcher.forced())
    assert forced == b'{"name'
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(b'{"name": "x"'))
    assert follow(matcher, VOCABULARY, b", ")
    assert b"".join(VOCABULARY.tokens[token] for token in matcher.forced()) == b'"tags": ['


# strings


def test_lengths_are_counted_in_characters():
    given = forms(Strings(min_length=1, max_length=2))
    assert takes(given, '"é😀"', '"\\n\\""', '"\\u0001x"') == [True] * 3
    assert takes(given, '""', '"abc"', '"é😀a"') == [False] * 3


def test_each_character_has_one_spelling():
    given = forms(Strings(), Strings(max_length=1))
    assert takes(given, '"\\u0000\\u001f\\b\\f\\n\\r\\t\\"\\\\/\x7f"') == [True]
    for other in (
        "\\u0041",
        "\\/",
        "\\u000a",
        "\\u001F",
        "\\ud83d",
        "\\ud83d\\ude00",
        "\\x41",
        "\\",
        '"',
        "\x01",
        "\n",
        "\t",
    ):
        assert takes(given, f'"{other}"') == [False]


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        ("^a", ["a", "ab"], ["ba", ""]),
        ("b", ["abc", "b"], ["ac"]),
        ('^"[a-z]+"$', ['"ab"'], ["ab", '""']),
        ("^C:\\\\[a-z]+$", ["C:\\win"], ["C:win", "C:\\\\win"]),
        ("^a\\nb$", ["a\nb"], ["a\\nb", "anb", "a b"]),
        ("^[^a]$", ["b", "\n", '"', "\\", "\x00", "😀"], ["a", "", "bb"]),
        ("^.$", ["b", '"', "é"], ["\n", "bb"]),
        ("^[^\\n\\r]{1,129}$", ["x" * 129], ["x" * 130, ""]),
        ("/", ["a/b"], ["ab"]),
        ("^(a|b$|$)", ["ac", "b", ""], ["bc", "c"]),
    ],
)
def test_patterns_are_searched_in_the_text_that_is_meant(source, yes, no):
    given = forms(Strings(patterns=(source,)))
    for text, expected in [*((text, True) for text in yes), *((text, False) for text in no)]:
        assert takes(given, json.dumps(text, ensure_ascii=False)) == [expected], text


def test_patterns_lengths_and_exclusions_hold_together():
    given = forms(
        Strings(min_length=2, max_length=4, patterns=("^a", "b$"), not_patterns=("x", '"'), excluded=("ab", "a\nb"))
    )
    assert takes(given, '"acb"', '"aaab"', '"a\\tb"') == [True] * 3
    assert takes(given, '"ab"', '"axb"', '"aaaab"', '"acc"', '"bab"', '"a\\"b"', '"a\\nb"') == [False] * 7


def test_formats_are_patterns():
    given = forms(Strings(formats=("date",), not_patterns=("^2",)))
    assert takes(given, '"1999-12-31"', '"2024-02-29"', '"1999-02-30"') == [True, False, False]


def test_strings_that_there_cannot_be():
    assert is_impossible(forms(Strings(min_length=5, patterns=("^a{1,3}$",))))
    given = forms(Strings(patterns=("^a$",), excluded=("a",)), Values(values=("1",)))
    assert allowed(compiled(given).matcher(), VOCABULARY) == {b"1"}


# numbers


def test_numbers():
    given = forms(Numbers(minimum=Fraction(0), maximum=Fraction(10), exclusive_maximum=True, excluded=(Fraction(5),)))
    assert takes(given, "0", "9.99", "5.1", "1e-06", "-0") == [True] * 5
    assert takes(given, "10", "-1", "5", "5.0", "1e1", "00", "1e999") == [False] * 7


def test_multiples():
    given = forms(Numbers(integer=True, multiple_of=Fraction(7), excluded=(Fraction(14),)))
    assert takes(given, "0", "7", "-21", "7000000000") == [True] * 4
    assert takes(given, "14", "8", "7.0", "07") == [False] * 4
    given = forms(Numbers(multiple_of=Fraction("0.01")))
    assert takes(given, "0.07", "1.10", "3", "-2.5") == [True] * 4
    assert takes(given, "0.075", "1e-2") == [False] * 2
    assert refused(forms(Numbers(multiple_of=Fraction(123_456_789), pointer="/x"))) == ("/x", "multipleOf")


def test_kinds_of_numbers_beside_one_another():
    given = forms(
        Numbers(integer=True, maximum=Fraction(3)), Values(values=("100", "12.5", '"1"')), Numbers(minimum=Fraction(50))
    )
    assert takes(given, "3", "-7", "100", "12.5", "50.5", '"1"') == [True] * 6
    assert takes(given, "4", "12", "10", "49.9") == [False] * 4


# arrays


def test_lengths_of_arrays():
    given = forms(Arrays(prefix=("s", "i"), rest="a", min_items=1, max_items=3), s=STRING, i=INTEGER, a=ABC)
    assert takes(given, '["x"]', '["x", 1]', '["x", 1, "a"]') == [True] * 3
    assert takes(given, "[]", "[1]", '["x", "a"]', '["x", 1, 2]', '["x", 1, "a", "a"]', '["x", 1,]') == [False] * 6
    assert takes(forms(Arrays(rest=NEVER)), "[]", "[1]") == [True, False]
    assert takes(forms(Arrays(rest="i", max_items=0), i=INTEGER), "[]", "[1]") == [True, False]


def test_an_item_that_there_cannot_be_ends_the_array():
    given = forms(Arrays(prefix=("i", "no", "i"), rest="i"), i=INTEGER, no=(Values(values=()),))
    assert takes(given, "[]", "[1]", "[1, 2]") == [True, True, False]


def test_no_two_items_are_equal():
    given = forms(Arrays(rest="a", unique=True, min_items=1), a=(*ABC, Values(values=('{"x":1,"y":[2]}', "1"))))
    assert takes(given, '["c", "a", "b"]', '[1, {"x": 1, "y": [2]}, "a"]', '["b"]') == [True] * 3
    assert takes(given, "[]", '["a", "a"]', '["d"]', '[{"x": 1, "y": [2]}, {"x": 1, "y": [2]}]') == [False] * 4
    assert refused(forms(Arrays(rest="i", unique=True, pointer="/p"), i=INTEGER)) == ("/p", "uniqueItems")
    assert takes(forms(Arrays(rest="i", unique=True, max_items=1), i=INTEGER), "[7]", "[7, 8]") == [True, False]


def test_values_that_are_listed_twice_in_other_words_are_one():
    given = forms(
        Arrays(rest="v", unique=True), v=(Values(values=('{"a":1,"b":2}',)), Values(values=('{"b":2,"a":1}',)))
    )
    assert takes(given, '[{"a": 1, "b": 2}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]') == [True, False]


def test_contains():
    given = forms(Arrays(rest=ANY, contains=(Contains(item="i", least=2),), max_items=4), i=INTEGER)
    assert takes(given, "[1, 2]", '["x", 1, null, 2]', '[1, "x", 2]') == [True] * 3
    assert takes(given, "[]", "[1]", '["x", 1]', '["x", "y", "z", 1]', "[1, 2, 3, 4, 5]") == [False] * 5
    given = forms(
        Arrays(rest="a", contains=(Contains(item="b", least=1, most=2),)), a=ABC, b=(Values(values=('"b"',)),)
    )
    assert takes(given, '["b"]', '["a", "b", "c", "b"]') == [True] * 2
    assert takes(given, "[]", '["a"]', '["b", "b", "b"]') == [False] * 3


@pytest.mark.parametrize(
    ("array", "keyword"),
    [
        (Arrays(contains=(Contains(item="i", most=2),), pointer="/p"), "maxContains"),
        (Arrays(prefix=("i",), contains=(Contains(item="i"),), pointer="/p"), "contains"),
        (Arrays(unique=True, contains=(Contains(item="i"),), pointer="/p"), "uniqueItems"),
        (Arrays(prefix=("i", "a"), rest=NEVER, unique=True, pointer="/p"), "uniqueItems"),
    ],
)
def test_arrays_that_cannot_be_written_are_refused(array, keyword):
    assert refused(forms(array, i=INTEGER, a=ABC)) == ("/p", keyword)


# objects


def test_properties_come_in_their_order_and_once():
    given = forms(
        Objects(properties=(("a", "i"), ("b", "i"), ("c", "i")), required=frozenset("b"), additional=NEVER), i=INTEGER
    )
    assert takes(given, '{"b": 1}', '{"a": 1, "b": 2}', '{"b": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}') == [True] * 4
    assert takes(given, "{}", '{"a": 1}', '{"b": 1, "a": 2}', '{"b": 1, "b": 2}', '{"b": 1, "x": 2}') == [False] * 5


def test_other_names_come_last_and_are_none_of_the_properties():
    given = forms(
        Objects(properties=(("a", "i"), ('q"', "i"), ("no", NEVER)), patterns=(("^x-", "s"),), additional="l"),
        i=INTEGER,
        s=STRING,
        l=(Arrays(rest=NEVER),),
    )
    assert (
        takes(given, '{"a": 1, "x-y": "s", "other": []}', '{"other": [], "x-": ""}', '{"q\\"": 1}', "{}") == [True] * 4
    )
    wrong = [
        '{"a": []}',
        '{"q\\"": []}',
        '{"no": []}',
        '{"no": 1}',
        '{"x-y": []}',
        '{"other": "s"}',
        '{"other": [], "a": 1}',
    ]
    assert takes(given, *wrong) == [False] * len(wrong)
    assert takes(given, '{"\\u0061": []}', '{"n\\u006f": []}') == [False] * 2


def test_a_pattern_never_stands_for_a_property():
    given = forms(Objects(properties=(("xa", "i"),), patterns=(("^x", "s"),), additional=NEVER), i=INTEGER, s=STRING)
    assert takes(given, '{"xa": 1, "xb": "s"}', '{"xa": "s"}') == [True, False]
    only = forms(Objects(properties=(("x", "i"),), patterns=(("^x$", "s"),), additional=NEVER), i=INTEGER, s=STRING)
    assert takes(only, '{"x": 1}', "{}", '{"x": "s"}') == [True, True, False]
    matcher = compiled(only).matcher()
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(b'{"x": 1'))
    assert b", " not in allowed(matcher, VOCABULARY)


def test_names_of_several_patterns_are_left_out_unless_they_ask_for_the_same():
    given = forms(Objects(patterns=(("^a", "i"), ("b$", "s"), ("c$", "i")), additional=NEVER), i=INTEGER, s=STRING)
    assert takes(given, '{"ax": 1, "xb": "s", "xc": 1, "ac": 1}') == [True]
    assert takes(given, '{"ab": 1}', '{"ab": "s"}', '{"xx": 1}') == [False] * 3


def test_a_pattern_for_names_that_may_not_be():
    given = forms(Objects(patterns=(("^_", NEVER),), additional="i"), i=INTEGER)
    assert takes(given, '{"a": 1}', '{"_a": 1}', '{"a_": 1}') == [True, False, True]


@pytest.mark.parametrize(
    ("least", "most", "right"),
    [(2, None, ["ab", "bc", "abc", "bx", "abx", "bxy"]), (0, 2, ["b", "ab", "bc", "bx"]), (2, 2, ["ab", "bc", "bx"])],
)
def test_numbers_of_properties(least, most, right):
    given = forms(
        Objects(
            properties=(("a", "i"), ("b", "i"), ("c", "i")),
            required=frozenset("b"),
            additional="i",
            min_properties=least,
            max_properties=most,
        ),
        i=INTEGER,
    )
    texts = {
        names: json.dumps({name: 1 for name in names})
        for names in ("", "b", "ab", "bc", "abc", "bx", "abx", "bxy", "abcx")
    }
    accepted = dict(zip(texts, takes(given, *texts.values()), strict=True))
    expected = {*right, *(["abcx"] if most is None else [])}
    assert {names for names, taken in accepted.items() if taken} == expected


def test_one_name_that_comes_twice_is_one_property():
    given = forms(Objects(properties=(("a", "i"),), additional="i", min_properties=2), i=INTEGER)
    assert takes(given, '{"a": 1, "x": 2}', '{"x": 1, "x": 2}') == [True, False]
    assert refused(forms(Objects(additional="i", min_properties=2, pointer="/p"), i=INTEGER)) == ("/p", "minProperties")


def test_objects_with_bounds_that_all_or_nothing_keeps():
    given = forms(Objects(properties=(("a", "i"), ("b", "i")), additional=NEVER, min_properties=1), i=INTEGER)
    assert takes(given, '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}', "{}") == [True, True, True, False]
    given = forms(Objects(additional="i", max_properties=1), i=INTEGER)
    assert takes(given, "{}", '{"a": 1}', '{"a": 1, "b": 2}') == [True, True, False]
    given = forms(
        Objects(properties=(("a", "i"),), required=frozenset("a"), additional="i", max_properties=2), i=INTEGER
    )
    assert takes(given, '{"a": 1}', '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}', "{}") == [True, True, False, False]


def test_an_optional_property_that_there_cannot_be_is_left_out():
    given = forms(Objects(properties=(("a", "no"), ("b", "i")), additional=ANY), i=INTEGER, no=(Values(values=()),))
    assert takes(given, '{"b": 1}', '{"a": 1}') == [True, False]


# definitions


def test_definitions_lead_to_themselves():
    node = Objects(properties=(("value", "i"), ("next", "node")), required=frozenset({"value"}), additional=NEVER)
    given = forms(Arrays(rest="node"), node=(node, Values(values=("null",))), i=INTEGER)
    deep = '{"value": 1, "next": ' * 40 + "null" + "}" * 40
    assert takes(given, f"[{deep}, null]", '[{"next": null}]') == [True, False]


def test_what_never_ends_is_refused():
    endless = forms(Objects(properties=(("next", "root"),), required=frozenset({"next"})))
    assert is_impossible(endless)


def test_long_chains_of_definitions_compile():
    """The library reads rules where they are first named, one within another: on its stack."""
    names = [f"d{number}" for number in range(3000)]
    definitions: dict[str, tuple[Form, ...]] = {
        name: (Arrays(rest=following, max_items=1),) for name, following in zip(names, [*names[1:], ANY], strict=True)
    }
    grammar = compiled(Forms(definitions=definitions, root="d0"))
    assert accepts(grammar, VOCABULARY, "[" * 50 + "]" * 50)


@pytest.mark.parametrize("optional", [True, False])
def test_many_properties_compile(optional):
    keys = [f"p{number}" for number in range(1500)]
    given = forms(
        Objects(
            properties=tuple((key, "i") for key in keys), required=frozenset(() if optional else keys), additional=NEVER
        ),
        i=INTEGER,
    )
    value = {key: 1 for key in (keys[::100] if optional else keys[:20])}
    text = json.dumps(value)
    matcher = compiled(given).matcher()
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(text[:-1].encode()))
    assert matcher.accept(ord("}")) == optional


def test_long_bounds_compile():
    given = forms(
        Objects(properties=(("s", "s"), ("a", "a")), required=frozenset("sa"), additional=NEVER),
        s=(Strings(min_length=3, max_length=1_000_000),),
        a=(Arrays(rest=ANY, min_items=2, max_items=1_000_000),),
    )
    assert takes(given, '{"s": "abc", "a": [1, 2, 3]}', '{"s": "ab"', '{"s": "abc", "a": [1]}') == [True, False, False]


def test_texts_are_json_of_the_kind():
    grammar = compiled(PERSON)
    written = [text for seed in range(30) if (text := random_text(grammar, VOCABULARY, seed))]
    assert len(written) > 15
    for text in written:
        value = json.loads(text)
        assert list(value) in (["name"], ["name", "tags"])


# other sources


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        ("[0-9]{3}-[a-z]+", ["123-ab"], ["123-", "x123-ab", "123-ab "]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        ("a*", ["", "aaa"], ["b"]),
        ("", [""], ["a"]),
        ("/x\\/", ["/x/"], ["x"]),
        ("(?!no)(?=.*[0-9])[a-z0-9]+", ["a1", "n0"], ["no1", "ab"]),
        ("(?i)yes|no", ["YES", "No"], ["maybe", "yesno"]),
        ('[^a]"\\n', ['b"\n'], ['a"\n']),
    ],
)
def test_a_regular_expression_is_the_whole_text(source, yes, no):
    grammar = BACKEND.compile(emit_regex(source))
    assert [text for text in yes if not accepts(grammar, VOCABULARY, text)] == []
    assert [text for text in no if accepts(grammar, VOCABULARY, text)] == []


def test_regular_expressions_that_cannot_be_followed():
    with pytest.raises(Unsupported):
        emit_regex("(a)\\1")
    for source in ("(a", "[z-a]", "a^b"):
        with pytest.raises(InvalidSchema):
            emit_regex(source)


def test_choices():
    texts = ["yes", "no", "né\n\x00\x7f\"'\\/", "yes!"]
    grammar = BACKEND.compile(emit_choice([*texts, "no"]))
    assert all(accepts(grammar, VOCABULARY, text) for text in texts)
    assert not any(accepts(grammar, VOCABULARY, text) for text in ("ye", "", "no!", "yes!!"))
    with pytest.raises(InvalidSchema, match="surrogate"):
        emit_choice(["\ud800"])


def test_large_sources_are_tried_in_a_child_first():
    assert not emit_choice(["a", "b"]).is_risky
    assert emit_choice([f"choice {number}" for number in range(20_000)]).is_risky
    assert emit_regex("(a{1,200}){1,200}").is_risky
    assert emit(forms(Strings(patterns=("^(a{1,200}b){1,200}$",))), compact=False).is_risky
    assert emit(forms(Strings(not_patterns=tuple(f"a.{{{n}}}b" for n in range(10)))), compact=False).is_risky
    assert emit(forms(Strings(patterns=("a.*b", "x.{3}y"))), compact=False).is_risky
    assert not emit(forms(Strings(patterns=("a.*b",), min_length=3)), compact=False).is_risky
    assert not emit(PERSON, compact=False).is_risky
