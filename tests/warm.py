"""
Runs train_grpo.py again and again, but imports the libraries only once: a process that has them forks itself for each
run, which saves 5 to 10 s of each. From the fork on it is as if the user had typed the command. `launch_warm` in
conftest.py talks to it: a line of JSON in, the run's process id and then its exit status out. With several ranks it
does what torchrun would: each is such a process, and when one fails the others end, too.
"""

import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # as train_grpo.py, before transformers imports joblib by the way
ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # transformers has an optional `kernels`: let it be ours

from models.start import import_engine, lean_imports  # noqa: E402

import_engine()
with lean_imports():
    import sglang.srt.model_executor.model_runner  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from numba.core.dispatcher import Dispatcher
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    import kernels
    import train_grpo  # noqa: F401

OURS = {path.stem for path in ROOT.iterdir()}
LOOPS = [x for x in vars(kernels).values() if isinstance(x, Dispatcher)]


def load_loops():
    """The loops that any process has compiled so far: each run would load them from their files."""
    for loop in LOOPS:
        for signature, *_ in loop._cache._cache_file._load_index() if hasattr(loop._cache, "_cache_file") else ():
            if signature not in loop.overloads:
                loop.compile(signature)


for line in sys.stdin:
    job, children = json.loads(line), []
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    load_loops()
    for env in job["ranks"]:
        if not (child := os.fork()):
            break
        children.append(child)
    else:
        os.close(output)
        print(children[0], flush=True)
        left, status = set(children), 0
        while left:
            child, ended = os.wait()
            left -= {child}
            if ended and not status:
                status = os.waitstatus_to_exitcode(ended)
                for other in left:
                    os.kill(other, signal.SIGKILL)
        print(status, flush=True)
        continue
    os.environ.update(env)
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()  # it has read that at its import
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if job["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
    script, *sys.argv[1:] = job["command"]
    sys.argv[0] = script
    folder = Path(script).resolve().parent
    sys.path[0] = str(folder)
    if not folder.is_relative_to(ROOT):  # it has modules of its own
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
    runpy.run_path(script, run_name="__main__")
    break
