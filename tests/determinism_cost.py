"""
What determinism costs while sampling: SGLang as it is, SGLang's deterministic mode, ours. One model, one batch.

    python tests/determinism_cost.py out/shape_0p6b     # Qwen3-0.6B's shape, 256 samples of 256 tokens
    CUDA_VISIBLE_DEVICES= python tests/determinism_cost.py out/shape_small     # a CPU: this script's own logic

The folder gets the model, with random weights, unless it has one. Each engine is a process; all start side by side, and
then sample alternately, three times each. Attention is SGLang's Triton kernels, or ours; with FlashAttention 3 SGLang
may be faster. On a CPU, where SGLang alone does not start, `plain` is our engine with the libraries' operators.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
SAMPLES, TOKENS = (256, 256) if CUDA else (8, 16)
KINDS = ["plain", "deterministic", "ours"] if CUDA else ["plain", "ours"]
CACHE = SAMPLES * (TOKENS + 8)  # tokens: so each engine takes as much, whoever else is on the card
SIZES = dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28 if CUDA else 1,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936 if CUDA else 512,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


def make_model(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model("qwen3", **SIZES)
    with torch.device(DEVICE):
        AutoModelForCausalLM.from_config(hf, dtype=DTYPE).save_pretrained(folder)


def engine_of(kind, folder, log):
    """A function that samples the batch once, with SGLang's parameters."""
    if kind == "ours" or not CUDA:
        from onecurve.models.dense import check_model
        from rollout_server import RolloutEngine
        from train_grpo import DEFAULTS

        batch = dict(max_prompt_tokens=8, max_new_tokens=TOKENS, prompts_per_step=SAMPLES, group_size=1)
        config = DEFAULTS | batch | dict(engine_args=f"max_total_tokens={CACHE}", batch_invariant=kind == "ours")
        engine = RolloutEngine(0, folder, check_model(folder, config), config, DEVICE, DTYPE, log)
        return lambda ids, params: engine.run([engine.generate(ids, params)], "in a trial")
    from sglang import Engine

    engine = Engine(
        model_path=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend="triton",
        mem_fraction_static=0.6,  # engine_memory's default
        max_total_tokens=CACHE,
        cuda_graph_max_bs_decode=SAMPLES,
        enable_deterministic_inference=kind == "deterministic",
        log_level="error",
    )
    return lambda ids, params: engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)


def one_engine(kind, folder):
    """A line 'ready' when the engine is, then for each line that comes in one with the seconds of a batch."""
    from onecurve.run.start import output_to

    log = folder / f"{kind}.log"
    with output_to(log):
        sample = engine_of(kind, folder, log)
    print("ready", flush=True)
    for _ in sys.stdin:
        ids = [[i % 500, 7, 8, 9] for i in range(SAMPLES)]
        params = [dict(max_new_tokens=TOKENS, ignore_eos=True, sampling_seed=i) for i in range(SAMPLES)]
        began = time.monotonic()
        sample(ids, params)
        print(time.monotonic() - began, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        one_engine(args.engine, args.folder)
        return
    if not (args.folder / "config.json").exists():
        make_model(args.folder)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    script = [sys.executable, __file__, args.folder, "--engine"]
    engines = {kind: subprocess.Popen([*script, kind], **pipes) for kind in args.kinds}
    for kind, engine in engines.items():
        if engine.stdout.readline() != "ready\n":
            sys.exit(f"error: {kind}: did not start; see {args.folder / kind}.log")
    seconds = {kind: [] for kind in engines}
    for _ in range(4):
        for kind, engine in engines.items():
            engine.stdin.write("\n")
            seconds[kind].append(float(engine.stdout.readline()))
    print("| engine | seconds of a batch, after the first | tokens/s |\n|---|---|---|")
    for kind, (_, *each) in seconds.items():
        rate = SAMPLES * TOKENS / statistics.median(each)
        print(f"| {kind} | {', '.join(f'{x:.2f}' for x in each)} | {rate:,.0f} |")
    for engine in engines.values():
        engine.communicate()  # closes its input, at the end of which it ends


if __name__ == "__main__":
    main()
