"""
Two machines out of one: two network namespaces, each with its own host name, and a cable between them.

    python tests/two_nodes.py out/two --max_steps=6    # config/small.py: a trainer here, a trainer and an engine there

Their host names lead nowhere: node-a's to 127.0.1.1, as Debian sets it, and node-b's is unknown.
"""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOSTS = {"node-a": "127.0.0.1 localhost\n127.0.1.1 node-a\n", "node-b": "127.0.0.1 localhost\n"}
ADDRESSES = "10.77.0.1", "10.77.0.2"
RANKS = 1, 2  # of each node


def enter(node):
    """What makes a command run on a node, in the working directory of the repository."""
    return ["nsenter", f"--target={node.pid}", "--net", "--uts", "--mount", f"--wd={ROOT}", "--"]


@contextmanager
def two_nodes():
    """The processes in whose namespaces the nodes are; they end with it. OSError where none can be made."""

    def run(*command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise OSError(f"no network namespaces here: {done.stdout.strip()}")

    with ExitStack() as stack:
        folder, nodes = Path(stack.enter_context(tempfile.TemporaryDirectory())), []
        run("unshare", "--net", "--uts", "--mount", "true")
        for name, hosts in HOSTS.items():
            (folder / name).write_text(hosts)
            mounts = f"mount --bind {folder}/{name} /etc/hosts && mount --bind /dev/null /etc/resolv.conf"
            script = f"hostname {name} && {mounts} && ip link set lo up && echo ready && exec cat"
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            nodes.append(subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", script], **pipes))
            stack.callback(nodes[-1].communicate)  # closes its input, at the end of which it ends
            if (said := nodes[-1].stdout.readline().strip()) != "ready":
                raise OSError(f"no network namespaces here: {said}")
        cable = "ip link add cable type veth peer name cable netns".split()
        run(*enter(nodes[0]), *cable, str(nodes[1].pid))
        for node, address in zip(nodes, ADDRESSES):
            run(*enter(node), "ip", "address", "add", f"{address}/24", "dev", "cable")
            run(*enter(node), "ip", "link", "set", "cable", "up")
        yield nodes


def start(nodes, folder, *flags, restarts=0):
    """A torchrun on each node, of one run of config/small.py: the processes; their output goes to folder.node-a, .."""
    agents = []
    for i, (node, name) in enumerate(zip(nodes, HOSTS)):
        torchrun = f"""-m torch.distributed.run --nnodes=2 --nproc_per_node={RANKS[i]} --max-restarts={restarts}
            --rdzv_backend=c10d --rdzv_id=two --rdzv_endpoint={ADDRESSES[0]}:29400 --rdzv_conf=is_host={1 - i}
            --local_addr={ADDRESSES[i]}""".split()
        command = [*enter(node), sys.executable, *torchrun, "train_grpo.py", "config/small.py", f"--out_dir={folder}"]
        with open(f"{folder}.{name}", "w") as output:
            agents.append(subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT))
    return agents


def finish(agents, folder, timeout=300):
    """Waits until both have ended; one that fails ends the other, too: [(status, output)]."""
    end = time.monotonic() + timeout
    try:
        while any(agent.poll() is None for agent in agents) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # it ends its ranks
    return [(agent.wait(30), Path(f"{folder}.{name}").read_text()) for agent, name in zip(agents, HOSTS)]


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    with two_nodes() as nodes:
        folder = Path(sys.argv[1]).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        failed = False
        for name, (status, output) in zip(HOSTS, finish(start(nodes, folder, *sys.argv[2:]), folder)):
            print(f"{name}: status {status}\n{output}")
            failed |= bool(status)
    sys.exit(failed)
