"""Ids of ASCII texts, piece by piece: always the library's, or left to the library."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers

from tests import tiny
from tests.models.texts import LINES, TEXTS, any_text
from trunkline.models import ascii_pieces
from trunkline.models.ascii_pieces import MAX_CHARACTERS, AsciiPieces
from trunkline.models.tokenizer import load_tokenizer
from trunkline.models.tokenizer_gguf import PRE_TOKENIZERS
from trunkline.models.tokenizer_json import JsonTokenizer

# What patterns tell apart, often enough that it meets.
words = st.sampled_from(
    ["the", "It's", "LL", "DON'T", "we've", "x1", "2024", "7", " ", "  ", "\n", "\r\n", "\t", "'", "_", "?!", "->"]
)
ascii_text = st.lists(words | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=4), max_size=12).map(
    "".join
)

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def library(request, tmp_path_factory) -> tokenizers.Tokenizer:
    folder = tmp_path_factory.mktemp("pre")
    loaded = load_tokenizer(str(tiny.tiny_gguf(folder / "m.gguf", pre=request.param)))
    assert isinstance(loaded, JsonTokenizer)
    return loaded._library


def make_library(pre_tokenizer, *, normalizer=None, model=None) -> tokenizers.Tokenizer:
    vocab = {token: number for number, token in enumerate(tiny._byte_alphabet())}
    made = tokenizers.Tokenizer(model or models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def cut_by(library: tokenizers.Tokenizer, text: str) -> list[str]:
    return [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]


@given(text=ascii_text)
def test_pieces_and_ids_are_those_of_the_library(library, text):
    if (pieces := AsciiPieces.of(library)) is None:
        return
    assert [piece.translate(ascii_pieces._ALPHABET) for piece in pieces.cut(text)] == cut_by(library, text)
    assert pieces.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_all_patterns_but_one_are_understood(library, request):
    assert (AsciiPieces.of(library) is None) == ("[default]" in request.node.name)


def test_other_texts_are_left_to_the_library(library):
    if (pieces := AsciiPieces.of(library)) is None:
        return
    for text in ("café", "日本", "form\ffeed", "\0", "nbsp\u00a0", "x" * (MAX_CHARACTERS + 1)):
        assert pieces.encode(text) is None
    for text in (text for text in (*LINES, *TEXTS) if text.isascii() and "<|" not in text):
        assert pieces.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_pieces_are_remembered_and_only_so_many(monkeypatch):
    monkeypatch.setattr(ascii_pieces, "MAX_PIECES", 3)
    pieces = AsciiPieces.of(make_library(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    assert pieces is not None
    pieces._known.clear()
    first = pieces.encode("a b a")
    assert list(pieces._known) == ["a", " b", " a"] and pieces.encode("a b a") == first
    assert pieces.encode(" c") == [pieces._model.token_to_id("Ġ"), pieces._model.token_to_id("c")]
    assert list(pieces._known) == [" c"]
    pieces.encode("w" * 33)
    assert list(pieces._known) == [" c"], "nobody's long numbers and names are kept"


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+",
        r"\p{P}+",
        r"\P{L}+",
        r"(a)(b)",
        r"[a-z&&[^b]]",
        r"\p{Lo}",
        r"[\p{M}]",
        r"\h+",
        r"a\Kb",
        r"(?<n>a",
        r"\p{N}{1,3}+",
        r"\p{N}{2}?",
        r"\s+$",
        r"^\s+",
        r"(?m:.)",
        r"(?x: a)",
        r"(?i)a",
        r"(?i:(?:\p{Lu}))",
        r"(?i:[\p{Ll}])",
        r"(?i:ß)",
        r"a{",
        r"a{,}",
        r"(a)",
    ],
)
def test_patterns_that_might_mean_something_else_are_left_to_the_library(pattern):
    with pytest.raises((ValueError, ascii_pieces.re.error)):
        ascii_pieces._of_ascii(pattern)


# What of patterns the engines read alike, and what they do not.
CHARACTERS = [
    r"\p{L}", r"\p{N}", r"\s", r"\S", "a", "'", " ", r"\n", ".", r"\$", r"[^\s\p{L}\p{N}]", r"[\r\n]", r"[\p{Lu}\p{M}]", "[a-c]",
    "(?i:s|t)", "(?:a|b)", "(?>a+)", r"[\s-]", "(?m:.)", r"(?i:\p{Lu})",
]  # fmt: skip
PLACES = [r"(?!\S)", r"(?<=\s)", "(?<!a)", "$", "^"]
QUANTIFIERS = ["", "+", "*", "?", "+?", "++", "?+", "{1,3}", "{2}", "{1,3}+", "{1,2}?", "{,2}"]
quantified = st.tuples(st.sampled_from(CHARACTERS), st.sampled_from(QUANTIFIERS)).map("".join) | st.sampled_from(PLACES)
patterns = st.lists(st.lists(quantified, min_size=1, max_size=3).map("".join), min_size=1, max_size=4).map("|".join)


@given(pattern=patterns, texts=st.lists(ascii_text, min_size=1, max_size=8))
def test_a_pattern_that_is_understood_cuts_as_the_library_does(pattern, texts):
    library = make_library(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTE_LEVEL]))
    if (pieces := AsciiPieces.of(library)) is not None:
        for text in texts:
            assert [piece.translate(ascii_pieces._ALPHABET) for piece in pieces.cut(text)] == cut_by(library, text)


@pytest.mark.parametrize(
    "made",
    [
        lambda: make_library(None),
        lambda: make_library(pre_tokenizers.Whitespace()),
        lambda: make_library(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: make_library(pre_tokenizers.Sequence([BYTE_LEVEL, pre_tokenizers.Split(Regex(" "), "isolated")])),
        lambda: make_library(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" "), "removed"), BYTE_LEVEL])),
        lambda: make_library(BYTE_LEVEL, normalizer=normalizers.Lowercase()),
        lambda: make_library(BYTE_LEVEL, model=models.BPE({"a": 0}, [], dropout=0.5)),
        lambda: make_library(BYTE_LEVEL, model=models.WordLevel({"a": 0}, unk_token="a")),
    ],
)  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(made):
    assert AsciiPieces.of(made()) is None


def test_a_probe_that_comes_out_otherwise_leaves_all_to_the_library(monkeypatch):
    library = make_library(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), BYTE_LEVEL]))
    assert AsciiPieces.of(library) is not None
    monkeypatch.setitem(ascii_pieces._ALPHABET, ord("e"), "f")
    assert AsciiPieces.of(library) is None


# ---------------------------------------------------------------- as a tokenizer uses them


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("tiny"))


marked = st.lists(st.sampled_from([*tiny.SPECIAL_TOKENS, "<|im", "_end|>", "é"]) | ascii_text, max_size=8).map("".join)


@given(text=marked | any_text)
def test_a_text_is_its_parts(folder, text):
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, JsonTokenizer) and tokenizer._pieces is not None
    expected = tokenizer._library.encode(text, add_special_tokens=False).ids
    parts = tokenizer.cut(text)
    assert "".join(parts) == text
    assert [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)] == expected
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == tokenizer._library.encode(text).ids
    assert tokenizer.encode(text, parse_special=False) == tokenizer._without_special.encode(text).ids


def with_added(folder: Path, tmp_path: Path, **flags: bool) -> JsonTokenizer:
    """The tiny tokenizer with one more token, "<x>", and begin tokens before every text."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    made = tokenizers.Tokenizer.from_str(json.dumps(settings))
    made.add_tokens([tokenizers.AddedToken("<x>", **{"normalized": False, **flags})])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert isinstance(loaded, JsonTokenizer)
    return loaded


@pytest.mark.parametrize(
    ("flags", "is_cut"),
    [({}, True), ({"lstrip": True}, False), ({"rstrip": True}, False), ({"single_word": True}, False), ({"normalized": True}, True)],
)  # fmt: skip
def test_tokens_that_take_their_surroundings_along_are_left_to_the_library(folder, tmp_path, flags, is_cut):
    tokenizer = with_added(folder, tmp_path, **flags)
    text = "a <x> b<x>c<|im_end|> d"
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == tokenizer._library.encode(text, add_special_tokens=False).ids
    )
    assert (len(tokenizer.cut(text)) > 1) == is_cut
    assert (tokenizer._pieces is not None) == (not flags)


def test_of_tokens_that_begin_alike_the_longest_is_found(folder, tmp_path):
    tokenizer = with_added(folder, tmp_path)
    tokenizer._library.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<x>>", "<x", "x>y")])
    tokenizer._library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.cut("a<x>>b<x>yc<xx>y") == ["a", "<x>>", "b", "<x>", "yc", "<x", "x>y"]
    for text in ("a<x>>b<x>yc<xx>y", "<x<x>>>", "<<x>y"):
        assert (
            tokenizer.encode(text, add_special_tokens=False)
            == tokenizer._library.encode(text, add_special_tokens=False).ids
        )


def test_tokens_before_and_after_every_text(folder, tmp_path):
    tokenizer = with_added(folder, tmp_path)
    library = tokenizer._library
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(token, tiny.TOKEN_IDS[token]) for token in ("<|im_start|>", "<|im_end|>")],
    )
    for text in ("", "a", "one two", "é", "<|im_end|>"):
        assert tokenizer.encode(text) == library.encode(text).ids
