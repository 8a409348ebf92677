"""
Serves a model to OpenAI's clients, until Ctrl-C; what the routes do is in onecurve/agents/endpoint.py.

    python tools/serve.py --init_from=out/run/ckpt/step_000100
    ONECURVE_API_KEY=secret python tools/serve.py --init_from=Qwen/Qwen3-0.6B --port=0 --context=4096

The key that requests must carry is in the environment (ONECURVE_API_KEY), as anybody on the machine can read a command
line; without one a random key is made, and printed.
"""

import asyncio
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from configurator import block, check_config, configure, named_arguments, on_cpu, require
from onecurve.keys.engine import SPARE
from onecurve.run.start import end_with_parent, lean_imports
from onecurve.run.versions import library_versions
from onecurve.sglang.start import start_schedulers

if __name__ == "__mp_main__":
    end_with_parent()  # an engine's process; before anything that takes time

# ------------------------------------------------------------------------------------------------------------------

init_from = ""  # a model folder, such as a run's ckpt/step_000100, a hub name or a GGUF file
host = "127.0.0.1"  # reached from this machine only; '0.0.0.0': from others, too
port = 8000  # 0: any free port
context = 0  # tokens of a request and its answer; 0: as many as the model has positions
seed = 1  # of requests that give none
device = ""  # 'cpu' or 'cuda'; '': cuda where there is one
dtype = ""  # as the run's
threads = 0  # CPU threads; 0: all cores. Changes no bit
chat_template_args = ""  # such as 'enable_thinking=False'
tool_call_parser = ""  # SGLang's name for the format of tool calls; '': qwen25, or llama3 for a llama
ignore_eos = False  # write on until the context is full: for benchmarks
# the engine; `train_grpo.py --help=all` says what each key means
batch_invariant = True
tp_split = 1
rollout_tp = 1
engine_memory = 0.8
engine_args = ""  # on a CPU the cache, max_total_tokens, is by default one full context, and 32,768 tokens at least
engine_timeout = 600.0
# ------------------------------------------------------------------------------------------------------------------

DEFAULTS = block(globals())
if __name__ == "__main__":
    config = configure(globals())
    if config["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in train_grpo.py

with lean_imports():
    import torch
    from tqdm import tqdm

    import kernels
    import train_grpo
    from onecurve.agents.chat import Episode, Template
    from onecurve.agents.endpoint import MOST_OPEN, POLICY, Endpoint, Refusal, listen
    from onecurve.agents.sampler import AgentSampler
    from onecurve.agents.scheduler import PATCHES
    from onecurve.models import folders
    from onecurve.models.dense import check_memory, check_model
    from onecurve.run.machine import report_error, take_gpu
    from rollout_server import Job, RolloutEngine
if __name__ == "__main__" and on_cpu(config):
    start_schedulers(config["rollout_tp"], "fork")

LEAST_CACHE = 2**15  # tokens, on a CPU


class Prompt(Template):
    """No chat template: the prompt of /completions, as it is."""

    def first(self, messages, tools):
        prompt = messages[0]["content"]
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if max(prompt) >= len(self.tokenizer):
            raise ValueError(f"there is no token {max(prompt)}")
        return prompt


def name_of(model):
    """'calculator/step_000060' of out/calculator/ckpt/step_000060; another folder's name; a hub name as it is."""
    if not Path(model).is_dir():
        return model
    folder = Path(model).resolve()
    return f"{folder.parent.parent.name}/{folder.name}" if folder.parent.name == "ckpt" else folder.name


def fingerprint(model):
    """OpenAI's system_fingerprint: a hash of the weights' files and of the libraries' versions."""
    total = hashlib.sha256(json.dumps(library_versions()).encode())
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"fp_{total.hexdigest()[:16]}"


def engine_config(config, positions):
    """The config of the engine, with the keys of train_grpo.py. Ends the process with one line if it cannot be."""
    most = positions - SPARE
    tokens = config["context"] or most
    fits = f"the model has {positions} positions, of which {SPARE} are to spare; use at most {most}"
    require(1 < tokens <= most, f"context={tokens}: {fits}")
    lengths = dict(max_prompt_tokens=tokens - 1, max_new_tokens=1, max_turns=2**31)
    if "max_total_tokens" not in config["engine_args"] and config["device"] == "cpu":
        lengths["engine_args"] = f"max_total_tokens={max(tokens + SPARE, LEAST_CACHE)}, {config['engine_args']}"
    full = train_grpo.DEFAULTS | config | lengths | dict(mode="rollout", agent="serve")
    check_config(full, config["rollout_tp"], train_grpo.DEFAULTS)
    return full


def serve(config):
    """Answers requests until SIGINT or SIGTERM."""
    require(config["init_from"], "init_from='': use a model folder, a run's ckpt/step_.. or a hub name")
    require(0 <= config["port"] < 2**16, f"port={config['port']}: use 1 .. 65535, or 0: any that is free")
    config["device"] = config["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    kernels.choose_dtype(config["device"], config["dtype"])
    model = folders.fetch_model(config["init_from"])
    small = train_grpo.DEFAULTS | dict(max_prompt_tokens=1, max_new_tokens=1)
    hf = check_model(model, small | {key: config[key] for key in ("tp_split", "rollout_tp")})
    config = engine_config(config, hf.max_position_embeddings)
    if config["device"] == "cuda":
        take_gpu(config, 1, 0)
    if config["device"] == "cuda" or folders.large(model):
        check_memory(hf, config, config["device"])
    tokenizer, stop_tokens = folders.load_tokenizer(model)
    sock = listen(config["host"], config["port"])
    torch.set_num_threads(config["threads"] or os.cpu_count())
    if config["batch_invariant"]:
        kernels.enable_batch_invariant(torch.get_num_threads())
    folder = tempfile.mkdtemp(prefix="onecurve_serve_")
    with ThreadPoolExecutor(1) as pool:
        weights = pool.submit(fingerprint, model)  # takes seconds, as an engine's start does
        dtype = kernels.compute_dtype(config["device"])
        log = Path(folder, "engine_0.log")
        engine = RolloutEngine(0, model, hf, config, config["device"], dtype, log, patches=PATCHES)
        engine.run([answer(sock, engine, tokenizer, stop_tokens, config, weights.result())], "while it serves")
        engine.close()
    shutil.rmtree(folder)  # an error would leave it: its line names the log


async def answer(sock, engine, tokenizer, stop_tokens, config, weights):
    """Has an Endpoint answer, with this engine, until a signal comes."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    # SGLang would log an error for each token that still comes for a client that is gone.
    log = logging.getLogger("sglang.srt.managers.tokenizer_manager")
    log.addFilter(lambda record: "the state was deleted" not in record.getMessage())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    arguments = named_arguments(config["chat_template_args"])
    templates = [kind(tokenizer, stop_tokens, arguments) for kind in (Prompt, Template)]
    agent = types.SimpleNamespace(solve=None, template=templates[1], model=config["init_from"])
    # A request's own seed is in its Episode's key.
    sampler = AgentSampler(agent, engine, config | dict(seed=0), "", 1, None, None, stop_tokens)
    tokens = config["max_prompt_tokens"] + 1
    limits = config | dict(max_new_tokens=tokens)  # a request has its whole history in it
    journal = types.SimpleNamespace(entries={})

    def serves(asked, i, chat):
        if chat and not tokenizer.chat_template:
            raise Refusal(400, "the model's tokenizer has no chat template; use /v1/completions")
        job = Job("serve", 0, 0, {}, 1, asked.sampling)
        source = functools.partial(sampler._turn, job, dict(cached_tokens=0))
        key = ["serve", config["seed"] if asked.seed is None else asked.seed, i]
        options = dict(most_tokens=tokens, most_forks=MOST_OPEN)
        return Episode(limits, templates[chat], "serve", i, key, source, sampler._calls, journal, **options)

    names = [name_of(config["init_from"]), POLICY]
    key = os.environ.get("ONECURVE_API_KEY") or secrets.token_urlsafe()
    endpoint = Endpoint(sock, key, names, functools.partial(templates[1].decode, special=True), serves, weights)
    told = f"context {tokens} tokens, {weights}, OPENAI_API_KEY={key}"
    print(f"serving {names[0]} at {endpoint.url}/v1, {told}", flush=True)
    await ended.wait()
    await endpoint.close()


if __name__ == "__main__":
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # as in train_grpo.py: no semaphores in /dev/shm
    tqdm.set_lock(threading.RLock())
    sys.excepthook = report_error
    serve(config)
