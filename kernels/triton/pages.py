"""Copies of whole pages, all layers at once: between pages of a device, and from and to a buffer that host memory is copied with.

    page      of keys or values: contiguous in each layer, [kv_heads, page_size, head_dim]
    staging   uint8 [n, page_bytes]: a page's keys layer by layer, then its values, as a host slot holds them

Every program copies the same words of one page after the other, in the order given: a page may be the target of one copy and the
source of a later one. What dtype the numbers have does not matter here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.interface import KvPages
from trunkline.kernels.triton.spec import Config, KernelSpec

# Words of 8 bytes. One stage: a later page must not be read before an earlier one is written.
CONFIG = Config({"BLOCK": 512}, num_stages=1)


@triton.jit(do_not_specialize=["copies"])
def _copy_kernel(
    source_keys_ptr, source_values_ptr, target_keys_ptr, target_values_ptr, sources_ptr, targets_ptr, copies, words,
    source_layer_stride, source_page_stride, target_layer_stride, target_page_stride,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    source_word = layer * source_layer_stride + word
    target_word = layer * target_layer_stride + word
    source_page_stride, target_page_stride = source_page_stride.to(tl.int64), target_page_stride.to(tl.int64)
    for copy in range(copies):
        source = tl.load(sources_ptr + copy) if HAS_SOURCES else copy
        target = tl.load(targets_ptr + copy) if HAS_TARGETS else copy
        source_at = source * source_page_stride + source_word
        target_at = target * target_page_stride + target_word
        keys = tl.load(source_keys_ptr + source_at, mask=inside)
        values = tl.load(source_values_ptr + source_at, mask=inside)
        tl.store(target_keys_ptr + target_at, keys, mask=inside)
        tl.store(target_values_ptr + target_at, values, mask=inside)


def copy_pages(kv: KvPages, sources: Tensor, targets: Tensor) -> None:
    """Page sources[i] goes to page targets[i], in order; both int32 [n]."""
    keys, values = _words(kv.keys), _words(kv.values)
    _launch((keys, values), (keys, values), sources, targets)


def gather_pages(kv: KvPages, pages: Tensor, staging: Tensor) -> None:
    """Page pages[i] goes to staging[i]; pages int32 [n], staging uint8 [n, page_bytes]."""
    _launch((_words(kv.keys), _words(kv.values)), _halves(staging, pages, kv), pages, None)


def scatter_pages(kv: KvPages, staging: Tensor, pages: Tensor) -> None:
    """staging[i] goes to page pages[i]; pages int32 [n], staging uint8 [n, page_bytes]."""
    _launch(_halves(staging, pages, kv), (_words(kv.keys), _words(kv.values)), None, pages)


def _words(pool: Tensor) -> Tensor:
    """[layers, pages, words]"""
    assert pool.is_contiguous(), pool.stride()
    return pool.flatten(2).view(torch.int64)


def _halves(staging: Tensor, pages: Tensor, kv: KvPages) -> tuple[Tensor, Tensor]:
    """Keys and values of the staging buffer, each [layers, n, words]."""
    layers = len(kv.keys)
    page_bytes = 2 * layers * kv.keys[0, 0].nbytes
    assert staging.shape == (len(pages), page_bytes) and staging.dtype == torch.uint8, f"{staging.shape} {page_bytes}"
    assert staging.is_contiguous(), staging.stride()
    keys, values = staging.view(torch.int64).view(len(pages), 2, layers, -1).transpose(0, 2).unbind(1)
    return keys, values


def _launch(
    source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], sources: Tensor | None, targets: Tensor | None
) -> None:
    layers, _, words = source[0].shape
    ids = [of for of in (sources, targets) if of is not None]
    assert all(of.dtype == torch.int32 and of.shape == ids[0].shape and of.is_contiguous() for of in ids), ids
    if not len(ids[0]):
        return
    grid = (layers, triton.cdiv(words, CONFIG.blocks["BLOCK"]))
    _copy_kernel[grid](
        *source, *target, ids[0] if sources is None else sources, ids[0] if targets is None else targets,
        len(ids[0]), words, *source[0].stride()[:2], *target[0].stride()[:2],
        HAS_SOURCES=sources is not None, HAS_TARGETS=targets is not None,
        **CONFIG.blocks, **CONFIG.options,
    )  # fmt: skip


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    return [_spec("copy", True, True), _spec("gather", True, False), _spec("scatter", False, True)]


def _spec(name: str, has_sources: bool, has_targets: bool) -> KernelSpec:
    pools = ("source_keys_ptr", "source_values_ptr", "target_keys_ptr", "target_values_ptr")
    strides = ("source_layer_stride", "source_page_stride", "target_layer_stride", "target_page_stride")
    return KernelSpec(
        name=f"{name}_pages",
        kernel=_copy_kernel,
        types={
            **dict.fromkeys(pools, "*i64"),
            "sources_ptr": "*i32",
            "targets_ptr": "*i32",
            "copies": "i32",
            "words": "i32:16",
            **dict.fromkeys(strides, "i32:16"),
        },
        constants={"HAS_SOURCES": has_sources, "HAS_TARGETS": has_targets, **CONFIG.blocks},
        config=CONFIG,
        quick=name == "copy",
    )
