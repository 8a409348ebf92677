"""Other people's graders in processes of their own: what one verdict does or takes changes no other."""

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from queue import SimpleQueue


class Workers:
    """
    As many processes as there are cores for this rank, each with nothing else of ours. `run(seconds)` is what they do,
    a function without globals but json, os, signal and sys: for each line of JSON on its input it forks, so that every
    verdict begins in the same state, and prints a line of JSON. seconds: CPU time that the kernel leaves a fork. name:
    what they run, for errors; around(): the command that starts the Python of one, up to its arguments.
    """

    def __init__(self, run, seconds, name, around=lambda: [sys.executable]):
        self.run = run
        self.seconds = seconds
        self.name = name
        self.around = around
        self.idle = SimpleQueue()  # None: a place for one that has not been started
        for _ in range(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))):
            self.idle.put(None)

    def _start(self):
        """A process that ends with its standard input, and so with this one, however that ends."""
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        env = os.environ | dict(PYTHONHASHSEED="0")  # sets of strings have an order by their hashes
        code = f"import json, os, signal, sys\n{inspect.getsource(self.run)}\n{self.run.__name__}({self.seconds})"
        return subprocess.Popen([*self.around(), "-P", "-c", code], **pipes, env=env)

    def ask(self, *question):
        """What a process answers. Blocks; RuntimeError if it has ended."""
        worker = self.idle.get() or self._start()
        try:
            print(json.dumps(question), file=worker.stdin, flush=True)
            answer = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as error:
            self.idle.put(None)
            raise RuntimeError(f"a process of {self.name} ended with status {worker.wait()}; resume the run") from error
        self.idle.put(worker)
        return answer


def needs(package, version, group):
    """Raises ValueError, with the cure, unless this version is there: another one may judge otherwise."""
    found = next((x.version for x in distributions(name=package)), "none")
    if found != version:
        cure = f"install it by `uv sync --group {group}`"
        raise ValueError(f"needs {package} {version}, and there is {found}; {cure}")
