#!/usr/bin/env bash
# One visit to a GPU: checks every kernel there, measures, runs the engine, and writes visit.json and visit.md into $OUT
# (benchmarks/gpu-visit if that is not set). Under 8 minutes on an H200. What it measures and what not: docs/gpu.md.
#
#   benchmarks/gpu_visit.sh                            all of it
#   benchmarks/gpu_visit.sh --part decode tree         parts
#   PYTHON=.venv/bin/python OUT=/tmp/rehearsal benchmarks/gpu_visit.sh --rehearse     on a CPU: does the script itself work?
#
# The machine needs Python 3.12 with torch 2.11 and triton 3.6 for its GPU, and no network. What else the engine imports comes as
# wheels in $WHEELS (gpu-visit-wheels in the repository if that is not set; without such a folder, everything must be installed).
# Fill it on any machine with a network, for the Python and the platform of the GPU's machine:
#
#   python3 -m pip download --only-binary=:all: --no-deps -d gpu-visit-wheels --python-version 3.12 --implementation cp \
#       $(printf -- '--platform manylinux_2_%s_x86_64 ' 31 28 27 24 17) --platform manylinux2014_x86_64 \
#       annotated-types apache-tvm-ffi fastapi gguf httptools jsonschema jsonschema-specifications 'llguidance>=1.9' msgspec \
#       opentelemetry-api outlines-core pydantic pydantic-core pyzmq referencing rpds-py starlette typing-inspection uvicorn \
#       'xgrammar>=0.2.9'
#
# They are installed into a folder of their own; nothing of the machine's Python changes.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/gpu-visit}
WHEELS=${WHEELS:-gpu-visit-wheels}

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  SITE=$(mktemp -d)
  trap 'rm -rf "$SITE"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" "$WHEELS"/*.whl
  export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -m benchmarks.gpu_visit --out "$OUT" "$@"
