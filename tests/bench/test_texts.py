import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_model
from trunkline.bench.texts import Texts, words
from trunkline.errors import ConfigError


def by_words(text: str) -> list[str]:
    """As byte-pair encodings of real models do for common words: one token a word, longer ones two."""
    tokens = []
    for word in re.findall(r" ?[A-Za-z]+|[^A-Za-z]", text):
        tokens += [word] if len(word) < 8 else [word[:4], word[4:]]
    return tokens


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def across_words(text: str) -> list[str]:
    """A tokenizer that knows no word boundary."""
    return re.findall(r"(?s).{1,7}", text)


@given(
    tokens=st.integers(24, 300), seed=st.integers(), first=st.booleans(), encode=st.sampled_from([by_words, by_bytes])
)
def test_a_piece_has_exactly_its_tokens(tokens: int, seed: int, first: bool, encode) -> None:
    piece = Texts(encode).piece(tokens, random.Random(seed), first=first)
    assert len(encode(piece)) == tokens
    assert piece.endswith(".") and piece.startswith(" ") != first
    assert {word.lower() for word in re.findall("[A-Za-z]+", piece)} <= set(words())


@given(seed=st.integers(), encode=st.sampled_from([by_words, by_bytes]))
def test_joined_pieces_keep_their_tokens(seed: int, encode) -> None:
    rng = random.Random(seed)
    texts = Texts(encode)
    system, question = texts.piece(96, rng, first=True), texts.piece(24, rng)
    prompt = texts.join((system, 96), (question, 24))
    assert prompt == system + question
    assert encode(prompt)[:96] == encode(system)
    assert len(encode(prompt)) == 96 + 24


def test_same_seed_same_text() -> None:
    def write(seed: str) -> str:
        return Texts(by_words).piece(64, random.Random(seed), first=True)

    assert write("7/system") == write("7/system")
    assert write("7/system") != write("8/system")


def test_reads_like_sentences() -> None:
    piece = Texts(by_words).piece(200, random.Random(1), first=True)
    sentences = piece.removesuffix(".").split(". ")
    assert len(sentences) > 8
    assert all(sentence[0].isupper() and sentence[1:].islower() for sentence in sentences)


def test_a_tokenizer_that_ignores_spaces_is_refused() -> None:
    texts = Texts(across_words)
    with pytest.raises(ConfigError, match="--tokenizer"):
        texts.join(*((texts.piece(30, random.Random(i), first=i == 0), 30) for i in range(4)))


def test_the_tokenizer_of_a_model_folder(tmp_path) -> None:
    from trunkline.bench.cli import make_texts

    texts = make_texts(str(tiny_model(tmp_path / "tiny")))
    assert texts.count(texts.piece(100, random.Random(3), first=True)) == 100


def test_word_list_is_plain() -> None:
    assert len(words()) > 1000
    assert list(words()) == sorted(set(words()))
    assert all(re.fullmatch("[a-z]{1,12}", word) for word in words())
