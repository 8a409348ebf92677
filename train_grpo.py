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

import functools
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import kernels
import sync
from configurator import FREE_KEYS, ORIGINS, block, check_config, configure, require, resume_config, roles, versions
from rewards import encode_answers, encode_prompts, load_reward, load_rows, permutation
from rollout_server import Job, RolloutEngine, Sampler, build_model, check_model

# ------------------------------------------------------------------------------------------------------------------
# the run
out_dir = "out/run"  # everything the run writes
# grpo; replay: train again from queue_dir; sft: train on the data's answers (neither has an engine);
# rollout: only generate and score; reject: and write the best samples as data; eval: only the held-out prompts
mode = "grpo"
init_from = "scratch"  # a model folder or hub name; 'scratch': a small Qwen3 made here; 'resume': go on in out_dir
seed = 1  # of the data order, the samples and a scratch model
max_steps = 100  # RL steps; with mode='sft' supervised ones
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
eval_samples = 1  # per held-out prompt
eval_temperature = 1.0  # 0: greedy
pass_reward = 1.0  # a sample with at least this reward is right: for pass@k, for easy and hard groups, for 'reject'
reject_best = 1  # mode='reject' writes so many of a group's right samples
# the rollout
prompts_per_step = 8  # P
group_size = 8  # G
max_new_tokens = 256
temperature = 1.0
ignore_eos = False  # sample on to max_new_tokens: for benchmarks
reward = "numeric"  # numeric, exact, format, 'my_file.py:my_function', or a weighted sum: 'numeric+0.2*format'
overlong_cache = 0  # the reward falls by up to 1 over the last so many tokens before max_new_tokens; 0: it does not
overlong_filter = False  # samples cut off at max_new_tokens are not trained on
dynamic_sampling = 0  # groups of equal rewards are replaced, in at most so many more rounds; 0: they are kept
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
advantage = "grpo"  # grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, gae (PPO's critic) or distill (a teacher)
gamma = 1.0  # of gae: discount per token
gae_lambda = 0.95
value_coef = 0.5  # of gae: weight of the critic's loss; its head is on the policy's trunk
value_clip = 0.2  # of gae: bound of a value's change in one batch; 0: none
teacher = ""  # of distill: model folder or hub name
loss = "ppo"  # ppo, gspo (a ratio per sequence), cispo or pg (no ratio)
loss_aggregation = "token"  # mean over all tokens; 'sequence': over each sample first; 'constant': max_new_tokens each
updates_per_batch = 1  # optimizer steps on each batch of rollouts
clip_low = 0.2  # the ratio is clipped to 1 - clip_low ..
clip_high = 0.2  # .. 1 + clip_high
dual_clip = 0.0  # bound of the ratio where the advantage is negative, such as 3.0; 0: none
importance = ""  # weigh tokens by trainer / engine probability, 'truncate' or 'mask'; exactly 1 where both agree
importance_floor = 0.0  # 'truncate' moves the weight to floor .. cap, 'mask' makes it 0 outside
importance_cap = 2.0
entropy_coef = 0.0  # of the entropy bonus
kl_coef = 0.0  # of the KL to the frozen reference
kl_in_reward = False  # of a sample, or with gae of each token; False: in the loss
kl_estimator = "k3"  # k1, k2 or k3
reference = ""  # model folder or hub name; '': that of init_from
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

DEFAULTS = block(globals())
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
FIGURES = ("rewards", "lengths", "truncated")  # (G,) each, of a group


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


def gae(rewards, values, gamma, lam):
    """
    Generalised advantages (.., T) of rewards (.., T) and values (.., T + 1) of the states before each token and after
    the last: 0 there if the episode is over, the critic's estimate if it was only cut off.
    A_t = sum_k (gamma lam)^k delta_t+k, delta_t = r_t + gamma V_t+1 - V_t: Schulman et al. 2015 (arXiv:1506.02438), 16.
    """
    deltas = rewards + gamma * values[..., 1:] - values[..., :-1]
    out, later = [], torch.zeros(())
    for delta in reversed(deltas.unbind(-1)):
        later = delta + gamma * lam * later
        out.append(later)
    return torch.stack(out[::-1], -1) if out else deltas


def value_loss(values, old_values, returns, clip):
    """
    (V - R)^2 / 2 per token (M,); with a clip, of V or of V kept within old V +- clip, what is larger: PPO's own
    code (github.com/openai/baselines, ppo2), which Huang et al. 2022 describe ("The 37 implementation details", 9).
    """
    plain = (values - returns).square()
    if clip:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        plain = torch.maximum(plain, (bounded - returns).square())
    return plain / 2


def overlong_penalty(lengths, longest, cache):
    """0 up to longest - cache tokens, then linear down to -1 at the longest: DAPO, equation 13."""
    return ((longest - cache - lengths) / cache).clamp(-1, 0) if cache else torch.zeros(lengths.shape)


def importance_weights(old_logprobs, rollout_logprobs, kind, floor, cap):
    """
    Trainer's over engine's probability of each sampled token (M,), the trainer's with the weights the engine had.
    truncate: moved to floor .. cap (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). mask: 0 outside of it, no gradient from such a token (Ling team 2025, arXiv:2510.18855).
    """
    w = torch.exp(old_logprobs - rollout_logprobs)
    return w.clamp(floor, cap) if kind == "truncate" else torch.where((w >= floor) & (w <= cap), w, 0.0)


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


def pass_at_k(n, right, k):
    """Chance that one of k samples is right, from n of which `right` are, unbiased: Chen et al. 2021, equation 1."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


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


# ---- a leaf -------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    tokens: torch.Tensor  # (T,) prompt and response
    prompt_tokens: int
    truncated: bool  # cut off at max_new_tokens
    loss_mask: torch.Tensor  # (R,) bool; R response tokens, here and below
    logprobs: torch.Tensor  # (R,) of the engine
    old_logprobs: torch.Tensor  # (R,) of the trainer before the first update; the engine's, if `importance` is off
    advantages: torch.Tensor  # (R,)
    reference: torch.Tensor  # (R,) log-probs of the reference or the teacher
    values: torch.Tensor  # (R,) of the critic before the first update
    returns: torch.Tensor  # (R,) what the critic learns
    end: float = 0.0  # the critic's value after the last token, if the sample was cut off


class Leaf(NamedTuple):
    ids: torch.Tensor  # (N,) samples end to end: no padding, so none can leak
    positions: torch.Tensor  # (N,)
    lengths: torch.Tensor  # (samples,) tokens
    counts: torch.Tensor  # (samples,) loss tokens
    sample: torch.Tensor  # (M,) index of each loss token's sample in the leaf
    place: torch.Tensor  # (M,) index of the token in its response
    rows: torch.Tensor  # (M,) the token before it: that one's output is the prediction
    targets: torch.Tensor  # (M,)
    logprobs: torch.Tensor  # (M,), and so on as in Sample
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor


def make_sample(prompt, response, loss_mask, logprobs, truncated=False):
    """What is not known yet is 0. prompt (tokens,), the others (R,)."""
    zeros = [torch.zeros(len(response))] * 4
    return Sample(torch.cat([prompt, response]), len(prompt), truncated, loss_mask, logprobs, logprobs, *zeros)


def pack(samples, device):
    """Samples end to end, with the loss tokens picked out."""
    parts, start = [], 0
    for i, s in enumerate(samples):
        place, n = s.loss_mask.nonzero()[:, 0], len(s.tokens)
        at = place + s.prompt_tokens
        sizes = torch.tensor([n]), torch.tensor([len(at)])
        token = torch.full((len(at),), i), place, start + at - 1, s.tokens[at]
        parts.append((s.tokens, torch.arange(n), *sizes, *token, *(field[place] for field in s[4:-1])))
        start += n
    return Leaf(*(torch.cat(field).to(device) for field in zip(*parts)))


def critic_advantages(samples, rewards, costs, gamma, lam):
    """
    The samples with the advantages of `gae`, normalised over the batch (Huang et al. 2022, detail 7), and returns.
    rewards (B,) come with each one's last loss token; costs, (loss tokens,) per sample, come token by token.
    """
    states, gains = [], []
    for s, reward, cost in zip(samples, rewards.tolist(), costs):
        gains.append(torch.cat([-cost[:-1], reward - cost[-1:]]))
        states.append(torch.cat([s.values[s.loss_mask], torch.tensor([s.end])]))
    at_the_end = dict(batch_first=True, padding_side="left")  # where the recursion starts, so padding comes after all
    padded = (torch.nn.utils.rnn.pad_sequence(x, **at_the_end) for x in (gains, states))
    advantages = [row[len(row) - len(g) :] for row, g in zip(gae(*padded, gamma, lam), gains)]
    mean, std = torch.cat(advantages).mean(), torch.cat(advantages).std()
    out = []
    for s, a, v in zip(samples, advantages, states):
        advantage, target = (scatter(s.loss_mask, x) for x in ((a - mean) / (std + 1e-6), a + v[:-1]))
        out.append(s._replace(advantages=advantage, returns=target))
    return out


def scatter(mask, x):
    """(R,) zeros with x where the mask (R,) is set."""
    return torch.zeros(len(mask)).masked_scatter(mask, x)


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
    check_config(config, world, DEFAULTS)
    try:
        reward_function = load_reward(reward)
    except ValueError as e:
        require(False, str(e))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place == "cuda":
        sync.check_cuda(config, world)
    run = sync.content_hash({k: v for k, v in config.items() if k not in FREE_KEYS})
    queue = Path(queue_dir or out / "queue")

    ranks = sync.start_process_groups(*roles(config, world), place)
    alike = ranks.trainers if ranks.is_trainer else ranks.engines  # trainers and engines mostly work in turn
    torch.set_num_threads(threads or max(1, os.cpu_count() // alike))
    local_rank, master = int(os.environ.get("LOCAL_RANK", 0)), ranks.rank == 0
    if place == "cuda":
        torch.cuda.set_device(local_rank)
    compute_dtype = torch.bfloat16 if place == "cuda" else torch.float32
    if master:
        lock = sync.open_run(out, config, resuming, torch.cuda.get_device_name() if place == "cuda" else "")
        if init_from == "scratch":
            sync.make_scratch_model(out / "model", config)
        else:
            sync.fetch_model(init_from)
    sync.meet()
    model_path = out / "model" if init_from == "scratch" else sync.fetch_model(init_from)
    hf = check_model(model_path, config)

    # ---- the state of the loop, and where an interrupted run takes it up again
    step = 0  # RL steps done; also the version of the weights
    saved = None  # the latest checkpoint
    if resuming and (found := sync.checkpoints(out / "ckpt")):
        saved = sync.read_checkpoint(found[-1], ranks.rank, world, run=run, versions=versions())
        step = saved["step"]
    sync.meet()
    if master:
        ledger = sync.open_record(out, saved, strict)
        if resuming:
            torn = sync.clean_queue(queue, step) if mode != "replay" else 0
            print(f"resuming at step {step}; {torn} torn rollout files deleted", flush=True)
    sync.meet()
    tokenizer, stop_tokens = sync.load_tokenizer(model_path)
    train_rows, eval_rows = load_rows(config)
    train_rows = encode_prompts(train_rows, tokenizer, config, "training")
    eval_rows = encode_prompts(eval_rows, tokenizer, config, "held-out")

    # ---- what a rank has: a trainer, an engine, or both
    model = engine = optimizer = None

    def optimizer_state():
        """AdamW's moments, named and cut like the parameters; and the critic's head, which no engine knows."""
        pairs = [(s, optimizer.state[w]) for s, w in zip(shards, weights)]
        moments = [s._replace(name=f"{k}.{s.name}", data=state[k]) for s, state in pairs for k in MOMENTS]
        return moments + [s for s in shards if s.name == "value_head"]

    if batch_invariant:
        kernels.enable_batch_invariant()
    if ranks.is_trainer:
        model = build_model(hf, ranks.mesh, place, batch_invariant, critic=advantage == "gae")
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        group = ranks.mesh.get_group()
        shards = sync.shards(model, ranks.mesh)
        policy = [s for s in shards if s.name != "value_head"]  # what engines and Hugging Face's folders know
        sync.load_weights(policy, found[-1] if saved else model_path, hf.tie_word_embeddings)
        # plain tensors that share the shards' storage: elementwise arithmetic needs no DTensor
        weights = [torch.nn.Parameter(s.data) for s in shards]
        decay = [w for w, s in zip(weights, shards) if len(s.shape) > 1]
        no_decay = [w for w, s in zip(weights, shards) if len(s.shape) == 1]
        optimizer = torch.optim.AdamW(
            [dict(params=decay, weight_decay=weight_decay), dict(params=no_decay, weight_decay=0.0)],
            betas=(beta1, beta2),
        )
        if model.value_head is not None:
            model.value_head.to_local().detach().zero_()
        if frozen := teacher or kl_coef and (reference or init_from):
            key = "teacher" if teacher else "reference"
            folder = sync.fetch_model(frozen, key)
            its = check_model(folder, config, key)
            require(its.vocab_size == hf.vocab_size, f"{key}={frozen!r}: of another vocabulary than the model")
            frozen_model = build_model(its, ranks.mesh, place, batch_invariant)
            sync.load_weights(sync.shards(frozen_model, ranks.mesh), folder, its.tie_word_embeddings)
        for w in weights:  # what AdamW would make at its first step
            zeros = {name: torch.zeros_like(w) for name in MOMENTS}
            optimizer.state[w] = dict(step=torch.tensor(float(saved["optimizer_steps"] if saved else 0)), **zeros)
        if saved:
            sync.load_weights(optimizer_state(), found[-1] / "optimizer", tied=False)
        if master:
            count = sum(math.prod(s.shape) for s in shards)
            print(f"model: {count:,} parameters, {len(train_rows)} prompts", flush=True)

    def record(file, **line):
        with open(out / file, "a") as f:
            f.write(json.dumps(line) + "\n")

    def due(every):
        return step == max_steps or every and step % every == 0

    def look(samples):
        """
        One pass over a batch without gradients: the samples with the trainer's own log-probs, the frozen model's and
        the critic's values filled in. Collective over the trainers.
        """
        size, mine = len(samples) // leaves, {}
        for i in range(ranks.rank, leaves, ranks.trainers):
            leaf = pack(samples[i * size : (i + 1) * size], place)
            with torch.no_grad():
                ours, _, values, ends = model.token_logprobs(leaf, temperature)
                model.reshard()  # FSDP2 would after a backward pass, which does not come
                theirs = ours
                if frozen:
                    theirs = frozen_model.token_logprobs(leaf, temperature)[0]
                    frozen_model.reshard()
            columns = (ours, theirs, leaf.values if values is None else values)
            columns = (x.cpu().split(leaf.counts.tolist()) for x in columns)
            mine[i] = [*zip(*columns, [0.0] * size if ends is None else ends.tolist())]
        found = [None] * ranks.trainers
        dist.all_gather_object(found, mine, group=group)
        out = []
        for s, (*columns, end) in zip(samples, sum((found[i % ranks.trainers][i] for i in range(leaves)), [])):
            ours, theirs, values = (scatter(s.loss_mask, x) for x in columns)
            ours = ours if importance else s.logprobs
            out.append(s._replace(old_logprobs=ours, reference=theirs, values=values, end=end if s.truncated else 0.0))
        return out

    def with_advantages(samples, rewards):
        """The samples with advantages, and a critic's returns, of rewards (P, G)."""
        if advantage == "distill":  # minus the reverse KL, token by token: Lu et al. 2025, "On-policy distillation"
            return [s._replace(advantages=s.reference - s.logprobs) for s in samples]
        costs = [torch.zeros(int(s.loss_mask.sum())) for s in samples]
        if kl_in_reward:  # of each token: Ziegler et al. 2019, equation 2; of the sample: Ahmadian et al. 2024
            costs = [kl_coef * kl(s.logprobs, s.reference, kl_estimator)[s.loss_mask] for s in samples]
        if advantage == "gae":
            return critic_advantages(samples, rewards.flatten(), costs, gamma, gae_lambda)
        net = rewards - torch.stack([c.sum() for c in costs]).view(rewards.shape)
        each = zip(samples, advantages_of(net, advantage).flatten().tolist())
        return [s._replace(advantages=torch.full(s.logprobs.shape, a)) for s, a in each]

    def update(samples, phase, lr, check=False):
        """
        One optimizer step on B samples, leaf by leaf: (metrics, hashes). Collective over the trainers. The sums of the
        metrics are made like the gradients': a row per leaf, the rows of all ranks, then one tree. check: the samples
        were made with these very weights, so every log-prob must be the rollout's.
        """
        size, n = len(samples) // leaves, ranks.trainers
        loss_tokens = max(1, sum(int(s.loss_mask.sum()) for s in samples))
        total, rows, first_mismatch = sync.LeafSum(), {}, None
        for i in range(ranks.rank, leaves, n):
            leaf = pack(samples[i * size : (i + 1) * size], place)
            counts, kind = leaf.counts.tolist(), loss_aggregation if phase == "rl" else "token"
            logprobs, entropy, values, _ = model.token_logprobs(leaf, temperature if phase == "rl" else 1.0)
            losses, sums = -logprobs, {"entropy": entropy}
            if check:
                sums["logprob_mismatch_tokens"] = logprobs.view(torch.int32) != leaf.logprobs.view(torch.int32)
                if sums["logprob_mismatch_tokens"].any() and first_mismatch is None:
                    first_mismatch = describe_mismatch(leaf, logprobs.detach(), i * size, group_size)
            if phase == "rl":
                ends = clip_low, clip_high, dual_clip
                old = leaf.old_logprobs
                losses, sums["clip_fraction"] = policy_loss(loss, logprobs, old, leaf.advantages, counts, *ends)
                if importance:
                    ends = importance_floor, importance_cap
                    w = importance_weights(old, leaf.logprobs, importance, *ends)
                    losses, sums["importance_mean"], sums["importance_not_one"] = losses * w, w, w != 1
                if entropy_coef:  # Schulman et al. 2017, equation 9
                    losses = losses - entropy_coef * entropy
                if frozen:
                    sums["kl_reference"] = kl(logprobs, leaf.reference, kl_estimator)
                if kl_coef and not kl_in_reward:
                    losses = losses + kl_coef * sums["kl_reference"]
                if values is not None:
                    sums["value_loss"] = value_loss(values, leaf.values, leaf.returns, value_clip)
                    losses = losses + value_coef * sums["value_loss"]
            part = aggregate(losses, counts, kind, len(samples), loss_tokens, max_new_tokens)
            part.backward()
            # FSDP2 gives no gradient to what took no part, as the critic in the warm-up
            grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
            total.add([g.detach().to_local() for g in grads])
            model.zero_grad()
            sums["loss"] = part
            if check:
                distance = (logprobs - leaf.logprobs).abs()
                sums["logprob_mismatch_max"] = torch.nn.functional.pad(distance, (0, 1)).max()  # there may be none
            rows[i] = torch.stack([x.detach().double().sum() for x in sums.values()])
        table = torch.zeros(leaves, len(sums), dtype=torch.float64, device=place)
        for i, row in rows.items():
            table[i] = row
        dist.all_reduce(table, group=group)
        totals = dict(zip(sums, sync.tree_sum(table).tolist()))
        mean_loss, mismatches = totals.pop("loss"), totals.pop("logprob_mismatch_tokens", 0)
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
        optimizer.zero_grad()  # or they would lie there until the next step's
        hashes["weights"] = sync.tensor_hashes(weights, shards, group)
        first, second = (sync.tensor_hashes([optimizer.state[w][k] for w in weights], shards, group) for k in MOMENTS)
        hashes["optimizer"] = {name: first[name] + second[name] for name in first}
        metrics = dict(loss=mean_loss, grad_norm=float(norm), lr=lr)
        if check:
            totals.pop("logprob_mismatch_max")
            largest = float(table[:, -1].max())
            metrics |= dict(logprob_mismatch_tokens=int(mismatches), logprob_mismatch_max=largest)
        return metrics | {name: x / loss_tokens for name, x in totals.items()}, hashes

    def rollouts(stream, step, rows, samples, temperature):
        """
        Has the engines do the prompts {index: row}, the groups of all smaller indices being there; the groups
        [(tensors, meta)] in their order, on every rank: the next round's prompts depend on them.
        """
        folder = queue / f"{stream}_{step:06d}"
        if engine is not None:
            sampler.sample(folder, Job(stream, step, rows, samples, temperature))
        sync.wait_for_groups(folder, max(rows) + 1, engine_timeout + 15 if ranks.engines else 0)
        expected = dict(run=run, stream=stream, step=step, version=step if ranks.trainers else 0)
        return [sync.read_group(folder, i, expected | {"prompt": i}) for i in rows]

    def collect():
        """
        The step's P groups, and all that were made for it. With dynamic sampling (DAPO, equation 11) groups of equal
        rewards are replaced by the next round's, and fill up what is missing after the last one; all in the order of
        the prompts. Each round has its own prompts, so what one step needs moves no other step's.
        """
        kept, dropped, rounds = [], [], 1 + dynamic_sampling
        for k in range(rounds):
            chosen = rows_of_step(len(train_rows), prompts_per_step, step * rounds + k, seed, "rl")
            rows = {k * prompts_per_step + i: train_rows[row] for i, row in enumerate(chosen)}
            for t, m in rollouts("rl", step, rows, group_size, temperature):
                equal = dynamic_sampling and (t["rewards"] == t["rewards"][0]).all()
                (dropped if equal else kept).append((t, m))
            if len(kept) >= prompts_per_step:
                break
        return (kept + dropped)[:prompts_per_step], kept + dropped

    def evaluate():
        """pass@k and the mean reward on the held-out prompts, under the weights the engines hold."""
        groups = rollouts("eval", step, dict(enumerate(eval_rows)), eval_samples, eval_temperature)
        if not master:
            return
        rewards = torch.stack([t["rewards"] for t, _ in groups]).double()
        scores = dict(eval_reward_mean=float(rewards.mean()))
        right = (rewards >= pass_reward).sum(1).tolist()
        line = []
        for k in (2**i for i in range(eval_samples.bit_length())):
            chances = torch.tensor([pass_at_k(eval_samples, n, k) for n in right], dtype=torch.float64)
            # 95 % of the normal distribution of a mean over prompts: Miller 2024 (arXiv:2411.00640), section 2
            mean, half = float(chances.mean()), 1.96 * float(chances.std()) / math.sqrt(len(right))
            scores |= {f"pass@{k}": mean, f"pass@{k}_ci95": half}
            line.append(f"pass@{k} {mean:.4f} +- {half:.4f}")
        record("metrics.jsonl", phase="eval", step=step, **scores)
        what = f"{len(right)} prompts, {eval_samples} samples each, reward {reward!r}, temperature {eval_temperature}"
        tqdm.write(f"held out after {step} RL steps: {', '.join(line)} ({what})")

    def checkpoint():
        """What is needed to go on from here on any number of ranks. Collective over the trainers."""
        partial = out / "ckpt" / f".step_{step:06d}"
        if master:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "optimizer").mkdir(parents=True)
            model.config.save_pretrained(partial)
            sync.save_tokenizer(partial, tokenizer, stop_tokens)
        sync.meet(group)
        sync.write_tensors(partial, "model", [s.data for s in policy], policy, ranks.mesh)
        state = optimizer_state()
        sync.write_tensors(partial / "optimizer", "optimizer", [s.data for s in state], state, ranks.mesh)
        if master:
            sync.seal_checkpoint(
                partial, out / "ckpt" / f"step_{step:06d}", step=step, run=run, versions=versions(),
                digest=ledger.digest, optimizer_steps=int(optimizer.state[weights[0]]["step"]),
                bytes={name: (out / name).stat().st_size for name in sync.LOGS},
            )  # fmt: skip
            sync.prune_checkpoints(out / "ckpt", keep_checkpoints)

    # ---- supervised learning: the warm-up, for which ranks with an engine do not wait, or all of mode='sft'
    sft_steps = max_steps if mode == "sft" else warmup_sft_steps if ranks.is_trainer and not saved else 0
    if sft_steps:
        answered = encode_answers(train_rows, tokenizer, stop_tokens, config)
    if mode == "sft" and checkpoint_every and not saved:
        checkpoint()
    for warm in range(step if mode == "sft" else 0, sft_steps):
        chosen = (answered[i] for i in rows_of_step(len(answered), sft_batch, warm, seed, "sft"))
        pairs = ((torch.tensor(row["prompt_tokens"]), torch.tensor(row["answer_tokens"])) for row in chosen)
        samples = [make_sample(p, a, torch.ones(len(a), dtype=torch.bool), torch.zeros(len(a))) for p, a in pairs]
        lr = learning_rate_at(warm, sft_learning_rate, 20, 0, 0.0)
        if mode == "sft":
            lr = learning_rate_at(warm, learning_rate, warmup_steps, lr_decay_steps, min_lr)
        metrics, hashes = update(samples, "sft", lr)
        if master:
            record("metrics.jsonl", phase="sft", step=warm, **metrics)
            ledger.append(phase="sft", step=warm, tokens=sync.content_hash(*(s.tokens for s in samples)), **hashes)
            if (warm + 1) % 50 == 0:
                tqdm.write(f"supervised step {warm + 1}: loss {metrics['loss']:.4f}")
        if mode == "sft":
            step += 1
            if checkpoint_every and due(checkpoint_every):
                checkpoint()

    if ranks.engine is not None:
        log = out / f"engine_{ranks.engine}.log"
        lends = place == "cuda" and ranks.is_trainer
        engine = RolloutEngine(ranks.engine, model_path, hf, config, place, compute_dtype, log, local_rank, lends)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        sampler = Sampler(engine, config, run, ranks.engines, reward_function, decode, stop_tokens)
    transport = None
    if mode == "grpo":
        how = weight_sync or ("ipc" if place == "cuda" and ranks.trainers == ranks.engines == world else "broadcast")
        if master:
            print(f"weights travel by {how}", flush=True)
        mine = policy if ranks.is_trainer else None
        transport = sync.WeightSync(how, ranks, mine, engine, place, compute_dtype, out / "weights")
        transport.publish(step)

    hidden = not master or mode in ("sft", "eval")
    bar = tqdm(total=max_steps, initial=step, disable=hidden, unit="step", dynamic_ncols=True, mininterval=0.5)
    if mode == "eval" or eval_rows and transport and not saved:
        evaluate()
    if checkpoint_every and ranks.is_trainer and not saved and mode != "sft":
        checkpoint()

    while step < max_steps and mode != "eval":
        t_start = time.monotonic()
        # 1. prompts and rollouts
        batch, made = collect()
        if engine is not None and transport:
            engine.sleep()  # until the next weights come
        t_rollout = time.monotonic()
        metrics, hashes = {}, {}
        rewards, lengths, truncated = (
            torch.stack([t[k] for t, _ in batch]) for k in ("rewards", "lengths", "truncated")
        )
        if ranks.is_trainer:
            # 2. advantages
            samples = []
            for t, _ in batch:
                fields = (t[k].split(t["lengths"].tolist()) for k in ("tokens", "loss_mask", "logprobs"))
                for tokens, mask, logprobs, cut in zip(*fields, t["truncated"].tolist()):
                    mask = mask & (not (cut and overlong_filter))
                    samples.append(make_sample(t["prompt_tokens"], tokens, mask, logprobs, cut))
            if frozen or importance or advantage == "gae":
                samples = look(samples)
            samples = with_advantages(samples, rewards + overlong_penalty(lengths, max_new_tokens, overlong_cache))
            # 3. the check, the loss, the gradient, the optimizer
            lr = learning_rate_at(step, learning_rate, warmup_steps, lr_decay_steps, min_lr)
            metrics, hashes = update(samples, "rl", lr, check=True)
            for _ in range(updates_per_batch - 1):
                later, hashes = update(samples, "rl", lr)
                metrics |= later  # but for the mismatch, which is the first update's
            hashes = {"advantages": sync.content_hash(*(s.advantages for s in samples))} | hashes
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
            seconds, sync_seconds = time.monotonic() - t_start, t_sync - t_train
            right = torch.stack([t["rewards"] >= pass_reward for t, _ in made])
            metrics = dict(
                phase="rl", step=step - 1, reward_mean=float(rewards.double().mean()),
                reward_std=float(rewards.double().std()),
                zero_std_groups=int((rewards == rewards[:, :1]).all(1).sum()),
                groups=len(made), easy_groups=int(right.all(1).sum()), hard_groups=int((~right).all(1).sum()),
                **metrics,
                response_length_mean=float(lengths.double().mean()), response_length_max=int(lengths.max()),
                truncated_fraction=float(truncated.double().mean()),
                engine_retractions=sum(m["retractions"] for _, m in made),
                weight_version=batch[0][1]["version"], wait_seconds=t_rollout - t_start,
                rollout_seconds=max(m["seconds"] for _, m in made), train_seconds=t_train - t_rollout,
                sync_seconds=sync_seconds, step_seconds=seconds, tokens_per_second=float(lengths.sum()) / seconds,
                sync_gb_per_second=transport.bytes / 1e9 / sync_seconds if transport else 0.0,
            )  # fmt: skip
            record("metrics.jsonl", **metrics)
            bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}", mismatch=metrics.get("logprob_mismatch_tokens"))
            bar.update()
            if mode == "reject":
                for t, m in batch:
                    best = sorted(range(group_size), key=lambda g: (-t["rewards"][g], g))[:reject_best]
                    for g in (g for g in best if t["rewards"][g] >= pass_reward):
                        record("best.jsonl", prompt=m["prompt_text"], answer=m["responses"][g])
            if sample_every and (step - 1) % sample_every == 0:
                with open(out / "samples.md", "a") as f:
                    t, m = batch[0]
                    f.write(f"\n## step {step - 1}\n\nprompt `{m['prompt_text']!r}`, answer `{m['answer']!r}`\n\n")
                    f.writelines(f"- {r:g}: `{text!r}`\n" for r, text in zip(t["rewards"].tolist(), m["responses"]))
            if keep_rollouts and step > keep_rollouts and mode == "grpo":
                shutil.rmtree(queue / f"rl_{step - 1 - keep_rollouts:06d}", ignore_errors=True)
        if eval_rows and transport and due(eval_every):
            evaluate()
        if checkpoint_every and ranks.is_trainer and due(checkpoint_every):
            checkpoint()
    bar.close()
    sync.meet()
    dist.destroy_process_group()
    if engine is not None:
        engine.close()
    if master:
        print(f"digest {ledger.digest}")
