"""Rotary position embedding: the frequencies that queries and keys are turned by, and how they were stretched to longer contexts.

    rope = rope_from_hf(fields, rope_section, max_position_embeddings=131072)
    rope.inverse_frequencies(rotary_dim)                # radians per position of each pair of dimensions

Knows no files and no torch. RoFormer, arXiv:2104.09864.
"""

import math
from collections.abc import Sequence

import msgspec

from trunkline.errors import ModelError
from trunkline.models.fields import MAX_TOKENS, Fields

HF_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
GGUF_KINDS = ("none", "linear", "yarn", "longrope")
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6  # outside of these frequencies overflow
MIN_THETA, MAX_THETA = 1.0, 1e15


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One way to turn. All of it follows from the position alone: cached keys serve whoever has the same prefix, however long the rest.

    kind "default"   frequency i of rotary_dim/2 is theta^(-2i/rotary_dim)
         "none"      0: nothing is turned                                               NoPE, arXiv:2305.19466
         "linear"    all frequencies divided by `factor`                                arXiv:2306.15595
         "llama3"    slow ones divided by `factor`, fast ones kept, those between blended. Slow: fewer turns in the
                     original context than `low_freq_factor`; fast: more than `high_freq_factor`        Llama 3.1
         "yarn"      the same with another blend, linear in i: fast are more than `beta_fast` turns, slow fewer than `beta_slow`;
                     `truncate`: where the blend begins and ends is rounded to whole i  arXiv:2309.00071
         "factors"   frequency i divided by factors[i]: what a GGUF file stores instead of llama3's four numbers
         "longrope"  the same, with `long_factors` where more than the original context is served   arXiv:2402.13753
         "dynamic"   theta grows with what is served beyond the original context        NTK-aware scaling
    attention_factor  queries and keys are multiplied by it as they are turned

    The last two depend on how long contexts get. `at_length` settles that for all of them, by what a server allows: transformers looks
    at the longest sequence of each call, which would turn a cached key one way and its neighbour another.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def at_length(self, tokens: int, rotary_dim: int) -> "RopeConfig":
        """As it is for contexts of up to so many tokens."""
        original = self.original_max_position_embeddings
        if self.kind == "longrope":
            factors = self.long_factors if tokens > original else self.factors
            return msgspec.structs.replace(self, kind="factors", factors=factors, long_factors=())
        if self.kind == "dynamic":
            stretch = self.factor * max(tokens, original) / original - (self.factor - 1)
            theta = self.theta * stretch ** (rotary_dim / (rotary_dim - 2))
            return RopeConfig(theta=theta, attention_factor=self.attention_factor)
        return self

    def inverse_frequencies(self, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair of dimensions: rotary_dim/2 floats, in float64, fastest first."""
        if self.kind == "none":
            return (0.0,) * (rotary_dim // 2)
        frequencies = [self.theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
        match self.kind:
            case "linear":
                return tuple(f / self.factor for f in frequencies)
            case "factors" | "longrope":
                return tuple(f / divisor for f, divisor in zip(frequencies, self.factors, strict=True))
            case "llama3":
                return tuple(f * self._blended(self._fast_by_turns(f)) for f in frequencies)
            case "yarn":
                first, last = self._yarn_range(rotary_dim)
                ramp = [(i - first) / (last - first) for i in range(len(frequencies))]
                return tuple(f * self._blended(1 - x) for f, x in zip(frequencies, ramp, strict=True))
        return tuple(frequencies)

    def check(self, rotary_dim: int) -> None:
        """Raises ModelError if there is not one factor for each pair of dimensions, or too few of these."""
        if self.kind == "dynamic" and rotary_dim < 4:
            raise ModelError(f"RoPE turns {rotary_dim} numbers of each head; allowed are at least 4 if it is dynamic.")
        lists = {"factors": (self.factors,), "longrope": (self.factors, self.long_factors)}.get(self.kind, ())
        for factors in lists:
            if len(factors) != rotary_dim // 2:
                raise ModelError(
                    f"The model has {len(factors)} RoPE factors, and RoPE turns {rotary_dim} numbers of each head; allowed are"
                    f" {rotary_dim // 2} factors, half as many."
                )

    def _blended(self, fast: float) -> float:
        """What is left of a frequency: all of a fast one, 1/factor of a slow one."""
        fast = min(1.0, max(0.0, fast))
        return fast + (1 - fast) / self.factor

    def _fast_by_turns(self, frequency: float) -> float:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        return (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)

    def _yarn_range(self, rotary_dim: int) -> tuple[float, float]:
        """The pair of dimensions that is the last fast one, and the first slow one."""

        def pair_of(turns: float) -> float:
            ratio = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotary_dim * math.log(ratio) / (2 * math.log(self.theta))

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        return first, last if last != first else last + 0.001


NOT_TURNED = RopeConfig(kind="none")


def rope_from_hf(
    fields: Fields, rope: Fields, *, theta: float = 10000.0, max_position_embeddings: int = MAX_TOKENS
) -> RopeConfig:
    """From a section of config.json.

    rope   the object `rope_scaling` or `rope_parameters`, or that of one kind of layer in the latter
    theta  where neither says
    """
    holder = rope if rope.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", MIN_THETA, MAX_THETA, default=theta)
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(key) or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in HF_KINDS:
        raise rope.refuse(key, ", ".join(map(repr, HF_KINDS[:-1])) + f" or {HF_KINDS[-1]!r}")
    if kind == "default":
        return RopeConfig(theta=theta)
    # What Phi-3 says outside this section comes first, as it does to transformers.
    says = fields if fields.get("original_max_position_embeddings") is not None else rope
    original = says.integer("original_max_position_embeddings", 1, MAX_TOKENS, default=max_position_embeddings)
    if kind == "longrope":
        return _hf_longrope(rope, theta, original, max_position_embeddings / original)
    factor = rope.number("factor", MIN_FACTOR, MAX_FACTOR)
    match kind:
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor)
        case "dynamic":
            return RopeConfig(
                theta=theta, kind="dynamic", factor=factor, original_max_position_embeddings=max_position_embeddings
            )
        case "llama3":
            return _hf_llama3(rope, theta, factor, original)
    return _hf_yarn(rope, theta, factor, original)


def _hf_llama3(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", MIN_FACTOR, MAX_FACTOR)
    high = rope.number("high_freq_factor", MIN_FACTOR, MAX_FACTOR)
    if high <= low:
        raise rope.refuse("high_freq_factor", f"a number greater than 'low_freq_factor', which is {low:g}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _hf_yarn(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    default = _yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # DeepSeek's
        scales = [rope.number(key, MIN_FACTOR, MAX_FACTOR) for key in ("mscale", "mscale_all_dim")]
        default = _yarn_attention_factor(factor, scales[0]) / _yarn_attention_factor(factor, scales[1])
    fast, slow = (
        rope.number(key, MIN_FACTOR, MAX_FACTOR, default=d) for key, d in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise rope.refuse("beta_fast", f"a number that is at least 'beta_slow', which is {slow:g}")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", default=True),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", MIN_FACTOR, MAX_FACTOR, default=default),
    )


def _hf_longrope(rope: Fields, theta: float, original: int, stretched: float) -> RopeConfig:
    factor = rope.number("factor", MIN_FACTOR, MAX_FACTOR, default=stretched)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    factors = []
    for key in ("short_factor", "long_factor"):
        if rope.get(key) is None:
            raise ModelError(f"{rope.where}: '{key}' is missing.")
        factors.append(rope.numbers(key, MIN_FACTOR, MAX_FACTOR))
    return RopeConfig(
        theta=theta,
        kind="longrope",
        factors=factors[0],
        long_factors=factors[1],
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", MIN_FACTOR, MAX_FACTOR, default=default),
    )


def _yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


# Tensors of a GGUF file that belong to its RoPE, by the fields of GGUFFactors.
GGUF_FACTORS = {"every": "rope_freqs.weight", "short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}


class GGUFFactors(msgspec.Struct, frozen=True, kw_only=True):
    """What these tensors hold: one for every context, or one for short and one for long ones."""

    every: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


def rope_from_gguf(
    fields: Fields, prefix: str, stored: GGUFFactors, *, max_position_embeddings: int = MAX_TOKENS
) -> RopeConfig:
    """From a GGUF file's metadata under `prefix`, e.g. "llama", and what it stores as tensors."""
    theta = fields.number(f"{prefix}.rope.freq_base", MIN_THETA, MAX_THETA, default=10000.0)
    for name, tensor in GGUF_FACTORS.items():
        _check_factors(tensor, getattr(stored, name))
    scaling = f"{prefix}.rope.scaling"
    original = fields.integer(f"{scaling}.original_context_length", 1, MAX_TOKENS, default=max_position_embeddings)
    attention_factor = fields.number(f"{scaling}.attn_factor", MIN_FACTOR, MAX_FACTOR, default=1.0)
    if stored.long:
        return RopeConfig(
            theta=theta,
            kind="longrope",
            factors=stored.short,
            long_factors=stored.long,
            original_max_position_embeddings=original,
            attention_factor=attention_factor,
        )
    kind = fields.get(f"{scaling}.type") or "linear"  # as llama.cpp has it: a factor alone means linear scaling
    if kind not in GGUF_KINDS[:-1]:
        wanted = "'none', 'linear' or 'yarn', or 'longrope' with its factors as tensors"
        raise fields.refuse(f"{scaling}.type", wanted)
    factor = 1.0
    if kind != "none":
        older = fields.number(f"{prefix}.rope.scale_linear", MIN_FACTOR, MAX_FACTOR, default=1.0)
        factor = fields.number(f"{scaling}.factor", MIN_FACTOR, MAX_FACTOR, default=older)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=attention_factor * _yarn_attention_factor(factor),
        )
    if stored.every:
        return RopeConfig(theta=theta, kind="factors", factors=tuple(factor * divisor for divisor in stored.every))
    return RopeConfig(theta=theta) if factor == 1 else RopeConfig(theta=theta, kind="linear", factor=factor)


def _check_factors(tensor: str, factors: Sequence[float]) -> None:
    for divisor in factors:
        if not 0 < divisor < math.inf:
            raise ModelError(f"GGUF tensor '{tensor}' holds {divisor}; allowed are finite numbers above 0.")
