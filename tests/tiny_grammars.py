"""Grammars over a vocabulary of 97 ids, that of the stub worker: real masks in microseconds.

grammars = TinyCompiler()
engine = make_engine(grammars=grammars)
run(engine, generate("r", [1, 2, 3], grammar=lark('start: /[a-c]{3}/')))
"""

import functools
from typing import Any

import numpy as np

from tests.stub import VOCAB_SIZE, next_allowed
from trunkline.constraint import Grammar, GrammarSource
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.lark import wrap
from trunkline.grammar.closing import find_ending
from trunkline.grammar.interface import Backend, Check, CompiledGrammar, GrammarRefused
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.tokenizer import Tokenizer

EOS, SPECIAL = 0, 1
WORDS = (
    *(['{"', '":', '": ', '", "', '"}', '":"', '","', "true", "null", "name", "age", "ab", "abc", "cab", "the", "12"]),
    *(["</", "think", ">{", ">\n", "</think>", "k>ab"]),
)
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]",:.-<>/\\ \n'
TOKENS = [b"<|eos|>", b"<|special|>", *(text.encode() for text in (*CHARACTERS, *WORDS))]
TOKENS += [bytes([65 + at]) for at in range(VOCAB_SIZE - len(TOKENS))]  # capital letters, as many as there is room for


class TinyTokenizer(Tokenizer):
    """TOKENS; writes the longest that fits."""

    def __init__(self) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(TOKENS) if token_id not in (EOS, SPECIAL)}
        super().__init__(
            vocab_size=len(TOKENS),
            special_ids=(EOS, SPECIAL),
            bos_token_id=None,
            eos_token_ids=(EOS,),
            special_tokens={},
            chat_template=None,
            strips_leading_space=False,
        )

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id] if 0 <= token_id < len(TOKENS) else b""

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        raw, ids = text.encode(), []
        while raw:
            token = next(raw[:n] for n in range(8, 0, -1) if raw[:n] in self._ids)
            ids.append(self._ids[token])
            raw = raw[len(token) :]
        return ids


@functools.cache
def tiny_vocabulary() -> Vocabulary:
    return Vocabulary(TinyTokenizer(), VOCAB_SIZE, (EOS,))


@functools.cache
def tiny_backend() -> LlguidanceBackend:
    return LlguidanceBackend(tiny_vocabulary())


def ids(text: str) -> list[int]:
    """As the tokenizer writes it."""
    return tiny_vocabulary().encode(text.encode())


def text_of(token_ids: list[int]) -> str:
    """Without end-of-text."""
    return b"".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS).decode()


def lark(source: str, **fields: Any) -> Grammar:
    return Grammar(sources=(GrammarSource("llguidance", "grammar", wrap(source)),), **fields)


class TinyCompilation:
    """Done at once, or when its compiler lets it be."""

    def __init__(self, compiler: "TinyCompiler", grammar: Grammar) -> None:
        self.compiler, self.grammar = compiler, grammar

    @property
    def done(self) -> bool:
        return not self.compiler.held

    def result(self) -> CompiledGrammar:
        return self.compiler.compiled(self.grammar)

    @property
    def ending(self) -> tuple[int, ...] | None:
        if not self.grammar.close_on_length:
            return None
        found = find_ending(self.result().matcher(), tiny_vocabulary())
        return None if found is None else tuple(found)

    @property
    def seconds(self) -> float:
        return 0.0


class TinyCompiler:
    """An interface.Compiler that compiles in the caller's thread.

    held   nothing is done while this is true
    waits  how often somebody waited
    """

    def __init__(self, *, held: bool = False, backend: Backend | None = None) -> None:
        self.held = held
        self.waits = 0
        self.closed = False
        self.vocabulary = tiny_vocabulary()
        self._backend = backend or tiny_backend()
        self._compiled: dict[Grammar, CompiledGrammar] = {}

    def submit(self, grammar: Grammar) -> TinyCompilation:
        return TinyCompilation(self, grammar)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        if grammar not in self._compiled:
            try:
                self._compiled[grammar] = self._backend.compile(grammar.sources[0])
            except ValueError as error:
                raise GrammarRefused(f"Refused: {error}", param=grammar.where) from None
        return self._compiled[grammar]

    def check(self, grammar: Grammar) -> Check:
        raise AssertionError("nobody asks")

    def wait(self, seconds: float) -> None:
        self.waits += 1

    def backend(self, name: str) -> Backend:
        return self._backend

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


def constrained_continuation(
    prompt: list[int],
    grammar: Grammar,
    max_tokens: int,
    *,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_ids: tuple[int, ...] = (),
) -> tuple[list[int], str]:
    """What the stub generates under a grammar, alone, token by token, and why it ends: "stop" or "length"."""
    matcher = tiny_backend().compile(grammar.sources[0]).matcher()
    output: list[int] = []
    row = np.zeros(tiny_vocabulary().num_words, np.int32)
    while len(output) < max_tokens:
        if matcher.is_stopped:
            return output, "stop"
        matcher.fill(row)
        allowed = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        if matcher.is_complete:
            allowed |= set(stop_ids)
        unwanted = ({EOS} - set(stop_ids) if ignore_eos else set()) | (
            {EOS, *stop_ids} if len(output) < min_tokens else set()
        )
        allowed = allowed - unwanted or allowed
        bits = np.zeros(32 * len(row), np.uint8)
        bits[sorted(allowed)] = 1
        token = next_allowed([*prompt, *output], np.packbits(bits, bitorder="little").view(np.int32))
        assert token is not None
        output.append(token)
        if (token in stop_ids and len(output) >= min_tokens) or not matcher.accept(token):
            return output, "stop"
    return output, "stop" if matcher.is_stopped else "length"
