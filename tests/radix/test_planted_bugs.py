"""Bugs that caches of this kind have had, planted one by one: the random lives of machine.py must find each of them.

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
from trunkline import radix

LIVES = settings(
    LIFE,
    max_examples=400,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # finding it is enough: no time is spent on the shortest example
)


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str


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
        "            upper.locks = 1\n        else:\n            self._lru[upper] = None",
        "            pass\n        self._lru[upper] = None",
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
        "        while not node.locks:\n            self._lru.move_to_end(node)\n            node = node.parent",
        "        if not node.locks:\n            self._touch(node.parent)\n            self._lru.move_to_end(node)",
    ),
    Bug(
        "a run is trimmed at its head",
        "tree.py",
        "            run = leaf.pages[keep:]",
        "            run = leaf.pages[: len(leaf.pages) - keep]",
    ),
    Bug(
        "a split isn't counted",
        "tree.py",
        "            self._lru[upper] = None\n        self.num_nodes += 1",
        "            self._lru[upper] = None",
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
        "        if lease.released:\n            return self.pool.give_back(np.zeros(1, np.int32))\n"
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
        "            self.tree.unlock(match.node)\n            return None",
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
        "        self.tree.lock(match.node)  # first, so that making room never takes the prefix itself\n"
        "        private = self._take(num_new_pages)\n",
        "        private = self._take(num_new_pages)\n        self.tree.lock(match.node)\n",
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
        "namespaces share a root",
        "tree.py",
        "root = self._roots.get(namespace)",
        'root = self._roots.get(namespace) or self._roots.get("")',
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
        return type("PlantedMachine", (CacheMachine,), {"make_cache": cache})

    yield load
    for module in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[module]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_found(bug: Bug, load: Callable[[Bug | None], type[CacheMachine]]) -> None:
    machine = load(bug)
    with pytest.raises((AssertionError, ValueError, LookupError)):  # of the audit, or where the bug leads
        run_state_machine_as_test(machine, settings=LIVES)


@pytest.mark.slow
def test_no_bug_no_finding(load: Callable[[Bug | None], type[CacheMachine]]) -> None:
    run_state_machine_as_test(load(None), settings=LIVES)
