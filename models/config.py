"""What a model looks like: sizes, heads, RoPE, special ids. Read from Hugging Face's config.json or from GGUF metadata.

    config = ModelConfig.from_hf(json_object)
    config.num_heads, config.head_dim                       # 9, 64
    config.rope_of(layer=0).inverse_frequencies(config.rotary_dim)    # 32 floats

Knows no files, tensors or torch. Every complaint is a ModelError that names the key, the value seen and those allowed. What one
architecture alone has is read in architectures.py.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from trunkline.errors import ModelError, shown
from trunkline.models.architectures import ARCHITECTURES, SUPPORTED, Architecture
from trunkline.models.fields import MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Fields
from trunkline.models.rope import NOT_TURNED, GGUFFactors, RopeConfig, rope_from_gguf, rope_from_hf

CLASSIFIER = "ForSequenceClassification"  # how Hugging Face's names of models with a classifier's head end
MAX_INNER = 2**20  # units of an MLP
NO_FACTORS = GGUFFactors()


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
    rotary_dim: int = 0  # numbers of each head that RoPE turns, the first ones; 0 stands for all and becomes head_dim
    max_position_embeddings: int  # tokens: the longest context the model was made for
    rms_norm_eps: float
    norm_offset: float = 0.0  # is added to the norms' weights, as they are stored
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # in layers with a window, if another one
    unrotated_layers: tuple[int, ...] = ()  # which use no RoPE
    windows: tuple[int, ...] = ()  # of each layer, see window_of; (): none has one
    attention_scale: float = 0.0  # scores are multiplied by it; 0 stands for the usual and becomes head_dim ** -0.5
    attention_soft_cap: float = 0.0  # score becomes soft_cap * tanh(score / soft_cap); 0: it stays    arXiv:2408.00118
    logit_soft_cap: float = 0.0  # the same of logits
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    qk_norm: bool = False  # queries and keys are normed, head by head, before RoPE
    post_norms: bool = False  # what attention and MLP add is normed, too
    num_experts: int = 0  # of a mixture that stands in for the MLP; 0: there is none
    experts_per_token: int = 0
    expert_size: int = 0  # of one expert, as intermediate_size is of an MLP
    normalize_experts: bool = False  # the weights of a token's experts are made to sum to 1
    dense_layers: tuple[int, ...] = ()  # which have an MLP all the same
    activation: Literal["silu", "gelu_tanh"] = "silu"  # in the MLP; see kernels.interface.Kernels.gated_mul
    tie_word_embeddings: bool = False  # the output layer is the embedding matrix
    has_head: bool = True  # False: no output layer, so it writes no text; the embedding matrix stands in for it
    qkv_bias: bool = False  # q, k and v have biases
    output_bias: bool = False  # attention's output layer, o, has one
    mlp_bias: bool = False  # gate, up and down have biases
    dtype: str = "float32"  # float32, float16 or bfloat16: what the weights lose little in; quantized ones: float16
    quantization: str | None = None  # ggml type of most weights, e.g. "Q4_1"; of a folder e.g. "awq"; None: none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends the text

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"The model has {self.num_heads} query heads and {self.num_kv_heads} key-value heads; the second"
                " must divide the first."
            )
        if self.head_dim % 2 or self.rotary_dim % 2:
            raise ModelError(
                f"The model's head size is {self.head_dim}, of which RoPE turns {self.rotary_dim or self.head_dim}; RoPE allows only"
                " even sizes."
            )
        # What 0 stands for depends on the others; a frozen struct can be completed here alone.
        if not self.rotary_dim:
            msgspec.structs.force_setattr(self, "rotary_dim", self.head_dim)
        if not self.attention_scale:
            msgspec.structs.force_setattr(self, "attention_scale", self.head_dim**-0.5)
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"Each token goes to {self.experts_per_token} of {self.num_experts} experts; allowed are 1 to {self.num_experts}."
            )
        for rope in {self.rope, self.local_rope or self.rope}:
            rope.check(self.rotary_dim)
        for token_id in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if token_id >= self.vocab_size:
                raise ModelError(
                    f"The model's begin- or end-of-text id is {token_id}, but the vocabulary has {self.vocab_size}"
                    " entries."
                )

    def window_of(self, layer: int) -> int:
        """The newest tokens that a token sees in this layer, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_mixture(self, layer: int) -> bool:
        """Whether experts stand in for this layer's MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def rope_of(self, layer: int) -> RopeConfig:
        """How queries and keys are turned in this layer."""
        if layer in self.unrotated_layers:
            return NOT_TURNED
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope

    def at_length(self, tokens: int) -> "ModelConfig":
        """As it is for contexts of up to so many tokens: see RopeConfig.at_length."""
        return msgspec.structs.replace(self, rope=self.rope.at_length(tokens, self.rotary_dim))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        stored_dtype: str = "float32",
        quantization: str | None = None,
    ) -> "ModelConfig":
        """From the object in config.json, and the one in generation_config.json for more end-of-text ids.

        How matrices are quantized is quantized_folder.py's; `quantization` is its name for that.

        Reads RoPE both as `rope_scaling` and `rope_theta` and as transformers 5's `rope_parameters`. Missing optional
        keys mean what they mean to transformers. `stored_dtype` stands in for a config.json that names no dtype.
        """
        name = _hf_architecture(Fields("config.json", config))
        architecture = ARCHITECTURES[name]
        fields = Fields("config.json", config, architecture.defaults)
        has_head = fields.get("architectures") != [architecture.bare]
        num_heads = fields.integer("num_attention_heads", 1, 2048)
        num_layers = fields.integer("num_hidden_layers", 1, 1024)
        hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
        head_dim = _head_dim(fields, "head_dim", hidden_size, num_heads)
        max_position_embeddings = fields.integer("max_position_embeddings", 1, MAX_TOKENS)
        rope, share = _hf_rope(fields, architecture, max_position_embeddings)
        generation_fields = Fields("generation_config.json", generation or {})
        eos_token_ids = (*fields.token_ids("eos_token_id"), *generation_fields.token_ids("eos_token_id"))
        return cls(
            architecture=name,
            vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 1, MAX_INNER),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", 1, 2048, default=num_heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * share),
            max_position_embeddings=_stretched(rope, max_position_embeddings),
            rms_norm_eps=fields.number("rms_norm_eps", 0, 1, default=1e-6),
            rope=rope,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False) or not has_head,
            has_head=has_head,
            dtype=_hf_dtype(fields, stored_dtype),
            quantization=quantization,
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            **architecture.from_hf(fields, num_layers),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        *,
        rope_factors: GGUFFactors = NO_FACTORS,
        dtype: str = "float32",
        quantization: str | None = None,
    ) -> "ModelConfig":
        """From a GGUF file's metadata, and the names of its tensors, which say what the metadata leaves out: tied
        embeddings, biases, norms of queries and keys. `rope_factors` are the values of those tensors that RoPE needs.

        Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
        """
        fields = Fields("GGUF metadata", metadata)
        name = _gguf_architecture(fields)
        architecture = ARCHITECTURES[name]
        prefix = architecture.gguf
        num_heads = fields.integer(f"{prefix}.attention.head_count", 1, 2048)
        num_layers = fields.integer(f"{prefix}.block_count", 1, 1024)
        details = architecture.from_gguf(fields, num_layers)
        _refuse_gguf_variants(fields, prefix, has_windows="windows" in details, has_experts="num_experts" in details)
        hidden_size = fields.integer(f"{prefix}.embedding_length", 1, MAX_WIDTH)
        head_dim = _head_dim(fields, f"{prefix}.attention.key_length", hidden_size, num_heads)
        value_key, rotary_key = f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"
        if (seen := fields.integer(value_key, 1, MAX_WIDTH, default=head_dim)) != head_dim:
            raise ModelError(
                f"GGUF metadata: '{value_key}' is {seen}; allowed is the head size of the keys, {head_dim}."
            )
        rotary_dim = fields.integer(rotary_key, 2, MAX_WIDTH, default=head_dim)
        if rotary_dim > head_dim or (rotary_dim < head_dim and not architecture.partial):
            raise ModelError(
                f"GGUF metadata: '{rotary_key}' is {rotary_dim}; allowed is the head size of the keys, {head_dim}."
            )
        max_position_embeddings = fields.integer(f"{prefix}.context_length", 1, MAX_TOKENS)
        eos_keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
        eos_token_ids = [token_id for key in eos_keys for token_id in fields.token_ids(key)]
        tokens = fields.get("tokenizer.ggml.tokens")
        return cls(
            architecture=name,
            vocab_size=fields.integer(f"{prefix}.vocab_size", 1, MAX_VOCAB, default=len(tokens) if tokens else None),
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{prefix}.feed_forward_length", 1, MAX_INNER),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer(f"{prefix}.attention.head_count_kv", 1, 2048, default=num_heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon", 0, 1),
            rope=rope_from_gguf(fields, prefix, rope_factors, max_position_embeddings=max_position_embeddings),
            tie_word_embeddings="output.weight" not in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            dtype=dtype,
            quantization=quantization,
            bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            **details,
        )


def _head_dim(fields: Fields, key: str, hidden_size: int, num_heads: int) -> int:
    """What `key` says; without it the heads share the hidden size evenly."""
    if fields.get(key) is None and hidden_size % num_heads:
        raise ModelError(
            f"{fields.where}: the hidden size is {hidden_size} and the number of heads {num_heads}; without '{key}'"
            " the second must divide the first."
        )
    return fields.integer(key, 2, 1024, default=hidden_size // num_heads)


def _hf_architecture(fields: Fields) -> str:
    """The key of ARCHITECTURES; `model_type` decides when `architectures` is missing."""
    names = fields.get("architectures") or [fields.get("model_type")]
    if names == [None]:
        raise ModelError(f"config.json: 'architectures' is missing; supported is {SUPPORTED}.")
    for key, architecture in ARCHITECTURES.items():
        if names in ([architecture.hf], [architecture.bare], [architecture.model_type]):
            return key
    seen = ", ".join(map(str, names)) if isinstance(names, list) else names
    if str(seen).endswith(CLASSIFIER):
        raise ModelError(
            f"config.json: the architecture is {seen!r}, a cross-encoder or another classifier, which cannot be served: /v1/rerank and"
            f" /v1/score compare embeddings of a language model; supported is {SUPPORTED}."
        )
    raise ModelError(f"config.json: the architecture is {shown(seen)}; supported is {SUPPORTED}.")


def _hf_dtype(fields: Fields, stored: str) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    seen = fields.get(key)
    if seen is None:
        return stored
    if seen not in ("float32", "float16", "bfloat16"):
        raise fields.refuse(key, "'float32', 'float16' or 'bfloat16'")
    return str(seen)


def _hf_rope(fields: Fields, architecture: Architecture, max_position_embeddings: int) -> tuple[RopeConfig, float]:
    """RoPE of the layers without windows, if they differ; and the share of each head that it turns."""
    # transformers 5 prefers an old-style `rope_scaling` over `rope_parameters` when a file has both.
    rope = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    if rope.get("full_attention") is not None:
        rope = rope.section("full_attention")
    share = 1.0
    for section in (rope, fields):
        if section.get("partial_rotary_factor") is not None:
            share = section.number("partial_rotary_factor", 0, 1)
            if share != 1 and not architecture.partial:
                raise section.refuse("partial_rotary_factor", "1: RoPE turns whole heads")
            break
    return rope_from_hf(fields, rope, max_position_embeddings=max_position_embeddings), share


def _stretched(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest context: these two kinds of RoPE are switched on in files whose other numbers stay as they were."""
    if rope.kind not in ("dynamic", "yarn"):
        return max_position_embeddings
    return max(max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings))


def _gguf_architecture(fields: Fields) -> str:
    seen = fields.get("general.architecture")
    if seen is None:
        raise ModelError("GGUF metadata: 'general.architecture' is missing.")
    for key, architecture in ARCHITECTURES.items():
        if seen == architecture.gguf:
            return key
    raise ModelError(f"GGUF metadata: the architecture is {seen!r}; supported is {SUPPORTED}.")


def _refuse_gguf_variants(fields: Fields, prefix: str, *, has_windows: bool, has_experts: bool) -> None:
    """Settings that change the arithmetic in ways that are not built: better no answer than a wrong one."""
    for key, meaning, is_built in (
        (f"{prefix}.expert_count", "a mixture of experts", has_experts),
        (f"{prefix}.attention.sliding_window", "sliding-window attention", has_windows),
    ):
        if fields.get(key) and not is_built:
            raise ModelError(
                f"GGUF metadata: '{key}' is {fields.get(key)!r}, {meaning}; supported is {SUPPORTED} without it."
            )
    if fields.get(f"{prefix}.attention.causal") is False:
        raise fields.refuse(f"{prefix}.attention.causal", "true: the model must write text from left to right")
    if (fields.get("split.count") or 1) != 1:
        raise fields.refuse("split.count", "1: join the parts with llama-gguf-split --merge")
