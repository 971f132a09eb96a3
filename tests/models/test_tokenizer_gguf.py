"""Byte-level vocabularies of GGUF files, against the same vocabulary in a folder, and the built-in one against llama.cpp."""

import re
from functools import cache

import pytest
from hypothesis import example, given

from tests import tiny
from tests.models.texts import any_text
from trunkline.errors import ModelError
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.models.tokenizer_gguf import PRE_TOKENIZERS, tokenizer_from_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """The same vocabulary, from a folder."""
    return load_tokenizer(str(tiny.tiny_model(tmp_path_factory.mktemp("tiny"))))


def bpe_metadata(merges=(), **changes) -> dict:
    """Metadata of a byte-level vocabulary: the 256 bytes, what `merges` make ("1 2"), and <|end|>."""
    tokens = [*tiny.TOKENS[:256], *(merge.replace(" ", "") for merge in merges), "<|end|>"]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 1) + [3],
        "merges": list(merges),
        "eos_token_id": len(tokens) - 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


@pytest.fixture(scope="module")
def gguf_tokenizer(tmp_path_factory) -> Tokenizer:
    file = tiny.tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", pre="gpt-2", vocab_size=tiny.VOCAB_SIZE + 8)
    return load_tokenizer(str(file))


@given(text=any_text)
@example("hello world, that's your 42nd")
@example("<|im_start|>user\nhello<|im_end|>")
def test_gguf_and_folder_agree(tokenizer, gguf_tokenizer, text):
    for parse_special in (False, True):
        assert gguf_tokenizer.encode(text, True, parse_special) == tokenizer.encode(text, True, parse_special)


def test_what_a_gguf_file_says_about_itself(gguf_tokenizer):
    assert gguf_tokenizer.vocab_size == tiny.VOCAB_SIZE + 8
    assert gguf_tokenizer.bos_token_id == tiny.TOKEN_IDS[tiny.BOS]
    assert gguf_tokenizer.eos_token_ids == (tiny.TOKEN_IDS[tiny.EOS], tiny.TOKEN_IDS[tiny.IM_END])
    assert gguf_tokenizer.special_ids == {tiny.TOKEN_IDS[token] for token in tiny.SPECIAL_TOKENS}
    assert gguf_tokenizer.special_tokens == {"bos_token": tiny.BOS, "eos_token": tiny.EOS}
    assert gguf_tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert gguf_tokenizer.token_bytes(tiny.VOCAB_SIZE + 3) == b""  # padding
    assert gguf_tokenizer.encode("[PAD300]") == list(b"[PAD300]")


def test_a_folder_with_one_gguf_file(tmp_path):
    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    assert load_tokenizer(str(tmp_path)).vocab_size == tiny.VOCAB_SIZE


MERGES = ("1 2", "12 3", "123 4", "' S", "! Ċ", "Ġ a", "# a", "é e", "a B")
CUTS = {  # how the pre-tokenizers of the families differ
    "gpt-2": ["1234", "!", "\n", "'", "S", "#", "a"],
    "default": ["123", "4", "!", "\n", "'", "S", "#", "a"],
    "llama-bpe": ["123", "4", "!\n", "'S", "#a"],
    "qwen2": ["1", "2", "3", "4", "!\n", "'S", "#a"],
    "smollm": ["1", "2", "3", "4", "!", "\n", "'", "S", "#", "a"],
    "tekken": ["1", "2", "3", "4", "!\n", "'S", "#a"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_where_a_pre_tokenizer_cuts(pre):
    loaded = tokenizer_from_gguf(bpe_metadata(MERGES, pre=pre), "bpe.gguf")
    assert [loaded.token_text(token_id) for token_id in loaded.encode("1234!\n'S#a")] == CUTS[pre]


def test_tekken_cuts_before_a_capital():
    pieces = {}
    for pre in ("tekken", "llama-bpe"):
        loaded = tokenizer_from_gguf(bpe_metadata(MERGES, pre=pre), "bpe.gguf")
        pieces[pre] = [loaded.token_text(token_id) for token_id in loaded.encode("aB")]
    assert pieces == {"tekken": ["a", "B"], "llama-bpe": ["aB"]}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=any_text)
def test_no_pre_tokenizer_loses_text(pre, text):
    loaded = bpe_tokenizer(pre)
    assert loaded.decode(loaded.encode(text, parse_special=False)) == text


@cache
def bpe_tokenizer(pre: str) -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata(MERGES, pre=pre), "bpe.gguf")


def test_a_word_that_is_a_token_needs_no_merges_in_llama3():
    whole = [*tiny.TOKENS[:256], "abc", "<|end|>"]
    metadata = bpe_metadata(tokens=whole, token_type=[1] * 257 + [3], eos_token_id=257)
    for pre, expected in (("llama-bpe", [256]), ("gpt-2", list(b"abc"))):
        loaded = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": pre}, "bpe.gguf")
        assert loaded.encode("abc") == expected


def test_begin_and_end_tokens_of_a_gguf_file():
    end = 256
    for changes, expected in (
        ({"bos_token_id": end}, [97]),
        ({"bos_token_id": end, "pre": "llama-bpe"}, [end, 97]),
        ({"bos_token_id": end, "pre": "llama-bpe", "add_bos_token": False}, [97]),
        ({"bos_token_id": end, "add_bos_token": True, "add_eos_token": True}, [end, 97, end]),
        ({"add_bos_token": True}, [97]),  # but there is none
    ):
        loaded = tokenizer_from_gguf(bpe_metadata(**changes), "bpe.gguf")
        assert loaded.encode("a") == expected
        assert loaded.encode("a", add_special_tokens=False) == [97]


def test_end_of_turn_tokens_end_a_text_though_the_file_does_not_say_so():
    loaded = tokenizer_from_gguf(bpe_metadata(eos_token_id=0), "bpe.gguf")
    assert loaded.eos_token_ids == (0, 256)


@pytest.mark.parametrize("kind", [1, 4])
def test_begin_and_end_tokens_are_special_though_the_file_calls_them_ordinary(kind):
    loaded = tokenizer_from_gguf(bpe_metadata(token_type=[kind] * 257, bos_token_id=0, eos_token_id=256), "bpe.gguf")
    assert loaded.special_ids == {0, 256}
    assert loaded.encode("a<|end|>") == [97, 256]
    assert loaded.encode("a<|end|>", parse_special=False) == list(b"a<|end|>")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no 'tokenizer.ggml.model'"),
        (bpe_metadata(model="bert"), "kind 'bert'; supported are 'gpt2' and 'llama'"),
        (bpe_metadata(pre="falcon-9"), "pre-tokenizer 'falcon-9'; supported are .*smollm"),
        (bpe_metadata(tokens=None), "no 'tokenizer.ggml.tokens'"),
        (bpe_metadata(tokens=[]), "0 tokens"),
        (bpe_metadata(tokens=7), "int in 'tokenizer.ggml.tokens'"),
        (bpe_metadata(token_type=[1]), "257 tokens and 1 token types"),
        (bpe_metadata(token_type=[9] * 257), "token types other than 1 to 6"),
        (bpe_metadata(tokens=[1] * 257), "not text"),
        (bpe_metadata(eos_token_id=257), "token 257 its 'eos' token"),
        (bpe_metadata() | {"tokenizer.ggml.merges": ["ab"]}, "merge 'ab'"),
        (bpe_metadata() | {"tokenizer.ggml.merges": ["a zz"]}, "merges that do not fit"),
    ],
)
def test_a_gguf_vocabulary_that_makes_no_sense(metadata, message):
    with pytest.raises(ModelError, match=message) as error:
        tokenizer_from_gguf(metadata, "broken.gguf")
    assert "broken.gguf" in str(error.value)


# ── the built-in model ──────────────────────────────────────────────────────────────────────────────────────────────────

# From llama.cpp's /tokenize (build b11549, October 2026), parse_special on.
REFERENCE = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "I'm sure they'll say we'Ve won, don't you?": [
        *(57, 5248, 2090, 502, 3060, 1643, 392, 23, 25917, 3763, 28, 1326, 982, 346, 47),
    ],
    "In 2024, 1,234.50 ② people": [
        *(788, 216, 34, 32, 34, 36, 28, 216, 33, 28, 34, 35, 36, 30, 37, 32, 216, 173, 235, 111, 701),
    ],
    "  two  spaces\n\n\ttab\r\n": [216, 827, 216, 5600, 1116, 197, 15999, 2738],
    "naïve café – 日本語 한국어 😀": [
        *(
            3546,
            46494,
            37366,
            816,
            17097,
            241,
            115,
            40993,
            179,
            120,
            248,
            216,
            33085,
            246,
            181,
            130,
            251,
            183,
            240,
            129,
        ),
        *(40303, 218),
    ],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "def f(x):\n    return x**2  # 4 spaces\n": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 36, 5600, 198),
    ],
}


@cache
def builtin() -> Tokenizer:
    return load_tokenizer(builtin_model())


@pytest.mark.real
@pytest.mark.parametrize("text", REFERENCE)
def test_builtin_agrees_with_llama_cpp(text):
    assert builtin().encode(text) == REFERENCE[text]


@pytest.mark.real
@given(text=any_text)
def test_builtin_gives_back_the_text(text):
    """But for 21 bytes, among them a few control characters, that its vocabulary never saw and drops."""
    single = {builtin().token_bytes(token_id) for token_id in range(300)}
    known = bytes(byte for byte in text.encode() if bytes([byte]) in single)
    ids = builtin().encode(text, parse_special=False)
    assert b"".join(map(builtin().token_bytes, ids)) == known
    assert builtin().decode(ids) == known.decode("utf-8", "replace")


@pytest.mark.real
def test_builtin_has_no_token_of_two_digits():
    assert not any(
        re.search(rb"\d\d", builtin().token_bytes(token_id)) for token_id in builtin().encode("1234567890" * 3)
    )


@pytest.mark.real
def test_builtin_says_about_itself():
    assert (builtin().vocab_size, builtin().bos_token_id, builtin().eos_token_ids) == (49152, 1, (2,))
    assert builtin().special_ids == set(range(17))
    assert builtin().eos_token == "<|im_end|>"
    assert "<|im_start|>assistant" in builtin().chat_template
