"""Which part of a model each rank holds, if several hold it together: Megatron's split.        arXiv:1909.08053

    split = Split(rank=1, size=2)
    split.check(config)                                            # ConfigError if the heads can't be dealt out
    split.config(config).num_heads                                 # 4 of 8
    split.index("model.layers.0.self_attn.q_proj.weight", config)  # (slice(256, 512),): which rows of it
    split.index("model.layers.0.self_attn.o_proj.weight", config)  # (slice(None), slice(256, 512)): which columns

q, k, v, gate and up are split by outputs, whole heads for attention; o and down by inputs, so that the sum over ranks is their output; the
embedding and the output layer by token ids. Everything else, every rank holds. If there are fewer kv heads than ranks, several ranks
hold the same one. Knows no files and no torch.
"""

from dataclasses import dataclass

import msgspec

from trunkline.errors import ConfigError
from trunkline.models.config import ModelConfig
from trunkline.models.weights import Index

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Split:
    """The part of rank `rank`, 0 … size-1."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if the model can't be dealt out to so many ranks evenly."""
        if not _fits(config, self.size):
            others = [str(size) for size in range(1, config.num_heads + 1) if _fits(config, size)]
            raise ConfigError(
                f"--tensor-parallel-size is {self.size}, but {config.num_heads} query heads, {config.num_kv_heads} key-value"
                f" heads and {config.expert_size or config.intermediate_size} inner units of {'an expert' if config.num_experts else 'the MLP'}, which this model has, can't be dealt out to"
                f" {self.size} ranks evenly; allowed {'are' if len(others) > 1 else 'is'} {', '.join(others)}."
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of what this rank computes: the model's own, but with its part of the heads and of the MLP."""
        if self.size == 1:
            return config
        return msgspec.structs.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
            expert_size=config.expert_size // self.size,
        )

    def vocab_rows(self, config: ModelConfig) -> int:
        """Rows of the embedding and of the output layer that each rank has: the last ranks may have zeros behind their own."""
        return -(-config.vocab_size // self.size)

    def first_id(self, config: ModelConfig) -> int:
        """The token id that this rank's first row is of."""
        return self.rank * self.vocab_rows(config)

    def holds(self, name: str) -> bool:
        """False for a bias that is added to a sum over ranks: rank 0 adds it, once."""
        return self.rank == 0 or not name.endswith((".o_proj.bias", ".down_proj.bias"))

    def index(self, name: str, config: ModelConfig) -> Index:
        """Which part of the tensor `name` this rank has.

        config  the whole model's
        """
        if self.size == 1:
            return ()
        if name in _VOCABULARY:
            first, last = self.first_id(config), self.first_id(config) + self.vocab_rows(config)
            return (slice(min(first, config.vocab_size), min(last, config.vocab_size)),)
        module, kind = name.rsplit(".", 2)[-2:]
        inner = config.expert_size if ".experts." in name else config.intermediate_size
        match module:
            case "q_proj":
                return (self._heads(config.num_heads, config.head_dim),)
            case "k_proj" | "v_proj":
                return (self._heads(config.num_kv_heads, config.head_dim),)
            case "gate_proj" | "up_proj":
                return (self._heads(inner, 1),)
            case "o_proj" if kind == "weight":
                return (slice(None), self._heads(config.num_heads, config.head_dim))
            case "down_proj" if kind == "weight":
                return (slice(None), self._heads(inner, 1))
        return ()

    def _heads(self, count: int, width: int) -> slice:
        """Of `count` heads of `width`, this rank's; the one that it shares with its neighbours, if there are fewer than ranks."""
        first, own = self.rank * count // self.size, max(1, count // self.size)
        return slice(first * width, (first + own) * width)


WHOLE = Split()


def _fits(config: ModelConfig, size: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if config.expert_size % size:
        return False
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0) and config.intermediate_size % size == 0
