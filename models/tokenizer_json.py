"""Vocabularies of the `tokenizers` library: byte-level BPE (GPT-2, Llama 3, Qwen) and BPE over "▁" with byte fallback (Llama 2).

Encoding is the library's. Decoding is ours, so that each token has bytes of its own (the library joins and decodes whole lists).
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from trunkline.errors import ModelError
from trunkline.models.ascii_pieces import AsciiPieces
from trunkline.models.tokenizer import Tokenizer
from trunkline.models.tokenizer_config import TokenizerConfig

NUM_RECENT = 2**15  # tokens whose bytes are remembered

# Texts are encoded one at a time: the library's threads would only wake one another. It reads this at every call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: "Ġ" -> 0x20. A byte that Latin-1 prints stands for itself; the
    others, in order, are the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece: "Ġcafé" written as "ĠcafÃ©" is b" caf\\xc3\\xa9"."""
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:  # not in the byte alphabet: the vocabulary has the text itself
        return piece.encode()


def metaspace_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece-like piece: "▁the" is b" the", "<0x0A>" is b"\\n"."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


class PieceDecoding(NamedTuple):
    """How pieces turn into text."""

    piece_bytes: Callable[[str], bytes]
    strips_leading_space: bool


BYTE_LEVEL = PieceDecoding(byte_level_bytes, strips_leading_space=False)


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        decoding: PieceDecoding,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        vocab_size: int | None = None,
        special_ids: frozenset[int] = frozenset(),
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        """`special_ids` are special beside those the library marks so; `eos_token_ids` None: the one of `special_tokens`."""
        added = library.get_added_tokens_decoder()
        eos = library.token_to_id(special_tokens.get("eos_token", ""))
        if eos_token_ids is None:
            eos_token_ids = () if eos is None else (eos,)
        super().__init__(
            vocab_size=vocab_size or 1 + max(library.get_vocab().values(), default=-1),
            special_ids=special_ids | {token_id for token_id, token in added.items() if token.special},
            bos_token_id=library.token_to_id(special_tokens.get("bos_token", "")),
            eos_token_ids=eos_token_ids,
            special_tokens=special_tokens,
            chat_template=chat_template,
            strips_leading_space=decoding.strips_leading_space,
        )
        library.no_truncation()  # a file may carry the settings of its author's last training run
        library.no_padding()
        self._library = library
        self._piece_bytes = decoding.piece_bytes
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._cuts = _cuts(added.values()) if decoding is BYTE_LEVEL else None
        self._is_cut_only_there = not any(token.normalized for token in added.values())
        self._recent_bytes = lru_cache(NUM_RECENT)(self._read_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        return self._recent_bytes(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if piece is None else self._piece_bytes(piece)

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        if self._pieces is None or not parse_special:
            return self._by_library(text, add_special_tokens, parse_special)
        token_ids: list[int] = []
        for part in self._cut(text):
            if (added := self._added_ids.get(part)) is not None:
                token_ids.append(added)
            else:
                ids = self._pieces.encode(part)
                token_ids += self._by_library(part, False, True) if ids is None else ids
        if add_special_tokens:
            before, after = self._around
            return [*before, *token_ids, *after]
        return token_ids

    def _by_library(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        library = self._library if parse_special else self._without_special
        # A batch of one, since that is how the library leaves out the offsets, which take it a quarter of the time.
        return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _cut(self, text: str) -> list[str]:
        return [text] if self._cuts is None else list(filter(None, self._cuts.split(text)))

    @cached_property
    def _pieces(self) -> AsciiPieces | None:
        """What takes the place of the library for nearly all texts; None: it can't."""
        return AsciiPieces.of(self._library) if self._cuts is not None and self._is_cut_only_there else None

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that are added to a text, before and after it."""
        probe = "a"
        inside = self._by_library(probe, False, True)
        whole = self._by_library(probe, True, True)
        start = next(at for at in range(len(whole)) if whole[at : at + len(inside)] == inside)
        return whole[:start], whole[start + len(inside) :]

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy that takes the texts of special tokens for ordinary text: a setting of the library's object, not of a call."""
        library = tokenizers.Tokenizer.from_str(self._library.to_str())
        library.encode_special_tokens = True
        return library


def _cuts(added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens at which the library cuts a text before anything else; what lies between is encoded on its own.

    They are those that are not looked for in normalized text, the longest of those that begin at the same character. None if
    there are none, or if one takes part of its surroundings along.
    """
    tokens = [token for token in added if not token.normalized and token.content]
    if not tokens or any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return None
    contents = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})")


def load_tokenizer_json(file: Path, config: TokenizerConfig) -> JsonTokenizer:
    """The tokenizer in `file`. Raises ModelError if it is damaged, or decodes in a way that has no bytes per token."""
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(
            f"'{file}' is not a tokenizer the 'tokenizers' library can read ({error}). Download it again."
        ) from error
    special_ids = _add_missing_tokens(library, file, config)
    return JsonTokenizer(
        library,
        _decoding_of(library, file),
        special_tokens=config.special_tokens,
        chat_template=config.chat_template,
        special_ids=special_ids,
    )


def _add_missing_tokens(library: tokenizers.Tokenizer, file: Path, config: TokenizerConfig) -> frozenset[int]:
    """Add the tokens that only tokenizer_config.json knows of, and return the ids of those it calls special."""
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for text in config.special_tokens.values():
        if text not in known and library.token_to_id(text) is not None:  # in the vocabulary, as if it were ordinary
            library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    for token_id, token in sorted(config.added_tokens.items()):
        if library.token_to_id(token.text) is None:
            library.add_tokens([tokenizers.AddedToken(token.text, special=token.special, normalized=False)])
        if (seen := library.token_to_id(token.text)) != token_id:
            raise ModelError(
                f"The token {token.text!r} has the id {token_id} in '{file.with_name('tokenizer_config.json')}' and {seen} in"
                f" '{file}'. The two files belong to different models: download both again."
            )
    return frozenset(token_id for token_id, token in config.added_tokens.items() if token.special)


def _decoding_of(library: tokenizers.Tokenizer, file: Path) -> PieceDecoding:
    """How the file's decoder turns pieces into text, if each piece has bytes of its own."""
    steps = _decoder_steps(library)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return BYTE_LEVEL
    if names == ["Metaspace"] and steps[0]["replacement"] == "▁":
        return PieceDecoding(metaspace_bytes, strips_leading_space=steps[0].get("prepend_scheme") != "never")
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    rest = [step for step in steps if step not in (spaces, strip)]
    if spaces in steps and all(step["type"] in ("ByteFallback", "Fuse") for step in rest):
        return PieceDecoding(metaspace_bytes, strips_leading_space=strip in steps)
    raise ModelError(
        f"'{file}' decodes with {' + '.join(names) or 'no decoder'}; supported are ByteLevel, Metaspace, and"
        " Replace + ByteFallback + Fuse (+ Strip) over '▁'. Serve a model with such a tokenizer."
    )


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if library.decoder is None:
        return []
    decoder = json.loads(library.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
