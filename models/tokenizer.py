"""Text to token ids and back, with the vocabulary a checkpoint carries.

    tokenizer = load_tokenizer("SmolLM2-135M-Instruct.gguf")
    tokenizer.encode("Hello 42")               [19556, 216, 36, 34]
    tokenizer.token_bytes(19556)               b"Hello"
    tokenizer.decode([19556, 216, 36, 34])     "Hello 42"

    tokenizer.json    read by tokenizer_json   (the tokenizers library)
    tokenizer.model   read by tokenizer_spm    (the sentencepiece library)
    a .gguf file      read by tokenizer_gguf   (its metadata builds one or the other)

The one idea: every token stands for a fixed run of bytes, and a text is the bytes of its tokens one after another. That is
what lets a stream be decoded token by token (trunkline.api.detokenizer) and a grammar be compiled to token masks.
Nothing here knows chats, requests, torch or transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from trunkline.errors import InvalidParameter, ModelError


class Tokenizer(ABC):
    """A vocabulary. Immutable once built: any number of threads may use it at once.

    vocab_size      token ids are 0 … vocab_size-1. The model may have more rows than that; those ids have no text
    special_ids     ids of tokens that steer the model and are no text of the conversation: begin, end, turn marks, unknown
    bos_token_id    the token that opens every text, or None
    eos_token_ids   the tokens that end a text; may be empty. generation_config.json may name more
    special_tokens  names and texts, as chat templates see them: {"bos_token": "<s>", "eos_token": "</s>"}
    chat_template   Jinja source, or None
    strips_leading_space  encode() puts a space before the text, so decode() takes one away from the start
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        special_ids: Iterable[int],
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        strips_leading_space: bool,
    ) -> None:
        self.vocab_size = vocab_size
        self.special_ids = frozenset(special_ids)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space

    @property
    def bos_token(self) -> str:
        """Text of the token that opens a text; "" if there is none."""
        return self.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a text; "" if there is none."""
        return self.special_tokens.get("eos_token", "")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens  put the begin (and end) token around it where the checkpoint says so. A rendered chat template
                            writes its own: encode it with False
        parse_special       "<|im_end|>" in the text is that one token; False: it is ten characters like any others.
                            Added tokens that are not special (a run of spaces, say) are found either way

        Raises InvalidParameter for a text that has no UTF-8 form (half of a surrogate pair).
        """
        _check_unicode(text)
        return self._encode(text, add_special_tokens, parse_special)

    def cut(self, text: str) -> list[str]:
        """Parts that can be encoded one by one: the ids of the text, without those that are added to it, are the ids of the
        parts, one after another. Where that is not sure, the text is the only part.

        Raises InvalidParameter as `encode`.
        """
        _check_unicode(text)
        return self._cut(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD.

        The space that encode() put before the text is taken away again, so decode(encode(text)) is `text`. A text that
        continues another one (a completion after its prompt) keeps its first space: join token_bytes for that.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_text(self, token_id: int) -> str:
        """The token as lists of log-probabilities show it: its text, or "bytes:\\xe2\\x82" if that is no whole UTF-8."""
        token = self.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def is_special(self, text: str) -> bool:
        """Whether this is the text of a special token: the whole of it, and of only one."""
        ids = [token for token in self.encode(text, add_special_tokens=False) if token in self.special_ids]
        return len(ids) == 1 and self.token_bytes(ids[0]) == text.encode()

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that is already under way; b"" for an id that has no token, whatever its value."""

    def _cut(self, text: str) -> list[str]:
        """As cut(), for a text that has a UTF-8 form."""
        return [text]

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """As encode(), for a text that has a UTF-8 form."""


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"The text is not valid Unicode: character {error.start} is U+{ord(text[error.start]):04X}, half of a"
            " surrogate pair. Send whole characters."
        ) from None


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`, a Hugging Face folder or a GGUF file.

    Raises ModelError if there is none, if it is damaged, or if it is of a kind we cannot reproduce exactly.
    """
    place = Path(path)
    if place.is_dir():
        return _load_from_folder(place)
    if not place.is_file():
        raise ModelError(f"There is no model at '{path}'. Give a Hugging Face folder or a GGUF file.")
    return _load_from_gguf(place)


def _load_from_gguf(file: Path) -> Tokenizer:
    from trunkline.models.gguf import read_gguf
    from trunkline.models.tokenizer_gguf import tokenizer_from_gguf

    return tokenizer_from_gguf(read_gguf(file).metadata, str(file))


def _load_from_folder(folder: Path) -> Tokenizer:
    from trunkline.models.tokenizer_config import read_tokenizer_config

    config = read_tokenizer_config(folder)
    if (file := folder / "tokenizer.json").is_file():
        from trunkline.models.tokenizer_json import load_tokenizer_json

        return load_tokenizer_json(file, config)
    if (file := folder / "tokenizer.model").is_file():
        from trunkline.models.tokenizer_spm import load_tokenizer_model

        return load_tokenizer_model(file, config)
    if len(files := list(folder.glob("*.gguf"))) == 1:
        return _load_from_gguf(files[0])
    raise ModelError(
        f"The folder '{folder}' has no tokenizer: neither 'tokenizer.json' nor 'tokenizer.model' is in it, nor one GGUF file."
        " Download the tokenizer beside the weights."
    )
