"""The tokens a grammar is compiled for."""

from collections.abc import Sequence

import pytest

from tests.grammar.matching import SPECIAL, WORDS, SmallTokenizer, small_vocabulary
from trunkline.grammar.vocabulary import Vocabulary


def test_tokens_of_a_model_that_has_more_rows_than_its_tokenizer_has_tokens():
    tokenizer = SmallTokenizer()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size + 40, tokenizer.eos_token_ids)
    assert len(vocabulary.tokens) == vocabulary.num_logits == tokenizer.vocab_size + 40
    assert vocabulary.tokens[ord("a")] == b"a"
    assert vocabulary.tokens[256] == WORDS[0].encode()
    assert vocabulary.tokens[-1] == b""
    assert vocabulary.num_words * 32 >= vocabulary.num_logits > (vocabulary.num_words - 1) * 32


def test_a_model_with_fewer_rows_than_tokens_knows_only_those():
    tokenizer = SmallTokenizer()
    vocabulary = Vocabulary(tokenizer, 256, tokenizer.eos_token_ids)
    assert len(vocabulary.tokens) == 256
    assert vocabulary.eos_token_ids == ()
    assert vocabulary.special_ids == frozenset()


def test_ids_that_end_a_text_are_special_even_if_the_tokenizer_does_not_say_so():
    vocabulary = Vocabulary(SmallTokenizer(), 300, [97, 98, 97])
    assert vocabulary.eos_token_ids == (97, 98)
    assert {97, 98} < vocabulary.special_ids


def test_special_tokens_have_the_bytes_of_their_names():
    vocabulary = small_vocabulary()
    assert {vocabulary.tokens[token] for token in vocabulary.special_ids} == {name.encode() for name in SPECIAL}


def test_the_fingerprint_tells_all_that_matters():
    def fingerprint(words: Sequence[str] = WORDS, num_logits: int = 400, eos: Sequence[int] = ()) -> str:
        tokenizer = SmallTokenizer(words)
        return Vocabulary(tokenizer, num_logits, eos or tokenizer.eos_token_ids).fingerprint

    same = fingerprint()
    assert fingerprint() == same
    others = {
        fingerprint(words=(*WORDS, "more")),
        fingerprint(words=WORDS[::-1]),
        fingerprint(words=("ab", "c", *WORDS[2:])),
        fingerprint(words=("a", "bc", *WORDS[2:])),
        fingerprint(num_logits=401),
        fingerprint(eos=[3]),
    }
    assert len(others | {same}) == 7


class SpaceBefore(SmallTokenizer):
    """Writes a space before every text, as sentencepiece models do; "\\n" and "x" are one token if `joins`."""

    def __init__(self, joins: bool) -> None:
        super().__init__(["\nx"] if joins else [])
        self.strips_leading_space = True

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return self.encode_bytes(f" {text}".encode())


def test_a_text_that_goes_on_gets_no_space_of_the_tokenizers_own():
    assert Vocabulary(SpaceBefore(joins=False), 300, []).encode(b"x {") == [*b"x {"]


def test_a_text_that_the_tokenizer_cannot_write_after_another_is_an_error():
    with pytest.raises(ValueError, match="line feed"):
        Vocabulary(SpaceBefore(joins=True), 300, []).encode(b"x {")


def test_a_name_of_a_special_token_in_a_text_is_text():
    vocabulary = small_vocabulary()
    assert vocabulary.encode(b"<|eos|>") == [*b"<|eos|>"]
