#!/usr/bin/env bash
# Law L12 on another kind of CPU: tests/one_digest.py on aarch64, in user-mode emulation, beside the same on this CPU.
#
#     tests/aarch64.sh [folder]    # which gets an aarch64 Python with its packages, once: 5 GB, most of them CUDA's
#
# Needs Debian 12 with qemu-user-static, and the network for apt and uv; nothing is installed outside of the folder.
# Prints the names of the pieces that differ: exit status 1 if one of ours does, or if none of torch's own does, which are
# the control.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v qemu-aarch64-static >/dev/null || { echo "qemu-aarch64-static is missing: apt-get install qemu-user-static"; exit 2; }
here=$(realpath "${1:-out/aarch64}")
mkdir -p "$here"/{lists,archives}/partial
touch "$here/status"
if [ ! -e "$here/usr/bin/python3.11" ]; then
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User="$(id -un)"
        -o Dir::State::lists="$here/lists" -o Dir::State::status="$here/status" -o Dir::Cache="$here"
        -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
    "${apt[@]}" update
    "${apt[@]}" install -y --download-only python3.11 libstdc++6
    for package in "$here"/archives/*.deb; do dpkg-deb -x "$package" "$here"; done
fi
if [ ! -e "$here/site" ]; then
    # the versions of this project's own environment; without an engine SGLang is not needed
    uv pip freeze | grep -E "^(torch|triton|numba|llvmlite|numpy|transformers|tokenizers|safetensors|tqdm|psutil)==" |
        uv pip install -q --python-platform aarch64-manylinux_2_28 --python-version 3.11 --only-binary :all: \
            --target "$here/unfinished" -r -
    mv "$here/unfinished" "$here/site"
fi
echo "kernels.py is compiled and runs on aarch64: ten minutes"
OMP_NUM_THREADS=1 PYTHONPATH="$here/site" qemu-aarch64-static -L "$here" "$here/usr/bin/python3.11" \
    tests/one_digest.py 1 2>/dev/null | tail -n 1 >"$here/aarch64.json"
uv run tests/one_digest.py 1 2>/dev/null | tail -n 1 >"$here/$(uname -m).json"
python3 - "$here/aarch64.json" "$here/$(uname -m).json" <<'PY'
import json, sys
there, here = (json.load(open(path)) for path in sys.argv[1:])
differ = [name for name in here if there[name] != here[name]]
print(f"{len(here)} pieces, {len(differ)} differ:", ", ".join(differ))
sys.exit(any(not name.startswith("torch's own") for name in differ) or not differ)
PY
