#!/usr/bin/env bash
# The GPU suite on a bare machine: bench/gpu/run.sh WHEELS OUT
#
# Needs python3 (3.11 or 3.12) with torch and torchvision, one NVIDIA GPU and no network. Installs
# every wheel of the folder WHEELS (bench/gpu/wheels.sh makes one) beside them, runs the tests marked
# gpu beside a sweep of every precision, then measures throughput alone, then the six shapes whose speeds
# bench/results/plan_predictions.json predicts (plan_scores.json has both), and writes gpu.json, gpu.md
# and a log per stage to the folder OUT: after each stage, so that a run that is cut off leaves what
# it had.
#
# STAGES="tests sweep throughput predictions" chooses, LIMIT is each stage's limit in seconds, WIDTHS the hidden
# sizes (the largest first), COMMIT names the commit where there is no git.
set -uo pipefail
wheels=$(realpath "${1:?the folder of wheels}") out=$(realpath -m "${2:?the folder for results}")
cd "$(dirname "$0")/../.." || exit 2
compgen -G "$wheels/*.whl" >/dev/null || { echo "error: no wheel is in $wheels" >&2; exit 2; }
mkdir -p "$out"
scratch=$(mktemp -d) limit=${LIMIT:-170}
trap 'rm -rf "$scratch"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
  --target "$scratch/site" "$wheels"/*.whl || exit 2
export PYTHONPATH="$scratch/site:$PWD" PYTHONUNBUFFERED=1
# torch's own libraries, not the system's: a process that mixes two versions of cuDNN cannot load.
libraries=$(python3 -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib")))')
export LD_LIBRARY_PATH="$libraries:${LD_LIBRARY_PATH:-}"
unset LD_BIND_NOW  # TransformerEngine resolves one symbol that cuBLAS may lack when it is called

stage() {  # name, command...
  local name=$1 rc; shift
  case " ${STAGES:-tests sweep throughput predictions} " in *" $name "*) ;; *) return ;; esac
  echo "== $name: $*"
  timeout --signal=INT --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  tail -n 30 "$out/$name.log"
  echo "$name $rc" >>"$out/status.txt"
  python3 bench/gpu/collect.py "$out" "$scratch/sweep" >/dev/null
}

rm -f "$out/status.txt" "$out/throughput.jsonl"
stage sweep python3 -m runner sweep=every_precision model=gpt data=text tracking=none \
  train.max_steps=100 model.width=256 optimizer.lr=3e-4 optimizer.eps=1e-4 checkpoint.final=false \
  "hydra.sweep.dir=$scratch/sweep" &
# Libraries there warn of one another; a file per process, since some train in processes of their own.
stage tests python3 -m pytest -m gpu tests/gpu -rs -p no:cacheprovider --tb=short -W default \
  -n 4 --dist loadfile
wait
stage throughput python3 bench/gpu/throughput.py --out "$out/throughput.jsonl" \
  --widths ${WIDTHS:-4096 2048 1024}
stage predictions python3 -m bench.plan.predictions --measure "$out/plan_scores.json"
cat "$out/gpu.md"
