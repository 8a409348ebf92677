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
sys.path[0] = str(Path(__file__).resolve().parent.parent)  # transformers has an optional `kernels`: let it be ours

from models.start import import_engine, lean_imports  # noqa: E402

import_engine()
with lean_imports():
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler
for name in ("configurator", "models", "models.start"):  # a run's script may be another folder's, with its own
    del sys.modules[name]

for line in sys.stdin:
    job, children = json.loads(line), []
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
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
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    break
