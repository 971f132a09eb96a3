"""What a Hugging Face folder says about its tokenizer beside the vocabulary: tokenizer_config.json and its neighbours."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trunkline.errors import ModelError
from trunkline.models.fields import MAX_VOCAB
from trunkline.models.json_file import read_json


class AddedText(NamedTuple):
    """A token that is found in the text as it stands, before the vocabulary is applied."""

    text: str
    special: bool


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one folder; where the folder says nothing, what Hugging Face's Llama tokenizer does."""

    special_tokens: dict[str, str] = {}  # {"bos_token": "<s>"}
    added_tokens: dict[int, AddedText] = {}
    chat_template: str | None = None
    add_bos_token: bool = True  # tokenizer.model only: tokenizer.json has its own post-processor
    add_eos_token: bool = False
    legacy: bool = True  # tokenizer.model only: a space is put after every special token too, not only at the start


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read what is there of the folder's tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja.

    Raises ModelError for a file that is not JSON or not of the expected shape.
    """
    config = _read_if_there(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_if_there(folder / "special_tokens_map.json")) | _special_tokens(config)
    flags = {
        name: config[name]
        for name in ("add_bos_token", "add_eos_token", "legacy")
        if isinstance(config.get(name), bool)
    }
    return TokenizerConfig(
        special_tokens=special_tokens,
        added_tokens=_added_tokens(folder, config, frozenset(special_tokens.values())),
        chat_template=_chat_template(folder, config),
        **flags,
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """`"<s>"` or `{"content": "<s>", …}`; anything else (a flag, null) names no token."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added_tokens(folder: Path, config: dict[str, Any], special_texts: frozenset[str]) -> dict[int, AddedText]:
    """By id. tokenizer_config.json lists them in full; older folders have added_tokens.json, text to id."""
    added = {}
    for text, token_id in _read_if_there(folder / "added_tokens.json").items():
        if not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCAB:
            raise ModelError(
                f"'{folder / 'added_tokens.json'}' gives {text!r} the id {token_id!r}; allowed are whole numbers from 0 to"
                f" {MAX_VOCAB - 1}. Download it again."
            )
        added[token_id] = AddedText(text, text in special_texts)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelError(
            f"'added_tokens_decoder' in '{folder / 'tokenizer_config.json'}' is no object. Download it again."
        )
    for key, token in decoder.items():
        content = _token_text(token)
        if content is None or not isinstance(token, dict) or not key.isdecimal() or int(key) >= MAX_VOCAB:
            raise ModelError(
                f"'added_tokens_decoder' in '{folder / 'tokenizer_config.json'}' has the entry {key!r}: {token!r}; an id below"
                f" {MAX_VOCAB} and an object with its 'content' are expected. Download it again."
            )
        added[int(key)] = AddedText(content, bool(token.get("special")) or content in special_texts)
    return added


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json: a string, or a list of which "default" is ours."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"'{file}' cannot be read as text ({error}). Download it again.") from error
