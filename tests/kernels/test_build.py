"""Compiling at first use: once, safely, and with a clear word when it can't be done. The compilers here are shell scripts."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trunkline.kernels import build
from trunkline.kernels.build import BuildError, build_ahead, build_library

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "fake %(version)s"; exit 0; }
echo "$@" >> %(log)s
while [ "$1" != -o ]; do shift; done
echo library > "$2"
%(then)s
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of its own, with a compiler that writes down how it is called, and two source files."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("a.c", "b.c"):
        (sources / name).write_text("int a;")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._temporary_folder.cache_clear()
    write_compiler(tmp_path)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    return tmp_path


def write_compiler(home: Path, *, version: str = "1.0", then: str = "") -> None:
    (home / "cc").write_text(COMPILER % {"version": version, "log": home / "log", "then": then})
    (home / "cc").chmod(0o755)


def compiled(home: Path) -> list[str]:
    """How the compiler was called for source files, in any order."""
    return [call for call in _calls(home) if " -c " in call]


def linked(home: Path) -> list[str]:
    """How it was called for libraries."""
    return [call for call in _calls(home) if "-shared" in call]


def _calls(home: Path) -> list[str]:
    return (home / "log").read_text().splitlines() if (home / "log").exists() else []


def test_compiled_once_into_a_folder_that_is_ours_alone(home: Path) -> None:
    library = build_library()
    assert library.parent == home / "cache/trunkline/kernels"
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert build_library() == library
    assert len(linked(home)) == 1
    assert [file.name for file in library.parent.iterdir()] == [library.name], "nothing unfinished is left"


def test_never_for_the_build_machine_alone(home: Path) -> None:
    build_library("avx2")
    avx2 = compiled(home)
    build_library("baseline")
    baseline = compiled(home)[len(avx2) :]
    assert all("-mavx2 -mfma -mf16c" in call for call in avx2) and not any("-mavx" in call for call in baseline)
    assert all("native" not in call and "-ffp-contract=off" in call for call in (*avx2, *baseline))


def test_each_source_has_a_compiler_of_its_own(home: Path) -> None:
    build_library()
    assert sorted(Path(call.split(" -c ")[1].split()[0]).name for call in compiled(home)) == ["a.c", "b.c"]
    (link,) = linked(home)
    assert sorted(Path(word).name for word in link.split() if word.endswith(".o")) == ["a.o", "b.o"]


def test_ahead_and_then_not_again(home: Path, tmp_path: Path) -> None:
    write_compiler(home, then=f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done")
    build_ahead()
    (tmp_path / "go").touch()
    library = build_library()
    assert library.read_text() == "library\n" and len(linked(home)) == 1


def test_what_goes_wrong_ahead_is_told_to_who_needs_it(home: Path) -> None:
    write_compiler(home, then="exit 3")
    build_ahead()
    with pytest.raises(BuildError, match="fails with code 3"):
        build_library()


def test_the_target_is_found_without_torch_and_is_what_torch_finds() -> None:
    code = (
        "import sys; from trunkline.kernels.build import detect_target; print(detect_target(), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    target, has_torch = ended.stdout.split()
    allowed = {"AVX512": {"avx512", "avx2"}, "AVX2": {"avx2"}}  # an early AVX-512 lacks what ours wants
    assert target in allowed.get(torch.backends.cpu.get_cpu_capability(), {"baseline"}) and has_torch == "False"


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni amx_int8", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx2"),  # Skylake
        ("avx2 fma f16c avx_vnni", "avx2"),
        ("avx2 f16c", "baseline"),
        ("sse4_2", "baseline"),
    ],
)
def test_a_target_wants_all_its_extensions(monkeypatch: pytest.MonkeyPatch, flags: str, target: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\nflags\t\t: {flags}\n")
    build._extensions.cache_clear()
    try:
        assert build.detect_target() == target
    finally:
        build._extensions.cache_clear()


def test_another_compiler_target_or_source_is_another_library(home: Path) -> None:
    libraries = {build_library("avx2"), build_library("baseline")}
    write_compiler(home, version="2.0")
    libraries.add(build_library("avx2"))
    (home / "sources/a.c").write_text("int b;")
    libraries.add(build_library("avx2"))
    (home / "sources/a.h").write_text("")
    libraries.add(build_library("avx2"))
    assert len(libraries) == 5


def test_the_compiler_complains(home: Path) -> None:
    write_compiler(home, then='echo "x.c:1: error: no such thing" >&2; exit 3')
    with pytest.raises(BuildError, match=r"cc fails with code 3: x\.c:1: error: no such thing"):
        build_library()
    assert list((home / "cache/trunkline/kernels").iterdir()) == []


def test_no_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(BuildError, match="no home folder"):
        build_library()


def test_no_compiler(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(home / "nothing"))
    with pytest.raises(BuildError, match="there is no C compiler"):
        build_library()
    monkeypatch.setenv("CC", str(home / "missing"))
    with pytest.raises(BuildError, match="missing does not run"):
        build_library()


def test_a_library_made_earlier_serves_without_a_compiler(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_library("avx2")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(home / "nothing"))
    assert build_library("avx2") == library
    with pytest.raises(BuildError, match="there is no C compiler"):
        build_library("baseline")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_used(home: Path, mode: int) -> None:
    folder = home / "cache/trunkline/kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    library = build_library()
    assert library.parent != folder and stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    assert build_library() == library, "one temporary folder for the process"
    assert len(linked(home)) == 1


def test_a_cache_that_cannot_be_made(home: Path) -> None:
    (home / "cache").write_text("a file in the way")
    assert build_library().read_text() == "library\n"


def test_the_real_one_is_cached_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.path.join(os.sep, "home", "somebody"))
    assert build.default_cache() == Path("/home/somebody/.cache/trunkline/kernels")
