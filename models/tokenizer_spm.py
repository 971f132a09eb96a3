"""Vocabularies of the `sentencepiece` library: a `tokenizer.model` file, or the same thing built from a GGUF file.

SentencePiece takes a text for ordinary text throughout. Special and user-defined tokens in it are ours to find: the text is cut at
them, and what lies between is encoded part by part,

    "<s>[INST] hi</s>"    ->    <s>   "[INST] hi"   </s>

with SentencePiece's leading space before each part (as Llama 2 was trained, and llama.cpp does), or before the first only
(Hugging Face's `legacy: false`).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from trunkline.errors import ModelError
from trunkline.models.tokenizer import Tokenizer
from trunkline.models.tokenizer_config import AddedText, TokenizerConfig

ModelProto: Any = sentencepiece_model_pb2.ModelProto  # generated at run time: no checker knows its fields
_Piece = ModelProto.SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of the `sentencepiece` library.

    model          the vocabulary, a ModelProto
    added          tokens beside it, by id: beyond its end, or in place of one of its pieces
    prefix_always  the model's leading space goes before every part of the text; False: only before the first
    add_bos, add_eos  encode() puts the begin, the end token around the text
    """

    def __init__(
        self,
        model: Any,
        *,
        added: Mapping[int, AddedText],
        prefix_always: bool,
        add_bos: bool,
        add_eos: bool,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        """Raises RuntimeError (the library's) or ValueError if `model` makes no sense."""
        own = {
            token_id: AddedText(piece.piece.replace("▁", " "), special=piece.type != _Piece.USER_DEFINED)
            for token_id, piece in enumerate(model.pieces)
            if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN, _Piece.USER_DEFINED)
        }
        found = own | dict(added)
        super().__init__(
            vocab_size=max(len(model.pieces), 1 + max(added, default=-1)),
            special_ids=[token_id for token_id, token in found.items() if token.special],
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            special_tokens=special_tokens,
            chat_template=chat_template,
            strips_leading_space=model.normalizer_spec.add_dummy_prefix,
        )
        self._bytes = [_piece_bytes(piece) for piece in model.pieces]
        self._bytes += [b""] * (self.vocab_size - len(self._bytes))
        for token_id, token in found.items():
            self._bytes[token_id] = token.text.encode()
        self._before = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._after = [eos_token_ids[0]] if add_eos and eos_token_ids else []

        self._ids = {token.text: token_id for token_id, token in found.items()}
        self._added = _any_of(token.text for token in found.values())
        self._added_plain = _any_of(token.text for token in found.values() if not token.special)

        self._first = _processor(model)
        self._others = self._first
        if model.normalizer_spec.add_dummy_prefix and not prefix_always:
            without_prefix = ModelProto()
            without_prefix.CopyFrom(model)
            without_prefix.normalizer_spec.add_dummy_prefix = False
            self._others = _processor(without_prefix)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids: list[int] = []
        parts = (self._added if parse_special else self._added_plain).split(text)
        for index, part in enumerate(parts):  # odd ones are the added tokens
            if index % 2:
                ids.append(self._ids[part])
            elif part:
                ids += (self._others if index else self._first).encode(part)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids


def load_tokenizer_model(file: Path, config: TokenizerConfig) -> SentencePieceTokenizer:
    """The tokenizer in `file`, with the special tokens of `config`, else the file's own. Raises ModelError if it is damaged."""
    model = ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
        if len(model.pieces) == 0:
            raise DecodeError("it has no pieces")
    except (OSError, DecodeError) as error:
        raise ModelError(f"'{file}' is not a SentencePiece model ({error}). Download it again.") from error
    special_tokens = _own_special_tokens(model) | config.special_tokens
    ids = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    ids |= {token.text: token_id for token_id, token in config.added_tokens.items()}
    eos = ids.get(special_tokens.get("eos_token", ""))
    try:
        return SentencePieceTokenizer(
            model,
            added={ids[text]: AddedText(text, special=True) for text in special_tokens.values() if text in ids}
            | config.added_tokens,
            prefix_always=config.legacy,
            add_bos=config.add_bos_token,
            add_eos=config.add_eos_token,
            bos_token_id=ids.get(special_tokens.get("bos_token", "")),
            eos_token_ids=() if eos is None else (eos,),
            special_tokens=special_tokens,
            chat_template=config.chat_template,
        )
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"'{file}' is refused by sentencepiece ({error}). Download it again.") from error


def _own_special_tokens(model: Any) -> dict[str, str]:
    """The names the model itself gives to its control pieces; a piece that it does not have is not named."""
    spec = model.trainer_spec
    pieces = {piece.piece for piece in model.pieces if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)}
    names = {
        "bos_token": spec.bos_piece,
        "eos_token": spec.eos_piece,
        "unk_token": spec.unk_piece,
        "pad_token": spec.pad_piece,
    }
    return {name: piece for name, piece in names.items() if piece in pieces}


def _processor(model: Any) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def _piece_bytes(piece: Any) -> bytes:
    if piece.type == _Piece.BYTE:
        return bytes([int(piece.piece[3:5], 16)])  # "<0x0A>"
    if piece.type == _Piece.UNUSED:
        return b""
    return piece.piece.replace("▁", " ").encode()


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Splits a text at any of `texts`, the longest where several fit, and keeps them: odd items of the split are the matches."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "((?!))")
