#!/usr/bin/env bash
# Law L12 on another kind of CPU, aarch64 in user-mode emulation: tests/one_digest.py beside the same on this CPU, and then
# config/small.py with SGLang's engine, whose digest must be the one in tests/test_laws.py.
#
#     tests/aarch64.sh [folder]    # which gets an aarch64 Python with its packages, once: 6 GB, most of them CUDA's
#
# Needs Debian 12 with qemu-user-static, and the network for apt and uv; nothing is installed outside of the folder. Some
# 20 minutes on two cores. Prints the names of the pieces that differ: exit status 1 if one of ours does, if none of
# torch's own does, which are the control, or if the run has another digest.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v qemu-aarch64-static >/dev/null || { echo "qemu-aarch64-static is missing: apt-get install qemu-user-static"; exit 2; }
here=$(realpath "${1:-out/aarch64}")
python=$here/usr/bin/python
mkdir -p "$here"/{lists,archives}/partial
touch "$here/status"
if [ ! -e "$python" ]; then
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User="$(id -un)"
        -o Dir::State::lists="$here/lists" -o Dir::State::status="$here/status" -o Dir::Cache="$here"
        -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
    "${apt[@]}" update
    "${apt[@]}" install -y --download-only python3.11 libstdc++6
    for package in "$here"/archives/*.deb; do dpkg-deb -x "$package" "$here"; done
    # for this machine a script, so that the processes which Python starts by its own name are emulated, too
    printf '#!/bin/sh\nexec qemu-aarch64-static -L "%s" -0 "%s" "%s" "$@"\n' "$here" "$python" "$here/usr/bin/python3.11" >"$python"
    chmod +x "$python"
fi
if [ ! -e "$here/site" ]; then
    # the versions of this project's own environment, without those that need a GPU, the tests or a C compiler
    without=$(paste -sd'|' docs/without_a_gpu.txt)
    uv pip freeze | grep -vE "^($without|pytest.*|ruff|cellpylib|pycosat|zss)==" |
        uv pip install -q --no-deps --python-platform aarch64-manylinux_2_34 --python-version 3.11 --only-binary :all: \
            --target "$here/unfinished" -r -
    mv "$here/unfinished" "$here/site"
fi
emulated() { env -u LD_LIBRARY_PATH OMP_NUM_THREADS=1 PYTHONPATH="$here/site" NUMBA_CACHE_DIR="$here/numba" "$python" "$@"; }
echo "kernels.py is compiled and runs on aarch64: ten minutes"
emulated tests/one_digest.py 1 2>/dev/null | tail -n 1 >"$here/aarch64.json"
uv run tests/one_digest.py 1 2>/dev/null | tail -n 1 >"$here/$(uname -m).json"
rm -rf "$here/run"
emulated train_grpo.py config/small.py --engine_timeout=7200 --out_dir="$here/run" | tee "$here/run.log"
python3 - "$here/aarch64.json" "$here/$(uname -m).json" "$here/run.log" <<'PY'
import json, re, sys
there, here = (json.load(open(path)) for path in sys.argv[1:3])
differ = [name for name in here if there[name] != here[name]]
print(f"{len(here)} pieces, {len(differ)} differ:", ", ".join(differ))
digest = re.search(r"^digest (\w+)$", open(sys.argv[3]).read(), re.MULTILINE)[1]
same = digest in open("tests/test_laws.py").read()
print("config/small.py has", "the" if same else "another", "digest")
sys.exit(any(not name.startswith("torch's own") for name in differ) or not differ or not same)
PY
