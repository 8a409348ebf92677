"""
On a machine without a GPU a rank that waits lends its cores to the ranks that work.
"""

import os

import kernels


def share_cores(from_all_ranks):
    """
    The path of a byte for each rank of this machine, in which it says whether it works (`lend_cores`). Collective over
    all ranks, by sync.from_all_ranks.
    """
    fd = os.memfd_create("working")  # there as long as this process
    os.ftruncate(fd, int(os.environ["LOCAL_WORLD_SIZE"]))
    node = os.environ.get("GROUP_RANK")
    everyone = from_all_ranks((node, f"/proc/{os.getpid()}/fd/{fd}"))
    return dict(reversed(everyone))[node]  # its first rank's


def lend_cores(waits):
    """Says that this rank waits, and the others of its machine have its cores; or that it works again."""
    if kernels.working:
        kernels.working[int(os.environ["LOCAL_RANK"])] = not waits
