#!/usr/bin/env bash
# Exactness and speed of speculation on one GPU, in less than four minutes.
#
#   bash benchmarks/gpu.sh                       one GPU, a model of a billion random weights
#   bash benchmarks/gpu.sh --attention sdpa      the same with torch's fused attention
#   bash benchmarks/gpu.sh --step graphs         the same with CUDA graphs (or static, compile)
#   bash benchmarks/gpu.sh --device cpu --quick  a tiny model, to try the script
#
# Needs this repository and a Python with torch and transformers (PYTHON=..., default python3). It
# downloads no model. Prints a table and one line of JSON; exit code 1 if a text was not exact.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$root:$root/workers${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" -c 'import torch, transformers' || {
  echo "gpu.sh: $python has no torch or transformers; set PYTHON to one that has." >&2
  exit 2
}
# Small packages that the engine needs beside those two.
if ! "$python" -c 'import filelock, platformdirs, pydantic, safetensors' 2>/dev/null; then
  "$python" -m pip install --quiet filelock platformdirs pydantic safetensors || {
    echo "gpu.sh: install filelock, platformdirs, pydantic and safetensors for $python." >&2
    exit 2
  }
fi
exec timeout --signal=INT "${LIMIT_S:-235}" "$python" "$root/benchmarks/gpu_check.py" "$@"
