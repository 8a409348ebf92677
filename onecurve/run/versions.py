"""
The code, libraries and machine of a run. Nothing here takes time to import: versions are checked before torch is.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from configurator import require

ROOT = Path(__file__).parents[2]


def library_versions():
    """{name: version} of the libraries whose change may change bits."""
    return {name: version(name).partition("+")[0] for name in "torch sglang transformers triton numba".split()}


def check_versions():
    """Refuses other versions than pyproject.toml's: the hooks into these libraries are written for them."""
    pins = (ROOT / "pyproject.toml").read_text()
    try:
        versions = library_versions()
    except PackageNotFoundError as e:
        require(False, f"{e.name}: not installed for {sys.executable}; start with uv run, as in: uv run train_grpo.py")
    for name, found in versions.items():
        wanted = re.search(f'"{name}==([^"]*)', pins)[1]
        cure = "install that one (uv sync), or adapt the hooks and the pin in pyproject.toml"
        require(found == wanted, f"{name} {found}: the hooks into it are written for {name} {wanted}; {cure}")


def commit():
    """The code's commit, with '-dirty' behind it if the code was changed; 'unknown' without git."""
    # Through env, which any machine has: without git it fails like git does without a repository.
    command = "env git describe --always --dirty --abbrev=40".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def provenance(gpu):
    """Comment lines for a saved config: command, commit, versions and machine. gpu: its name, or '' for the CPU."""
    libraries = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    chip = gpu or f"{platform.processor() or platform.machine()} CPU"
    machine = f"python {platform.python_version()}, {libraries}; {chip}, {os.cpu_count()} cores"
    return f"# {shlex.join(sys.argv)}\n# commit {commit()}\n# {machine}\n"
