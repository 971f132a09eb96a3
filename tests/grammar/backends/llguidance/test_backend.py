"""The matcher that wraps llguidance: masks, accepting, taking back, forks, failures; compiling and its errors."""

import threading

import numpy as np
import pytest

from tests.grammar.matching import SmallTokenizer, accepts, allowed, follow, mask_of, small_vocabulary
from trunkline.constraint import GrammarSource
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit_choice, emit_ebnf, emit_lark, emit_regex
from trunkline.grammar.interface import CompiledGrammar, Matcher, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)
EOS = {b"<|eos|>", b"<|im_end|>"}


def compile_lark(lark: str) -> CompiledGrammar:
    return BACKEND.compile(emit_lark(lark))


def matcher(lark: str, text: bytes = b"") -> Matcher:
    """After `text`."""
    made = compile_lark(lark).matcher()
    assert follow(made, VOCABULARY, VOCABULARY.encode(text))
    return made


def fill_from_garbage(one: Matcher, words: int) -> np.ndarray:
    row = np.full(words, -1, np.int32)
    one.fill(row)
    return row


def test_masks_hold_what_may_come_and_nothing_else():
    one = matcher('start: "hello" | "help" | /[0-9]/')
    assert allowed(one, VOCABULARY) == {b"h", b"hello", *(str(digit).encode() for digit in range(10))}
    one = matcher('start: "hello" | "help"', b"hel")
    assert allowed(one, VOCABULARY) == {b"l", b"p"}


def test_ids_of_end_of_text_are_there_exactly_where_the_text_may_end():
    one = matcher("start: /a{2,3}/")
    assert not one.is_complete
    assert not allowed(one, VOCABULARY) & EOS
    assert follow(one, VOCABULARY, b"aa")
    assert one.is_complete
    assert not one.is_stopped
    assert allowed(one, VOCABULARY) == EOS | {b"a"}
    assert one.accept(ord("a"))
    assert one.is_complete
    assert one.is_stopped
    assert allowed(one, VOCABULARY) == EOS
    assert not one.accept(ord("a"))
    assert one.forced() == []


def test_no_special_token_is_in_a_string_though_its_text_would_be():
    one = matcher('start: /"[^"]*"/', b'"')
    ids = mask_of(one, VOCABULARY)
    assert not ids & VOCABULARY.special_ids
    assert ord("<") in ids


def test_a_grammar_may_name_a_special_token():
    one = matcher('start: <|bos|> "a"')
    assert allowed(one, VOCABULARY) == {b"<|bos|>"}
    assert follow(one, VOCABULARY, [VOCABULARY.tokens.index(b"<|bos|>"), ord("a")])


def test_ids_without_text_are_never_allowed():
    one = matcher("start: /(?s:.*)/")
    ids = mask_of(one, VOCABULARY)
    assert not any(VOCABULARY.tokens[token] == b"" for token in ids)
    assert max(ids) < VOCABULARY.num_logits


@pytest.mark.parametrize("more", [0, 1, 13, 14, 45])
def test_a_row_is_as_wide_as_the_models_logits(more):
    vocabulary = small_vocabulary(num_logits=SmallTokenizer().vocab_size + more)
    one = LlguidanceBackend(vocabulary).compile(emit_lark("start: /(?s:.*)/")).matcher()
    row = fill_from_garbage(one, vocabulary.num_words)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[SmallTokenizer().vocab_size :].any()
    assert follow(one, vocabulary, b"xyz")


@pytest.mark.parametrize("num_logits", [255, 256, 257, 272])
def test_a_model_without_end_of_text(num_logits):
    vocabulary = Vocabulary(SmallTokenizer(special=[]), num_logits, [])
    one = LlguidanceBackend(vocabulary).compile(emit_regex("ab?")).matcher()
    assert allowed(one, vocabulary) == {b"a"}
    assert one.accept(ord("a"))
    assert one.is_complete
    assert allowed(one, vocabulary) == {b"b"}
    assert one.accept(ord("b"))
    assert one.is_stopped
    assert allowed(one, vocabulary) == set()


def test_accepting_what_may_not_come_changes_nothing():
    one = matcher('start: "ab" /[0-9]+/', b"a")
    nonsense = [ord("x"), -1, VOCABULARY.num_logits, 10**9, *VOCABULARY.special_ids]
    for token in nonsense:
        assert not one.accept(token)
        assert one.count_valid([token, ord("b")]) == 0
    assert allowed(one, VOCABULARY) == {b"b"}


def test_count_valid_counts_up_to_the_first_that_may_not_come():
    one = matcher('start: "ab" /[0-9]+/')
    tokens = list(b"ab12")
    assert one.count_valid([*tokens, ord("x"), ord("1")]) == 4
    assert one.count_valid([*tokens, VOCABULARY.eos_token_ids[0], ord("1")]) == 4
    assert one.count_valid([]) == 0
    assert follow(one, VOCABULARY, tokens)


def test_taking_back_leads_to_the_same_masks():
    one = matcher('start: "{" /[a-z]*/ "}"')
    seen = []
    for token in b"{abc}":
        seen.append(mask_of(one, VOCABULARY))
        assert one.accept(token)
    assert one.is_stopped
    for back in (1, 2, 2):
        one.rollback(back)
        seen = seen[: len(seen) - back + 1]
        assert mask_of(one, VOCABULARY) == seen.pop()
        assert not one.is_stopped
    assert follow(one, VOCABULARY, b"{abc}")
    one.rollback(0)
    assert one.is_stopped


def test_no_more_can_be_taken_back_than_was_accepted():
    one = matcher('start: "abc"', b"ab")
    for too_many in (3, -1):
        with pytest.raises(ValueError, match="cannot be taken back"):
            one.rollback(too_many)
    one.rollback(2)
    assert allowed(one, VOCABULARY) == {b"a"}


def test_a_fork_goes_its_own_way():
    one = matcher('start: "a" ("b" "c" | "d" "e")', b"a")
    other = one.fork()
    assert one.accept(ord("b"))
    assert other.accept(ord("d"))
    assert allowed(one, VOCABULARY) == {b"c"}
    assert allowed(other, VOCABULARY) == {b"e"}
    other.rollback(2)
    assert allowed(other, VOCABULARY) == {b"a"}
    assert allowed(one, VOCABULARY) == {b"c"}


def test_each_text_begins_anew():
    compiled = compile_lark('start: "ab"')
    first = compiled.matcher()
    assert first.accept(ord("a"))
    assert allowed(compiled.matcher(), VOCABULARY) == {b"a"}
    assert compiled.num_bytes > 0


def test_forced_tokens_are_each_alone_in_their_masks():
    one = matcher('start: "{\\"name\\": " /[0-9]+/ ", \\"age\\": " /[0-9]/ "}"')
    forced = one.forced()
    assert b"".join(VOCABULARY.tokens[token] for token in forced) == b'{"name": '
    for token in forced:
        assert mask_of(one, VOCABULARY) == {token}
        assert one.accept(token)
    assert one.forced() == []
    assert len(mask_of(one, VOCABULARY)) > 1


def test_where_a_token_is_forced_other_spellings_of_the_text_are_not_accepted():
    one = matcher('start: "hello" | "hello" "!"')
    assert allowed(one, VOCABULARY) == {b"hello"}
    assert one.count_valid([ord("h")]) == 0
    assert not one.accept(ord("h"))
    assert follow(one, VOCABULARY, VOCABULARY.encode(b"hello!"))


def test_characters_may_be_cut_between_tokens():
    compiled = compile_lark('start: /[é😀]+/ "."')
    assert accepts(compiled, VOCABULARY, "é😀é.")
    one = compiled.matcher()
    assert follow(one, VOCABULARY, "😀".encode()[:2])
    assert not one.is_complete
    assert not one.accept(ord("."))


def test_a_grammar_that_comes_to_a_dead_end_fails_its_own_text_only():
    compiled = compile_lark('start: "a" NO "b" | "c"\nNO: /x/ & /y/')
    dead, alive = compiled.matcher(), compiled.matcher()
    assert dead.accept(ord("a"))
    rows = [np.full(VOCABULARY.num_words, -1, np.int32) for _ in range(2)]
    failed = BACKEND.fill_batch([dead, alive], rows)
    assert list(failed) == [0]
    assert "dead end" in failed[0]
    with pytest.raises(MatcherFailed):
        dead.fill(rows[0])
    with pytest.raises(MatcherFailed):
        dead.accept(ord("b"))
    with pytest.raises(MatcherFailed):
        assert dead.is_complete
    assert dead.is_stopped
    assert allowed(alive, VOCABULARY) >= {b"c"}


def test_a_batch_is_filled_as_one_by_one():
    texts = [b"", b"a", b"ab", b"abc", b"x"]
    matchers = [matcher('start: "abc" | "x" /[a-z]*/', text) for text in texts]
    rows = [np.full(VOCABULARY.num_words, 0x5A5A5A5A, np.int32) for _ in matchers]
    assert BACKEND.fill_batch(matchers, rows) == {}
    for one, row in zip(matchers, rows, strict=True):
        assert np.array_equal(row, fill_from_garbage(one, VOCABULARY.num_words))
    assert BACKEND.fill_batch([], []) == {}


def test_grammars_compile_and_texts_go_on_in_threads():
    failures = []

    def work(number: int) -> None:
        compiled = compile_lark(f'start: "{number}" /[a-z]*/ "."')
        if not all(accepts(compiled, VOCABULARY, f"{number}{text}.") for text in ("", "ab", "hello")):
            failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "source",
    [
        emit_lark("start: nothing"),
        emit_lark('start: "a'),
        emit_lark("A: /a/"),
        emit_lark("start: /a(/"),
        emit_lark("start: NO\nNO: /a/ & /b/"),
        emit_lark("start: start"),
        emit_ebnf("root ::= nothing"),
        emit_ebnf("nonsense"),
        GrammarSource("llguidance", "grammar", "[1]"),
        GrammarSource("llguidance", "grammar", '{"grammars": []}'),
        GrammarSource("llguidance", "regex", "a"),
        GrammarSource("xgrammar", "grammar", "a"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_in_few_words(source):
    with pytest.raises(ValueError, match=r"."):
        BACKEND.compile(source)


def test_errors_do_not_repeat_a_long_grammar():
    with pytest.raises(ValueError, match=r".") as error:
        BACKEND.compile(emit_lark("start: " + "nothing " * 5000))
    assert len(str(error.value)) <= 300


def test_gbnf():
    compiled = BACKEND.compile(emit_ebnf('root ::= "a" [0-9]+ ("x" | "y")*'))
    assert accepts(compiled, VOCABULARY, "a12xyx")
    assert not accepts(compiled, VOCABULARY, "a12z")


def test_the_empty_text_can_be_a_choice():
    compiled = BACKEND.compile(emit_choice(["", "yes"]))
    assert accepts(compiled, VOCABULARY, "")
    assert accepts(compiled, VOCABULARY, "yes")
    assert not accepts(compiled, VOCABULARY, "ye")
    assert accepts(BACKEND.compile(emit_choice([""])), VOCABULARY, "")


def test_limits_end_a_text_that_costs_too_much_per_token():
    """The library counts its work, and gives up at the same place each time."""
    compiled = compile_lark('start: (T "a")*\nT: /((a{1,100}){1,100}){1,100}b/')
    ends = []
    for _ in range(2):
        one, count = compiled.matcher(), 0
        with pytest.raises(MatcherFailed):
            while count < 400:
                mask_of(one, VOCABULARY)
                assert one.accept(ord("a"))
                count += 1
        ends.append(count)
    assert ends[0] == ends[1] > 0


def test_a_text_that_reaches_a_limit_fails_alone():
    """All texts of a grammar share an automaton; those that are under way go on, and so do new ones."""
    compiled = compile_lark('start: T* "."\nT: /((a{1,100}){1,100}){1,100}b/')
    other = compiled.matcher()
    assert follow(other, VOCABULARY, b"aab")
    culprit = compiled.matcher()
    with pytest.raises(MatcherFailed, match="limit"):
        follow(culprit, VOCABULARY, b"a" * 400)
    with pytest.raises(MatcherFailed):
        mask_of(culprit, VOCABULARY)
    assert allowed(other, VOCABULARY) == {b"a", b"."}
    other.rollback(1)
    assert allowed(other, VOCABULARY) == {b"a", b"b"}
    rows = [np.zeros(VOCABULARY.num_words, np.int32) for _ in range(2)]
    assert list(BACKEND.fill_batch([culprit, other], rows)) == [0]
    assert np.array_equal(rows[1], fill_from_garbage(other, VOCABULARY.num_words))
    assert follow(other.fork(), VOCABULARY, b"bab.")
    assert accepts(compiled, VOCABULARY, "aaab.")


@pytest.mark.parametrize("lark", ['start: "a" start', 'start: "x" more\nmore: "a" more'])
def test_a_text_that_is_forced_without_end_is_refused(lark):
    with pytest.raises(ValueError, match="forced at the beginning has no end"):
        compile_lark(lark)
