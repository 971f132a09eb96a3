"""SentencePiece vocabularies, from a tokenizer.model file and from a GGUF file, against the library itself and transformers."""

import io
import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import assume, example, given

from tests.models.texts import LINES, TEXTS, any_text
from trunkline.errors import ModelError
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.models.tokenizer_gguf import tokenizer_from_gguf
from trunkline.models.tokenizer_spm import ModelProto


@cache
def spm_model() -> bytes:
    """A SentencePiece BPE model with byte fallback, trained on LINES."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture
def spm_folder(tmp_path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(spm_model())
    return tmp_path


def spm_metadata(**changes) -> dict:
    """The same model as a GGUF file's metadata."""
    pieces = ModelProto.FromString(spm_model()).pieces
    keys = {
        "model": "llama",
        "tokens": [piece.piece for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [piece.type for piece in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


@cache
def spm_gguf() -> Tokenizer:
    return tokenizer_from_gguf(spm_metadata(), "spm.gguf")


@given(text=any_text)
@example("  two  spaces ")
def test_sentencepiece_gives_back_the_text(text):
    assume("<tool>" not in text)  # a space follows it that nobody wrote
    assume("▁" not in text)  # sentencepiece writes spaces so, and reads this as one
    loaded = spm_gguf()
    ids = loaded.encode(text, parse_special=False)
    assert ids[0] == loaded.bos_token_id
    assert loaded.decode(ids) == text
    assert b"".join(map(loaded.token_bytes, ids[1:])) == (" " + text if text else "").encode()


def test_sentencepiece_folder_gguf_and_library_agree(spm_folder):
    from_folder, from_gguf = load_tokenizer(str(spm_folder)), spm_gguf()
    library = sentencepiece.SentencePieceProcessor(model_proto=spm_model())
    assert from_folder.vocab_size == from_gguf.vocab_size == library.vocab_size()
    assert from_folder.special_ids == from_gguf.special_ids
    assert (
        from_folder.special_tokens
        == from_gguf.special_tokens
        == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    assert from_folder.eos_token_ids == from_gguf.eos_token_ids[:1] == (2,)
    for text in TEXTS:
        assert from_folder.encode(text) == from_gguf.encode(text)
        assert from_folder.encode(text, parse_special=False) == [1, *library.encode(text)]
    for token_id in range(library.vocab_size()):
        assert from_folder.token_bytes(token_id) == from_gguf.token_bytes(token_id)


def test_sentencepiece_special_tokens_in_the_middle(spm_folder):
    loaded = load_tokenizer(str(spm_folder))
    start, end = loaded.encode("<|im_start|><|im_end|>", add_special_tokens=False)
    hi = loaded.encode("hi", add_special_tokens=False)
    assert loaded.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False) == [start, *hi, end]
    assert loaded.token_bytes(hi[0])[:1] == b" "  # each part opens with SentencePiece's space
    assert end not in loaded.encode("hi<|im_end|>", parse_special=False)
    assert loaded.decode([start, *hi, end]) == "hi"


def test_without_legacy_only_the_start_gets_a_space(spm_folder):
    (spm_folder / "tokenizer_config.json").write_text(
        '{"legacy": false, "add_bos_token": false, "add_eos_token": true}'
    )
    loaded = load_tokenizer(str(spm_folder))
    ids = loaded.encode("the<|im_end|>the")
    assert b"".join(map(loaded.token_bytes, ids)) == b" the<|im_end|>the</s>"


def test_the_unknown_token_may_begin_a_text():
    loaded = tokenizer_from_gguf(spm_metadata(bos_token_id=0), "spm.gguf")
    assert loaded.encode("")[0] == 0


def test_no_space_prefix_in_a_gguf_file():
    loaded = tokenizer_from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False), "spm.gguf")
    assert b"".join(map(loaded.token_bytes, loaded.encode("the<|im_end|> the"))) == b"the<|im_end|> the"
    assert loaded.decode(loaded.encode(" the")) == " the"


def test_user_defined_tokens_are_found_even_as_plain_text(spm_folder):
    loaded = load_tokenizer(str(spm_folder))
    (tool,) = loaded.encode("<tool>", add_special_tokens=False)
    assert tool in loaded.encode("a<tool>b", parse_special=False)
    assert tool not in loaded.special_ids
    assert loaded.decode([tool]) == "<tool>"


def test_tokens_added_beside_the_model(spm_folder):
    size = spm_gguf().vocab_size
    (spm_folder / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1, "<pad>>": size + 2}))
    (spm_folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    loaded = load_tokenizer(str(spm_folder))
    assert loaded.vocab_size == size + 3
    assert loaded.encode("<pad><pad>>", add_special_tokens=False) == [size + 1, size + 2]  # the longer where both fit
    assert loaded.token_bytes(size) == b""  # a hole between
    assert loaded.decode([size + 1, size + 2]) == "<pad>>"


def test_a_token_the_config_names_is_special_though_the_model_calls_it_ordinary(spm_folder):
    pieces = ModelProto.FromString(spm_model()).pieces
    end = next(piece.piece for piece in pieces if piece.type == piece.NORMAL and piece.piece.isalpha())
    (spm_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    loaded = load_tokenizer(str(spm_folder))
    assert loaded.special_ids > set(loaded.eos_token_ids)
    assert loaded.token_bytes(loaded.eos_token_ids[0]) == end.encode()
    assert loaded.decode(loaded.encode(f"1{end}1"), skip_special_tokens=False) == f"<s> 1{end} 1"  # cut there


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_sentencepiece_agrees_with_transformers(spm_folder, legacy):
    from transformers import LlamaTokenizer

    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": legacy, "add_bos_token": True}
    (spm_folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(str(spm_folder)), LlamaTokenizer.from_pretrained(spm_folder, legacy=legacy)
    for text in (*TEXTS, "<s>hi", "<|im_start|>user\nhi<|im_end|>\n", "a<tool>b"):
        if text.startswith((" ", "▁")):
            continue  # here transformers itself departs from SentencePiece: it adds no second space
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (spm_metadata(scores=[0.0]), "and 1 scores"),
        (spm_metadata(scores=["high"] * 420), "sentencepiece refuses"),
        (spm_metadata(token_type=[2, *[6] * 419]), "sentencepiece refuses"),
        (spm_metadata(scores=None), "no 'tokenizer.ggml.scores'"),
        (spm_metadata(token_type=[1] * 420), "sentencepiece refuses"),
    ],
)
def test_a_vocabulary_that_makes_no_sense(metadata, message):
    with pytest.raises(ModelError, match=message) as error:
        tokenizer_from_gguf(metadata, "broken.gguf")
    assert "broken.gguf" in str(error.value)
