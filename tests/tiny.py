"""Tiny Llama checkpoints for tests: two random layers in a Hugging Face folder, or the same model as one GGUF file.

    folder = tiny_model(tmp_path / "tiny")                         # configs, weights, tokenizer, chat template
    folder = tiny_model(tmp_path / "t", num_layers=1, tie=False)   # any field of Tiny can be overridden
    file = tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0")  # the same weights, stored as llama.cpp does

Same seed, same weights. Nothing here imports torch, transformers or trunkline, so that a test may take these files as a
second opinion.
The tokenizer is byte-level BPE: token id b below 256 is the byte b, then `MERGES`, then four special tokens.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from tests.k_quants import quantize

WORDS = (" the", " and", "ing", " of", "tion", "hello", " world", " is", "er", "ould", " that", " your", " = {", '":')
BOS, EOS, IM_START, IM_END = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself if printable in Latin-1, else the next one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Pairs that build each of WORDS from the left, in byte-alphabet characters, without repeats."""
    alphabet = _byte_alphabet()
    pairs: dict[tuple[str, str], None] = {}
    for word in WORDS:
        first, *rest = (alphabet[byte] for byte in word.encode())
        for character in rest:
            pairs[first, character] = None
            first += character
    return list(pairs)


MERGES = _merges()
TOKENS = (*_byte_alphabet(), *(left + right for left, right in MERGES), *SPECIAL_TOKENS)  # token of each id
TOKEN_IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
VOCAB_SIZE = len(TOKENS)
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What the model looks like. `rope_scaling` is Hugging Face's, e.g. {"rope_type": "linear", "factor": 2.0}."""

    seed: int = 0
    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None  # None: hidden_size // num_heads
    vocab_size: int = VOCAB_SIZE  # larger: rows that the tokenizer has no token for, as many real models have
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie: bool = True  # the output layer is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 512
    dtype: str = "float32"  # of the safetensors file: float32, float16 or bfloat16
    std: float = 0.2  # of the weights: large enough that the layers, not the last token alone, decide what comes next

    @property
    def size_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face's name, [out, in] for matrices."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.size_per_head, self.num_kv_heads * self.size_per_head
        linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            for name, shape in linears.items():
                shapes[f"{prefix}.self_attn.{name}.weight"] = shape
                if self.attention_bias:
                    shapes[f"{prefix}.self_attn.{name}.bias"] = shape[:1]
            for name, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            ):
                shapes[f"{prefix}.mlp.{name}.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{prefix}.mlp.{name}.bias"] = shape[:1]
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def weights(self) -> dict[str, np.ndarray]:
        """Random float32 tensors. Norms are near 1 but never 1, so that a forgotten norm is noticed."""
        generator = np.random.default_rng(self.seed)
        weights = {}
        for name, shape in self.shapes().items():
            values = generator.standard_normal(shape, dtype=np.float32) * np.float32(self.std)
            weights[name] = values + 1 if name.endswith("norm.weight") else values
        return weights


def tiny_model(path: str | Path, **overrides: Any) -> Path:
    """Write the model of `Tiny(**overrides)` into the folder `path`, which is created, and return the folder."""
    tiny = Tiny(**overrides)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _hf_config(tiny))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": TOKEN_IDS[BOS], "eos_token_id": [TOKEN_IDS[EOS], TOKEN_IDS[IM_END]], "temperature": 0.7},
    )
    write_safetensors(folder / "model.safetensors", tiny.weights(), tiny.dtype)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": tiny.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def tiny_embedder(path: str | Path, **overrides: Any) -> Path:
    """The same folder as embedding models are published: without an output layer, tensors named without "model."."""
    folder, tiny = tiny_model(path, **overrides), Tiny(**overrides)
    config = json.loads((folder / "config.json").read_text())
    _write_json(folder / "config.json", config | {"architectures": ["LlamaModel"], "tie_word_embeddings": False})
    tensors = {
        name.removeprefix("model."): values for name, values in tiny.weights().items() if name != "lm_head.weight"
    }
    write_safetensors(folder / "model.safetensors", tensors, tiny.dtype)
    return folder


def tiny_gguf(
    path: str | Path,
    *,
    quantization: str = "F32",
    others: Mapping[str, str] = NOTHING,
    pre: str = "gpt-2",
    **overrides: Any,
) -> Path:
    """Write the same model to the GGUF file `path` and return the file.

    quantization  ggml type of the matrices whose rows divide into its blocks, e.g. "Q8_0"; the other tensors stay F32
    others        ggml types of modules that have another one, by GGUF's names, e.g. {"attn_v": "Q6_K"}
    pre           `tokenizer.ggml.pre`; "gpt-2" cuts text exactly as the tokenizer.json of tiny_model does
    """
    tiny = Tiny(**overrides)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, "llama")
    _add_gguf_config(writer, tiny)
    add_gguf_tokenizer(writer, tiny, pre)
    for name, values in tiny.weights().items():
        if ".q_proj." in name:
            values = interleave(values, tiny.num_heads)
        elif ".k_proj." in name:
            values = interleave(values, tiny.num_kv_heads)
        module = _gguf_name(name).split(".")[-2]
        kind = gguf.GGMLQuantizationType[others.get(module, quantization)]
        if values.ndim != 2 or values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quantize(values, kind.name), raw_dtype=kind)
    if (tiny.rope_scaling or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(tiny))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_safetensors(file: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Write float32 arrays as `dtype`: length of the header (u64), header (JSON), then the tensors back to back."""
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, values in tensors.items():
        parts.append(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def llama3_factors(tiny: Tiny) -> np.ndarray:
    """float32 [head_dim / 2], as in `rope_freqs.weight`: what Llama 3.1's scaling divides each RoPE frequency by."""
    assert tiny.rope_scaling is not None
    scaling, factor = tiny.rope_scaling, tiny.rope_scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(tiny.size_per_head // 2):
        wavelength = 2 * math.pi * tiny.rope_theta ** (2 * pair / tiny.size_per_head)
        turns = scaling["original_max_position_embeddings"] / wavelength  # in the original context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / (kept + (1 - kept) / factor))
    return np.array(factors, np.float32)


def _hf_config(tiny: Tiny) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.size_per_head,
        "hidden_act": "silu",
        "max_position_embeddings": tiny.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": tiny.rope_theta,
        "rope_scaling": tiny.rope_scaling,
        "tie_word_embeddings": tiny.tie,
        "attention_bias": tiny.attention_bias,
        "mlp_bias": tiny.mlp_bias,
        "torch_dtype": tiny.dtype,
        "bos_token_id": TOKEN_IDS[BOS],
        "eos_token_id": TOKEN_IDS[EOS],
    }


@cache
def _tokenizer_json() -> str:
    vocabulary = {token: token_id for token_id, token in enumerate(TOKENS[: -len(SPECIAL_TOKENS)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer.to_str(pretty=True)


def _add_gguf_config(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(tiny.vocab_size)
    writer.add_context_length(tiny.max_position_embeddings)
    writer.add_embedding_length(tiny.hidden_size)
    writer.add_block_count(tiny.num_layers)
    writer.add_feed_forward_length(tiny.intermediate_size)
    writer.add_head_count(tiny.num_heads)
    writer.add_head_count_kv(tiny.num_kv_heads)
    writer.add_key_length(tiny.size_per_head)
    writer.add_value_length(tiny.size_per_head)
    writer.add_rope_dimension_count(tiny.size_per_head)
    writer.add_rope_freq_base(tiny.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    if tiny.rope_scaling is not None and tiny.rope_scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(tiny.rope_scaling["factor"])


def add_gguf_tokenizer(writer: gguf.GGUFWriter, tiny: Tiny, pre: str) -> None:
    """The tokenizer of `tiny_model`; `pre` as in `tiny_gguf`."""
    padding = [f"[PAD{token_id}]" for token_id in range(VOCAB_SIZE, tiny.vocab_size)]
    types = [gguf.TokenType.NORMAL] * (VOCAB_SIZE - len(SPECIAL_TOKENS)) + [gguf.TokenType.CONTROL] * len(
        SPECIAL_TOKENS
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*TOKENS, *padding])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * len(padding)])
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(TOKEN_IDS[BOS])
    writer.add_eos_token_id(TOKEN_IDS[EOS])
    writer.add_eot_token_id(TOKEN_IDS[IM_END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama-type GGUF files store q and k: within a head, the two rows that RoPE pairs are neighbours."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(ours, theirs)
    return name


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2))
