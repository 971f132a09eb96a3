"""The tokenizer inside a GGUF file: its metadata lists tokens, types, and merges or scores, and names the pre-tokenizer.

    tokenizer.ggml.model  "gpt2"   byte-level BPE: tokens + merges + `tokenizer.ggml.pre`    -> the tokenizers library
                          "llama"  SentencePiece BPE: tokens + scores                        -> the sentencepiece library

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. What a pre-tokenizer's name means is written down
nowhere but in llama.cpp (src/llama-vocab.cpp), where each stands for a list of regular expressions; where llama.cpp rewrote one
for its own engine, ours is the original of the model's tokenizer.json. An unknown name is refused: a text cut at the wrong
places still looks like text, and the model answers it a little worse.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from trunkline.errors import ModelError
from trunkline.models.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """Where a text is cut before merging: at the matches of each pattern in turn, within the parts the earlier ones left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a part that is a token as it stands is not built up from merges
    add_bos: bool = False  # where the file does not say


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_PRE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _BY_DIGIT,
    "starcoder": _BY_DIGIT,
    "refact": _BY_DIGIT,
    "command-r": _BY_DIGIT,
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}

# Tokens that end a turn. Many files name only the end of text as `eos_token_id`, and a chat would never stop.
END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`; the numbers are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Vocabulary(NamedTuple):
    """What both kinds of vocabulary have."""

    tokens: list[str]
    types: list[int]
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer in the metadata of the file `name` (for messages).

    Raises ModelError if it is missing, damaged, or of a kind that is not in the tables above.
    """
    kind = _get(metadata, name, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        return _byte_level_bpe(metadata, name)
    if kind == "llama":
        return _sentencepiece(metadata, name)
    raise ModelError(
        f"'{name}' has a tokenizer of the kind {kind!r}; supported are 'gpt2' and 'llama'. Serve another file."
    )


def _byte_level_bpe(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    from trunkline.models.tokenizer_json import BYTE_LEVEL, JsonTokenizer

    vocabulary = _vocabulary(metadata, name, {})
    pre_name = _get(metadata, name, "tokenizer.ggml.pre", str, default="default")
    pre = PRE_TOKENIZERS.get(pre_name)
    if pre is None:
        raise ModelError(
            f"'{name}' needs the pre-tokenizer {pre_name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}."
            " Serve the model's Hugging Face folder instead: its tokenizer.json holds the rules."
        )
    merges = [_pair(merge, name) for merge in _get(metadata, name, "tokenizer.ggml.merges", Sequence)]
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind != TokenType.UNUSED
    }
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"'{name}' has merges that do not fit its tokens ({error}). Download it again.") from error
    library = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    bos = vocabulary.special_tokens.get("bos_token")
    eos = vocabulary.special_tokens.get("eos_token")
    before = (
        [bos]
        if bos is not None and _get(metadata, name, "tokenizer.ggml.add_bos_token", bool, default=pre.add_bos)
        else []
    )
    after = (
        [eos] if eos is not None and _get(metadata, name, "tokenizer.ggml.add_eos_token", bool, default=False) else []
    )
    library.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(token, ids[token]) for token in {*before, *after}]
    )
    return JsonTokenizer(
        library,
        BYTE_LEVEL,
        vocab_size=len(vocabulary.tokens),
        eos_token_ids=vocabulary.eos_token_ids,
        special_tokens=vocabulary.special_tokens,
        chat_template=vocabulary.chat_template,
    )


def _sentencepiece(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    from trunkline.models.tokenizer_spm import ModelProto, SentencePieceTokenizer

    vocabulary = _vocabulary(metadata, name, {"bos": 1, "eos": 2, "unknown": 0})
    scores = _get(metadata, name, "tokenizer.ggml.scores", Sequence)
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"'{name}' has {len(vocabulary.tokens)} tokens and {len(scores)} scores. Download it again.")
    model = ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = TokenType.BYTE in vocabulary.types
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = _get(metadata, name, "tokenizer.ggml.add_space_prefix", bool, default=True)
    model.normalizer_spec.remove_extra_whitespaces = False
    try:
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True):
            piece = token.replace(" ", "▁")  # user-defined ones have plain spaces
            model.pieces.add(piece=piece, score=score, type=kind)
        return SentencePieceTokenizer(
            model,
            added={},
            prefix_always=True,
            add_bos=_get(metadata, name, "tokenizer.ggml.add_bos_token", bool, default=True),
            add_eos=_get(metadata, name, "tokenizer.ggml.add_eos_token", bool, default=False),
            bos_token_id=vocabulary.bos_token_id,
            eos_token_ids=vocabulary.eos_token_ids,
            special_tokens=vocabulary.special_tokens,
            chat_template=vocabulary.chat_template,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"'{name}' has a vocabulary that sentencepiece refuses ({error}). Download it again."
        ) from error


def _vocabulary(metadata: Mapping[str, Any], name: str, default_ids: Mapping[str, int]) -> _Vocabulary:
    """`default_ids`: ids of the special tokens that a file need not name, by the word in their key."""
    tokens = list(_get(metadata, name, "tokenizer.ggml.tokens", Sequence))
    types = list(_get(metadata, name, "tokenizer.ggml.token_type", Sequence, default=[TokenType.NORMAL] * len(tokens)))
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"'{name}' has {len(tokens)} tokens and {len(types)} token types. Download it again.")
    if not all(isinstance(token, str) for token in tokens) or not set(types) <= set(TokenType):
        raise ModelError(f"'{name}' has tokens that are not text, or token types other than 1 to 6. Download it again.")

    def special_id(word: str) -> int | None:
        token_id = _get(metadata, name, f"tokenizer.ggml.{word}_token_id", int, default=default_ids.get(word, -1))
        if token_id >= len(tokens):
            raise ModelError(
                f"'{name}' calls token {token_id} its {word!r} token, but has only {len(tokens)} tokens. Download it again."
            )
        return token_id if token_id >= 0 else None

    by_name = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special_tokens = {key: tokens[i] for key, word in by_name.items() if (i := special_id(word)) is not None}
    bos = special_id("bos")
    ends = [token_id for word in ("eos", "eot", "eom") if (token_id := special_id(word)) is not None]
    ends += [token_id for token_id, token in enumerate(tokens) if token in END_OF_TURN]
    for token_id in ends if bos is None else [bos, *ends]:
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = TokenType.CONTROL  # some files call them ordinary
    return _Vocabulary(
        tokens=tokens,
        types=types,
        special_tokens=special_tokens,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=_get(metadata, name, "tokenizer.chat_template", str, default="") or None,
    )


def _pair(merge: Any, name: str) -> tuple[str, str]:
    """ "Ġ t" -> ("Ġ", "t")."""
    left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
    if not left or not right:
        raise ModelError(
            f"'{name}' has the merge {merge!r}; two pieces with a space between are expected. Download it again."
        )
    return left, right


def _get(metadata: Mapping[str, Any], name: str, key: str, kind: type, default: Any = None) -> Any:
    """The value of a key; if it is missing, the default, and if that is None, a ModelError."""
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"'{name}' has no '{key}': it holds no whole tokenizer. Serve another file.")
    if not isinstance(value, kind):
        raise ModelError(
            f"'{name}' has a {type(value).__name__} in '{key}'; {kind.__name__} is expected. Download it again."
        )
    return value
