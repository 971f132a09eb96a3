"""The tiers: what is copied when, what is found, and what happens to slots when requests, reads, writes and steps don't end well."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.radix.tier_factories import Device, FaultyFiles, name, names, payload
from trunkline.radix.tiers import BATCH_PAGES, BATCH_SECONDS, Found, Threads, Tiers
from trunkline.step import CopyKind


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


# ---- host memory


def test_a_page_goes_to_host_memory_and_comes_back() -> None:
    device = Device()
    device.compute(1, page=3)
    assert device.store(1, page=3) == 1
    assert device.found(1) == (0, 1), "its copy is on its way"
    device.step()
    assert device.found(1) == (1, 0)
    assert device.load(1, page=5) == (1, 0)
    device.step()
    assert device.holds(1, page=5)
    device.tiers.check()


def test_an_evicted_page_is_read_before_it_is_written_again() -> None:
    """The page of 1 is evicted, leased again, and loaded with 2, all between two plans."""
    device = Device()
    device.fill(2)
    device.compute(1, page=0)
    device.store(1, page=0)
    device.load(2, page=0)
    assert [copy.kind for copy in device.copies] == [CopyKind.STORE, CopyKind.LOAD]
    device.step()
    assert device.holds(2, page=0)
    device.load(1, page=1)
    device.step()
    assert device.holds(1, page=1)


def test_what_is_there_is_not_stored_again() -> None:
    device = Device()
    device.fill(1)
    assert device.store(1, page=4) == 1
    assert device.copies == []


def test_the_least_recently_used_page_is_given_up() -> None:
    device = Device(num_slots=3)
    device.fill(1, 2, 3)
    device.found(1)
    device.fill(4)
    assert [device.found(prefix) for prefix in (1, 2, 3, 4)] == [(1, 0), (0, 0), (1, 0), (1, 0)]
    assert device.tiers.evicted_pages_total == {"host": 1}


def test_only_a_run_from_the_first_page_on_is_found() -> None:
    device = Device()
    device.fill(1, 3)
    assert device.found(1, 2, 3) == (1, 0)
    assert device.tiers.look_up(names(1, 2, 3), 2, 3) == Found(1, 0)


def test_a_slot_that_is_being_read_is_never_reused() -> None:
    """Scenario 20: the host tier is full while a load is in flight."""
    device = Device(num_slots=2)
    device.fill(1, 2)
    device.load(1, 2, page=4)
    load = device.plan()
    device.compute(7, page=0)
    assert device.store(7, page=0) == 0, "every slot is pinned: the page is dropped"
    assert device.tiers.errors["no_slot"] == 1
    device.run(load)
    device.tiers.step_done(device.last_step)
    assert device.holds(1, page=4) and device.holds(2, page=5)
    assert device.store(7, page=0) == 1


def test_a_page_that_finds_no_slot_is_never_taken_for_stored() -> None:
    """Scenario 23."""
    device = Device(num_slots=1)
    device.compute(1, page=0)
    device.compute(2, page=1)
    assert device.store(1, 2, page=0) == 1
    device.step()
    assert device.found(1) == (1, 0) and device.found(2) == (0, 0)


def test_a_slot_is_not_found_under_its_old_name_once_it_is_reserved_again() -> None:
    """Scenarios 24 and 25: the slot of 1 is the next to be used, in the very plan that evicts the page it would go to."""
    device = Device(num_slots=1)
    device.fill(1)
    device.compute(2, page=0)
    device.store(2, page=0)
    assert device.found(1) == (0, 0)
    device.step()
    device.load(2, page=0)
    device.step()
    assert device.holds(2, page=0)


def test_a_lost_step_leaves_nothing_to_be_found() -> None:
    """Scenario 19 and 22: nobody knows what of it was done. Its slots are free again."""
    device = Device(num_slots=2)
    device.fill(1)
    device.compute(2, page=0)
    device.store(2, page=0)
    device.load(1, page=3)
    device.plan()
    device.tiers.step_lost(device.last_step)
    assert device.found(1) == (1, 0) and device.found(2) == (0, 0)
    device.tiers.check()
    assert device.tiers.host.num_used == 1


def test_rates_are_measured() -> None:
    device = Device()
    before = device.tiers.copy_rate.bytes_per_second
    device.compute(1, page=0)
    device.store(1, page=0)
    device.run(device.plan())
    device.tiers.step_done(device.last_step, copy_seconds=1.0)
    assert device.tiers.copy_rate.bytes_per_second < before
    assert device.tiers.seconds_to_load(Found(10, 10)) > device.tiers.seconds_to_load(Found(20, 0)) > 0


# ---- disk


def test_pages_outlive_the_process(tmp_path: Path) -> None:
    Device(tmp_path).save(1, 2, 3)
    again = Device(tmp_path)
    assert again.found(1, 2, 3, 4) == (0, 3)
    fetch = again.tiers.fetch(names(1, 2, 3, 4), 0, 3)
    assert not fetch.done and fetch.num_pages == 3
    again.io.run_all()
    assert not fetch.done, "the engine's loop has not taken it in"
    again.tiers.poll(0.0)
    assert fetch.done and again.found(1, 2, 3) == (3, 0)
    assert again.load(1, 2, 3, page=2) == (0, 3), "they came from disk"
    again.step()
    assert [again.holds(prefix, page) for prefix, page in ((1, 2), (2, 3), (3, 4))] == [True] * 3
    assert again.load(1, page=0) == (1, 0), "and from host memory the next time"


def test_batches_are_written_when_full_when_old_and_when_idle(tmp_path: Path) -> None:
    device = Device(tmp_path, num_slots=4 * BATCH_PAGES)

    def written(now: float, *, idle: bool = False) -> int:
        device.tiers.poll(now, idle=idle)
        num_jobs = len(device.io.jobs)
        device.io.run_all()
        device.tiers.poll(now)
        return num_jobs

    device.fill(*range(BATCH_PAGES - 1))
    assert device.tiers.has_work
    assert written(10.0) == 0
    device.fill(BATCH_PAGES)
    assert written(10.0) == 1
    assert not device.tiers.has_work
    device.fill(1000)
    assert [written(20.0), written(20.0 + BATCH_SECONDS / 2), written(20.0 + BATCH_SECONDS)] == [0, 0, 1]
    device.fill(2000)
    assert written(30.0, idle=True) == 1
    assert len(segments(tmp_path)) == 3


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    device = Device(tmp_path, num_slots=2)
    device.save(1)
    device.save(2)
    device.save(3)  # 1 leaves host memory
    assert device.found(1) == (0, 1)
    device.fill(1)
    assert not device.tiers.has_work
    assert len(segments(tmp_path)) == 3


def test_pages_on_disk_leave_host_memory_before_those_that_are_not(tmp_path: Path) -> None:
    device = Device(tmp_path, num_slots=2)
    device.fill(1)
    device.save(2)  # both go into one segment
    device.fill(3)
    device.fill(4)
    assert device.found(1) == device.found(2) == (0, 1)
    device.fill(5)  # 3 and 4 aren't on disk, and the older one has to go
    assert device.found(3) == (0, 0) and device.found(4) == (1, 0)
    assert device.tiers.errors["unsaved"] == 1


def test_abort_mid_load_and_every_way_a_read_can_end(tmp_path: Path) -> None:
    """Scenario 13: nobody waits any more. A late read is of use to the next, and one that never ends costs its slots only."""
    Device(tmp_path).save(1, 2)
    device = Device(tmp_path, num_slots=4)
    device.tiers.fetch(names(1), 0, 1)  # whoever asked is gone
    device.tiers.fetch(names(2), 0, 1)  # this read never ends
    device.io.run()
    device.tiers.poll(0.0)
    assert device.found(1) == (1, 0)
    device.fill(5, 6, 7)
    assert device.tiers.host.num_used == 4
    assert device.found(2) == (0, 1) and not device.tiers.fetch(names(2), 0, 1).done
    device.tiers.check()


def test_two_who_want_the_same_pages_read_them_once(tmp_path: Path) -> None:
    Device(tmp_path).save(1, 2)
    device = Device(tmp_path)
    first, second = (device.tiers.fetch(names(1, 2), 0, 2) for _ in range(2))
    assert (first.num_pages, second.num_pages, len(device.io.jobs)) == (2, 0, 1)
    device.io.run_all()
    device.tiers.poll(0.0)
    assert first.done and second.done


def test_reads_hold_half_of_the_slots_at_most_and_lose_nothing(tmp_path: Path) -> None:
    Device(tmp_path, num_slots=8).save(*range(8))
    device = Device(tmp_path, num_slots=4)
    assert device.tiers.fetch(names(*range(8)), 0, 8).num_pages == 2
    assert device.tiers.fetch(names(*range(4, 8)), 0, 4).num_pages == 0
    device.tiers.check()


def test_a_segment_flushed_while_it_is_written_is_deleted(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.fill(1, tenant="a")
    device.fill(2, tenant="b")
    device.tiers.poll(0.0, idle=True)
    assert device.tiers.flush("a") == 1
    device.io.run_all()
    device.tiers.poll(0.0)
    assert device.found(1) == (0, 0) and device.found(2) == (1, 0)
    device.tiers.check()
    restarted = Device(tmp_path)
    assert restarted.found(1) == (0, 0)
    assert sum(restarted.found(2)) == 1, "a flush takes nothing from another tenant"
    assert len(segments(tmp_path)) == 1


def test_flush_by_tenant_and_salt(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.save(1, tenant="a", salt="x")
    device.save(2, tenant="a", salt="y")
    device.save(3, tenant="b", salt="x")
    assert device.tiers.flush("a", "x") == 2, "one in host memory, one on disk"
    assert [sum(device.found(prefix)) for prefix in (1, 2, 3)] == [0, 1, 1]
    assert sum(Device(tmp_path).found(1)) == 0, "after a restart, too"
    assert device.tiers.flush() == 4
    assert segments(tmp_path) == [] and device.tiers.host.num_used == 0


def test_flushed_pages_on_their_way_do_not_come_back(tmp_path: Path) -> None:
    Device(tmp_path).save(1)
    device = Device(tmp_path)
    device.compute(2, page=0)
    device.store(2, page=0)
    copies = device.plan()
    fetch = device.tiers.fetch(names(1), 0, 1)
    device.tiers.flush()
    device.run(copies)
    device.tiers.step_done(device.last_step)
    device.io.run_all()
    device.tiers.poll(0.0)
    assert fetch.done and device.found(1) == device.found(2) == (0, 0)
    device.tiers.check()
    assert device.tiers.host.num_used == 0


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, bit: int) -> None:
    Device(tmp_path).save(1, 2)
    (segment,) = segments(tmp_path)
    content = bytearray(segment.read_bytes())
    at = content.index(payload(2).tobytes()) + 5
    content[at] ^= 1 << bit
    segment.write_bytes(content)
    device = Device(tmp_path)
    fetch = device.tiers.fetch(names(1, 2), 0, 2)
    device.io.run_all()
    device.tiers.poll(0.0)
    assert fetch.done and device.found(1, 2) == (1, 0)
    assert device.tiers.errors["corrupt"] == 1
    device.tiers.check()


def test_more_pages_wait_than_the_folder_may_hold(tmp_path: Path) -> None:
    """They are written as segments that fit, and the last of them stay."""
    device = Device(tmp_path, num_slots=64, max_bytes=20_000)
    device.save(*range(64))
    device.save(*range(100, 164))
    tiers = device.tiers
    assert tiers.disk is not None
    assert tiers.errors["no_space"] == 0
    assert tiers.disk.segment_pages < len(tiers.disk) <= 128
    assert name(163) in tiers.disk and name(0) not in tiers.disk
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 20_000

    smallest = Device(tmp_path / "smallest", num_slots=64, max_bytes=5_000)
    smallest.save(*range(64))
    assert smallest.tiers.disk is not None
    assert len(smallest.tiers.disk) == 1 and smallest.tiers.errors["no_space"] == 0


def test_a_full_disk_is_counted_and_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    device = Device(tmp_path, files=files)
    files.room = 4100
    for prefix in (1, 2, 3):
        device.save(prefix)
    assert device.tiers.errors["no_space"] == 3
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    assert device.found(1) == (1, 0), "it is still in host memory"
    assert len([record for record in caplog.records if "no space" in record.getMessage()]) == 1
    files.room = None
    device.save(4)
    assert len(segments(tmp_path)) == 1, "the disk is well again"


def test_files_that_cannot_be_written_are_misses(tmp_path: Path) -> None:
    files = FaultyFiles()
    device = Device(tmp_path, files=files)
    files.unwritable = PermissionError(errno.EACCES, "Permission denied")
    device.save(1)
    assert device.tiers.errors["write"] == 1 and segments(tmp_path) == []


def test_files_that_cannot_be_read_are_misses(tmp_path: Path) -> None:
    Device(tmp_path).save(1)
    files = FaultyFiles()
    device = Device(tmp_path, files=files)
    files.unreadable = OSError(errno.EIO, "Input/output error")
    fetch = device.tiers.fetch(names(1), 0, 1)
    device.io.run_all()
    device.tiers.poll(0.0)
    assert fetch.done and device.found(1) == (0, 0) and device.tiers.errors["read"] == 1


def test_a_segment_that_another_server_deleted_is_a_miss_for_all_its_pages(tmp_path: Path) -> None:
    Device(tmp_path).save(1, 2, 3)
    device = Device(tmp_path)
    os.unlink(segments(tmp_path)[0])
    device.tiers.fetch(names(1), 0, 1)
    device.io.run_all()
    device.tiers.poll(0.0)
    assert device.found(1) == device.found(2) == device.found(3) == (0, 0)
    assert device.tiers.errors["missing"] == 1


def test_threads_do_the_same(tmp_path: Path) -> None:
    device = Device(tmp_path)
    assert device.tiers.disk is not None
    tiers = Tiers(device.host_pages, device.copies, device.tiers.disk, Threads())
    device.tiers = tiers
    device.fill(1)
    tiers.close()
    assert len(segments(tmp_path)) == 1
    device = Device(tmp_path)
    assert device.tiers.disk is not None
    device.tiers = tiers = Tiers(device.host_pages, device.copies, device.tiers.disk, Threads())
    fetch = tiers.fetch(names(1), 0, 1)
    while not fetch.done:
        tiers.wait(10.0)
        tiers.poll(0.0)
    device.load(1, page=9)
    device.step()
    assert device.holds(1, page=9)
    tiers.close()


def test_pages_of_a_prefix_used_in_memory_stay_on_disk(tmp_path: Path) -> None:
    """What the tree has all the time is hot; its segment must not go for being read from disk by nobody."""
    device = Device(tmp_path, max_bytes=3 * 5000, num_slots=2)
    device.save(1)
    os.utime(segments(tmp_path)[0], (1, 1))
    device.save(2)
    os.utime(segments(tmp_path)[1], (2, 2))
    device.tiers.use(names(1), 1)
    device.save(3)
    device.save(4)
    assert sum(Device(tmp_path).found(1)) == 1 and sum(Device(tmp_path).found(2)) == 0


def test_the_bytes_of_a_slot_are_the_bytes_of_the_page(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.fill(6)
    entry = device.tiers.host.find(name(6))
    assert entry is not None and np.array_equal(device.host_pages[entry.slot], payload(6))


def test_what_there_is_in_words(tmp_path: Path) -> None:
    Device(tmp_path).save(1, 2)
    host, disk = Device(tmp_path).tiers.descriptions
    assert host.startswith("host memory: ")
    assert disk.endswith(f" in {tmp_path}, 2 pages of this model are there")
