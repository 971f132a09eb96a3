"""The same checkpoint in `transformers`, in float32: the reference for whole-model tests and benchmarks."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trunkline.config import ModelSource
from trunkline.models.checkpoint import open_checkpoint


def load_reference(path: str) -> Any:
    """LlamaForCausalLM holding exactly the (dequantized) weights of the checkpoint at `path`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        checkpoint = open_checkpoint(ModelSource(path=path))
        config = checkpoint.config
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tie_word_embeddings,
                attention_bias=config.qkv_bias,
                mlp_bias=config.mlp_bias,
                bos_token_id=config.bos_token_id,
                eos_token_id=list(config.eos_token_ids),
            )
        )
    return filled(model, {name: tensor.float() for name, tensor in checkpoint.tensors()})


def filled(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """The model with exactly these weights; an output layer that is not among them is the embedding."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def hidden_states(path: str | Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The hidden states [T, H] of each prompt behind the last norm, in float64 arithmetic."""
    model = load_reference(str(path)).model.double()
    return [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]


@torch.inference_mode()
def greedy_gaps(model: Any, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
    """For each output token, given all before it: the reference's choice, and how far its best logit is above that of `output`."""
    ids = torch.tensor([prompt + output])
    logits = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
    best = logits.max(dim=-1)
    ours = logits[torch.arange(len(output)), torch.tensor(output)]
    return list(zip(best.indices.tolist(), (best.values - ours).tolist(), strict=True))
