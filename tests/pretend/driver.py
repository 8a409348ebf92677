"""
A process with a pretended card, and a driver of CUDA that has none, so that SGLang's CUDA libraries can be loaded.

    python tests/pretend/driver.py train_grpo.py config/small.py --device=cuda      # any command of Python's
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAMES = """
    cuInit cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuCtxGetDevice cuPointerGetAttribute cuGetErrorString
    cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap
    cuMemRelease cuMemSetAccess cuMemUnmap""".split()
SOURCE = "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }\n"


def stub_driver(folder):
    """
    Builds a libcuda.so.1 in `folder`, whose functions all say that there is no device; returns the folder, for
    LD_LIBRARY_PATH of a process that is yet to start. Raises FileNotFoundError without gcc.
    """
    source = SOURCE + "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in NAMES)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(Path(folder, "libcuda.so.1"))]
    subprocess.run(command, input=source, text=True, check=True)
    return folder


def environment(folder):
    """What pretends a card, of a process that is yet to start; the driver is built in `folder`."""
    return dict(
        PYTHONPATH=str(Path(__file__).parent / "site"),
        LD_LIBRARY_PATH=stub_driver(folder),
        PRETEND_LOG=folder,
        TRITON_INTERPRET="1",
        TORCHDYNAMO_DISABLE="1",
        SGLANG_DEEPGEMM_PDL="0",  # it would start cuBLASLt
        OMP_NUM_THREADS="1",
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = subprocess.run([sys.executable, *sys.argv[1:]], env=os.environ | environment(folder))
    sys.exit(command.returncode)
