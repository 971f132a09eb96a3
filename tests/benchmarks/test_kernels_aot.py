"""The gate finds what is planted, and passes what is sound."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernels_aot import Compiled, Resources, defects, main, misdescribed, table, twice, write_page
from trunkline.kernels.triton.spec import ARCHS, Config, KernelSpec

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cache: Path | None = None) -> tuple[int, str]:
    """The gate in a process of its own, where kernels are compiled rather than interpreted: exit code and what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "benchmarks.kernels_aot", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def compiled(
    name: str = "sound", *, arch: int = 90, registers: int = 64, stack: int = 0, local: int = 0, **other: Any
) -> Compiled:
    counts = {"HMMA": 0, "HGMMA": 4, "UTCHMMA": 0, "LDGSTS": 24, "LDG.E.128": 0}
    facts: dict[str, Any] = {"needs": (), "threads": 128, "shared": 49_152, "multiplies_float32": False, "tf32": False}
    used = Resources(registers=registers, stack=stack, local=local, counts=counts)
    return Compiled(name=name, arch=arch, resources=used, **facts | other)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (compiled(stack=96), "spills: 96 bytes of stack"),
        (compiled(local=8), "0 bytes of stack and 8 of local memory"),
        (compiled(shared=232_449), "wants 232,449 bytes of shared memory, allowed are 232,448"),
        (compiled(arch=80, shared=200_000), "allowed are 166,912"),
        (compiled(registers=255, threads=512), "wants 255 registers for each of 512 threads"),
        (compiled(needs=("HMMA",)), "holds no HMMA"),
        (compiled(tf32=True), "rounds float32 to TF32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_defect_is_a_sentence(one: Compiled, says: str) -> None:
    (sentence,) = defects(one)
    assert sentence.startswith(f"sound for sm_{one.arch} ") and says in sentence and sentence.endswith(".")


@pytest.mark.parametrize(
    "one",
    [compiled(), compiled(shared=232_448), compiled(needs=("HMMA", "HGMMA")), compiled(registers=255, threads=256)],
)
def test_what_is_sound_passes(one: Compiled) -> None:
    assert list(defects(one)) == []


def test_names_tell_kernels_apart() -> None:
    assert twice([compiled("a"), compiled("a", arch=80), compiled("b"), compiled("a")]) == [
        "a for sm_90 is the name of two specs."
    ]


def described(kind: str, *, do_not_specialize: bool) -> KernelSpec:
    parameter = SimpleNamespace(name="count", do_not_specialize=do_not_specialize)
    kernel = SimpleNamespace(arg_names=["count"], params=[parameter])
    return KernelSpec(name="k", kernel=kernel, types={"count": kind}, constants={}, config=Config({}))


def test_a_spec_says_what_a_launch_would_compile() -> None:
    assert misdescribed(described("i32", do_not_specialize=True)) == ""
    assert misdescribed(described("i32:16", do_not_specialize=False)) == ""
    assert misdescribed(described("fp32", do_not_specialize=False)) == ""
    assert "name it in do_not_specialize" in misdescribed(described("i32", do_not_specialize=False))
    assert "its type is i32." in misdescribed(described("i32:16", do_not_specialize=True))


def test_an_integer_may_be_described_for_both_of_its_kinds() -> None:
    odd = described("i32", do_not_specialize=False)
    even = replace(described("i32:16", do_not_specialize=False), kernel=odd.kernel)
    assert misdescribed(odd, [even, odd]) == misdescribed(even, [even, odd]) == ""
    assert "in another spec" in misdescribed(odd, [described("i32:16", do_not_specialize=False), odd]), (
        "another kernel's"
    )


def test_a_spec_names_the_kernels_arguments() -> None:
    spec = described("i32", do_not_specialize=True)
    wrong = KernelSpec(name="k", kernel=spec.kernel, types={}, constants={"BLOCK": 16}, config=Config({}))
    assert "BLOCK, count" in misdescribed(wrong)


def test_table_is_markdown() -> None:
    lines = table([compiled(), compiled("b", multiplies_float32=True)]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2].endswith("| –    |") and lines[3].endswith("| yes  |")


def test_an_architecture_keeps_its_part_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(page, {90: "ninety", 80: "eighty"})
    write_page(page, {100: "a hundred", 90: "ninety again"})
    parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    assert parts == ["sm_80\n\neighty\n\n", "sm_90\n\nninety again\n\n", "sm_100\n\na hundred\n"]


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        main([])
    assert "unset it" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit):
        main(["--arch", "70"])
    assert "--arch is 70; allowed are 80,90,100" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_planted_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    status, printed = run("--module", "tests.benchmarks.planted_kernels", "--output", str(page), cache=tmp_path)
    assert status == 1
    for sentence in (
        r"too large a block for sm_90 spills: \d+ bytes of stack",
        r"too many stages for sm_90 wants [\d,]+ bytes of shared memory, allowed are 232,448",
        r"too few rows for sm_90 holds no HGMMA",
        r"rounded for sm_90 rounds float32 to TF32",
        r"K too small for sm_90 does not compile: .*K >= 16",
        r"9 of 10 kernels compiled in \d+ s, 5 defects",
    ):
        assert re.search(sentence, printed), f"{sentence}\n{printed}"
    assert [f"## sm_{arch}" in page.read_text() for arch in ARCHS] == [True] * 3
    assert re.search(r"sound, float32 .* yes +\|", page.read_text())
    kept = [json.loads(file.read_text()) for file in tmp_path.glob("resources-*.json")]
    assert len(kept) == 9, "not disassembled again"


@pytest.mark.slow
def test_a_quick_run_takes_a_sample_of_the_other_architectures(tmp_path: Path) -> None:
    _, printed = run("--module", "tests.benchmarks.planted_kernels", "--arch", "80", "--quick", cache=tmp_path)
    assert "1 of 1 kernels compiled" in printed and "0 defects" in printed


@pytest.mark.slow
def test_no_kernel_at_all_is_a_defect() -> None:
    status, printed = run("--module", "trunkline.kernels.triton.spec_of_nothing")
    assert status == 1 and "spec_of_nothing" in printed


@pytest.mark.real
def test_every_shipped_kernel_passes_and_none_is_missing_at_its_launch(tmp_path: Path) -> None:
    """The gate as `make check` has it, from an empty cache. After it no wrapper finds a kernel missing: specs say what
    launches do."""
    status, printed = run("--quick", cache=tmp_path)
    assert status == 0, printed
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.benchmarks.launch_everything"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert "compiled at its launch" not in printed and "launches looked for a kernel" in printed, printed
