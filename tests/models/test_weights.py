"""Names, shapes and row order of a Llama's tensors."""

import gguf
import numpy as np

from trunkline.models.config import ModelConfig
from trunkline.models.weights import gguf_place, tensor_shapes, unpermute


def test_unpermute_puts_the_two_rows_of_a_pair_half_a_head_apart():
    rows = np.arange(8)[:, None]  # two heads of four rows
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_gguf_names_are_llama_cpps():
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert gguf_place("model.layers.12.self_attn.o_proj.bias", config) == ("blk.12.attn_output.bias", None)
    for name in tensor_shapes(config):
        assert gguf_place(name, config).name == mapping.get_name(name, try_suffixes=(".weight", ".bias"))
