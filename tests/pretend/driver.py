"""A driver of CUDA without a card, so that SGLang's CUDA libraries can be loaded where there is none."""

import subprocess
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
