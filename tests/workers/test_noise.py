"""Philox against its published vectors and a scalar twin; Gumbel noise against its distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.workers.noise import GUMBEL_SPAN, Words, gumbel, gumbel_of_all, philox4x32

# Lines "philox4x32 10" of kat_vectors in Random123 (https://github.com/DEShawResearch/random123): counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def philox_by_hand(counter: tuple[int, int, int, int], key: int) -> tuple[int, ...]:
    """One block in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key % 2**32, key // 2**32 % 2**32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 // 2**32 ^ c1 ^ k0, p1 % 2**32, p0 // 2**32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    counter_words = Words(*(np.array([int(word, 16)], dtype=np.uint64) for word in counter.split()))
    low, high = (int(word, 16) for word in key.split())
    words = philox4x32(counter_words, high << 32 | low)
    assert [f"{int(word[0]):08x}" for word in words] == expected.split()


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20, unique=True),
)
def test_a_token_reads_one_word_of_its_block(seed, position, ids):
    ids.sort()
    words = [philox_by_hand((token_id // 4, position, 0, 0), seed)[token_id % 4] for token_id in ids]
    uniform = (np.array(words) + 0.5) / 2**32
    np.testing.assert_allclose(gumbel(seed, position, np.array(ids)), -np.log(-np.log(uniform)), rtol=1e-14, atol=1e-14)


@given(seed=st.integers(0, 2**64 - 1), ids=st.sets(st.integers(0, 499), min_size=1))
def test_noise_does_not_depend_on_which_tokens_are_asked_for(seed, ids):
    ids = np.array(sorted(ids))
    everything = gumbel_of_all(seed, 12, 500)
    assert everything.shape == (500,)
    assert np.array_equal(gumbel(seed, 12, ids), everything[ids])


def test_no_tokens_no_noise():
    assert gumbel(1, 2, np.empty(0, dtype=np.int64)).shape == (0,)


def test_noise_is_gumbel_distributed():
    """Kolmogorov-Smirnov against exp(-exp(-x)); 1.95/sqrt(n) is the 99.9 % point. Mean is Euler's constant."""
    noise = np.sort(gumbel_of_all(3, 5, 100_000))
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / np.sqrt(len(noise))
    assert abs(noise.mean() - 0.5772157) < 0.02
    assert np.ptp(noise) < GUMBEL_SPAN


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated():
    n = 20_000
    noise = gumbel_of_all(3, 5, n)
    for other in (gumbel_of_all(4, 5, n), gumbel_of_all(3, 6, n), np.roll(noise, 1), np.roll(noise, 4)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 4 / np.sqrt(n)
