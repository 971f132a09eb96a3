"""Bugs that caches of this kind have had, planted one by one: the written lives of scenes.py, or the random ones of
machine.py, must find each of them.

A bug is one replacement in one file of a copy of radix/. If the old text is no longer there, the test says so.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.radix.machine import LIFE, CacheMachine
from tests.radix.scenes import play
from trunkline import radix
from trunkline.config import EVICTION_POLICIES

LIVES = settings(
    LIFE,
    max_examples=400,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # finding it is enough: no time is spent on the shortest example
    report_multiple_bugs=False,
)
# Hypothesis draws constants of the modules that are loaded, too: which life finds a bug changes with any source of ours, and
# the rarest are found in one of some hundred.
SEARCH = settings(LIVES, max_examples=10_000)


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    policies: tuple[str, ...] = EVICTION_POLICIES


BUGS = [
    Bug(
        "a comparison ignores the last token of a page",
        "tree.py",
        "not tokens.startswith(child.tokens, at)",
        "not tokens.startswith(child.tokens[:-TOKEN_BYTES], at)",
    ),
    Bug(
        "duplicates are freed, but the lease keeps pointing at them",
        "cache.py",
        "lease.share(node, self.tree.page_ids(node, shared))",
        "lease.share(node, own)",
    ),
    Bug(
        "duplicates are freed while a step in flight reads them",
        "cache.py",
        "self.pool.give_back(own[:num_present], after_step=after_step)",
        "self.pool.give_back(own[:num_present])",
    ),
    Bug(
        "the upper half of a split isn't locked",
        "tree.py",
        "            upper.locks = 1\n        else:\n            self._order.split(upper, lower)",
        "            pass\n        self._order.add(upper)",
    ),
    Bug(
        "a page is shared before its last token is computed",
        "cache.py",
        "shared, whole = lease.num_shared, num_tokens // self.page_size",
        "shared, whole = lease.num_shared, -(-num_tokens // self.page_size)",
    ),
    Bug(
        "the last token of a prompt is matched, too",
        "cache.py",
        "most = max(0, num_tokens - 1) if limit is None",
        "most = num_tokens if limit is None",
    ),
    Bug(
        "use is noted from the root down, so a parent is evicted before its child",
        "tree.py",
        "        while not node.locks:\n            self._order.touch(node)\n            node = node.parent",
        "        if not node.locks:\n            self._touch(node.parent)\n            self._order.touch(node)",
    ),
    Bug(
        "a run is trimmed at its head",
        "tree.py",
        "        run = leaf.pages[keep:]",
        "        run = leaf.pages[: len(leaf.pages) - keep]",
    ),
    Bug(
        "a split isn't counted",
        "tree.py",
        "            self._order.split(upper, lower)\n        self.num_nodes += 1",
        "            self._order.split(upper, lower)",
    ),
    Bug(
        "an abort shares what is known instead of what is computed",
        "cache.py",
        "shared, whole = lease.num_shared, num_tokens // self.page_size",
        "shared, whole = lease.num_shared, min(lease.num_pages, len(tokens) // self.tree.page_bytes)",
    ),
    Bug(
        "release frees the shared pages as well",
        "cache.py",
        "self.pool.give_back(lease.pages[lease.num_shared :], after_step=after_step)",
        "self.pool.give_back(lease.pages, after_step=after_step)",
    ),
    Bug(
        "a second release frees the pages again",
        "cache.py",
        "        if lease.released:\n            return\n        self.pool.give_back(lease.pages[lease.num_shared :]",
        "        if lease.released:\n            return self.pool.give_back(lease._buffer[:1])\n"
        "        self.pool.give_back(lease.pages[lease.num_shared :]",
    ),
    Bug(
        "private pages are freed while a step in flight writes to them",
        "cache.py",
        "self.pool.give_back(lease.pages[lease.num_shared :], after_step=after_step)",
        "self.pool.give_back(lease.pages[lease.num_shared :])",
    ),
    Bug(
        "a failed admission keeps its lock",
        "cache.py",
        "            self.tree.unlock(node)\n            return None",
        "            return None",
    ),
    Bug(
        "a failed admission evicts",
        "cache.py",
        "        if num_pages > self.available:\n            return None",
        "        if num_pages > self.available:\n            self.evict(1)\n            return None",
    ),
    Bug(
        "a match is believed after its pages were evicted",
        "cache.py",
        "return match.node.depth == match.num_pages",
        "return True",
    ),
    Bug(
        "an eviction makes room out of the prefix that is being admitted",
        "cache.py",
        "        self.tree.lock(node)  # first, so that making room never takes the prefix itself\n"
        "        private = self._take(num_private, ADMISSION)\n",
        "        private = self._take(num_private, ADMISSION)\n        self.tree.lock(node)\n",
    ),
    Bug(
        "a node is joined although another lease ends there",
        "tree.py",
        "if upper.own_locks or len(upper.children) != 1",
        "if len(upper.children) != 1",
    ),
    Bug(
        "the hashes of trimmed pages are kept",
        "tree.py",
        "        leaf.hashes = leaf.hashes[: keep * HASH_BYTES]\n",
        "",
    ),
    Bug(
        "the hash of everything up to a tail that was cut off is kept",
        "tree.py",
        "        leaf.sha = None\n",
        "",
    ),
    Bug(
        "namespaces share a root",
        "tree.py",
        "root = self._roots.get(namespace)",
        "root = self._roots.get(namespace) or self._roots.get(Namespace())",
    ),
    Bug(
        "a hash ignores the last token of a page",
        "events.py",
        "sha256(parent + tokens[start : start + page_bytes])",
        "sha256(parent + tokens[start : start + page_bytes - 4])",
    ),
    Bug(
        "a failed admission counts as a hit",
        "cache.py",
        "        private = self._take(num_private, ADMISSION)\n",
        "        private = self._take(num_private, ADMISSION)\n        for above in self.tree.path(node):\n            above.hits += 1\n",
    ),
    Bug(
        "a split forgets hits and urgency",
        "tree.py",
        "        upper.hits, upper.last_used, upper.urgency = lower.hits, lower.last_used, lower.urgency\n",
        "",
    ),
    Bug(
        "what was hit is joined with what wasn't",
        "tree.py",
        "if lower.hits != upper.hits or lower.urgency != upper.urgency:",
        "if False:",
    ),
    Bug(
        "an urgent request that goes over to a twin's pages leaves them as they are",
        "cache.py",
        "            used.urgency = min(used.urgency, lease.priority)\n",
        "            used.urgency = min(node.urgency, lease.priority) if used is node else used.urgency\n",
    ),
    Bug(
        "what slru protects no longer goes next instead of last",
        "eviction.py",
        "            self._probation[demoted] = None\n",
        "            self._probation[demoted] = None\n            self._probation.move_to_end(demoted, last=False)\n",
        policies=("slru",),
    ),
    Bug(
        "slru goes on counting pages that were cut off",
        "tree.py",
        "        self._order.shrink(leaf, len(leaf.pages) - keep)\n",
        "",
        policies=("slru",),
    ),
    Bug(
        "a pin locks nothing",
        "pins.py",
        "            self._tree.lock(node)\n",
        "",
    ),
    Bug(
        "pages that two pins hold count twice",
        "pins.py",
        "                if node in seen:\n                    break\n                seen.add(node)\n"
        "        return sum(len(node.pages) for node in seen)",
        "                seen.add(node)\n        return sum(pin.num_pages for pin in self.of(tenant)) + (more.depth if more else 0)",
    ),
    Bug(
        "a pin outlives its time",
        "pins.py",
        "if pin.until <= now]",
        "if pin.until < now]",
    ),
    Bug(
        "a second pin shortens the first",
        "pins.py",
        "until=max(pin.until, until)",
        "until=until",
    ),
    Bug(
        "the pins that yield are those that end last",
        "pins.py",
        "key=lambda pin: (pin.until, pin.pin_id)",
        "key=lambda pin: (-pin.until, pin.pin_id)",
    ),
    Bug(
        "a tenant's excess is taken from everybody",
        "cache.py",
        "self.tree.evict(excess, partial(self._leaving, QUOTA), order)",
        "self.tree.evict(excess, partial(self._leaving, QUOTA))",
    ),
    Bug(
        "pages of an evicted tail still count as their tenant's",
        "cache.py",
        "        self._count_tenant(node.namespace.tenant, first - len(node.pages))\n",
        "        self._count_tenant(node.namespace.tenant, -len(node.pages) if not first else 0)\n",
    ),
    Bug(
        "a flush takes what is in use",
        "tree.py",
        "if not node.locks and which(node.namespace)]",
        "if which(node.namespace)]",
    ),
    Bug(
        "what is evicted is remembered by its end",
        "cache.py",
        "self.ghosts.add(self.tree.path_hash(node.parent, page), ghost)",
        'self.ghosts.add(self.tree.path_hash(node, b""), ghost)',
    ),
    Bug(
        "a tail that was cut off counts as gone although it is back",
        "tree.py",
        "            parent.trimmed = None\n",
        "            pass\n",
    ),
    Bug(
        "a join forgets what was cut off before",
        "cache.py",
        "if not above.depth and above.trimmed is not None:",
        "if False:",
    ),
    Bug(
        "the hook hears of the head of a run that stays",
        "cache.py",
        "self.on_evicted(node, first, node.pages[first:])",
        "self.on_evicted(node, 0, node.pages)",
    ),
    Bug(
        "a guess begins with what is known",
        "continuation.py",
        "    found = next_node.tokens[len(known) :]\n",
        "    found = next_node.tokens\n",
    ),
    Bug(
        "what was said after a tail that is cut off is said to follow what is left",
        "tree.py",
        '        leaf.tail = b""  # it followed the old end\n',
        "",
    ),
]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bug | None], type[CacheMachine]]]:
    """Import a copy of radix/ with a bug in it, and the random lives of its cache."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(bug: Bug | None) -> type[CacheMachine]:
        for source in Path(radix.__path__[0]).glob("*.py"):
            text = source.read_text(encoding="utf-8")
            if bug is not None and source.name == bug.file:
                assert text.count(bug.right) == 1, f"{bug.file} doesn't have {bug.right!r} in one place: adapt the bug"
                text = text.replace(bug.right, bug.wrong)
            copy = tmp_path / "planted" / source.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(re.sub(r"\btrunkline\.radix\b", "planted", text), encoding="utf-8")
        cache = importlib.import_module("planted.cache").PrefixCache
        policies = EVICTION_POLICIES if bug is None else bug.policies
        return type("PlantedMachine", (CacheMachine,), {"make_cache": cache, "policies": policies})

    yield load
    for module in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[module]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_found(bug: Bug, load: Callable[[Bug | None], type[CacheMachine]]) -> None:
    machine = load(bug)
    with pytest.raises((AssertionError, ValueError, LookupError)):  # of the audit, or where the bug leads
        play(machine)
        run_state_machine_as_test(machine, settings=SEARCH)


@pytest.mark.slow
def test_no_bug_no_finding(load: Callable[[Bug | None], type[CacheMachine]]) -> None:
    machine = load(None)
    play(machine)
    run_state_machine_as_test(machine, settings=LIVES)
