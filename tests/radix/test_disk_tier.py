"""The folder of the disk tier: what is made, what is deleted, and what is left alone."""

import os
import stat
from pathlib import Path

import pytest

from tests.radix.tier_factories import FINGERPRINT, PAGE_BYTES, Device, FaultyFiles, name, open_disk, owner, payload
from trunkline.errors import ConfigError
from trunkline.radix.disk_tier import STALE_SECONDS, DiskTier, Page
from trunkline.radix.segment import Layout, segment_bytes

ONE_PAGE = segment_bytes(1, PAGE_BYTES)
OTHER = "f" * 32


def write(disk: DiskTier, *prefixes: int) -> Path:
    """One segment of these pages."""
    result = disk.write([Page(name(prefix), owner(), payload(prefix)) for prefix in prefixes], disk.take_touched())
    disk.take_write(result)
    assert result.segment is not None, result.trouble
    return result.segment.path


def age(path: Path, seconds: float) -> None:
    """Used last so long after the beginning of time."""
    os.utime(path, (seconds, seconds))


def test_folder_and_files_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write(open_disk(tmp_path / "a" / "kv"), 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.name == FINGERPRINT


def test_what_was_used_least_recently_is_deleted_other_models_included(tmp_path: Path) -> None:
    other = DiskTier(tmp_path, Layout(OTHER, 16, PAGE_BYTES), max_bytes=2**20)
    theirs = [write(other, 1), write(other, 2)]
    disk = open_disk(tmp_path, max_bytes=4 * ONE_PAGE)
    ours = [write(disk, 3), write(disk, 4)]
    for seconds, path in enumerate([ours[0], theirs[0], theirs[1], ours[1]]):
        age(path, seconds)
    write(disk, 5)
    assert not ours[0].exists() and theirs[0].exists()
    assert name(3) not in disk and name(4) in disk and disk.removed_pages_total == 1
    write(disk, 6)
    assert not theirs[0].exists() and theirs[1].exists()
    assert disk.num_bytes == 4 * ONE_PAGE


def test_reading_counts_as_use(tmp_path: Path) -> None:
    device = Device(tmp_path, max_bytes=2 * ONE_PAGE, num_slots=4)
    device.save(1)
    device.save(2)
    old, new = sorted(tmp_path.glob("*/*.kv"))
    device = Device(tmp_path, max_bytes=2 * ONE_PAGE, num_slots=4)
    age(old, 1)
    age(new, 2)
    device.tiers.fetch(name(1), 0, 1)
    device.io.run_all()
    device.tiers.poll(0.0)
    device.save(3)
    assert old.exists() and not new.exists()


def test_a_segment_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, max_bytes=ONE_PAGE)
    kept = write(disk, 1)
    result = disk.write([Page(name(prefix), owner(), payload(prefix)) for prefix in (2, 3)], [])
    assert (result.segment, result.trouble) == (None, "no_space")
    assert kept.exists()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = [
        tmp_path / "notes.kv",
        tmp_path / "folder" / f"{0:020}-{'a' * 12}.kv",
        tmp_path / FINGERPRINT / "mine.kv",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_bytes(b"x" * 10_000)
        age(path, 1)
    disk = open_disk(tmp_path, max_bytes=ONE_PAGE)
    write(disk, 1)
    write(disk, 2)
    assert all(path.exists() for path in foreign)


def test_files_left_half_written_go_once_nobody_can_be_writing_them(tmp_path: Path) -> None:
    path = write(open_disk(tmp_path), 1)
    draft = path.with_name(f"{0:020}-{'a' * 12}.kv.tmp")
    draft.write_bytes(b"half")
    files = FaultyFiles()
    open_disk(tmp_path, files=files)
    assert draft.exists(), "another server may be writing it right now"
    files.clock = STALE_SECONDS + 60
    open_disk(tmp_path, files=files)
    assert not draft.exists() and path.exists()


def test_a_damaged_header_is_counted_and_deleted(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    torn, whole = write(disk, 1, 2), write(disk, 3)
    torn.write_bytes(torn.read_bytes()[:-1])
    again = open_disk(tmp_path)
    assert len(again) == 1 and again.troubles["corrupt"] == 1
    assert not torn.exists() and whole.exists()


def test_of_a_page_that_is_there_twice_the_newest_is_read(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    old, new = write(disk, 1), write(disk, 1, 2)
    place = open_disk(tmp_path).find(name(1))
    assert place is not None and place.segment.path == new
    disk.delete(disk._segments[old])
    assert name(1) in disk, "the other one is still there"
    disk.delete(disk._segments[new])
    assert name(1) not in disk


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    first, second = Device(tmp_path), Device(tmp_path)
    first.save(1)
    second.save(2)
    assert len(list(tmp_path.glob("*/*.kv"))) == 2
    third = Device(tmp_path)
    assert third.found(1, 2) == (0, 2)


@pytest.mark.parametrize(
    ("max_bytes", "told"),
    [(ONE_PAGE - 1, "--disk-cache-size is .* one page of this model takes"), (1, "--disk-cache-size")],
)
def test_less_than_a_page_is_no_cache(tmp_path: Path, max_bytes: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_disk(tmp_path, max_bytes=max_bytes)


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--disk-cache-dir is .*file.*Please name a folder"):
        open_disk(tmp_path / "file" / "kv")
    files = FaultyFiles()
    files.unwritable = PermissionError(13, "Permission denied")
    with pytest.raises(ConfigError, match="Permission denied"):
        open_disk(tmp_path / "kv", files=files)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Whoever can write there could choose what is read from it."""
    folder = tmp_path / FINGERPRINT
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="written to by others"):
        open_disk(tmp_path)


@pytest.mark.parametrize(("mode", "refused"), [(0o770, True), (0o707, True), (0o1777, False), (0o755, False)])
def test_so_is_one_in_which_others_could_exchange_ours(tmp_path: Path, mode: int, refused: bool) -> None:
    """Unless it is sticky, as /tmp is; that one is the parent of other folders in any case."""
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    if refused:
        with pytest.raises(ConfigError, match=rf"its mode is {mode:o}\). Please run chmod go-w on it"):
            open_disk(folder)
        assert list(folder.iterdir()) == []
    else:
        open_disk(folder)
    open_disk(folder / "mine")
    assert stat.S_IMODE((folder / "mine").stat().st_mode) == 0o700


def test_so_is_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    us = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    if us:
        with pytest.raises(ConfigError, match=rf"belongs to another user \(uid {us}\)"):
            open_disk(tmp_path)
    else:  # root's folder is as good as ours; what is in it, is not
        with pytest.raises(ConfigError, match="written to by others"):
            open_disk(tmp_path)
