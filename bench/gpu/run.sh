#!/usr/bin/env bash
# The GPU suite on a bare machine: bench/gpu/run.sh WHEELS OUT
#
# Needs python3 (3.11 or 3.12) with torch and torchvision, one NVIDIA GPU and no network. Installs
# every wheel of the folder WHEELS beside them, runs the tests marked gpu, sweeps every precision,
# measures throughput and writes gpu.json, gpu.md and the logs to the folder OUT. Everything is
# written as it comes, so that a run that is cut off leaves what it had.
# STAGES="tests sweep throughput" chooses; LIMIT is each stage's limit in seconds (240).
set -uo pipefail
wheels=${1:?the folder of wheels} out=${2:?the folder for results}
cd "$(dirname "$0")/../.."
mkdir -p "$out"
out=$(cd "$out" && pwd) site=$(mktemp -d) limit=${LIMIT:-240}
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$wheels"/*.whl || exit 2
fi
export PYTHONPATH="$site:$PWD" MLFLOW_ENABLE_ASYNC_LOGGING=false
unset LD_BIND_NOW  # TransformerEngine resolves one symbol that cuBLAS may lack when it is called

stage() {  # name, command...
  local name=$1; shift
  case " ${STAGES:-tests sweep throughput} " in *" $name "*) ;; *) return ;; esac
  echo "== $name: $*"
  timeout --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.log" | tail -n 40
  echo "$name ${PIPESTATUS[0]}" >>"$out/status.txt"
}

: >"$out/status.txt"
precisions=$(python3 -c 'from runner.precision.support import names; print(",".join(names()))') || exit 2
stage tests python3 -m pytest -m gpu tests/gpu -rs -p no:cacheprovider
stage sweep python3 -m runner -m "precision=$precisions" model=gpt data=text tracking=none \
  train.max_steps=100 model.width=256 optimizer.eps=1e-4 "hydra.sweep.dir=$out/sweep"
stage throughput python3 bench/gpu/throughput.py --out "$out/throughput.jsonl"
python3 bench/gpu/collect.py "$out"
