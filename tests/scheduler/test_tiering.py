"""Requests whose pages come from host memory and from disk: the same tokens, and who waits for what."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.radix.tier_factories import ManualIO
from tests.scheduler.factories import Clock, Driver, Outcome, generate, make_engine, plans, run
from tests.stub import VOCAB_SIZE, StubWorker, continuation
from trunkline.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.messages import Abort, Call, Reply
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.tiering import LEAST_PATIENCE
from trunkline.step import CopyKind


def prompt(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def hits(engine: Engine) -> dict[str, int]:
    return dict(engine.scheduler.counters.hits_by_tier)


def copies(engine: Engine) -> list[CopyKind]:
    return [copy.kind for plan in plans(engine) for copy in plan.copies]


def ask(engine: Engine, tokens: list[int], name: str = "r", **sampling: Any) -> Outcome:
    """One request alone, checked."""
    outcome = run(engine, generate(name, tokens, **sampling))[name]
    assert outcome.tokens == continuation(tokens, 8)
    return outcome


def churn(engine: Engine, seed: int = 99) -> None:
    """Fill the device with something else."""
    room = (engine.scheduler.cache.num_pages - 3) * engine.scheduler.cache.page_size
    for i in range(2):
        ask(engine, prompt(seed + i, room), f"churn {seed + i}")


# ---- host memory


@pytest.mark.parametrize("depth", [0, 1])
def test_evicted_pages_come_back_from_host_memory(depth: int) -> None:
    engine = make_engine(num_pages=12, host_slots=64, depth=depth)
    ask(engine, prompt(1))
    churn(engine)
    computed = engine.scheduler.counters.prompt_tokens_computed
    assert ask(engine, prompt(1)).cached_tokens == 16
    assert engine.scheduler.counters.prompt_tokens_computed - computed == 4
    assert hits(engine) == {"device": 0, "host": 16, "disk": 0}
    engine.scheduler.check()


def test_loaded_pages_are_published_like_computed_ones() -> None:
    """Scenario 7 and 22: the tree adopts the pages that were loaded, and keeps one copy."""
    engine = make_engine(num_pages=16, host_slots=64)
    ask(engine, prompt(1))
    churn(engine)
    both = run(engine, generate("a", [*prompt(1), 5]), generate("b", [*prompt(1), 6]))
    assert both["a"].tokens == continuation([*prompt(1), 5], 8) and both["b"].tokens == continuation([*prompt(1), 6], 8)
    assert (both["a"].cached_tokens, both["b"].cached_tokens) == (20, 20)
    assert hits(engine)["host"] == 20, "the second found them in the tree"


def test_a_page_used_twice_is_stored_before_it_is_evicted() -> None:
    engine = make_engine(num_pages=64, host_slots=64)
    ask(engine, prompt(1))
    assert copies(engine) == []
    ask(engine, prompt(1))
    assert copies(engine) == [CopyKind.STORE]
    ask(engine, prompt(1))
    assert copies(engine) == [CopyKind.STORE], "once is enough"


def test_loading_that_does_not_pay_is_left_alone() -> None:
    engine = make_engine(num_pages=12, host_slots=64)
    ask(engine, prompt(1))
    churn(engine)
    tiers = engine.tiers
    assert tiers is not None
    tiers.copy_rate.bytes_per_second = 1.0
    engine.scheduler.pace.seconds_per_token = 0.1  # 16 bytes a page, which takes 16 s
    assert ask(engine, prompt(1)).cached_tokens == 0
    tiers.copy_rate.bytes_per_second = 1e9
    churn(engine)
    assert ask(engine, prompt(1)).cached_tokens == 16


def test_prompt_logprobs_take_nothing_from_the_tiers() -> None:
    engine = make_engine(num_pages=12, host_slots=64)
    ask(engine, prompt(1))
    churn(engine)
    outcome = ask(engine, prompt(1), prompt_logprobs=0)
    assert outcome.cached_tokens == 0


def test_a_step_that_fails_loses_what_it_copied() -> None:
    class Breaking(StubWorker):
        breaks = False

        def wait(self, handle: int) -> Any:
            result = super().wait(handle)
            if self.breaks:
                self.breaks = False
                raise RuntimeError("the device is gone")
            return result

    worker = Breaking(num_pages=12, page_size=4, host_slots=64)
    engine = make_engine_over(worker)
    ask(engine, prompt(1))
    driver = Driver(engine)
    driver.send(generate("big", prompt(7, 40)))
    worker.breaks = True
    with pytest.raises(RuntimeError, match="gone"):
        driver.drain()
    engine.scheduler.check()
    found = engine.tiers is not None and engine.tiers.host.num_used
    assert found == 0, "what was evicted in that step may never have been copied"
    assert ask(engine, prompt(1), "again").tokens


def make_engine_over(worker: StubWorker, cache: CacheConfig | None = None, **scheduler: Any) -> Engine:
    config = EngineConfig(
        model=ModelSource(path="stub"),
        cache=cache or CacheConfig(block_size=worker.page_size),
        scheduler=SchedulerConfig(**scheduler),
    )
    return Engine(config, worker, eos_token_ids=(0,), max_model_len=4096, vocab_size=VOCAB_SIZE, clock=Clock())


# ---- preemption


@pytest.mark.parametrize("depth", [0, 1])
def test_swapped_out_and_back_gives_the_same_tokens(depth: int) -> None:
    engine = make_engine(num_pages=10, host_slots=64, depth=depth, preemption_mode="swap", policy="fcfs")
    names = {name: [ord(name) % 50] * 8 for name in "abc"}
    outcomes = run(engine, *(generate(name, tokens, max_tokens=20) for name, tokens in names.items()))
    for name, tokens in names.items():
        assert outcomes[name].tokens == continuation(tokens, 20)
    ways = engine.stats()["num_preemptions_total"]
    assert ways["swap"] > 0
    assert hits(engine)["host"] > 0


def test_preempted_during_write_back() -> None:
    """Scenario 19: the pages of a victim are stored, evicted and written by another, all in one step."""
    engine = make_engine(num_pages=8, host_slots=8, preemption_mode="swap", policy="fcfs")
    outcomes = run(engine, generate("a", [1] * 8, max_tokens=22), generate("b", [2] * 8, max_tokens=22))
    assert outcomes["a"].tokens == continuation([1] * 8, 22) and outcomes["b"].tokens == continuation([2] * 8, 22)
    assert CopyKind.STORE in copies(engine) and CopyKind.LOAD in copies(engine)


def test_the_cheaper_way_is_chosen() -> None:
    def ways(seconds_per_token: float, mode: str = "auto") -> dict[str, int]:
        engine = make_engine(num_pages=10, host_slots=64, policy="fcfs", preemption_mode=mode)
        engine.scheduler.pace.seconds_per_token = seconds_per_token
        assert engine.tiers is not None
        engine.tiers.copy_rate.bytes_per_second = 1600.0  # a page of 16 bytes: 0.01 s a way
        run(engine, *(generate(name, [ord(name) % 50] * 8, max_tokens=20) for name in "abc"))
        return engine.stats()["num_preemptions_total"]

    assert ways(1.0)["recompute"] == 0 < ways(1.0)["swap"]
    assert ways(1e-4)["swap"] == 0 < ways(1e-4)["recompute"]
    assert ways(1.0, "recompute")["swap"] == 0
    assert ways(1e-4, "swap")["swap"] > 0


def test_flags_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no host memory to swap to"):
        make_engine(preemption_mode="swap")
    for cache in ({"host_cache_memory": 1000}, {"disk_cache_dir": str(tmp_path)}):
        with pytest.raises(ConfigError, match="no-enable-prefix-caching"):
            make_engine_over(StubWorker(host_slots=4), CacheConfig(enable_prefix_caching=False, **cache))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"--disk-cache-dir is .* can't be used"):
        make_engine(host_slots=4, disk_cache_dir=tmp_path / "file")


# ---- disk


def killed(folder: Path, **settings: Any) -> Engine:
    """A new engine over what an engine has left that is gone without a word."""
    return make_engine(host_slots=512, disk_cache_dir=folder, **settings)


def served(folder: Path, *prompts: list[int], **settings: Any) -> None:
    """Each prompt twice, and what is to be written is written; then the engine is killed."""
    engine = make_engine(host_slots=512, disk_cache_dir=folder, **settings)
    for tokens in prompts:
        ask(engine, tokens)
        ask(engine, tokens)
    assert not engine.has_work
    assert engine.tiers is not None
    engine.tiers.close()  # waits for its threads, and writes nothing that was not due


def test_the_tree_tells_which_tiers_have_a_copy(tmp_path: Path) -> None:
    def told(engine: Engine) -> list[str]:
        (root,) = engine._calls["tree"](tenant=None, depth=1, limit=1, top=1)["namespaces"]
        (node,) = root["children"]
        return list(node["copies"])

    engine = make_engine(host_slots=64)
    ask(engine, prompt(1))
    assert told(engine) == [], "it was computed, and is used by nobody else"
    ask(engine, prompt(1))
    assert told(engine) == ["host"]
    served(tmp_path, prompt(1))
    engine = killed(tmp_path)
    ask(engine, prompt(1))
    ask(engine, prompt(1))
    assert told(engine) == ["host", "disk"], "it came from the one through the other"


def test_a_prompt_served_twice_hits_after_a_restart(tmp_path: Path) -> None:
    served(tmp_path, prompt(1, 41))
    engine = killed(tmp_path)
    assert ask(engine, prompt(1, 41)).cached_tokens == 40
    assert hits(engine) == {"device": 0, "host": 0, "disk": 40}
    assert ask(engine, prompt(1, 41)).cached_tokens == 40
    assert hits(engine)["device"] == 40


def test_evicted_pages_hit_after_a_restart(tmp_path: Path) -> None:
    engine = make_engine(num_pages=12, host_slots=64, disk_cache_dir=tmp_path)
    ask(engine, prompt(1))
    churn(engine)
    assert engine.tiers is not None
    engine.tiers.close()
    assert ask(killed(tmp_path), prompt(1)).cached_tokens == 16


def test_other_weights_hit_nothing(tmp_path: Path) -> None:
    served(tmp_path, prompt(1))
    assert ask(killed(tmp_path, fingerprint="cd" * 16), prompt(1)).cached_tokens == 0
    # Not even if the files are put where they would be looked for.
    shutil.copytree(tmp_path / ("ab" * 16), tmp_path / ("ef" * 16))
    engine = killed(tmp_path, fingerprint="ef" * 16)
    assert engine.namespace("tenant", "salt").weights == "ef" * 16
    assert ask(engine, prompt(1)).cached_tokens == 0
    assert engine.stats()["tier_errors_total"]["corrupt"] > 0


def test_other_tenants_and_salts_hit_nothing(tmp_path: Path) -> None:
    served(tmp_path, prompt(1))
    engine = killed(tmp_path)
    for request in (generate("a", prompt(1), tenant="other"), generate("b", prompt(1), salt="other")):
        assert run(engine, request)[request.request_id].cached_tokens == 0
    assert ask(engine, prompt(1)).cached_tokens == 16


def test_flipped_bytes_never_give_wrong_tokens(tmp_path: Path) -> None:
    prompts = [prompt(seed, 41) for seed in range(20)]
    served(tmp_path, *prompts, num_pages=512)
    files = sorted(tmp_path.glob("*/*.kv"))
    rng = random.Random(3)
    for _ in range(200):
        file = rng.choice(files)
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    engine = killed(tmp_path, num_pages=512)
    for tokens in prompts:
        ask(engine, tokens)
    assert 0 < hits(engine)["disk"] < 20 * 40
    assert engine.stats()["tier_errors_total"]["corrupt"] > 0


def test_who_waits_for_the_disk_says_so_and_lets_others_go(tmp_path: Path) -> None:
    served(tmp_path, prompt(1))
    io, clock = ManualIO(), Clock()
    engine = killed(tmp_path, background=io, clock=clock)
    driver = Driver(engine)
    driver.send(generate("old", prompt(1)), generate("new", prompt(2)))
    driver.step()
    (waiting,) = engine.scheduler.waiting
    assert waiting.request_id == "old" and waiting.lease is None
    assert engine.scheduler.admission.reasons()[waiting] == "loading 4 pages from disk"
    io.run_all()
    driver.step()
    assert not engine.scheduler.waiting
    assert {name: outcome.tokens for name, outcome in driver.drain().items()} == {
        "old": continuation(prompt(1), 8),
        "new": continuation(prompt(2), 8),
    }
    assert driver.outcomes["old"].cached_tokens == 16


def test_a_disk_that_never_answers_is_waited_for_in_vain_only_once(tmp_path: Path) -> None:
    """Scenario 13: the request is computed instead, and the read may still come."""

    class Hanging(ManualIO):
        def wait(self, futures: Any, seconds: float) -> None:
            clock.now += seconds

    served(tmp_path, prompt(1))
    io, clock = Hanging(), Clock()
    engine = killed(tmp_path, background=io, clock=clock)
    driver = Driver(engine)
    driver.send(generate("r", prompt(1)))
    driver.drain()
    assert driver.outcomes["r"].tokens == continuation(prompt(1), 8)
    assert driver.outcomes["r"].cached_tokens == 0
    assert LEAST_PATIENCE <= clock.now < 2 * LEAST_PATIENCE
    io.run_all()
    ask(engine, prompt(1), "again")
    engine.scheduler.check()


def test_aborted_while_its_pages_are_read(tmp_path: Path) -> None:
    served(tmp_path, prompt(1))
    io = ManualIO()
    engine = killed(tmp_path, background=io)
    driver = Driver(engine)
    driver.send(generate("r", prompt(1)))
    driver.step()
    driver.send(Abort(request_id="r"))
    assert not engine.has_work
    io.run_all()
    assert ask(engine, prompt(1), "again").cached_tokens == 16
    assert hits(engine)["disk"] == 16


def test_two_loads_that_fit_only_one_after_the_other(tmp_path: Path) -> None:
    """Scenario 45: each reserves all it needs before it loads, so that neither waits for the other."""
    served(tmp_path, prompt(1, 41), prompt(2, 41))
    engine = killed(tmp_path, num_pages=16)
    outcomes = run(engine, generate("a", prompt(1, 41)), generate("b", prompt(2, 41)))
    assert [outcomes[name].cached_tokens for name in "ab"] == [40, 40]
    assert outcomes["a"].tokens == continuation(prompt(1, 41), 8)
    assert outcomes["b"].tokens == continuation(prompt(2, 41), 8)


def test_a_run_that_is_split_while_it_is_stored() -> None:
    """Scenario 21: slots are pinned, not nodes, so a split has nothing to inherit."""
    engine = make_engine(num_pages=64, host_slots=256, depth=1)
    ask(engine, prompt(1, 41))
    driver = Driver(engine)
    driver.send(generate("a", prompt(1, 41)))
    driver.step()
    driver.send(generate("b", [*prompt(1, 41)[:14], *prompt(3, 20)]))
    driver.drain()
    engine.scheduler.check()
    churn(engine)
    assert ask(engine, prompt(1, 41), "c").cached_tokens == 40


def test_flush_forgets_every_tier(tmp_path: Path) -> None:
    served(tmp_path, prompt(1))
    engine = killed(tmp_path)
    ask(engine, prompt(1))
    reply = engine.handle(Call(call_id=1, method="flush", args={}))[0]
    assert isinstance(reply, Reply) and reply.error is None
    assert ask(engine, prompt(1)).cached_tokens == 0
    assert list(tmp_path.glob("*/*.kv")) == []


# ---- random traffic


@given(data=st.data())
@settings(deadline=None)
def test_random_traffic_over_tiers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """As test_engine.test_random_traffic, with little memory, little host memory, a disk that is slow, and restarts."""
    folder = tmp_path_factory.mktemp("tiers") if data.draw(st.booleans()) else None
    settings: dict[str, Any] = {
        "num_pages": data.draw(st.integers(8, 24)),
        "page_size": data.draw(st.sampled_from([1, 2, 4])),
        "depth": data.draw(st.integers(0, 1)),
        "host_slots": data.draw(st.integers(2, 40)),
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "max_num_batched_tokens": data.draw(st.integers(6, 40)),
        "preemption_mode": data.draw(st.sampled_from(["auto", "swap"])),
        "disk_cache_dir": folder,
    }
    for life in range(data.draw(st.integers(1, 3))):
        io, clock = ManualIO(), Clock()
        driver = Driver(make_engine(background=io, clock=clock, **settings))
        worker = driver.engine.worker
        assert isinstance(worker, StubWorker)
        wanted: dict[str, tuple[list[int], int]] = {}
        aborted: set[str] = set()
        for i in range(data.draw(st.integers(1, 20))):
            action = data.draw(
                st.sampled_from(["arrive", "arrive", "step", "step", "step", "abort", "io", "tick", "flush"])
            )
            if action == "arrive":
                longest = driver.engine.scheduler.max_tokens_per_request - 1
                tokens = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=longest))
                wanted[f"r{life}.{i}"] = tokens, data.draw(st.integers(1, 10))
                driver.send(generate(f"r{life}.{i}", tokens, max_tokens=wanted[f"r{life}.{i}"][1]))
            elif action == "abort" and wanted:
                aborted.add(name := data.draw(st.sampled_from(sorted(wanted))))
                driver.send(Abort(request_id=name))
            elif action == "io" and io.jobs:
                io.run(data.draw(st.integers(0, len(io.jobs) - 1)))
            elif action == "tick":
                clock.now += 0.4
            elif action == "flush" and not worker.in_flight and data.draw(st.integers(0, 4)) == 0:
                driver.engine.handle(Call(call_id=i, method="flush", args={}))
            else:
                driver.step()
        driver.drain()
        for name, (tokens, max_tokens) in wanted.items():
            room = min(max_tokens, driver.engine.scheduler.max_tokens_per_request - len(tokens))
            if name not in aborted:
                assert driver.outcomes[name].tokens == continuation(tokens, room), name
        # Whatever I/O was not run by now never ran: the process was killed.
