#!/usr/bin/env bash
# The wheels that bench/gpu/run.sh installs on a machine without network: bench/gpu/wheels.sh WHEELS
#
# For Python 3.12, Linux x86-64 and CUDA 13.0; what such a machine has anyway (torch, torchvision,
# numpy, scikit-learn, matplotlib, rich, pytest, peft) is left out, and of bitsandbytes every other
# CUDA version's library. TransformerEngine's wheels must be built for the machine's torch; put
# them into the same folder.
set -euo pipefail
out=${1:?the folder for the wheels} python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=(--platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d "$out" "hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4" \
  "torchao>=0.18,<0.19" pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection
"$python" -m pip wheel --quiet --no-deps -w "$out" antlr4-python3-runtime==4.9.3
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d "$work" "bitsandbytes>=0.50,<0.51"
"$python" -m venv "$work/venv" && "$work/venv/bin/pip" install --quiet wheel
(
  cd "$work" && "$work/venv/bin/python" -m wheel unpack -d unpacked bitsandbytes-*.whl
  find unpacked -name 'libbitsandbytes_*.so' ! -name '*cuda130*' ! -name '*cpu*' -delete
  "$work/venv/bin/python" -m wheel pack -d "$out" unpacked/bitsandbytes-*
)
du -sh "$out"
