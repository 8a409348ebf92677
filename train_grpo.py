"""
GRPO, top to bottom in the order it runs. One seed gives one curve, bit for bit.

    python train_grpo.py config/tiny.py                                    # one process does both roles in turn
    torchrun --nproc_per_node=2 train_grpo.py config/tiny.py               # one trainer, one engine
    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b.py --seed=2  # six trainers would not divide the leaves:
                                                                           # that preset has 4 trainers and 4 engines
What differs from the GRPO paper (Shao et al. 2024, arXiv:2402.03300):
  1. no KL term by default and no reference model: the policy is compared with itself, and exactly (DAPO, Yu et al.
     2025, arXiv:2503.14476, drops it too)
  2. `loss_aggregation` is by default a mean over all loss tokens of the step, not over each sample first (DAPO)
  3. `clip_low` and `clip_high` are separate (DAPO, "clip-higher")
  4. before each first update of a batch the trainer's log-probs are compared with the engine's, as bits

Letters: P prompts per step, G samples per prompt, B = P * G samples, T tokens, N tokens of a packed leaf, M loss
tokens of it, V vocabulary. A leaf is a fixed micro-batch of B / leaves samples.
"""

import json
import math
import os
import shutil
import sys
import threading
import time
import types
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import kernels
import sync
from configurator import ORIGINS, config_source, configure, fail, provenance, require, resume_config, versions
from rewards import encode_prompts, load_reward, load_rows, permutation
from rollout_server import RolloutEngine

# ------------------------------------------------------------------------------------------------------------------
# the run
out_dir = "out/run"  # everything the run writes
mode = "grpo"  # 'replay': train again from queue_dir, no engine; 'rollout': only generate and score
init_from = "scratch"  # a model folder or hub name; 'scratch': a small Qwen3 made here; 'resume': go on in out_dir
seed = 1  # of the data order, the samples and a scratch model
max_steps = 100  # RL steps
device = ""  # 'cpu' or 'cuda'; '': cuda where there is one
threads = 0  # CPU threads of a trainer or an engine; 0: the cores shared evenly. Changes no bit
# who does what
rollout_ranks = 1  # the last so many ranks host an engine each, the others train
colocate = False  # every rank does both, one after the other (a single process always does)
# the data
dataset = "arithmetic"  # a hub name, a .jsonl or .parquet file, or 'arithmetic': sums made here
arithmetic_min = 0  # the least operand of those sums
arithmetic_size = 100  # their operands are below this
dataset_config = ""  # of a hub data set, such as 'main'
split = "train"
prompt_column = "prompt"
answer_column = "answer"
prompt_template = ""  # such as 'Q: {prompt}\nA:', with any column's name in braces; '': the prompt column as it is
chat_template = False  # put the prompt through the tokenizer's chat template as a user's message
max_prompt_tokens = 256  # longer prompts are dropped
eval_split = ""  # of a hub data set; '': the last eval_size rows of a fixed shuffle are held out
eval_size = 256  # held-out prompts; 0: no evaluation
eval_every = 0  # steps; 0: before the first and after the last
eval_temperature = 1.0  # 0: greedy
# the rollout
prompts_per_step = 8  # P
group_size = 8  # G
max_new_tokens = 256
temperature = 1.0
ignore_eos = False  # sample on to max_new_tokens: for benchmarks
reward = "numeric"  # numeric, exact, format, 'my_file.py:my_function', or a weighted sum: 'numeric+0.2*format'
# the update
gradient_checkpointing = False  # keep one activation per layer and compute the others again; changes no bit
leaves = 8  # fixed micro-batches of a step, a power of two; they, not the ranks, set the order of sums
learning_rate = 1e-6
warmup_steps = 0  # of the learning rate, linear
lr_decay_steps = 0  # cosine from warmup_steps to lr_decay_steps; 0: constant
min_lr = 0.0
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.0  # of matrices
grad_clip = 1.0  # l2 norm; 0: off
advantage = "grpo"  # grpo, dr_grpo, rloo, reinforce++ or reinforce++_baseline
loss = "ppo"  # ppo, gspo (a ratio per sequence), cispo or pg (no ratio)
loss_aggregation = "token"  # mean over all tokens; 'sequence': over each sample first; 'constant': max_new_tokens each
updates_per_batch = 1  # optimizer steps on each batch of rollouts
clip_low = 0.2  # the ratio is clipped to 1 - clip_low ..
clip_high = 0.2  # .. 1 + clip_high
entropy_coef = 0.0  # of the entropy bonus
kl_coef = 0.0  # of the KL to the frozen reference, in the loss
kl_estimator = "k3"  # k1, k2 or k3
reference = ""  # model folder or hub name; '': that of init_from
dual_clip = 0.0  # bound of the ratio where the advantage is negative, such as 3.0; 0: none
# supervised warm-up on the reference answers, before RL
warmup_sft_steps = 0
sft_learning_rate = 1e-3  # constant, after 20 steps of warm-up
sft_batch = 64  # samples per step, a multiple of leaves
# determinism
strict = True  # stop at the first log-prob that differs between engine and trainer
batch_invariant = True  # False: the libraries' own kernels, to see what they do
# the engine
radix_cache = True  # reuse the keys of shared prefixes
cuda_graphs = True
engine_memory = 0.6  # share of a GPU for weights and cache
engine_kv_tokens = 0  # cache size; 0: room for all samples of a step (CPU), what engine_memory gives (CUDA)
engine_max_running = 0  # requests at a time; 0: all (CPU), SGLang's choice (CUDA)
engine_prefill_chunk = 0  # tokens; 0: SGLang's choice
engine_timeout = 600.0  # seconds of silence after which an engine counts as dead
# weights, checkpoints, the record
weight_sync = ""  # 'broadcast', 'ipc' (to an engine of the same rank) or 'disk'; '': ipc if colocated on CUDA
checkpoint_every = 50  # steps; and after the warm-up and the last step. 0: no checkpoints
keep_checkpoints = 2  # the last so many
queue_dir = ""  # where the rollouts of mode='replay' are; '': out_dir/queue
keep_rollouts = 0  # steps of rollout files to keep; 0: all
sample_every = 20  # steps between entries of samples.md; 0: none
# a model made by init_from='scratch'
scratch_layers = 4
scratch_hidden = 128
scratch_heads = 4
scratch_kv_heads = 2
scratch_head_dim = 32
scratch_mlp = 384
# ------------------------------------------------------------------------------------------------------------------

# keys that say where and how fast, not what is computed: they may differ between two runs with one digest
FREE_KEYS = {
    "out_dir", "mode", "queue_dir", "max_steps", "device", "threads", "rollout_ranks", "colocate", "eval_every",
    "gradient_checkpointing", "radix_cache", "cuda_graphs", "engine_memory", "engine_kv_tokens", "engine_max_running",
    "engine_prefill_chunk", "engine_timeout", "strict", "weight_sync", "checkpoint_every", "keep_checkpoints",
    "keep_rollouts", "sample_every",
}  # fmt: skip
CHOICES = {
    "device": ("", "cpu", "cuda"),
    "mode": ("grpo", "replay", "rollout"),
    "weight_sync": ("", "broadcast", "ipc", "disk"),
    "advantage": ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"),
    "loss": ("ppo", "gspo", "cispo", "pg"),
    "loss_aggregation": ("token", "sequence", "constant"),
    "kl_estimator": ("k1", "k2", "k3"),
}
MODEL_TYPES = ("qwen3", "qwen2", "llama")
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
LOGS = ("ledger.jsonl", "metrics.jsonl", "samples.md")


def roles(config, world):
    """(trainers, engines) of `world` ranks; the engines' are the last ones, both may be one rank."""
    if config["mode"] == "replay":
        return world, 0
    if config["mode"] == "rollout":
        return 0, world
    if world == 1 or config["colocate"]:
        return world, world
    return world - config["rollout_ranks"], config["rollout_ranks"]


def check_config(config, world):
    """Refuses values that make no sense together, before anything is started. world: number of ranks."""
    c = types.SimpleNamespace(**config)
    batch = c.prompts_per_step * c.group_size
    require(c.group_size > 1, f"group_size={c.group_size}: GRPO's baseline is the mean of the group; use at least 2")
    for key in ("prompts_per_step", "max_new_tokens", "max_prompt_tokens", "engine_timeout", "keep_checkpoints"):
        require(config[key] > 0, f"{key}={config[key]}: must be more than 0")
    require(c.leaves > 0 and c.leaves & (c.leaves - 1) == 0, f"leaves={c.leaves}: not a power of two; use 1, 2, 4, ..")
    product = "prompts_per_step * group_size"
    require(batch % c.leaves == 0, f"leaves={c.leaves}: does not divide the {batch} samples of a step ({product})")
    sft_fits = not c.warmup_sft_steps or c.sft_batch % c.leaves == 0
    require(sft_fits, f"sft_batch={c.sft_batch}: not a multiple of leaves={c.leaves}")
    for key, known in CHOICES.items():
        require(config[key] in known, f"{key}={config[key]!r}: use {', '.join(filter(None, known))}")
    per_sequence = c.loss != "gspo" or c.loss_aggregation == "sequence"
    require(
        per_sequence, f"loss='gspo': its ratio is a sequence's; --loss_aggregation=sequence, not {c.loss_aggregation}"
    )
    several = c.updates_per_batch == 1 or c.loss != "pg" and c.updates_per_batch > 1
    require(several, f"updates_per_batch={c.updates_per_batch}: loss='pg' has no ratio; use 1, or --loss=ppo")
    refers = not c.kl_coef or c.reference or c.init_from != "scratch"
    require(refers, f"kl_coef={c.kl_coef}: to what? a scratch model is random; --reference=model folder")
    require(c.kl_coef or not c.reference, f"reference={c.reference!r}: is for kl_coef, which is 0")
    require(not c.dual_clip or c.dual_clip > 1, f"dual_clip={c.dual_clip}: a bound of the ratio; use more than 1, or 0")
    sample = c.max_prompt_tokens + c.max_new_tokens
    holds = c.engine_kv_tokens == 0 or c.engine_kv_tokens > sample
    require(holds, f"engine_kv_tokens={c.engine_kv_tokens}: one sample may take {sample + 1}; use more, or 0")
    require(c.temperature > 0, f"temperature={c.temperature}: samples of a group must differ; use more than 0")
    require(c.eval_temperature >= 0, f"eval_temperature={c.eval_temperature}: below 0")
    trainers, engines = roles(config, world)
    advice = "at least one must roll out and one train; or use --colocate"
    split = c.mode != "grpo" or trainers > 0 < engines
    require(split, f"rollout_ranks={c.rollout_ranks}: of {world} ranks {advice}")
    shared = not trainers or c.leaves % trainers == 0
    require(shared, f"leaves={c.leaves}: {trainers} trainer ranks cannot share them; use 1, 2, 4, ..")
    replays = c.mode != "replay" or Path(c.queue_dir, "rl_000000").is_dir()
    require(replays, f"queue_dir={c.queue_dir!r}: mode='replay' needs the queue of a run, such as 'out/tiny/queue'")
    require(c.mode == "replay" or not c.queue_dir, f"queue_dir={c.queue_dir!r}: is for mode='replay'")
    same = c.weight_sync != "ipc" or trainers == engines == world
    require(same, "weight_sync='ipc': engine and trainer must be one process; use --colocate or another transport")


# ---- the algorithm: pure functions --------------------------------------------------------------------------------


def advantages_of(rewards, kind, eps=1e-6):
    """
    Advantages (P, G) of rewards (P, G), a group of G samples per prompt; std is the sample's (n - 1).

    grpo                   (r - mean) / (std + eps) in the group: Shao et al. 2024, 4.1.2
    dr_grpo                r - mean: Liu et al. 2025 (arXiv:2503.20783)
    rloo                   r - mean of the others in the group: Ahmadian et al. 2024 (arXiv:2402.14740)
    reinforce++            (r - mean) / (std + eps) in the batch: Hu et al. 2025 (arXiv:2501.03262)
    reinforce++_baseline   r - mean in the group, divided by its std + eps in the batch: the same

    A group of equal rewards gets exact zeros, but for reinforce++, whose baseline is the batch's.
    """
    if kind == "reinforce++":
        return (rewards - rewards.mean()) / (rewards.std() + eps)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # their mean may be a rounding away from them
    centred = torch.where(equal, 0.0, rewards - rewards.mean(1, keepdim=True))
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":  # r - (G mean - r) / (G - 1)
        return centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    return centred / ((centred.std() if kind == "reinforce++_baseline" else rewards.std(1, keepdim=True)) + eps)


def policy_loss(kind, logprobs, old_logprobs, advantages, counts, clip_low, clip_high, dual_clip=0.0):
    """
    Loss per token and where the clip is what counts, all (M,); `counts` is a list of the M tokens' samples' lengths.
    With r = exp(logprob - old_logprob):

    pg      -A logprob, the policy gradient
    ppo     -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): Schulman et al. 2017, equation 7, its ends as in DAPO,
            equation 8. With dual_clip = c, for A < 0 no more than -c A: Ye et al. 2020 (arXiv:1912.09729)
    gspo    the same with r = exp(mean over the sample of logprob - old_logprob): Zheng et al. 2025 (arXiv:2507.18071),
            whose gradient reaches each token as in its GSPO-token
    cispo   -clip(r) A logprob, no gradient through the clip: MiniMax-M1 (arXiv:2506.13585)
    """
    if kind == "pg":
        return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
    difference = logprobs - old_logprobs
    if kind == "gspo":
        mean = torch.cat([part.detach().mean().expand(len(part)) for part in difference.split(counts)])
        difference = mean + logprobs - logprobs.detach()
    ratio = torch.exp(difference)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        return -bounded.detach() * advantages * logprobs, bounded != ratio
    plain, clipped = ratio * advantages, bounded * advantages
    objective = torch.minimum(plain, clipped)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective, clipped < plain


def kl(logprobs, reference_logprobs, kind):
    """
    Estimates of KL(policy || reference) from samples of the policy, per token (M,), with d = logprob - reference's:
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020, "Approximating KL divergence"; k3 is GRPO's equation 4).
    """
    d = logprobs - reference_logprobs
    return d if kind == "k1" else d * d / 2 if kind == "k2" else torch.exp(-d) - 1 + d


def aggregate(losses, counts, kind, samples, tokens, longest):
    """
    A leaf's part of the loss of a step with so many samples and loss tokens: the leaves' parts add up to

    token      the mean over all tokens (DAPO, equation 8)
    sequence   the mean over samples of the mean over each one's tokens (GRPO, equation 3)
    constant   the sum over all tokens / (samples * longest) (Dr. GRPO: length has no weight)
    """
    if kind == "token":
        return losses.sum() / tokens
    if kind == "constant":
        return losses.sum() / (samples * longest)
    return torch.stack([part.sum() / max(1, len(part)) for part in losses.split(counts)]).sum() / samples


def learning_rate_at(step, peak, warmup_steps, decay_steps, min_lr):
    """Linear from 0 over warmup_steps, then cosine to min_lr at decay_steps (constant if 0). Steps from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if not decay_steps:
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return min_lr + (peak - min_lr) * 0.5 * (1 + math.cos(math.pi * done))


# ---- the data: what step s reads is a function of (seed, s), so there is no iterator to save -----------------------


def rows_of_step(n, per_step, step, *key):
    """Indices of the rows of a step: the data in a new order every epoch, epochs end to end."""
    places = (divmod(step * per_step + i, n) for i in range(per_step))
    return [permutation(n, *key, epoch)[place] for epoch, place in places]


# ---- the model ----------------------------------------------------------------------------------------------------


def make_scratch_model(folder, config):
    """A small Qwen3 with random weights and a character tokenizer, as an ordinary Hugging Face folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    characters = ["<pad>", "<eos>", "\n"] + [chr(c) for c in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    # pad and eos are two tokens: where they are one, masking the padding masks the end of every answer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(config["seed"])
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(characters), hidden_size=config["scratch_hidden"], intermediate_size=config["scratch_mlp"],
            num_hidden_layers=config["scratch_layers"], num_attention_heads=config["scratch_heads"],
            num_key_value_heads=config["scratch_kv_heads"], head_dim=config["scratch_head_dim"],
            max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip


def fetch_model(name):
    """The local folder of a model folder or hub name."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        require(False, f"init_from={name!r}: neither a model folder nor to be had from the hub: {reason}")


def check_model(folder, config):
    """The Hugging Face config of a model we can train and serve alike."""
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(folder)
    except Exception as e:
        require(False, f"init_from={str(folder)!r}: no usable config.json: {str(e).splitlines()[0]}")
    name = f"init_from={str(folder)!r}"
    require(hf.model_type in MODEL_TYPES, f"{name}: a {hf.model_type} model; known are {', '.join(MODEL_TYPES)}")
    sliding = getattr(hf, "use_sliding_window", False) or "sliding_attention" in (getattr(hf, "layer_types", 0) or ())
    require(not sliding, f"{name}: sliding-window attention is not supported")
    tokens, most = config["max_prompt_tokens"] + config["max_new_tokens"], hf.max_position_embeddings
    fits = f"max_new_tokens={config['max_new_tokens']}: {tokens} tokens with the prompt, and 8 to spare"
    require(tokens + 8 <= most, f"{fits}; the model has {most} positions")
    return hf


def build_model(hf, mesh, device, batch_invariant):
    """
    The Hugging Face model, sharded by FSDP2, its weights still unset. fp32 master weights; on CUDA computed with in
    bfloat16. `model.token_logprobs` is its forward pass for training.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from rollout_server import rope_frequencies

    ALL_ATTENTION_FUNCTIONS.register("batch_invariant", kernels.packed_attention)
    attention = "batch_invariant" if batch_invariant else "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, attn_implementation=attention)
    # cast_forward_inputs would round RoPE's float32 cos and sin to bfloat16, which the engine does not do
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = dict(mesh=mesh, mp_policy=bf16 if device == "cuda" else MixedPrecisionPolicy())
    for block in (*model.model.layers, model):
        fully_shard(block, **options)
        block.set_custom_reduce_scatter(sync.TreeReduceScatter())
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf).to(device)  # its buffers are in no checkpoint
    if batch_invariant:  # what `install_operators` does in the engine
        inv_freq = rope_frequencies(hf, device).to(device)
        model.model.rotary_emb.forward = lambda x, position_ids: kernels.rope_table(inv_freq, position_ids[0])
        modeling = sys.modules[type(model.model.rotary_emb).__module__]
        theirs = modeling.apply_rotary_pos_emb

        def rope(q, k, cos, sin):  # of (1, heads, N, D). It serves all models in this process: our table is (N, D / 2)
            if cos.dim() == 3:
                return theirs(q, k, cos, sin)
            q, k = kernels.rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
            return q.transpose(0, 1)[None], k.transpose(0, 1)[None]

        modeling.apply_rotary_pos_emb = rope
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.forward = lambda x, m=module: kernels.rms_norm(x, m.weight, m.variance_epsilon)
            elif name.endswith(".mlp"):
                module.forward = lambda x, m=module: m.down_proj(kernels.swiglu(m.gate_proj(x), m.up_proj(x)))
    model.token_logprobs = types.MethodType(token_logprobs, model)
    register_fsdp_forward_method(model, "token_logprobs")
    return model


def load_weights(shards, folder, tied):
    """Each rank reads its own rows of each parameter from the folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    files = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as e:
            require(False, f"init_from={str(folder)!r}: {path.name}: {e}")
        files |= dict.fromkeys(file.keys(), file)
    for s in shards:
        name = "model.embed_tokens.weight" if tied and s.name == "lm_head.weight" else s.name
        require(name in files, f"init_from={str(folder)!r}: no {name} in its safetensors files")
        rows = files[name].get_slice(name)
        shape = tuple(rows.get_shape())
        require(shape == s.shape, f"init_from={str(folder)!r}: {name} is {shape}, config.json says {s.shape}")
        s.data.copy_(rows[s.first : s.first + len(s.data)])


# ---- a leaf, and the forward pass over it --------------------------------------------------------------------------


class Sample(NamedTuple):
    tokens: torch.Tensor  # (T,) prompt and response
    prompt_tokens: int
    loss_mask: torch.Tensor  # (response tokens,) bool
    logprobs: torch.Tensor  # (response tokens,) of the rollout; zeros in supervised warm-up
    advantage: float


class Leaf(NamedTuple):
    ids: torch.Tensor  # (N,) samples end to end: no padding, so none can leak
    positions: torch.Tensor  # (N,)
    lengths: torch.Tensor  # (samples,) tokens
    counts: torch.Tensor  # (samples,) loss tokens
    rows: torch.Tensor  # (M,) the token before each loss token: its output is the prediction
    targets: torch.Tensor  # (M,)
    logprobs: torch.Tensor  # (M,)
    advantages: torch.Tensor  # (M,)
    sample: torch.Tensor  # (M,) index of the token's sample in the leaf
    place: torch.Tensor  # (M,) index of the token in its response


def pack(samples, device):
    """Samples end to end, with the loss tokens picked out."""
    parts, start = [], 0
    for i, s in enumerate(samples):
        place = s.loss_mask.nonzero()[:, 0]
        at = place + s.prompt_tokens
        parts.append(
            (s.tokens, torch.arange(len(s.tokens)), torch.tensor([len(s.tokens)]), torch.tensor([len(at)]),
             start + at - 1, s.tokens[at], s.logprobs[place], torch.full((len(at),), s.advantage),
             torch.full((len(at),), i), place)
        )  # fmt: skip
        start += len(s.tokens)
    return Leaf(*(torch.cat(field).to(device) for field in zip(*parts)))


def token_logprobs(model, leaf, temperature):
    """Log-probs of the leaf's targets and the entropies there, (M,) each."""
    plan = kernels.packed_plan(leaf.lengths)
    ids, positions = leaf.ids[None], leaf.positions[None]
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, plan=plan).last_hidden_state[0]
    return kernels.token_logprobs(hidden[leaf.rows], model.lm_head.weight, leaf.targets, temperature)


def describe_mismatch(leaf, logprobs, first_sample, group_size):
    """One line about the first token of the leaf whose two log-probs differ."""
    i = int((logprobs.view(torch.int32) != leaf.logprobs.view(torch.int32)).nonzero()[0])
    prompt, sample = divmod(first_sample + int(leaf.sample[i]), group_size)
    bits = [f"{float(x):.9g} (0x{int(x.view(torch.int32)) & 0xFFFFFFFF:08x})" for x in (leaf.logprobs[i], logprobs[i])]
    return f"prompt {prompt}, sample {sample}, token {int(leaf.place[i])}: engine {bits[0]}, trainer {bits[1]}"


# ---- the loop ------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    config = configure(globals())
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # transformers imports it by the way; it leaves semaphores behind,
    tqdm.set_lock(threading.RLock())  # and so would tqdm: the engine's end takes the process that should remove them
    sys.excepthook = sync.report_disk_error
    out = Path(out_dir)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun --max-restarts
    resuming = init_from == "resume" or restarted and (out / "config.py").exists()
    if resuming:
        require((out / "config.py").is_file(), f"init_from='resume': out_dir={out_dir!r} holds no run")
        if init_from == "resume":
            del ORIGINS["init_from"]  # it is this command's; the run has its own
        config = resume_config(config, out / "config.py", FREE_KEYS)
        globals().update(config)
    world = int(os.environ.get("WORLD_SIZE", 1))
    check_config(config, world)
    try:
        reward_function = load_reward(reward)
    except ValueError as e:
        require(False, str(e))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    has_device = place == "cpu" or torch.cuda.is_available()
    require(has_device, "device='cuda': this machine has no CUDA device; use --device=cpu")
    run = sync.content_hash({k: v for k, v in config.items() if k not in FREE_KEYS})
    queue = Path(queue_dir or out / "queue")

    ranks = sync.start_process_groups(*roles(config, world), place)
    alike = ranks.trainers if ranks.is_trainer else ranks.engines  # trainers and engines mostly work in turn
    torch.set_num_threads(threads or max(1, os.cpu_count() // alike))
    local_rank, master = int(os.environ.get("LOCAL_RANK", 0)), ranks.rank == 0
    if place == "cuda":
        count = torch.cuda.device_count()
        require(local_rank < count, f"device='cuda': {count} CUDA devices for more ranks; lower --nproc_per_node")
        torch.cuda.set_device(local_rank)
    compute_dtype = torch.bfloat16 if place == "cuda" else torch.float32
    if master:
        try:
            lock = sync.lock(out)  # until this process ends
        except BlockingIOError:
            fail(f"out_dir={out_dir!r}: another run is writing there; choose another")
        except OSError as e:
            fail(f"out_dir={out_dir!r}: {e.strerror}; choose another")
        if (out / "config.py").exists() and not resuming:
            fail(f"out_dir={out_dir!r}: holds a run already; choose another, or go on with --init_from=resume")
        print(config_source(config), flush=True)
        earlier = (out / "config.py").read_text().splitlines(True) if resuming else []
        chip = torch.cuda.get_device_name() if place == "cuda" else ""
        source = "".join(x for x in earlier if x[0] == "#") + provenance(chip) + config_source(config)
        sync.write_atomic(out / "config.py", source.encode())
        if init_from == "scratch":
            make_scratch_model(out / "model", config)
        else:
            fetch_model(init_from)
    sync.meet()
    model_path = out / "model" if init_from == "scratch" else fetch_model(init_from)
    hf = check_model(model_path, config)

    # ---- the state of the loop, and where an interrupted run takes it up again
    step = 0  # RL steps done; also the version of the weights
    saved = None  # the latest checkpoint
    if resuming and (found := sync.checkpoints(out / "ckpt")):
        saved = sync.read_checkpoint(found[-1], ranks.rank, world, run=run, versions=versions())
        step = saved["step"]
    sync.meet()
    if master:
        size = dict.fromkeys(LOGS, 0) | (saved["bytes"] if saved else {})
        ledger = sync.Ledger(out / "ledger.jsonl", "onecurve 1", size.pop("ledger.jsonl"), strict)
        if saved and ledger.digest != saved["digest"]:
            raise sync.RunError(f"{ledger.path}: does not lead to {found[-1]}; was it edited?")
        for name, length in size.items():
            (out / name).touch()
            os.truncate(out / name, length)
        if resuming:
            torn = sync.clean_queue(queue, step) if mode != "replay" else 0
            print(f"resuming at step {step}; {torn} torn rollout files deleted", flush=True)
    sync.meet()

    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    try:
        stop = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a folder without generation_config.json
        stop = tokenizer.eos_token_id
    stop_tokens = stop if isinstance(stop, list) else [stop]
    require(stop_tokens != [None], f"init_from={init_from!r}: neither generation config nor tokenizer has an EOS token")
    train_rows, eval_rows = load_rows(config)
    train_rows = encode_prompts(train_rows, tokenizer, config, "training")
    eval_rows = encode_prompts(eval_rows, tokenizer, config, "held-out")

    # ---- what a rank has: a trainer, an engine, or both
    model = engine = optimizer = None

    def moments():
        """AdamW's state, named and cut like the parameters."""
        pairs = [(s, optimizer.state[w]) for s, w in zip(shards, weights)]
        return [s._replace(name=f"{k}.{s.name}", data=state[k]) for s, state in pairs for k in MOMENTS]

    if batch_invariant and place == "cpu":
        kernels.enable_batch_invariant()
    if ranks.is_trainer:
        model = build_model(hf, ranks.mesh, place, batch_invariant)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        group = ranks.mesh.get_group()
        shards = sync.shards(model, ranks.mesh)
        load_weights(shards, found[-1] if saved else model_path, hf.tie_word_embeddings)
        # plain tensors that share the shards' storage: elementwise arithmetic needs no DTensor
        weights = [torch.nn.Parameter(s.data) for s in shards]
        decay = [w for w, s in zip(weights, shards) if len(s.shape) > 1]
        no_decay = [w for w, s in zip(weights, shards) if len(s.shape) == 1]
        optimizer = torch.optim.AdamW(
            [dict(params=decay, weight_decay=weight_decay), dict(params=no_decay, weight_decay=0.0)],
            betas=(beta1, beta2),
        )
        if kl_coef:
            folder = fetch_model(reference or init_from)
            its = check_model(folder, config)
            require(its.vocab_size == hf.vocab_size, f"reference={reference!r}: of another vocabulary than the model")
            reference_model = build_model(its, ranks.mesh, place, batch_invariant)
            load_weights(sync.shards(reference_model, ranks.mesh), folder, its.tie_word_embeddings)
        for w in weights:  # what AdamW would make at its first step
            zeros = {name: torch.zeros_like(w) for name in MOMENTS}
            optimizer.state[w] = dict(step=torch.tensor(float(saved["optimizer_steps"] if saved else 0)), **zeros)
        if saved:
            load_weights(moments(), found[-1] / "optimizer", tied=False)
        if master:
            count = sum(math.prod(s.shape) for s in shards)
            print(f"model: {count:,} parameters, {len(train_rows)} prompts", flush=True)

    def record(file, **line):
        with open(out / file, "a") as f:
            f.write(json.dumps(line) + "\n")

    def update(samples, phase, lr, check=False):
        """
        One optimizer step on B samples, leaf by leaf: (metrics, hashes). Collective over the trainers. The sums of the
        metrics are made like the gradients': a row per leaf, the rows of all ranks, then one tree. check: the samples
        were made with these very weights, so every log-prob must be the rollout's.
        """
        size, me, n = len(samples) // leaves, ranks.rank, ranks.trainers
        loss_tokens = sum(int(s.loss_mask.sum()) for s in samples)
        total, sums = sync.LeafSum(), torch.zeros(leaves, 6, dtype=torch.float64)
        first_mismatch = None
        for i in range(me, leaves, n):
            leaf = pack(samples[i * size : (i + 1) * size], place)
            counts, kind = leaf.counts.tolist(), loss_aggregation if phase == "rl" else "token"
            logprobs, entropy = model.token_logprobs(leaf, temperature if phase == "rl" else 1.0)
            differs = distance = clipped = divergence = torch.zeros(1)
            if check:
                differs = logprobs.detach().view(torch.int32) != leaf.logprobs.view(torch.int32)
                if differs.any() and first_mismatch is None:
                    first_mismatch = describe_mismatch(leaf, logprobs.detach(), i * size, group_size)
                distance = (logprobs.detach() - leaf.logprobs).abs().max()
            losses = -logprobs
            if phase == "rl":
                ends = clip_low, clip_high, dual_clip
                losses, clipped = policy_loss(loss, logprobs, leaf.logprobs, leaf.advantages, counts, *ends)
                if entropy_coef:  # Schulman et al. 2017, equation 9
                    losses = losses - entropy_coef * entropy
                if kl_coef:
                    with torch.no_grad():
                        theirs, _ = reference_model.token_logprobs(leaf, temperature)
                    reference_model.reshard()  # FSDP2 would after a backward pass, which does not come
                    divergence = kl(logprobs, theirs, kl_estimator)
                    losses = losses + kl_coef * divergence
            part = aggregate(losses, counts, kind, len(samples), loss_tokens, max_new_tokens)
            part.backward()
            total.add([p.grad.to_local() for p in model.parameters()])
            model.zero_grad()
            means = [x.detach().sum() / loss_tokens for x in (entropy, clipped, divergence)]
            numbers = (part.detach(), *means, differs.sum(), distance)
            sums[i] = torch.stack([x.double().cpu().reshape(()) for x in numbers])
        sums = sums.to(place)
        dist.all_reduce(sums, group=group)
        mean_loss, entropy, clipped, divergence, mismatches, _ = sync.tree_sum(sums).tolist()
        if mismatches and strict:
            found = [None] * n
            dist.all_gather_object(found, first_mismatch, group=group)
            first = next(line for line in found if line)
            line = f"step {step}, {first}; {mismatches:.0f} of {loss_tokens} log-probs differ (strict=True)"
            require(False, line)
        finite = math.isfinite(mean_loss)
        require(finite, f"{phase} step {step}: the loss is {mean_loss}; the weights are as they were")
        grads = total.total()
        norm = sync.grad_norm(grads, shards, group)
        require(math.isfinite(norm), f"{phase} step {step}: the gradient norm is {norm}; the weights are as they were")
        if grad_clip and norm > grad_clip:
            for g in grads:
                g.mul_((grad_clip / norm).float())
        hashes = {"gradients": sync.tensor_hashes(grads, shards, group)}
        for w, g in zip(weights, grads):
            w.grad = g
        for g in optimizer.param_groups:
            g["lr"] = lr
        optimizer.step()
        hashes["weights"] = sync.tensor_hashes(weights, shards, group)
        first, second = (sync.tensor_hashes([optimizer.state[w][k] for w in weights], shards, group) for k in MOMENTS)
        hashes["optimizer"] = {name: first[name] + second[name] for name in first}
        metrics = dict(
            loss=mean_loss, grad_norm=float(norm), entropy=entropy, clip_fraction=clipped,
            logprob_mismatch_tokens=int(mismatches), logprob_mismatch_max=float(sums[:, 5].max()), lr=lr,
        )  # fmt: skip
        if kl_coef:
            metrics["kl_reference"] = divergence
        return metrics, hashes

    def rollouts(stream, step, rows, samples, temperature):
        """Has the engines do these prompts; on a trainer: the groups [(tensors, meta)] in the order of the prompts."""
        folder = queue / f"{stream}_{step:06d}"
        if engine is not None:
            job = dict(
                stream=stream, step=step, rows=rows, samples=samples, temperature=temperature, reward=reward_function,
                decode=lambda t: tokenizer.decode(t, skip_special_tokens=True), stop_tokens=stop_tokens,
                engines=ranks.engines, run=run,
            )  # fmt: skip
            engine.rollout(folder, job)
        if ranks.is_trainer or master:
            sync.wait_for_groups(folder, len(rows), engine_timeout + 15 if ranks.engines else 0)
            expected = dict(run=run, stream=stream, step=step, version=step if ranks.trainers else 0)
            return [sync.read_group(folder, i, expected | {"prompt": i}) for i in range(len(rows))]

    def evaluate():
        """Mean reward of one sample for each held-out prompt, under the weights the engines hold."""
        groups = rollouts("eval", step, eval_rows, 1, eval_temperature)
        if master:
            score = sum(float(t["rewards"].double().mean()) for t, _ in groups) / len(groups)
            record("metrics.jsonl", phase="eval", step=step, eval_reward_mean=score)
            what = f"reward {reward!r}, {len(groups)} prompts, temperature {eval_temperature}"
            tqdm.write(f"held-out accuracy {score:.4f} after {step} RL steps ({what})")

    def checkpoint():
        """What is needed to go on from here on any number of ranks. Collective over the trainers."""
        partial = out / "ckpt" / f".step_{step:06d}"
        if master:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "optimizer").mkdir(parents=True)
            model.config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            GenerationConfig(eos_token_id=stop).save_pretrained(partial)
        sync.meet(group)
        sync.write_tensors(partial, "model", weights, shards, ranks.mesh)
        state = moments()
        sync.write_tensors(partial / "optimizer", "optimizer", [s.data for s in state], state, ranks.mesh)
        if master:
            sync.seal_checkpoint(
                partial, out / "ckpt" / f"step_{step:06d}", step=step, run=run, versions=versions(),
                digest=ledger.digest, optimizer_steps=int(optimizer.state[weights[0]]["step"]),
                bytes={name: (out / name).stat().st_size for name in LOGS},
            )  # fmt: skip
            sync.prune_checkpoints(out / "ckpt", keep_checkpoints)

    # ---- supervised warm-up; ranks with an engine only start it meanwhile
    for warm in range(warmup_sft_steps if ranks.is_trainer and not saved else 0):
        chosen = [train_rows[i] for i in rows_of_step(len(train_rows), sft_batch, warm, seed, "sft")]
        samples = []
        for row in chosen:
            answer = torch.tensor(tokenizer(row["answer"], add_special_tokens=False)["input_ids"] + stop_tokens[:1])
            tokens = torch.cat([torch.tensor(row["prompt_tokens"]), answer])
            mask = torch.ones(len(answer), dtype=torch.bool)
            samples.append(Sample(tokens, len(row["prompt_tokens"]), mask, torch.zeros(len(answer)), 1.0))
        lr = learning_rate_at(warm, sft_learning_rate, 20, 0, 0.0)
        metrics, hashes = update(samples, "sft", lr)
        if master:
            record("metrics.jsonl", phase="sft", step=warm, **metrics)
            ledger.append(phase="sft", step=warm, tokens=sync.content_hash(*(s.tokens for s in samples)), **hashes)
            if (warm + 1) % 50 == 0:
                tqdm.write(f"warm-up step {warm + 1}: loss {metrics['loss']:.4f}")

    if ranks.engine is not None:
        log = out / f"engine_{ranks.engine}.log"
        engine = RolloutEngine(ranks.engine, model_path, config, place, compute_dtype, log, gpu=local_rank)
    transport = None
    if mode == "grpo":
        how = weight_sync or ("ipc" if place == "cuda" and ranks.trainers == ranks.engines == world else "broadcast")
        if master:
            print(f"weights travel by {how}", flush=True)
        mine = shards if ranks.is_trainer else None
        transport = sync.WeightSync(how, ranks, mine, engine, place, compute_dtype, out / "weights")
        transport.publish(step)

    bar = tqdm(total=max_steps, initial=step, disable=not master, unit="step", dynamic_ncols=True, mininterval=0.5)
    if not saved:
        if eval_rows and transport:
            evaluate()
        if checkpoint_every and ranks.is_trainer:
            checkpoint()

    while step < max_steps:
        t_start = time.monotonic()
        # 1. prompts and rollouts
        rows = [train_rows[i] for i in rows_of_step(len(train_rows), prompts_per_step, step, seed, "rl")]
        batch = rollouts("rl", step, rows, group_size, temperature)
        t_rollout = time.monotonic()
        metrics, hashes = {}, {}
        if batch:
            rewards = torch.stack([t["rewards"] for t, _ in batch])  # (P, G), in the order of the prompts
        if ranks.is_trainer:
            # 2. advantages
            advantages = advantages_of(rewards, advantage)
            samples = []
            for (t, _), group_advantage in zip(batch, advantages.tolist()):
                fields = (t[k].split(t["lengths"].tolist()) for k in ("tokens", "loss_mask", "logprobs"))
                for tokens, mask, logprobs, its_advantage in zip(*fields, group_advantage):
                    whole = torch.cat([t["prompt_tokens"], tokens])
                    samples.append(Sample(whole, len(t["prompt_tokens"]), mask, logprobs, its_advantage))
            # 3. the check, the loss, the gradient, the optimizer
            lr = learning_rate_at(step, learning_rate, warmup_steps, lr_decay_steps, min_lr)
            metrics, hashes = update(samples, "rl", lr, check=True)
            for _ in range(updates_per_batch - 1):
                later, hashes = update(samples, "rl", lr)
                metrics |= {k: v for k, v in later.items() if not k.startswith("logprob_mismatch")}
            hashes = {"advantages": sync.content_hash(advantages)} | hashes
        step += 1
        # 4. new weights to the engines
        t_train = time.monotonic()
        if transport:
            transport.publish(step)
        t_sync = time.monotonic()
        # 5. the record
        if master:
            stages = {k: sync.content_hash(*(t[k] for t, _ in batch)) for k in ("tokens", "logprobs", "rewards")}
            texts = [m["prompt_text"] for _, m in batch]
            prompts = sync.content_hash(texts, *(t["prompt_tokens"] for t, _ in batch))
            ledger.append(phase="rl", step=step - 1, prompts=prompts, **stages, **hashes)
            lengths = torch.cat([t["lengths"] for t, _ in batch]).double()
            seconds, sync_seconds = time.monotonic() - t_start, t_sync - t_train
            metrics = dict(
                phase="rl", step=step - 1, reward_mean=float(rewards.double().mean()),
                reward_std=float(rewards.double().std()),
                zero_std_groups=int((rewards == rewards[:, :1]).all(1).sum()), **metrics,
                response_length_mean=float(lengths.mean()), response_length_max=int(lengths.max()),
                truncated_fraction=float(torch.cat([t["truncated"] for t, _ in batch]).double().mean()),
                engine_retractions=sum(m["retractions"] for _, m in batch),
                weight_version=batch[0][1]["version"], wait_seconds=t_rollout - t_start,
                rollout_seconds=max(m["seconds"] for _, m in batch), train_seconds=t_train - t_rollout,
                sync_seconds=sync_seconds, step_seconds=seconds, tokens_per_second=float(lengths.sum()) / seconds,
                sync_gb_per_second=transport.bytes / 1e9 / sync_seconds if transport else 0.0,
            )  # fmt: skip
            record("metrics.jsonl", **metrics)
            bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}", mismatch=metrics.get("logprob_mismatch_tokens"))
            bar.update()
            if sample_every and (step - 1) % sample_every == 0:
                with open(out / "samples.md", "a") as f:
                    t, m = batch[0]
                    f.write(f"\n## step {step - 1}\n\nprompt `{m['prompt_text']!r}`, answer `{m['answer']!r}`\n\n")
                    f.writelines(f"- {r:g}: `{text!r}`\n" for r, text in zip(t["rewards"].tolist(), m["responses"]))
            if keep_rollouts and step > keep_rollouts and mode == "grpo":
                shutil.rmtree(queue / f"rl_{step - 1 - keep_rollouts:06d}", ignore_errors=True)
        if eval_rows and transport and (step == max_steps or eval_every and step % eval_every == 0):
            evaluate()
        if checkpoint_every and ranks.is_trainer and (step == max_steps or step % checkpoint_every == 0):
            checkpoint()
    bar.close()
    sync.meet()
    if engine is not None:
        engine.close()
    dist.destroy_process_group()
    if master:
        print(f"digest {ledger.digest}")
