"""Tokenizers of Hugging Face folders, against transformers; and folders that hold none."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from tokenizers import decoders, models, pre_tokenizers, processors

from tests import tiny
from tests.models.texts import LINES, TEXTS, any_text
from trunkline.errors import InvalidParameter, ModelError
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.models.tokenizer_json import byte_level_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return load_tokenizer(str(folder))


def test_what_a_folder_says_about_itself(tokenizer):
    assert tokenizer.vocab_size == tiny.VOCAB_SIZE
    assert tokenizer.special_ids == {tiny.TOKEN_IDS[token] for token in tiny.SPECIAL_TOKENS}
    assert (tokenizer.bos_token, tokenizer.eos_token) == (tiny.BOS, tiny.EOS)
    assert tokenizer.bos_token_id == tiny.TOKEN_IDS[tiny.BOS]
    assert tokenizer.eos_token_ids == (tiny.TOKEN_IDS[tiny.EOS],)
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


@given(text=any_text)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_found_unless_told_otherwise(tokenizer):
    end = tiny.TOKEN_IDS[tiny.IM_END]
    assert tokenizer.encode("a<|im_end|>b") == [ord("a"), end, ord("b")]
    assert tokenizer.encode("a<|im_end|>b", parse_special=False) == list(b"a<|im_end|>b")
    assert tokenizer.decode([ord("a"), end]) == "a"
    assert tokenizer.decode([ord("a"), end], skip_special_tokens=False) == "a<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, tiny.VOCAB_SIZE, 2**31, 2**70, -(2**70)])
def test_ids_without_a_token_have_no_text(tokenizer, token_id):
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""
    assert tokenizer.token_text(token_id) == ""


def test_token_text_shows_bytes_that_are_no_character(tokenizer):
    assert tokenizer.token_text(0xE2) == r"bytes:\xe2"
    assert tokenizer.token_text(tiny.TOKEN_IDS["Ġthe"]) == " the"


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InvalidParameter, match=r"character 1 is U\+D83D"):
        tokenizer.encode("a\ud83d")


def test_threads_may_share_a_tokenizer(folder):
    shared = load_tokenizer(str(folder))
    alone = [shared.encode(line) for line in LINES]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda line: (shared.encode(line), shared.encode(line, parse_special=False)), LINES))
    assert together == [(ids, ids) for ids in alone]


@pytest.mark.slow
def test_folder_agrees_with_transformers(folder, tokenizer):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def json_folder(folder: Path, library: tokenizers.Tokenizer, **config) -> Path:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama2_like(decoder) -> tokenizers.Tokenizer:
    """BPE over "▁" with byte fallback, as Llama 2's tokenizer.json."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi"]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[("h", "i"), ("▁", "hi")] if "hi" in pieces else [],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoder
    library.add_special_tokens(["<unk>", "<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


SPACES, STRIP = decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1)


@pytest.mark.parametrize(
    "decoder",
    [decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), STRIP]), decoders.Metaspace()],
    ids=["sequence", "metaspace"],
)
def test_pieces_with_spaces_written_as_underscores(tmp_path, decoder):
    loaded = load_tokenizer(str(json_folder(tmp_path, llama2_like(decoder), bos_token="<s>")))
    ids = loaded.encode(" hi é\n")
    assert ids[0] == loaded.bos_token_id == 1
    assert loaded.encode(" hi é\n", add_special_tokens=False) == ids[1:]
    assert b"".join(map(loaded.token_bytes, ids[1:])) == " hi é\n".encode()
    assert loaded.decode(loaded.encode("hi é\n")) == "hi é\n"


def test_a_decoder_without_strip_keeps_the_leading_space(tmp_path):
    library = llama2_like(decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]))
    loaded = load_tokenizer(str(json_folder(tmp_path, library)))
    assert loaded.decode(loaded.encode("hi")) == " hi"


def test_settings_of_a_training_run_are_ignored(tmp_path, folder, tokenizer):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    loaded = load_tokenizer(str(json_folder(tmp_path, library)))
    for text in ("you", "hello your world"):
        assert loaded.encode(text) == tokenizer.encode(text)


def test_tokens_that_only_the_config_knows_are_added(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    added = {
        str(tiny.VOCAB_SIZE): {"content": "<tool>", "special": False},
        str(tiny.VOCAB_SIZE + 1): {"content": "<x>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("<tool><x>") == [tiny.VOCAB_SIZE, tiny.VOCAB_SIZE + 1]
    assert loaded.encode("<tool><x>", parse_special=False) == [tiny.VOCAB_SIZE, *b"<x>"]
    assert loaded.decode([tiny.VOCAB_SIZE, tiny.VOCAB_SIZE + 1]) == "<tool>"


def test_the_config_may_call_a_token_special_that_the_vocabulary_does_not(tmp_path, folder):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens(["<tool>"])
    added = {str(tiny.VOCAB_SIZE): {"content": "<tool>", "special": True}}
    loaded = load_tokenizer(str(json_folder(tmp_path, library, added_tokens_decoder=added)))
    assert tiny.VOCAB_SIZE in loaded.special_ids
    assert loaded.decode([tiny.VOCAB_SIZE]) == ""


def test_a_token_the_config_names_is_special_though_the_vocabulary_calls_it_ordinary(tmp_path, folder):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(str(json_folder(tmp_path, library, eos_token="er")))
    assert loaded.eos_token_ids == (tiny.TOKEN_IDS["er"],)
    assert loaded.special_ids > {tiny.TOKEN_IDS["er"]}
    assert loaded.encode("er", parse_special=False) == [tiny.TOKEN_IDS["er"]]  # it may still be built from its letters


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "from the file", "tokenizer_config.json": '{"chat_template": "no"}'}, "from the file"),
        ({"tokenizer_config.json": '{"chat_template": "a string"}'}, "a string"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]}
                )
            },
            "yes",
        ),
        ({"tokenizer_config.json": "{}"}, None),
        ({}, None),
    ],
)
def test_where_the_chat_template_comes_from(tmp_path, folder, files, expected):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert load_tokenizer(str(tmp_path)).chat_template == expected


def test_special_tokens_by_name(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|eos|>", "bos_token": {"content": "<|bos|>"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "add_bos_token": true}')
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    assert loaded.eos_token_ids == (tiny.TOKEN_IDS["<|im_end|>"],)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither 'tokenizer.json' nor 'tokenizer.model'"),
        ({"tokenizer.json": "{"}, "tokenizer.json' is not a tokenizer"),
        ({"tokenizer.json": '{"model": {"type": "Magic"}}'}, "tokenizer.json' is not a tokenizer"),
        ({"tokenizer.model": "not a model"}, "tokenizer.model' is not a SentencePiece model"),
        ({"tokenizer.model": ""}, "no pieces"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is not a valid JSON object"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": {"content": "a"}}}'}, "entry 'x'"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "is no object"),
        ({"added_tokens.json": '{"<pad>": "one"}'}, "the id 'one'"),
        ({"added_tokens.json": '{"<pad>": 99999999999}'}, "the id 99999999999"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"99999999": {"content": "a"}}}'}, "entry '99999999'"),
    ],
)
def test_a_folder_that_is_damaged(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_config_of_another_model(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {"content": "<|eos|>"}}}')
    with pytest.raises(ModelError, match=r"id 7 in .* belong to different models"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([SPACES, decoders.CTC()])])
def test_a_decoder_that_has_no_bytes_per_token(tmp_path, decoder):
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        library.decoder = decoder
    with pytest.raises(ModelError, match="supported are ByteLevel, Metaspace"):
        load_tokenizer(str(json_folder(tmp_path, library)))


def test_no_model_there(tmp_path):
    with pytest.raises(ModelError, match="There is no model at"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "text.gguf").write_text("no GGUF")
    with pytest.raises(ModelError):
        load_tokenizer(str(tmp_path / "text.gguf"))


def test_the_byte_alphabet_covers_every_byte():
    assert sorted(byte_level_bytes(token) for token in tiny.TOKENS[:256]) == [bytes([byte]) for byte in range(256)]
    assert byte_level_bytes("a b") == b"a b"  # a space is not in the alphabet: plain text
