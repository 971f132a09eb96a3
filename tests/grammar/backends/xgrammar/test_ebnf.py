"""How XGrammar's EBNF is written. What the library makes of it is tested in test_xgrammar_emitter."""

from trunkline.grammar.backends.xgrammar.ebnf import EMPTY, Ebnf, char_class, expression, is_plain, literal
from trunkline.grammar.regex import ast, characters, dfa, pattern


def plain(source: str) -> str:
    tree = pattern.whole_tree(source)
    assert is_plain(tree)
    return expression(tree)


def test_literals_spell_what_has_a_meaning_by_number() -> None:
    assert literal('a"b\\\n') == '"a\\u0022b\\u005C\\u000A"'
    assert literal("é😀") == '"\\u00E9\\U0001F600"'
    assert literal("") == EMPTY


def test_classes_take_the_shorter_way_and_never_a_surrogate() -> None:
    assert char_class(characters.of("abcx")) == "[a-cx]"
    assert char_class(characters.complement(characters.of('"'))) == "[^\\u0022\\uD800-\\uDFFF]"
    assert char_class(characters.ALL) == "[^\\uD800-\\uDFFF]"


def test_plain_trees() -> None:
    assert plain("^ab[0-9]{2,4}c?$") == '"ab" [0-9]{2,4} [c]?'
    assert plain("^(yes|no)$") == '"yes" | "no"'
    assert plain("^x([0-9]{2})?(a|bc)?$") == '"x" ([0-9]{2})? ([a] | "bc")?'
    assert not is_plain(pattern.whole_tree("^(ab)*$"))


def test_equal_bodies_are_one_rule_and_unused_ones_are_left_out() -> None:
    ebnf = Ebnf()
    first, second = ebnf.rule('"r1"'), ebnf.rule('"b"')
    assert ebnf.rule('"r1"') == first != second
    assert ebnf.text(f"{first} [r1]") == 'root ::= r0 [r1]\nr0 ::= "r1"'


def test_automata_become_right_recursion_with_their_end() -> None:
    machine = dfa.build([pattern.whole_tree('^("[a-c]*x)$')], limit=10)
    assert machine is not None
    ebnf = Ebnf()
    start = ebnf.automaton(machine, ast.json_chars, '"\\""')
    assert ebnf.text(start).splitlines() == [
        'root ::= "\\u005C\\u0022" r0',
        'r0 ::= [a-c] r0 | "x" r1',
        'r1 ::= "\\""',
    ]
