"""What others reach on this GPU at the same work: torch's SDPA and flex_attention, transformers' continuous batching.

Their keys and values are dense, one block a request; ours lie in pages. The layers' names are those of the other parts.
"""

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_visit.part import Visit, discard


def run(visit: Visit) -> None:
    for what, measure in (
        ("torch SDPA, decode 64 × 4,096", sdpa_decode),
        ("torch SDPA, prefill 1 × 8,192", sdpa_prefill),
        ("flex_attention, prefill 1 × 8,192", flex_prefill),
        ("transformers, continuous batching of W2's shape, Qwen3-0.6B's shape", continuous_batching),
    ):
        with visit.row(what):
            measure(visit, what)


def _heads(visit: Visit, batch: int, queries: int, context: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of Llama-3.1-8B."""
    query_heads, kv_heads, dim = visit.sizes((32, 8, 128), (4, 2, 16))
    shapes = ((batch, query_heads, queries, dim), (batch, kv_heads, context, dim), (batch, kv_heads, context, dim))
    return tuple(torch.randn(shape, dtype=torch.bfloat16, device=visit.device) for shape in shapes)


def sdpa_decode(visit: Visit, what: str) -> None:
    batch, context = visit.sizes((64, 4096), (2, 40))
    q, k, v = _heads(visit, batch, 1, context)
    seconds = visit.seconds(lambda _: discard(scaled_dot_product_attention(q, k, v, enable_gqa=True)), calls=8)
    rate = (k.nbytes + v.nbytes) / seconds
    share = rate / visit.ceilings["copy"] if "copy" in visit.ceilings else None
    visit.emit(what, rate / 1e9, "GB/s", share=share, of="the copy", note=f"{seconds * 1e6:.1f} µs a layer")


def sdpa_prefill(visit: Visit, what: str) -> None:
    tokens = visit.sizes(8192, 40)
    q, k, v = _heads(visit, 1, tokens, tokens)
    seconds = visit.seconds(
        lambda _: discard(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)), calls=5
    )
    _prefill(visit, what, q, seconds)


def flex_prefill(visit: Visit, what: str) -> None:
    if visit.rehearsal:
        visit.emit(what, note="compiling it takes too long here")
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _heads(visit, 1, 8192, 8192)
    mask = create_block_mask(lambda b, h, row, column: row >= column, None, None, 8192, 8192, device="cuda")
    compiled = torch.compile(flex_attention)
    seconds = visit.seconds(
        lambda _: discard(compiled(q, k, v, block_mask=mask, enable_gqa=True)), calls=5, graph=False
    )
    _prefill(visit, what, q, seconds)


def _prefill(visit: Visit, what: str, q: torch.Tensor, seconds: float) -> None:
    _, heads, tokens, dim = q.shape
    rate = 4 * heads * dim * (tokens * (tokens + 1) // 2) / seconds
    share = rate / visit.ceilings["matmul"] if "matmul" in visit.ceilings else None
    visit.emit(what, rate / 1e12, "TFLOP/s", share=share, of="the matmul", note=f"{seconds * 1e6:.0f} µs a layer")


def continuous_batching(visit: Visit, what: str) -> None:
    """32 requests of 1,024 shared, 128 and 24 tokens; 64 new ones each. Random weights, as ours have."""
    if visit.rehearsal:
        visit.emit(what, note="runs on a GPU only")
        return
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    torch.set_default_device(visit.device)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    generator = torch.Generator().manual_seed(visit.seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (count,), generator=generator, device="cpu").tolist()

    system, documents = tokens(1024), [tokens(128) for _ in range(8)]
    prompts = [system + documents[index % 8] + tokens(24) for index in range(32)]
    settings = transformers.GenerationConfig(max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=-1)
    model.generate_batch(inputs=prompts[:2], generation_config=settings)  # warms up
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    written = sum(len(output.generated_tokens) for output in outputs.values())
    visit.emit(
        what, written / seconds, "tokens/s", note=f"{written} tokens; all 32 requests at once, ours has 8 at a time"
    )
