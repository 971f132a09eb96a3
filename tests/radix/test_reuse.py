"""The estimator of reuse against a cache that evicts what was used least recently, counted exactly."""

import json
import random
from collections import OrderedDict
from functools import cache as remember
from itertools import islice

import numpy as np
import pytest

from tests.data import data_file
from tests.radix.factories import packed
from trunkline.radix.events import NOBODY, Namespace
from trunkline.radix.reuse import MAX_SAMPLES, ReuseEstimator

PAGE_SIZE = 4


class NaiveLRU:
    """Single pages, named by all that is before them; each size has its own dictionary, and nothing is estimated."""

    def __init__(self, sizes: list[int], page_size: int) -> None:
        self.page_size = page_size
        self.caches: dict[int, OrderedDict[object, None]] = {size: OrderedDict() for size in sizes}
        self.found = dict.fromkeys(sizes, 0)
        self.num_tokens = 0

    def see(self, names: list[object], num_tokens: int) -> None:
        """`names` has one for each whole page of a prompt of `num_tokens`."""
        self.num_tokens += num_tokens
        for size, pages in self.caches.items():
            for name in names[: (num_tokens - 1) // self.page_size]:
                if name not in pages:
                    break
                self.found[size] += 1
            for name in reversed(names):
                pages[name] = None
                pages.move_to_end(name)
            while len(pages) > size:
                pages.popitem(last=False)

    def hit_rate(self, size: int) -> float:
        return self.found[size] * self.page_size / self.num_tokens


def assert_close(reuse: ReuseEstimator, naive: NaiveLRU, tolerance: float) -> None:
    for size in naive.caches:
        assert abs(reuse.hit_rate(size) - naive.hit_rate(size)) <= tolerance, (
            f"{size} pages: {reuse.hit_rate(size):.4f} estimated, {naive.hit_rate(size):.4f} counted"
        )


def random_prompts(num: int, *, stems: int, stem_pages: int, own_pages: int, seed: int) -> list[list[int]]:
    """Prompts that begin with one of some stems, the first the most popular, and go on alone."""
    rng = random.Random(seed)
    tokens = [[rng.randrange(10_000) for _ in range(stem_pages * PAGE_SIZE)] for _ in range(stems)]
    chosen = rng.choices(tokens, weights=[1 / (rank + 1) for rank in range(stems)], k=num)
    return [
        stem[: rng.randrange(len(stem) // 2, len(stem) + 1)]
        + [rng.randrange(10_000) for _ in range(rng.randrange(1, own_pages * PAGE_SIZE))]
        for stem in chosen
    ]


def replay(prompts: list[list[int]], sizes: list[int], *, horizon: int) -> tuple[ReuseEstimator, NaiveLRU]:
    reuse = ReuseEstimator(page_size=PAGE_SIZE, horizon=horizon)
    naive = NaiveLRU(sizes, PAGE_SIZE)
    for prompt in prompts:
        tokens = packed(prompt)
        reuse.see(NOBODY, tokens, len(prompt))
        whole = len(prompt) // PAGE_SIZE
        naive.see([hash(tokens[: (page + 1) * PAGE_SIZE * 4]) for page in range(whole)], len(prompt))
    return reuse, naive


@pytest.mark.parametrize("seed", range(3))
def test_every_page_sampled(seed: int) -> None:
    """Fewer pages than samples: nothing is left to chance but the width of a bucket."""
    prompts = random_prompts(300, stems=40, stem_pages=12, own_pages=6, seed=seed)
    reuse, naive = replay(prompts, [8, 16, 32, 64, 128, 256, 512, 1024], horizon=4096)
    assert reuse.num_samples < MAX_SAMPLES
    assert_close(reuse, naive, 0.015)


def test_few_pages_sampled() -> None:
    prompts = random_prompts(2000, stems=400, stem_pages=80, own_pages=40, seed=7)
    reuse, naive = replay(prompts, [1024, 4096, 16384, 65536], horizon=2**20)
    assert reuse.num_samples <= MAX_SAMPLES
    assert_close(reuse, naive, 0.025)
    assert naive.hit_rate(65536) - naive.hit_rate(1024) > 0.2, "the sizes are told apart"


def test_a_long_life_needs_no_more_memory() -> None:
    """Pages that never come back are forgotten beyond the horizon, so the few that do are still seen well."""
    rng = random.Random(1)
    reuse = ReuseEstimator(page_size=PAGE_SIZE, horizon=2000)
    stem = [rng.randrange(10_000) for _ in range(20 * PAGE_SIZE)]
    for _ in range(400):
        reuse.see(NOBODY, packed(stem + [rng.randrange(10_000) for _ in range(80 * PAGE_SIZE)]), 100 * PAGE_SIZE)
    assert reuse.num_samples <= 2002
    assert reuse.hit_rate(2000) == pytest.approx(0.2, abs=0.005)
    assert reuse.hit_rate(10) == pytest.approx(0.1, abs=0.01), "half of the stem"


def test_the_curve_never_falls() -> None:
    reuse, _ = replay(random_prompts(200, stems=9, stem_pages=9, own_pages=9, seed=3), [], horizon=500)
    rates = [reuse.hit_rate(num_pages) for num_pages in range(1, 700)]
    assert rates == sorted(rates)
    assert rates[-1] == reuse.hit_rate(10**9) <= 1


def test_namespaces_share_nothing() -> None:
    reuse = ReuseEstimator(page_size=PAGE_SIZE, horizon=100)
    for salt in "abc":
        reuse.see(Namespace(salt=salt), packed(range(40)), 40)
    assert reuse.hit_rate(100) == 0
    reuse.see(Namespace(salt="a"), packed(range(40)), 40)
    assert reuse.hit_rate(100) == 9 * PAGE_SIZE / 160  # its last token is always computed, and so is that page


def test_nothing_seen_and_nothing_to_see() -> None:
    reuse = ReuseEstimator(page_size=PAGE_SIZE, horizon=100)
    assert reuse.hit_rate(100) == 0
    for num_tokens in (0, 1, PAGE_SIZE - 1, PAGE_SIZE):
        reuse.see(NOBODY, packed(range(num_tokens)), num_tokens)
    assert reuse.hit_rate(100) == 0
    assert reuse.hit_rate(0) == 0


@remember
def block(hash_id: int) -> bytes:
    """512 tokens that go with a hash of a trace."""
    return np.random.default_rng(hash_id).integers(0, 49152, 512, dtype="<i4").tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversation_trace", "toolagent_like_trace"])
def test_recorded_traffic(name: str) -> None:
    """Half a million pages, one in a hundred of them sampled."""
    reuse = ReuseEstimator(page_size=16, horizon=2**20)
    naive = NaiveLRU([2**k for k in (12, 14, 16, 18)], page_size=16)
    with data_file(f"traces/{name}.jsonl").open(encoding="utf-8") as lines:
        for line in islice(lines, 1500):
            request = json.loads(line)
            ids = request["hash_ids"]
            num_tokens = min(request["input_length"], 512 * len(ids))
            reuse.see(NOBODY, b"".join(map(block, ids)), num_tokens)
            naive.see([(ids[page // 32], page % 32) for page in range(num_tokens // 16)], num_tokens)
    assert_close(reuse, naive, 0.03)
