"""Random lives of the tiers, beside a naive model that knows what every byte should be.

A page's content names its prefix (tier_factories.payload), so whatever is loaded shows at once whether it is what was asked for.
Steps run late, get lost halfway, and run after others were planned; reads and writes run in any order, fail, or never run; files
are damaged, deleted and torn; the process is killed.
"""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.radix.tier_factories import PAGE_BYTES, Device, FaultyFiles, names, payload
from trunkline.radix.segment import segment_bytes
from trunkline.radix.tiers import Fetch
from trunkline.step import Int32, PageCopy

LIFE = settings(deadline=None, stateful_step_count=40)
NUM_PAGES = 10
PROMPTS = st.builds(lambda kind, length: list(range(4 * kind, 4 * kind + length)), st.integers(0, 2), st.integers(1, 4))
THEN = st.sampled_from(["", "plan", "finish"])  # how far the steps go on at once
ACCIDENTS = ("abort", "flush", "full", "broken", "mended", "killed", "flipped", "torn", "deleted")
TENANTS = ("a", "b")


def tenant(prefix: int) -> str:
    return TENANTS[prefix % 2]


class Step:
    """A plan that was made and is yet to run: its copies, and then what it computes, page → prefix.

    loaded  page → prefix: what its loads must have brought once it is done
    """

    def __init__(self, number: int, copies: list[PageCopy], computes: dict[int, int], loaded: dict[int, int]) -> None:
        self.number = number
        self.copies = copies
        self.computes = computes
        self.loaded = loaded


class TierMachine(RuleBasedStateMachine):
    """The scheduler's part, naively: which device page is free, in the tree (with its prefix), or being filled by a step."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.files = FaultyFiles()
        self.steps: list[Step] = []
        self.now = 0.0

    @initialize(num_slots=st.integers(1, 8), on_disk=st.booleans(), room=st.integers(1, 6))
    def start(self, num_slots: int, on_disk: bool, room: int) -> None:
        self.settings: dict[str, Any] = {
            "num_pages": NUM_PAGES,
            "num_slots": num_slots,
            "max_bytes": room * segment_bytes(2, PAGE_BYTES),
            "files": self.files,
        }
        self.folder = self.root / "kv" if on_disk else None
        self.device = Device(self.folder, **self.settings)
        self.begin()

    def begin(self) -> None:
        self.free = list(range(NUM_PAGES))
        self.tree: dict[int, int] = {}  # page → prefix
        self.computes: dict[int, int] = {}  # by the next plan
        self.loaded: dict[int, int] = {}
        self.steps = []
        self.fetches: list[Fetch] = []

    # ---- what the scheduler does

    @precondition(lambda self: self.tree)
    @rule(which=st.integers(0, 99), number=st.integers(1, 4), stays=st.booleans(), then=THEN)
    def store(self, which: int, number: int, stays: bool, then: str) -> None:
        """Pages are used again, or evicted: then they may be leased at once."""
        for page in list(self.tree)[which % len(self.tree) :][:number]:
            self.copy_out(page)
            if not stays:
                del self.tree[page]
                self.free.insert(0, page)
        self.go_on(then)

    def copy_out(self, page: int) -> None:
        prefix = self.tree[page]
        self.device.store(prefix, page=page, tenant=tenant(prefix))

    @rule(prompt=PROMPTS, then=THEN)
    def admit(self, prompt: list[int], then: str) -> None:
        """A request starts, and others' pages make room for it: what is ready is loaded, and the rest computed by the same step."""
        while len(self.free) < len(prompt) and self.tree:
            page = next(iter(self.tree))
            self.copy_out(page)
            del self.tree[page]
            self.free.append(page)
        pages, self.free = self.free[: len(prompt)], self.free[len(prompt) :]
        num_ready = min(len(pages), self.device.tiers.look_up(names(*prompt), 0, len(prompt)).num_ready)
        if num_ready:
            self.device.tiers.load(names(*prompt), 0, num_ready, np.array(pages, np.int32))
        self.loaded |= dict(zip(pages[:num_ready], prompt, strict=False))
        self.computes |= dict(zip(pages[num_ready:], prompt[num_ready:], strict=False))
        self.go_on(then)

    def go_on(self, then: str) -> None:
        """Plan a step, and let all end, or let one wait, of two that may be in flight."""
        if then:
            while len(self.steps) > (then == "plan"):
                self.finish()
            self.plan()
            while self.steps and then == "finish":
                self.finish()

    def plan(self) -> None:
        copies = self.device.plan()
        self.steps.append(Step(self.device.last_step, copies, self.computes, self.loaded))
        self.computes, self.loaded = {}, {}

    def finish(self) -> None:
        step = self.steps.pop(0)
        self.device.run(step.copies)
        for page, prefix in step.loaded.items():
            assert self.device.holds(prefix, page), f"page {page} was loaded with something else than prefix {prefix}"
        for page, prefix in step.computes.items():
            self.device.compute(prefix, page)
        self.device.tiers.step_done(step.number)
        self.tree |= step.loaded | step.computes

    @precondition(lambda self: self.steps)
    @rule(num_copies=st.integers(0, 3))
    def lose(self, num_copies: int) -> None:
        """The step fails somewhere in its copies, and its requests end."""
        step = self.steps.pop(0)
        self.device.run(step.copies[:num_copies])
        for page in (*step.loaded, *step.computes):
            self.device.memory[page] = 0
            self.free.append(page)
        self.device.tiers.step_lost(step.number)

    @rule(prompt=PROMPTS, quick=st.booleans())
    def fetch(self, prompt: list[int], quick: bool) -> None:
        """Pages are read for a request, which may be gone before they come. Nothing depends on who waits."""
        self.fetches.append(self.device.tiers.fetch(names(*prompt), 0, len(prompt)))
        if quick:
            self.device.io.run_all()
            self.device.tiers.poll(self.now)
            assert self.fetches[-1].done or self.steps or self.device.copies, "only a store can be on its way"

    # ---- what happens meanwhile

    @rule(which=st.integers(0, 99), seconds=st.sampled_from([0.0, 0.6]), idle=st.booleans())
    def io(self, which: int, seconds: float, idle: bool) -> None:
        """A read or a write ends, whichever, and the engine's loop comes round."""
        if self.device.io.jobs:
            self.device.io.run(which % len(self.device.io.jobs))
        self.now += seconds
        self.device.tiers.poll(self.now, idle=idle)

    @rule(kind=st.sampled_from(ACCIDENTS), which=st.integers(0, 99), at=st.integers(0, 10**6))
    def accident(self, kind: str, which: int, at: int) -> None:
        if kind == "abort" and self.loaded:  # before its step is planned: the page is free, and may be leased again
            page = min(self.loaded)
            del self.loaded[page]
            self.free.insert(0, page)
        elif kind == "flush":
            self.flush([None, *TENANTS][which % 3])
        elif kind == "full":
            self.files.room = at % 5000
        elif kind == "broken":
            self.files.unreadable = OSError(errno.EIO, "Input/output error")
        elif kind == "mended":
            self.files.room = self.files.unreadable = None
        elif kind == "killed" and which % 4 == 0:
            self.kill()
        elif self.segments():
            self.damage(kind, self.segments()[which % len(self.segments())], at)
            if which % 2:
                self.kill()

    def kill(self) -> None:
        """The process is gone, with all that it had begun; another starts over the same folder."""
        self.files.room = self.files.unreadable = None
        self.device = Device(self.folder, **self.settings)
        self.begin()

    def flush(self, whose: str | None) -> None:
        self.device.tiers.flush(whose)
        for prefix in range(12):
            if whose in (None, tenant(prefix)):
                assert self.device.tiers.look_up(names(prefix), 0, 1, touch=False) == (0, 0)

    def damage(self, kind: str, file: Path, at: int) -> None:
        content = bytearray(file.read_bytes())
        if kind == "flipped":
            content[-1 - at % (len(content) if at % 3 == 0 else PAGE_BYTES)] ^= 0x10  # mostly in the last page
            file.write_bytes(content)
        elif kind == "torn":
            file.write_bytes(content[: at % len(content)])
        elif kind == "deleted":
            file.unlink()

    # ---- what must hold

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "device"):
            return
        tiers = self.device.tiers
        tiers.check()
        for entry in tiers.host.entries():
            if entry.ready:
                content = self.device.host_pages[entry.slot].tobytes()
                (prefix,) = [prefix for prefix in range(12) if names(prefix) == entry.prefix_hash]
                assert content == payload(prefix).tobytes(), f"slot {entry.slot} does not hold prefix {prefix}"
        assert all(0 <= share <= 1 for share in tiers.usage.values())

    def teardown(self) -> None:
        """All I/O and steps end: nothing is held any more, and every fetch is done."""
        if hasattr(self, "device"):
            while self.steps:
                self.finish()
            self.plan()
            self.finish()
            self.device.tiers.poll(self.now, idle=True)
            self.device.io.run_all()
            self.device.tiers.poll(self.now)
            assert all(fetch.done for fetch in self.fetches)
            assert all(not entry.pins for entry in self.device.tiers.host.entries())
            assert self.device.tiers.host.num_used == len(list(self.device.tiers.host.entries()))
        shutil.rmtree(self.root)

    # ---- helpers

    def segments(self) -> list[Path]:
        return sorted(self.root.glob("kv/*/*.kv"))

    @staticmethod
    def int32(values: list[int]) -> Int32:
        return np.array(values, np.int32)
