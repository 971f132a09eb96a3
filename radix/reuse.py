"""How much more memory would help: the hit rate that a cache of any size would have, estimated as requests come by.

    reuse = ReuseEstimator(page_size=16, horizon=64 * num_pages)
    reuse.see(namespace, prompt, len(prompt) // 4)    # every prompt, once
    reuse.hit_rate(2 * num_pages)                     # of all prompt tokens seen, with twice the memory

Token ids only; it knows no tree and no pages of a pool, and its memory does not grow.

A cache that evicts what was used least recently finds a page if fewer other pages than it has room for were used since
that page was: its reuse distance (Mattson et al., IBM Systems Journal 1970). So one histogram of reuse distances gives
the hit rate of every size. Exact distances take memory for every page ever seen. SHARDS (Waldspurger et al., FAST '15)
looks only at pages whose hash is below a threshold, always the same ones, and divides their distances by the share that
is looked at. Here in its variant of fixed size: if the sampled pages become too many, the threshold is lowered, and
those above it are forgotten.
"""

import math
from bisect import bisect_left
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from trunkline.radix.events import Namespace, root_hash

MAX_SAMPLES = 4096
# When there are more, so many stay: lowering the threshold by a good step is done rarely.
KEPT_SAMPLES = MAX_SAMPLES * 7 // 8
BUCKETS_PER_OCTAVE = 16  # of the histogram: sizes are told apart to 4 %

UInt64 = npt.NDArray[np.uint64]

_ALL = 2**32  # a threshold above every key
_BASE = np.uint64(0x9E3779B97F4A7C15)


class ReuseEstimator:
    """Reuse distances of prompt pages, sampled.

    page_size   tokens per page
    horizon     pages: the largest cache it can tell about. What was not used for longer than that is forgotten
    num_tokens  of all prompts seen
    """

    def __init__(self, *, page_size: int, horizon: int) -> None:
        self.page_size = page_size
        self.horizon = horizon
        self.num_tokens = 0
        self._num_lookups = 0  # pages that could have been found
        self._sampled_lookups = 0.0  # the same, estimated from the samples
        self._histogram = np.zeros(_bucket(horizon) + 1)  # pages found, by the bucket of their distance
        self._threshold = _ALL
        self._num_touches = 0
        # Sampled pages by key, least recently used first: the number of the touch. `_touches` has the same numbers,
        # ascending, so that a bisection says how many sampled pages were used since.
        self._last_touch: OrderedDict[int, int] = OrderedDict()
        self._touches: list[int] = []
        self._powers = np.ones(1, np.uint64)

    @property
    def num_samples(self) -> int:
        """Pages that are remembered now, at most MAX_SAMPLES."""
        return len(self._last_touch)

    def see(self, namespace: Namespace, tokens: bytes, num_tokens: int) -> None:
        """A prompt arrives. tokens: int32 little-endian, at least num_tokens of them.

        All its pages are looked up before any of them counts as used; then the last is used first, as in the tree,
        which lets go of a prefix from its end.
        """
        num_pages = num_tokens // self.page_size
        num_lookups = max(0, num_tokens - 1) // self.page_size  # the last token is computed in any case
        self.num_tokens += num_tokens
        self._num_lookups += num_lookups
        keys = self._keys(namespace, tokens, num_pages)
        sampled = np.flatnonzero(keys < self._threshold)
        sampled_keys = keys[sampled].tolist()
        self._look_up(sampled_keys[: int(np.searchsorted(sampled, num_lookups))])
        for key in reversed(sampled_keys):
            if key < self._threshold:
                self._touch(key)
        self._forget()

    def hit_rate(self, num_pages: int) -> float:
        """The share of all prompt tokens seen that a cache of `num_pages` would have found.

        0 … 1; of nothing seen, 0. For a cache that evicts what was used least recently. Beyond the horizon, that of the
        horizon.
        """
        if num_pages < 1 or not self.num_tokens:
            return 0.0
        position = min(math.log2(num_pages + 1) * BUCKETS_PER_OCTAVE, float(len(self._histogram)))
        whole = int(position)
        found = float(self._histogram[:whole].sum())
        if whole < len(self._histogram):
            found += (position - whole) * float(self._histogram[whole])
        # Whether the few hottest pages are among the samples is chance, and makes the samples too many or too few. They
        # are found by every cache, so the difference is counted as found (SHARDS-adj in the paper).
        found += self._num_lookups - self._sampled_lookups
        return max(0.0, min(found, float(self._num_lookups))) * self.page_size / self.num_tokens

    # ---- the steps of `see`

    def _look_up(self, keys: list[int]) -> None:
        weight = _ALL / self._threshold  # pages that one sampled page stands for
        self._sampled_lookups += weight * len(keys)
        for key in keys:
            touch = self._last_touch.get(key)
            if touch is not None:
                used_since = len(self._touches) - bisect_left(self._touches, touch) - 1
                bucket = _bucket(1 + used_since * weight)
                if bucket < len(self._histogram):
                    self._histogram[bucket] += weight

    def _touch(self, key: int) -> None:
        touch = self._last_touch.pop(key, None)
        if touch is not None:
            del self._touches[bisect_left(self._touches, touch)]
        self._num_touches += 1
        self._last_touch[key] = self._num_touches
        self._touches.append(self._num_touches)
        if len(self._touches) > MAX_SAMPLES:
            self._threshold = sorted(self._last_touch)[KEPT_SAMPLES]
            kept = [item for item in self._last_touch.items() if item[0] < self._threshold]
            self._last_touch = OrderedDict(kept)
            self._touches = [touch for _, touch in kept]

    def _forget(self) -> None:
        """Drop what lies beyond the horizon: else pages that never come back would fill the samples."""
        room = math.ceil(self.horizon * self._threshold / _ALL) + 1
        surplus = len(self._touches) - room
        if surplus > 0:
            del self._touches[:surplus]
            for _ in range(surplus):
                self._last_touch.popitem(last=False)

    def _keys(self, namespace: Namespace, tokens: bytes, num_pages: int) -> npt.NDArray[np.int64]:
        """int64 [num_pages], 0 … 2**32 - 1: a hash of the namespace and all tokens up to the end of each page.

        A polynomial of the tokens modulo 2**64, mixed as in MurmurHash3. Spread evenly, cheap, and not for security.
        """
        num_tokens = num_pages * self.page_size
        if len(self._powers) < num_tokens:
            self._powers = np.cumprod(np.full(2 * num_tokens, _BASE), dtype=np.uint64)
        terms = (np.frombuffer(tokens, "<i4", num_tokens).astype(np.uint64) + np.uint64(1)) * self._powers[:num_tokens]
        at_page_ends: UInt64 = np.cumsum(terms, dtype=np.uint64)[self.page_size - 1 :: self.page_size]
        hashes: UInt64 = at_page_ends + np.frombuffer(root_hash(namespace), np.uint64, 1)
        for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
            hashes ^= hashes >> np.uint64(33)
            hashes *= factor
        return (hashes >> np.uint64(32)).astype(np.int64)


def _bucket(distance: float) -> int:
    """Of the histogram: bucket b has the distances from 2**(b / BUCKETS_PER_OCTAVE) on."""
    return int(math.log2(distance) * BUCKETS_PER_OCTAVE)
