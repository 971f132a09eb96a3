"""`trunkline env` and `trunkline completion`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline
from trunkline.cli import main
from trunkline.environment import PACKAGES, as_text, describe

CPUINFO = "processor\t: 0\nmodel name\t: A Processor 9000\nflags\t\t: fpu sse4_2 avx2 avx512_vnni amx_int8\n"
MEMINFO = "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:    524288 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Files as a machine has them under its root."""
    for name, text in {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/\n",
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="An OS 12"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_known_of_a_machine(machine: Path) -> None:
    facts = describe(machine, {})
    assert facts["trunkline"]["version"] == trunkline.__version__
    assert facts["packages"].keys() == set(PACKAGES)
    assert facts["packages"]["torch"] and facts["packages"]["xgrammar"]
    assert facts["os"]["system"] == "An OS 12"
    assert facts["cpu"]["model"] == "A Processor 9000"
    assert facts["cpu"]["features"] == ["sse4_2", "avx2", "avx512_vnni", "amx_int8"]
    assert facts["memory"] == {"total": 2**30, "available": 2**29}
    text = as_text(facts)
    assert "A Processor 9000" in text and "1.0 GiB, 512.0 MiB available" in text


def test_what_cannot_be_found_out_is_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no compiler, no git, no nvidia-smi
    (machine / "proc/cpuinfo").unlink()
    monkeypatch.setattr("trunkline.environment._version", lambda name: None)
    facts = describe(machine, {})
    assert (facts["compiler"], facts["gpus"], facts["trunkline"]["commit"]) == (None, [], None)
    text = as_text(facts)
    for words in ("none that nvidia-smi knows of", "none; the CPU kernels run in plain PyTorch", "not installed"):
        assert words in text


def test_gpus_are_listed(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 9.0, 550.54.15'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    facts = describe(machine, {})
    assert facts["gpus"] == [
        {"name": "NVIDIA H100 80GB HBM3", "memory": "81559 MiB", "compute_capability": "9.0", "driver": "550.54.15"}
    ]
    assert "NVIDIA H100 80GB HBM3, 81559 MiB, compute capability 9.0, driver 550.54.15" in as_text(facts)


def test_variables_that_matter_without_their_secrets(machine: Path) -> None:
    environment = {
        "TRUNKLINE_API_KEY": "abc",
        "TRUNKLINE_PORT": "8000",
        "HF_TOKEN": "abc",
        "OTEL_EXPORTER_OTLP_HEADERS": "x=abc",
        "https_proxy": "http://me:abc@abc@proxy:1/",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/home/me",
        "MY_PASSWORD": "abc",
    }
    facts = describe(machine, environment)
    assert facts["environment"] == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_TOKEN": "…",
        "OTEL_EXPORTER_OTLP_HEADERS": "…",
        "TRUNKLINE_API_KEY": "…",
        "TRUNKLINE_PORT": "8000",
        "https_proxy": "http://…@proxy:1/",
    }
    assert "abc" not in as_text(facts)


def test_the_command_prints_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"CPython {facts['python']['version']}" in text and facts["packages"]["msgspec"] in text


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom trunkline.cli import main\nmain(['env'])\n"
        "sys.exit(f'imported: {heavy}' if (heavy := {'torch', 'numpy', 'xgrammar'} & sys.modules.keys()) else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ARGCOMPLETE" in script and "trunkline" in script
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trunkline ser", {"serve"}),
        ("trunkline bench ", {"serve", "cache"}),
        ("trunkline serve --max-mod", {"--max-model-len"}),
        ("trunkline serve --dtype ", {"auto", "float16", "half"}),
        ("trunkline completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, words: set[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    command = tmp_path / "trunkline"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trunkline "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(trunkline completion bash)"\nCOMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDBREAKS=" "\n'
        '_python_argcomplete trunkline\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    # With a setting that cannot be read: whoever completes has not started anything yet.
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "TRUNKLINE_PORT": "many"}
    ended = subprocess.run(
        [bash, "-c", script, "bash", line], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert words <= {word.strip() for word in ended.stdout.splitlines()}, ended
