"""The parts of sampling by themselves: keys, noise, adjustments; as a whole it is tested in tests/workers/test_device_sampler.py."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.kernels.triton.factories  # noqa: F401  (mends the interpreter)
from tests.workers.test_sampler import make_row, rows_with_logits
from trunkline.errors import GenerationFailed
from trunkline.kernels.triton import filters, logprobs, noise, sampling
from trunkline.kernels.triton import sampling_table as columns
from trunkline.kernels.triton.noise import gumbel
from trunkline.kernels.triton.sampling_table import id_of, key_of, to_key, to_logit, to_ranked
from trunkline.kernels.triton.spec import ARCHS
from trunkline.workers import noise as cpu_noise
from trunkline.workers.device_sampler import DeviceSampler
from trunkline.workers.sampler import _adjust


@triton.jit
def _keys_kernel(logits_ptr, keys_ptr, back_ptr, ranked_ptr, parts_ptr, number, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < number
    keys = to_key(tl.load(logits_ptr + at, mask=inside, other=0.0))
    tl.store(keys_ptr + at, keys, mask=inside)
    tl.store(back_ptr + at, to_logit(keys), mask=inside)
    ranked = to_ranked(keys, at)
    tl.store(ranked_ptr + at, ranked, mask=inside)
    tl.store(parts_ptr + at, key_of(ranked), mask=inside)
    tl.store(parts_ptr + number + at, id_of(ranked), mask=inside)


@settings(max_examples=20)
@given(st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0]), min_size=1, max_size=64))
def test_keys_are_ordered_as_logits_are(values) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    number = len(values)
    keys, back, parts = (
        torch.empty(number, dtype=torch.int32),
        torch.empty(number),
        torch.empty(2, number, dtype=torch.int32),
    )
    ranked = torch.empty(number, dtype=torch.int64)
    _keys_kernel[(1,)](logits, keys, back, ranked, parts, number, BLOCK=64)
    assert torch.equal(back.nan_to_num(7), logits.nan_to_num(7)), "-0.0 is 0.0"
    assert torch.equal(parts[0], keys) and parts[1].tolist() == list(range(number))
    by_key = sorted(range(number), key=lambda at: -int(ranked[at]))
    by_logit = sorted(range(number), key=lambda at: (not math.isnan(values[at]), -logits[at].nan_to_num().item(), at))
    infinite = any(math.isinf(value) for value in values)
    if not infinite:  # nan_to_num would change their order
        assert by_key == by_logit
    assert int(keys.max()) < columns.INFINITY_KEY.value or not torch.isfinite(logits).all()
    assert int(keys.min()) > columns.NO_KEY.value


@triton.jit
def _noise_kernel(out_ptr, seeds_ptr, positions_ptr, first_id, BLOCK: tl.constexpr):
    noise = gumbel(tl.load(seeds_ptr), tl.load(positions_ptr), first_id, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), noise)


@settings(max_examples=20)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**29).map(lambda block: 4 * block))
def test_noise_is_that_of_the_cpu(seed: int, position: int, first_id: int) -> None:
    seen = torch.empty(16, dtype=torch.float64)
    positions = torch.from_numpy(np.array([position], np.uint32).view(np.int32))
    _noise_kernel[(1,)](seen, torch.tensor([seed]), positions, min(first_id, 2**31 - 16), BLOCK=16)
    expected = cpu_noise.gumbel(seed, position, min(first_id, 2**31 - 16) + np.arange(16))
    np.testing.assert_allclose(seen.numpy(), expected, rtol=0, atol=1e-13)


def test_no_noise_reaches_further() -> None:
    assert 0 < noise.GUMBEL_SPAN.value - cpu_noise.GUMBEL_SPAN < 1e-5


@settings(max_examples=25)
@given(rows_with_logits())
def test_adjusts_bit_for_bit(case) -> None:
    logits, row = case
    assert row.sampling is not None
    if not (row.sampling.penalizes or row.sampling.logit_bias or row.banned):
        return
    sampler = DeviceSampler(len(logits), 1, "cpu")
    prepared = sampler.prepare([row])
    sampling.adjust(torch.from_numpy(logits[None]), None, prepared.table, prepared.counts, sampler._workspace)
    try:
        expected = _adjust(logits, row, row.sampling)
    except GenerationFailed:
        return
    seen = sampler._workspace.adjusted[0].numpy()
    assert (seen + 0.0).tobytes() == (expected + np.float32(0)).tobytes(), "but for the sign of 0"


def test_rows_without_a_filter_are_left_to_the_draw() -> None:
    sampler = DeviceSampler(8, 4, "cpu")
    rows = [make_row(temperature=0), make_row(), make_row(top_k=1, top_p=0.5), make_row(top_p=0.5)]
    counts = sampler.prepare(rows).counts
    assert counts == columns.Counts(rows=4, draws=2, filters=1, adjusts=0, reports=0)


def test_misfits_are_refused() -> None:
    with pytest.raises(AssertionError, match="vocabulary of 524289"):
        DeviceSampler(columns.MAX_VOCAB + 1, 1, "cpu")
    sampler = DeviceSampler(8, 1, "cpu")
    prepared = sampler.prepare([make_row()])
    with pytest.raises(AssertionError, match="float16"):
        sampler.sample(torch.zeros(1, 8, dtype=torch.float16), prepared)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_listed(arch: int) -> None:
    specs = [spec for module in (sampling, filters, logprobs) for spec in module.specs(arch)]
    assert len({spec.name for spec in specs}) == len(specs)
    kernels = {
        kernel.fn.__name__
        for module in (sampling, filters, logprobs)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    assert {spec.kernel.fn.__name__ for spec in specs} == kernels
    for spec in specs:
        assert {*spec.types, *spec.constants} == set(spec.kernel.arg_names)
