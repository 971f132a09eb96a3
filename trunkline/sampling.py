"""How the next token is chosen, and when a request ends: one frozen struct, checked when it is made."""

import copy
import difflib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trunkline.constraint import Constraint
from trunkline.errors import ContextLengthExceeded, InvalidParameter

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024
INT32_MAX = 2**31 - 1

# Other libraries' names of what `constraint` says here, each with the kind of Constraint that it is.
CONSTRAINT_NAMES: Mapping[str, str] = {
    "structured_outputs": "json_schema",
    "guided_decoding": "json_schema",
    "response_format": "json_schema",
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "grammar": "ebnf",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}


class _WithNames(msgspec.StructMeta):
    """Its structs name the nearest field to whoever misspells one."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        unknown = next((name for name in fields if name not in cls.__struct_fields__), None)
        if unknown is None:
            return super().__call__(*args, **fields)
        near = difflib.get_close_matches(unknown, cls.__struct_fields__, n=1)
        if unknown in CONSTRAINT_NAMES:
            hint = f"Give constraint=Constraint({CONSTRAINT_NAMES[unknown]}=…); `from trunkline import Constraint`."
        else:
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(cls.__struct_fields__)}."
        raise TypeError(f"{cls.__name__} has no parameter {unknown!r}. {hint}")


class SamplingParams(msgspec.Struct, metaclass=_WithNames, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping, as in the OpenAI API and vLLM.

    SamplingParams(temperature=0, max_tokens=64)              # greedy
    SamplingParams(temperature=0.8, top_p=0.95, seed=7)       # same seed, same text, whatever the batch
    SamplingParams(stop="\\n\\n", stop_token_ids=[2])         # either ends the text
    SamplingParams(logprobs=5)                                # 5 alternatives beside each token
    SamplingParams(max_tokens=16, ignore_eos=True)            # exactly 16 tokens
    SamplingParams(bad_words=["sorry"])                       # one word less
    SamplingParams(constraint=Constraint(regex="[0-9]{3}"))   # three digits

    Sequences are kept as tuples; a single `stop` may be a string, and None stands for an empty one.

    Raises InvalidParameter, naming the parameter, for a value out of range; TypeError, naming the nearest, for one that there is not.
    """

    n: int = 1  # independent continuations of the prompt
    max_tokens: int | None = None  # None: until the model's context is full
    min_tokens: int = 0  # end-of-text and stop ids are impossible before this many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0  # nucleus: the smallest set of tokens whose probability reaches top_p
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    presence_penalty: float = 0.0  # subtracted once from every token already generated
    frequency_penalty: float = 0.0  # subtracted once per occurrence
    repetition_penalty: float = 1.0  # divides (or multiplies, if negative) logits of tokens in prompt or output
    logit_bias: Mapping[int, float] = {}  # token id -> added to its logit
    seed: int | None = None  # any 64-bit integer; continuation i of n uses seed + i; None: a fresh one
    logprobs: int | None = None  # alternatives reported beside each chosen token; 0: only the chosen one
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None  # no others are chosen; None: all may be
    bad_words: Sequence[str] = ()  # never completed: their last token is impossible after the ones before it
    constraint: Constraint | None = None  # what the text must follow

    def __post_init__(self) -> None:
        self._make_tuples()
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter.of("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        _number("temperature", self.temperature, 0, 2)
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for param in ("logprobs", "prompt_logprobs"):
            if getattr(self, param) is not None:
                _integer(param, getattr(self, param), 0, MAX_LOGPROBS)
        self._check_logit_bias()
        self._check_stops()
        self._check_words()
        for param in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, param), bool):
                raise InvalidParameter.of(param, getattr(self, param), "true or false")

        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise InvalidParameter.of("constraint", self.constraint, "a trunkline.Constraint")

    def _make_tuples(self) -> None:
        """Of what people write, and of what a decoder gives."""
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for param in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            given = getattr(self, param)
            if isinstance(given, list):
                msgspec.structs.force_setattr(self, param, tuple(given))
            elif given is None and param != "allowed_token_ids":
                msgspec.structs.force_setattr(self, param, ())

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter.of("logit_bias", self.logit_bias, "an object of token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter.of("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, INT32_MAX)
            _number("logit_bias", bias, -100, 100)

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise InvalidParameter.of("stop", self.stop, "a string or a list of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter.of("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for stop in self.stop:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise InvalidParameter.of("stop", stop, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidParameter.of("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter.of(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, INT32_MAX)

    def _check_words(self) -> None:
        """What may be chosen, and what may not; a constraint says both in its own way."""
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not isinstance(allowed, tuple):
                raise InvalidParameter.of("allowed_token_ids", allowed, "a list of token ids")
            if not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
                raise InvalidParameter.of("allowed_token_ids", f"{len(allowed)} ids", f"1 to {MAX_ALLOWED_TOKEN_IDS}")
            for token_id in allowed:
                _integer("allowed_token_ids", token_id, 0, INT32_MAX)
        if not isinstance(self.bad_words, tuple):
            raise InvalidParameter.of("bad_words", self.bad_words, "a list of strings")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParameter.of("bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
                raise InvalidParameter.of("bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters")
        for param, given in (("allowed_token_ids", allowed), ("bad_words", self.bad_words)):
            if given and self.constraint is not None:
                raise InvalidParameter(
                    f"'{param}' is given, and the answer must follow a schema, a grammar or tools, which already say what may be"
                    " written; leave one of them out.",
                    param=param,
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidParameter for a token id of a parameter that the model does not have."""
        for param in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, param) or ():
                if token_id >= vocab_size:
                    raise InvalidParameter.of(param, token_id, f"token ids from 0 to {vocab_size - 1}")

    def check_length(self, num_prompt: int, *, max_model_len: int, num_cache_tokens: int, what: str = "prompt") -> None:
        """Raises ContextLengthExceeded if a prompt of `num_prompt` tokens, and one to follow if any is wanted, can never fit.

        max_model_len     tokens of one request that the model can read
        num_cache_tokens  tokens that the whole KV cache holds
        what              the parameter to name in the error
        """
        longest = min(max_model_len, num_cache_tokens)
        if num_prompt + (self.max_tokens != 0) > longest:
            cause = "" if longest == max_model_len else f" (The whole KV cache holds {longest} tokens.)"
            raise ContextLengthExceeded(limit=longest, seen=num_prompt, what=what, cause=cause)

    def continuations(self, **values: Any) -> "list[SamplingParams]":
        """One for each of the `n` continuations: itself with n = 1, and the seed + i modulo 2**64 for continuation i; and with
        `values` as `changed` takes them."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [self.changed(n=1, seed=(seed + i) % 2**64, **values) for i in range(self.n)]

    def changed(self, **values: Any) -> "SamplingParams":
        """A copy with other values, known to be valid: unlike msgspec.structs.replace it does not check them all once more."""
        copied = copy.copy(self)
        for param, value in values.items():
            msgspec.structs.force_setattr(copied, param, value)
        return copied

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        """True if the choice depends on which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _integer(param: str, seen: Any, low: int, high: int) -> None:
    if type(seen) is int and low <= seen <= high:  # nearly always
        return
    if isinstance(seen, bool) or not isinstance(seen, int) or not low <= seen <= high:
        raise InvalidParameter.of(param, seen, f"an integer from {low} to {high}")


def _number(param: str, seen: Any, low: float, high: float) -> None:
    if type(seen) is float and low <= seen <= high:  # nearly always
        return
    if (
        isinstance(seen, bool)
        or not isinstance(seen, int | float)
        or not math.isfinite(seen)
        or not low <= seen <= high
    ):
        raise InvalidParameter.of(param, seen, f"a number from {low:g} to {high:g}")
