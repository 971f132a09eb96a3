"""What a model looks like: sizes, heads, RoPE, special ids. Read from Hugging Face's config.json or from GGUF metadata.

    config = ModelConfig.from_hf(json_object)
    config.num_heads, config.head_dim                       # 9, 64
    config.rope.inverse_frequencies(config.head_dim)        # 32 floats

Knows no files, tensors or torch. Every complaint is a ModelError that names the key, the value seen and those allowed.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from trunkline.errors import ModelError, shown

MAX_TOKENS = 2**27  # of context: more than any model claims, and positions stay exact in int32
MAX_VOCAB = 2**24  # token ids; the largest vocabularies have 2**18


class Architecture(NamedTuple):
    """One architecture in both spellings."""

    hf: str  # in `architectures` of config.json
    bare: str  # the same without an output layer: what embedding models are published as
    gguf: str  # in `general.architecture`


ARCHITECTURES = {"llama": Architecture(hf="LlamaForCausalLM", bare="LlamaModel", gguf="llama")}
CLASSIFIER = "ForSequenceClassification"  # how Hugging Face's names of models with a classifier's head end
SUPPORTED = (
    f"{', '.join(a.hf for a in ARCHITECTURES.values())} (Hugging Face)"
    f" and {', '.join(a.gguf for a in ARCHITECTURES.values())} (GGUF)"
)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding, and how it was stretched to longer contexts.

    kind "default"   frequency i of head_dim/2 is theta^(-2i/head_dim)                  RoFormer, arXiv:2104.09864
         "linear"    all frequencies divided by `factor`                                arXiv:2306.15595
         "llama3"    slow ones divided by `factor`, fast ones kept, those between blended. Slow: fewer turns in the
                     original context than `low_freq_factor`; fast: more than `high_freq_factor`        Llama 3.1
         "factors"   frequency i divided by factors[i]: what a GGUF file stores instead of llama3's four numbers
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair of dimensions: head_dim/2 floats, in float64, fastest first."""
        frequencies = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return tuple(f / self.factor for f in frequencies)
        if self.kind == "factors":
            return tuple(f / divisor for f, divisor in zip(frequencies, self.factors, strict=True))
        if self.kind == "llama3":
            return tuple(f * self._kept(f) for f in frequencies)
        return tuple(frequencies)

    def _kept(self, frequency: float) -> float:
        """Llama 3.1's share of `frequency` that is left after scaling, between 1/factor and 1."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        fast = min(1.0, max(0.0, fast))
        return fast + (1 - fast) / self.factor


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Sizes are counts of elements; a linear layer's weight is [out, in].

    Raises ModelError when the sizes contradict each other.
    """

    architecture: str = "llama"  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int  # of keys and of values; query head h reads kv head h // (num_heads // num_kv_heads)
    head_dim: int
    max_position_embeddings: int  # tokens: the longest context the model was made for
    rms_norm_eps: float
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False  # the output layer is the embedding matrix
    has_head: bool = True  # False: no output layer, so it writes no text; the embedding matrix stands in for it
    attention_bias: bool = False  # q, k, v and o have biases
    mlp_bias: bool = False  # gate, up and down have biases
    dtype: str = "float32"  # float32, float16 or bfloat16: what the weights lose little in; quantized ones: float16
    quantization: str | None = None  # ggml type of most weights, e.g. "Q4_1"; None: not quantized
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends the text

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"The model has {self.num_heads} query heads and {self.num_kv_heads} key-value heads; the second"
                " must divide the first."
            )
        if self.head_dim % 2:
            raise ModelError(f"The model's head size is {self.head_dim}; RoPE allows only even sizes.")
        if self.rope.kind == "factors" and len(self.rope.factors) != self.head_dim // 2:
            raise ModelError(
                f"The model has {len(self.rope.factors)} RoPE factors for heads of size {self.head_dim};"
                f" allowed are {self.head_dim // 2}, half of that size."
            )
        for token_id in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if token_id >= self.vocab_size:
                raise ModelError(
                    f"The model's begin- or end-of-text id is {token_id}, but the vocabulary has {self.vocab_size}"
                    " entries."
                )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, stored_dtype: str = "float32"
    ) -> "ModelConfig":
        """From the object in config.json, and the one in generation_config.json for more end-of-text ids.

        Reads RoPE both as `rope_scaling` and `rope_theta` and as transformers 5's `rope_parameters`. Missing optional
        keys mean what they mean to transformers. `stored_dtype` stands in for a config.json that names no dtype.
        """
        fields = _Fields("config.json", config)
        architecture = _hf_architecture(fields)
        has_head = fields.get("architectures") != [ARCHITECTURES[architecture].bare]
        _refuse_hf_variants(fields)
        num_heads = fields.integer("num_attention_heads", 1, 2048)
        hidden_size = fields.integer("hidden_size", 1, 2**17)
        max_position_embeddings = fields.integer("max_position_embeddings", 1, MAX_TOKENS)
        generation_fields = _Fields("generation_config.json", generation or {})
        eos_token_ids = (*fields.token_ids("eos_token_id"), *generation_fields.token_ids("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 1, 2**20),
            num_layers=fields.integer("num_hidden_layers", 1, 1024),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", 1, 2048, default=num_heads),
            head_dim=_head_dim(fields, "head_dim", hidden_size, num_heads),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.number("rms_norm_eps", 0, 1, default=1e-6),
            rope=_hf_rope(fields, max_position_embeddings),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False) or not has_head,
            has_head=has_head,
            attention_bias=fields.boolean("attention_bias", default=False),
            mlp_bias=fields.boolean("mlp_bias", default=False),
            dtype=_hf_dtype(fields, stored_dtype),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        *,
        rope_factors: Sequence[float] = (),
        dtype: str = "float32",
        quantization: str | None = None,
    ) -> "ModelConfig":
        """From a GGUF file's metadata, and the names of its tensors, which say what the metadata leaves out: tied
        embeddings and biases. `rope_factors` are the values of the tensor `rope_freqs.weight`, if the file has it.

        Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
        """
        fields = _Fields("GGUF metadata", metadata)
        architecture = _gguf_architecture(fields)
        prefix = ARCHITECTURES[architecture].gguf
        _refuse_gguf_variants(fields, prefix)
        num_heads = fields.integer(f"{prefix}.attention.head_count", 1, 2048)
        hidden_size = fields.integer(f"{prefix}.embedding_length", 1, 2**17)
        head_dim = _head_dim(fields, f"{prefix}.attention.key_length", hidden_size, num_heads)
        for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
            if (seen := fields.integer(key, 1, 2**17, default=head_dim)) != head_dim:
                raise ModelError(f"GGUF metadata: '{key}' is {seen}; allowed is the head size of the keys, {head_dim}.")
        eos_keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
        eos_token_ids = [token_id for key in eos_keys for token_id in fields.token_ids(key)]
        tokens = fields.get("tokenizer.ggml.tokens")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer(f"{prefix}.vocab_size", 1, MAX_VOCAB, default=len(tokens) if tokens else None),
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{prefix}.feed_forward_length", 1, 2**20),
            num_layers=fields.integer(f"{prefix}.block_count", 1, 1024),
            num_heads=num_heads,
            num_kv_heads=fields.integer(f"{prefix}.attention.head_count_kv", 1, 2048, default=num_heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{prefix}.context_length", 1, MAX_TOKENS),
            rms_norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon", 0, 1),
            rope=_gguf_rope(fields, prefix, rope_factors),
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            dtype=dtype,
            quantization=quantization,
            bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        )


class _Fields:
    """Checked look-ups in the settings of one file. A null is the same as a missing key, as it is to transformers."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def refuse(self, key: str, allowed: str) -> ModelError:
        return ModelError(f"{self.where}: '{key}' is {shown(self.get(key))}; allowed is {allowed}.")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        seen = self._present(key, default)
        if isinstance(seen, bool) or not isinstance(seen, int) or not low <= seen <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return seen

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Greater than `low`, at most `high`; `default` None: the key must be there."""
        seen = self._present(key, default)
        if isinstance(seen, bool) or not isinstance(seen, int | float) or not low < seen <= high:
            raise self.refuse(key, f"a number greater than {low:g} and at most {high:g}")
        return float(seen)

    def boolean(self, key: str, *, default: bool) -> bool:
        seen = self._present(key, default)
        if not isinstance(seen, bool):
            raise self.refuse(key, "true or false")
        return seen

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; () if there is none."""
        seen = self.get(key)
        if seen is None:
            return ()
        token_ids = seen if isinstance(seen, list) else [seen]
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCAB:
                raise self.refuse(key, "a token id or a list of token ids")
        return tuple(token_ids)

    def section(self, key: str) -> "_Fields":
        """The object under `key`, empty if there is none."""
        seen = self.get(key)
        if seen is not None and not isinstance(seen, Mapping):
            raise self.refuse(key, "an object")
        return _Fields(f"{self.where}: {key}", seen or {})

    def _present(self, key: str, default: Any) -> Any:
        seen = self.get(key)
        if seen is None and default is None:
            raise ModelError(f"{self.where}: '{key}' is missing.")
        return default if seen is None else seen


def _head_dim(fields: _Fields, key: str, hidden_size: int, num_heads: int) -> int:
    """What `key` says; without it the heads share the hidden size evenly."""
    if fields.get(key) is None and hidden_size % num_heads:
        raise ModelError(
            f"{fields.where}: the hidden size is {hidden_size} and the number of heads {num_heads}; without '{key}'"
            " the second must divide the first."
        )
    return fields.integer(key, 2, 1024, default=hidden_size // num_heads)


def _hf_architecture(fields: _Fields) -> str:
    """The key of ARCHITECTURES; `model_type` decides when `architectures` is missing."""
    names = fields.get("architectures") or [fields.get("model_type")]
    if names == [None]:
        raise ModelError(f"config.json: 'architectures' is missing; supported is {SUPPORTED}.")
    for key, architecture in ARCHITECTURES.items():
        if names in ([architecture.hf], [architecture.bare], [key]):
            return key
    seen = ", ".join(map(str, names)) if isinstance(names, list) else names
    if str(seen).endswith(CLASSIFIER):
        raise ModelError(
            f"config.json: the architecture is {seen!r}, a cross-encoder or another classifier, which cannot be served: /v1/rerank and"
            f" /v1/score compare embeddings of a language model; supported is {SUPPORTED}."
        )
    raise ModelError(f"config.json: the architecture is {seen!r}; supported is {SUPPORTED}.")


def _refuse_hf_variants(fields: _Fields) -> None:
    """Settings that change the arithmetic in ways that are not built: better no answer than a wrong one."""
    for key in ("quantization_config", "compression_config"):
        if fields.get(key) is not None:
            method = fields.section(key).get("quant_method")
            raise ModelError(
                f"config.json: the weights are quantized ({key}, method {method!r}); supported are float32, float16 and"
                f" bfloat16 safetensors, and quantized GGUF files, of {SUPPORTED}."
            )
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        raise ModelError(
            f"config.json: 'sliding_window' is {fields.get('sliding_window')!r}; supported is attention to the whole"
            f" context only, as in {SUPPORTED}."
        )
    if fields.get("hidden_act") not in (None, "silu", "swish"):  # two names of one function
        raise fields.refuse("hidden_act", "'silu'")


def _hf_dtype(fields: _Fields, stored: str) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    seen = fields.get(key)
    if seen is None:
        return stored
    if seen not in ("float32", "float16", "bfloat16"):
        raise fields.refuse(key, "'float32', 'float16' or 'bfloat16'")
    return str(seen)


def _hf_rope(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    # transformers 5 prefers an old-style `rope_scaling` over `rope_parameters` when a file has both.
    rope = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    holder = rope if rope.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", 0, 1e15, default=10000.0)
    for section in (rope, fields):
        if section.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise section.refuse("partial_rotary_factor", "1: RoPE turns whole heads")
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(key) or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3"):
        raise rope.refuse(key, "'default', 'linear' or 'llama3'")
    factor = rope.number("factor", 0, 1e6)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low = rope.number("low_freq_factor", 0, 1e6)
    high = rope.number("high_freq_factor", 0, 1e6)
    if high <= low:
        raise rope.refuse("high_freq_factor", f"a number greater than 'low_freq_factor', which is {low:g}")
    original = rope.integer("original_max_position_embeddings", 1, MAX_TOKENS, default=max_position_embeddings)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _gguf_architecture(fields: _Fields) -> str:
    seen = fields.get("general.architecture")
    if seen is None:
        raise ModelError("GGUF metadata: 'general.architecture' is missing.")
    for key, architecture in ARCHITECTURES.items():
        if seen == architecture.gguf:
            return key
    raise ModelError(f"GGUF metadata: the architecture is {seen!r}; supported is {SUPPORTED}.")


def _refuse_gguf_variants(fields: _Fields, prefix: str) -> None:
    """The same for GGUF, where one name ("llama") covers more than one arithmetic."""
    for key, meaning in (
        (f"{prefix}.expert_count", "a mixture of experts"),
        (f"{prefix}.attention.sliding_window", "sliding-window attention"),
    ):
        if fields.get(key):
            raise ModelError(
                f"GGUF metadata: '{key}' is {fields.get(key)!r}, {meaning}; supported is {SUPPORTED} without it."
            )
    if fields.get(f"{prefix}.attention.causal") is False:
        raise fields.refuse(f"{prefix}.attention.causal", "true: the model must write text from left to right")
    if (fields.get("split.count") or 1) != 1:
        raise fields.refuse("split.count", "1: join the parts with llama-gguf-split --merge")


def _gguf_rope(fields: _Fields, prefix: str, factors: Sequence[float]) -> RopeConfig:
    theta = fields.number(f"{prefix}.rope.freq_base", 0, 1e15, default=10000.0)
    type_key = f"{prefix}.rope.scaling.type"
    kind = fields.get(type_key) or "linear"  # as llama.cpp has it: a factor alone means linear scaling
    if kind not in ("none", "linear"):
        raise fields.refuse(type_key, "'none' or 'linear'")
    factor = 1.0
    if kind == "linear":
        older = fields.number(f"{prefix}.rope.scale_linear", 0, 1e6, default=1.0)
        factor = fields.number(f"{prefix}.rope.scaling.factor", 0, 1e6, default=older)
    if factors:
        for divisor in factors:
            if not 0 < divisor < math.inf:
                raise ModelError(
                    f"GGUF tensor 'rope_freqs.weight' holds {divisor}; allowed are finite numbers above 0."
                )
        return RopeConfig(theta=theta, kind="factors", factors=tuple(factor * divisor for divisor in factors))
    return RopeConfig(theta=theta) if factor == 1 else RopeConfig(theta=theta, kind="linear", factor=factor)
