"""
GRPO: the config, the formulas, a leaf's loss, the trainer, the loop. One seed gives one curve, bit for bit.

    python train_grpo.py config/tiny.py                                    # one process does both roles in turn
    torchrun --nproc_per_node=2 train_grpo.py config/tiny.py               # one trainer, one engine
    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b.py --seed=2  # 4 trainers, 4 engines

What differs from the GRPO paper (Shao et al. 2024, arXiv:2402.03300):
  1. no KL term by default and no reference model (as in DAPO, Yu et al. 2025, arXiv:2503.14476)
  2. `loss_aggregation` is by default a mean over all loss tokens of the step, not over each sample first (DAPO)
  3. `clip_low` and `clip_high` are separate (DAPO, "clip-higher")
  4. before a batch moves any weight, the trainer's log-probs are compared with the engine's, as bits

Letters: P prompts per step, G samples per prompt, B = P * G samples, T tokens of a sample, R tokens of its response,
N tokens of a packed leaf, M loss tokens of it, V vocabulary. A leaf is a micro-batch: samples of at most `leaf_tokens`
tokens together. A row of leaves has one leaf per lane, and the trainer ranks share the lanes.
"""

import heapq
import math
import os
import shutil
import sys
import threading
import types
from collections import ChainMap, namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from configurator import MODES, OWN, block, keys_of, load_features, require, resolve, roles
from onecurve.keys.prompts import sources_of
from onecurve.run.start import end_with_parent, lean_imports
from onecurve.run.versions import check_versions, library_versions
from onecurve.sglang.start import start_engine_early

# ------------------------------------------------------------------------------------------------------------------
# The keys that every run turns. Those of a feature are in onecurve/keys/, a file for each feature.

# the run
out_dir = "out/run"  # everything the run writes
# a model folder, hub name or GGUF file; 'scratch': a small Qwen3 made here; 'resume': go on in out_dir
init_from = "scratch"
# grpo: sample and train. Modes without an engine: replay trains again on the rollouts in queue_dir, sft trains on the
# data's answers, rm a reward model on the data's pairs, dpo the model itself on such pairs (kl_coef is DPO's beta).
# Modes without a trainer: rollout generates and scores, eval samples and scores the held-out prompts only
mode = "grpo"
max_steps = 100  # RL steps; with mode='sft', 'rm' or 'dpo' supervised steps
seed = 1  # of the data order, the samples and a scratch model
device = ""  # 'cpu' or 'cuda'; '': cuda where there is one
threads = 0  # CPU threads of a trainer or an engine; 0: the cores, shared by those that work. Changes no bit
# the data
# a hub name, a .jsonl or .parquet file, 'my_file.py:my_function' that returns rows, 'reasoning_gym:countdown'; made
# here: 'programs', and 'arithmetic', sums of two numbers from 0 up to 99, or 'arithmetic:10:50', from 10 up to 49
dataset = "arithmetic"
dataset_config = ""  # configuration of a hub data set, such as 'main'; arguments of a function or of a gym's task
split = "train"
prompt_column = "prompt"
answer_column = "answer"
prompt_template = ""  # such as 'Q: {prompt}\nA:', with any column's name in braces; '': the prompt column as it is
# put the prompt through the tokenizer's chat template, as a user's message or as the list of messages that it is
chat_template = False
max_prompt_tokens = 256  # longer prompts are dropped
# numeric, exact, format, math, judge, code (programs and tests), reasoning_gym, 'my_file.py:my_function',
# 'model:my_folder' (a reward model), or a weighted sum: 'numeric+0.2*format'; '0*' before a term that is only noted
reward = "numeric"
# the rollout
prompts_per_step = 8  # P
group_size = 8  # G
max_new_tokens = 256
temperature = 1.0
# the update
learning_rate = 1e-6
warmup_steps = 0  # of the learning rate, linear
lr_decay_steps = 0  # cosine from warmup_steps to lr_decay_steps; 0: constant
min_lr = 0.0
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.0  # of matrices only
grad_clip = 1.0  # l2 norm; 0: off
# the loss
# grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, gae (PPO's critic), distill (a reference) or 'mine.py:f'
advantage = "grpo"
# ppo, gspo (a ratio per sequence), cispo, pg (no ratio) or 'mine.py:f'; experiments/losses.py has more, and shows how
loss = "ppo"
# 'token': sum / loss tokens; 'sequence': mean of sample means; 'constant': sum / (samples * max_new_tokens)
loss_aggregation = "token"
updates_per_batch = 1  # optimizer steps on each batch of rollouts
clip_low = 0.2  # the ratio is clipped to 1 - clip_low ..
clip_high = 0.2  # .. 1 + clip_high
entropy_coef = 0.0  # weight of the entropy bonus
# evaluation
eval_split = ""  # held-out split of a hub data set, or a file; '': eval_size rows of `split`, first of a fixed shuffle
eval_size = 256  # held-out prompts; 0: no evaluation
eval_every = 0  # steps between evaluations; 0: only before the first step and after the last
eval_samples = 1  # samples per held-out prompt
eval_temperature = 1.0  # 0: greedy
pass_reward = 1.0  # a sample with at least this reward is right: for pass@k, for easy and hard groups
# who does what
rollout_ranks = 1  # number of ranks, taken from the end, that sample; the others train
colocate = False  # every rank samples and trains, one after the other (a single process always does)
rollout_tp = 1  # number of sampling ranks that share an engine, for models larger than a GPU (tensor parallel)
lanes = 8  # leaves that the trainers compute side by side, a row: a power of two. It, not their number, orders sums
leaf_tokens = 16384  # most tokens of a micro-batch ("leaf"); a longer sample is a leaf of its own
gradient_checkpointing = False  # keep one activation per layer and compute the others again; changes no bit
# compute once what samples of a leaf begin with alike, such as a group's prompt, in the update, too: much of the work
# where answers are short. The gradients are then added in another order
share_prefixes = False
# checkpoints, the record
checkpoint_every = 50  # steps between checkpoints, beside those after the warm-up and the last step; 0: no checkpoints
keep_checkpoints = 2  # number of checkpoints that are kept, the last ones
keep_rollouts = 0  # steps of rollout files to keep; 0: all
sample_every = 20  # steps between entries of samples.md; 0: none
# determinism
strict = True  # stop at the first log-prob that differs between engine and trainer
batch_invariant = True  # False: the libraries' own kernels, for comparison
# ------------------------------------------------------------------------------------------------------------------

DEFAULTS = block(globals()) | keys_of(load_features())
if __name__ == "__mp_main__" or __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_parent()  # a rank of torchrun's, or an engine's process; before anything that takes time
if __name__ == "__main__":
    # Before the libraries, whose import takes seconds: neither --help nor a mistyped key should wait for them.
    config, resumed, restarted = resolve(globals(), DEFAULTS)
    check_versions()

with lean_imports(aloud=__name__ == "__main__" and os.environ.get("RANK", "0") == "0"):
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from tqdm import tqdm

    import kernels
    import rewards
    import sync
    from onecurve.algorithms import critic, turns
    from onecurve.algorithms.pairs import evaluate_pairs, pair_loss
    from onecurve.cpu.host import share_cores
    from onecurve.graders.watch import hacking, nothing_to_learn, text_metrics
    from onecurve.models import adapters, folders
    from onecurve.models.dense import build_model, check_memory, check_model
    from onecurve.models.moe import routers_of
    from onecurve.run.checkpoint import (
        checkpoints,
        clean_queue,
        delete_checkpoints,
        read_checkpoint,
        seal_checkpoint,
        write_file,
        write_tensors,
    )
    from onecurve.run.machine import end_with_a_line, one_device, report_error, take_gpu
    from onecurve.run.record import Record, check_shared, open_run
    from rewards import own_function
    from rollout_server import Flight, Job, RolloutEngine, Sampler, sample_step, sampling_of
if __name__ == "__main__":
    start_engine_early(config)

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments


# ---- the algorithm: pure functions --------------------------------------------------------------------------------


def advantages_of(rewards, kind, eps=1e-6):
    """
    Advantages (P, G) of rewards (P, G), a group of G samples per prompt; std is the sample's (n - 1).

    grpo                   (r - mean) / (std + eps) in the group: Shao et al. 2024, 4.1.2
    dr_grpo                r - mean: Liu et al. 2025 (arXiv:2503.20783)
    rloo                   r - mean of the others in the group: Ahmadian et al. 2024 (arXiv:2402.14740)
    reinforce++            (r - mean) / (std + eps) in the batch: Hu et al. 2025 (arXiv:2501.03262)
    reinforce++_baseline   r - mean in the group, divided by its std + eps in the batch: Hu et al. 2025, too

    A group of equal rewards gets exact zeros, except with reinforce++, whose baseline is the batch's mean.
    """
    if kind == "reinforce++":
        return (rewards - rewards.mean()) / (rewards.std() + eps)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # even then the rounded mean may differ from them
    centred = torch.where(equal, 0.0, rewards - rewards.mean(1, keepdim=True))
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":  # r - (G mean - r) / (G - 1)
        return centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    return centred / ((centred.std() if kind == "reinforce++_baseline" else rewards.std(1, keepdim=True)) + eps)


def overlong_penalty(lengths, longest, cache):
    """0 up to longest - cache tokens, then linear down to -1 at the longest: DAPO, equation 13."""
    return ((longest - cache - lengths) / cache).clamp(-1, 0)


def importance_weights(old_logprobs, rollout_logprobs, kind, floor, cap):
    """
    w = exp(old_logprob - rollout_logprob) of each sampled token (M,): the trainer's probability before the first update
    of a batch over the engine's. full: w itself; with the loss ppo that is decoupled PPO (Fu et al. 2025, AReaL,
    arXiv:2505.24298, equation 5). truncate: w clamped to floor .. cap (Ionides 2008; Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training"). mask: 0 where w is outside floor .. cap, so that such a
    token gives no gradient (Ling team 2025, arXiv:2510.18855).
    """
    w = torch.exp(old_logprobs - rollout_logprobs)
    bounded = w.clamp(floor, cap)
    if kind == "mask":
        return w.where(w == bounded, 0.0)
    return bounded if kind == "truncate" else w


def policy_loss(kind, logprobs, old_logprobs, advantages, counts, clip_low, clip_high, dual_clip=0.0, **_):
    """
    Per-token loss, and a mask of tokens where the clipped branch is active (of cispo: where the ratio was clipped),
    (M,) each; `counts` is a list of the loss tokens of each sample, M in all.
    With r = exp(logprob - old_logprob):

    pg      -A logprob, the policy gradient
    ppo     -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): Schulman et al. 2017, equation 7, with the two bounds of
            DAPO, equation 8. With dual_clip = c, for A < 0 no more than -c A: Ye et al. 2020 (arXiv:1912.09729)
    gspo    the same with r = exp(mean over the sample of logprob - old_logprob): Zheng et al. 2025 (arXiv:2507.18071),
            with the gradient of its variant GSPO-token
    cispo   -clip(r) A logprob, no gradient through the clip: MiniMax-M1 (arXiv:2506.13585)

    old_logprob is the trainer's before the first update with `importance`, else the engine's.

    A loss in a file returns the same, of what it gets by name: these arguments, rollout_logprobs (the engine's),
    entropy (M,), what else a Leaf has (reference, mark, ..), and every key of the config.
    """
    if kind == "pg":
        return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
    difference = logprobs - old_logprobs
    if kind == "gspo":
        means = [part.mean().expand(len(part)) for part in difference.detach().split(counts)]
        difference = torch.cat(means) + logprobs - logprobs.detach()
    ratio = torch.exp(difference)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        return -bounded.detach() * advantages * logprobs, bounded != ratio
    plain = ratio * advantages
    clipped = bounded * advantages
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
    A leaf's part of a step's loss; `samples` and `tokens` are how many samples and loss tokens the whole step has. The
    parts of all leaves add up to

    token      the mean over all tokens (DAPO, equation 8)
    sequence   the mean over samples of the mean over each one's tokens (GRPO, equation 3)
    constant   the sum over all tokens / (samples * longest) (Dr. GRPO: length has no weight)
    """
    if kind == "sequence":
        return torch.stack([part.sum() / max(1, len(part)) for part in losses.split(counts)]).sum() / samples
    return losses.sum() / (tokens if kind == "token" else samples * longest)


def learning_rate_at(step, peak, warmup_steps, decay_steps, min_lr):
    """Linear from peak / warmup_steps at step 0, then cosine to min_lr at decay_steps (0: constant at the peak)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if not decay_steps:
        return peak
    from onecurve.cpu.loops import cos_sin  # a libm's cosine follows the machine

    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return min_lr + (peak - min_lr) * 0.5 * (1 + cos_sin(math.pi * done)[0])


# ---- samples, and the leaves they are packed into -------------------------------------------------------------------


class Sample(NamedTuple):
    tokens: Tensor  # (T,) prompt and response
    prompt_tokens: int  # how many of them are the prompt's
    loss_at: Tensor  # (M,) indices of the loss tokens in `tokens`; the tensors below are of these tokens alone
    turn: Tensor  # (M,) index of each token's turn
    staleness: Tensor  # (M,) steps from the weights that sampled the token to those that are trained now
    logprobs: Tensor  # (M,) the engine's
    old_logprobs: Tensor  # (M,) the ratio's denominator: the engine's, or the trainer's before the first update
    advantages: Tensor  # (M,)
    reference: Tensor  # (M,) log-probs of the reference
    values: Tensor  # (M,) of the critic before the first update
    returns: Tensor  # (M,) what the critic learns
    mark: Tensor  # (M,) what the `before` of a loss in a file has noted for it
    bootstrap: float = 0.0  # the critic's value after the last token; 0 unless cut off
    name: str = ""  # 'prompt 3, sample 5', for errors
    truncated: bool = False  # cut off at max_new_tokens
    of: int = 0  # index of the sample in the batch; an agent's forks have the same, being dialogues of one sample
    turn_rewards: Tensor = torch.zeros(1)  # (turns,)
    kept: Tensor = torch.zeros(2, 0).long()  # (2, K) pairs of a loss token and an id: what its sampling rule kept


COLUMNS = "staleness logprobs old_logprobs advantages reference values returns mark".split()  # of Sample and Leaf
LEAF = [  # the fields of a Leaf
    "ids",  # (N,) samples end to end: no padding, so none can leak
    "positions",  # (N,) of each token in its sample
    "lengths",  # (samples,) tokens
    "counts",  # (samples,) loss tokens
    "predictors",  # (M,) index of the token before each loss token: its output predicts that one
    "targets",  # (M,) ids of the loss tokens
    *COLUMNS,  # (M,) as in Sample
    "kept",  # (2, K) as in Sample
]
Leaf = namedtuple("Leaf", LEAF)


def make_sample(prompt, response, loss_mask, logprobs, turn=None, staleness=None, **others):
    """
    A Sample of a prompt and a response (R,), of whose tokens those in loss_mask (R,) have a loss. logprobs, turn,
    staleness: (R,); None: 0. others: the last fields of a Sample. Columns that are not known yet are 0, and
    old_logprobs the engine's.
    """
    at = loss_mask.nonzero()[:, 0]
    zeros = torch.zeros(len(at))
    turn, staleness = (zeros.long() if x is None else x[at] for x in (turn, staleness))
    logprobs = logprobs[at]
    columns = dict.fromkeys(COLUMNS, zeros) | dict(staleness=staleness, logprobs=logprobs, old_logprobs=logprobs)
    tokens = torch.cat([prompt, response])
    return Sample(tokens, len(prompt), loss_at=len(prompt) + at, turn=turn, **columns, **others)


def loss_tokens(samples):
    """How many tokens of the samples have a loss."""
    return sum(len(s.loss_at) for s in samples)


# One token without loss, which stands in an empty leaf: its rank must take part in the other ranks' collectives.
nothing = torch.zeros(0)
FILLER = make_sample(torch.zeros(1).long(), nothing.long(), nothing, nothing)


def samples_of(groups, step, overlong_filter=False):
    """
    The samples of rollout Groups in their order, for training at `step`. overlong_filter: those cut off teach nothing.
    """
    samples = []
    begun = 0  # samples of the groups before
    for group in groups:
        t, meta = group
        rows = group.rows("tokens", "loss_mask", "logprobs", "weight_version", "turn")
        gained = t["turn_rewards"].split(t["turns"].tolist())
        where = f"prompt {meta['prompt']}"
        if step != meta["step"]:  # a partial rollout, which may be trained on at a later step than its file's
            where += f" of step {meta['step']}"
        for g, cut, gains, row in zip(t["sample"].tolist(), t["truncated"].tolist(), gained, rows):
            tokens, mask, logprobs, version, turn = row
            samples.append(
                make_sample(
                    t["prompt_tokens"],
                    tokens,
                    mask & (not (cut and overlong_filter)),
                    logprobs,
                    turn,
                    staleness=step - version,
                    name=f"{where}, sample {g}",
                    truncated=cut,
                    of=begun + g,
                    turn_rewards=gains,
                )
            )
        begun += len(t["rewards"])
    return samples


def tokens_of_age(sample, age):
    """The sample, cut after its last loss token of this staleness, with no loss on other tokens; None without any."""
    chosen = sample.staleness == age
    if not chosen.any():
        return None
    columns = {name: getattr(sample, name)[chosen] for name in ("loss_at", "turn", *COLUMNS)}
    return sample._replace(tokens=sample.tokens[: columns["loss_at"][-1] + 1], **columns)


def max_staleness(c):
    """The largest staleness of a token, in steps; it is also how many older versions of the weights must be kept."""
    if not c.segment_tokens:
        return c.lag
    # A group is sampled in at most `drawn` steps. Then it waits for the groups begun before it, and each step trains on
    # P of these; if it was the last in flight, the step in which it was begun has already trained on P of them.
    drawn = -(-c.max_new_tokens // c.segment_tokens)
    return c.lag + max(0, drawn - 2) + (c.groups_in_flight - 1) // c.prompts_per_step


def pack(samples, device):
    """Samples end to end as one Leaf on the device, with the loss tokens picked out; a FILLER if there are none."""
    every = Sample(*zip(*(samples or [FILLER])))  # its fields are tuples: of each field, that of every sample
    ids = torch.cat(every.tokens)
    lengths = torch.tensor([len(x) for x in every.tokens])
    counts = torch.tensor([len(x) for x in every.loss_at])
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(ids)) - starts.repeat_interleave(lengths)
    at = torch.cat(every.loss_at) + starts.repeat_interleave(counts)
    columns = [torch.cat(getattr(every, name)) for name in COLUMNS]
    kept = torch.cat(every.kept, 1)
    pairs = torch.tensor([x.shape[1] for x in every.kept])
    kept[0] += (counts.cumsum(0) - counts).repeat_interleave(pairs)
    fields = ids, positions, lengths, counts, at - 1, ids[at], *columns, kept
    return Leaf._make(x.to(device) for x in fields)


def split_kept(kept, counts):
    """The pairs of a leaf, sorted, apart for its samples, which have `counts` (samples,) loss tokens."""
    kept = kept.cpu()
    ends = counts.cpu().cumsum(0)
    parts = kept.tensor_split(torch.searchsorted(kept[0], ends)[:-1], 1)
    return [torch.stack([rows - start, ids]) for (rows, ids), start in zip(parts, [0, *ends.tolist()])]


def plan_leaves(lengths, leaf_tokens, lanes):
    """
    Packs samples of these lengths (tokens) into leaves of at most leaf_tokens: lists of indices, `lanes` of them to a
    row, row after row. A longer sample is a leaf of its own; a leaf may be empty. The ranks that share a row wait for
    its longest leaf, so leaves are made as even as can be: the longest sample first, each into the lightest leaf
    (Graham 1969, LPT), in about as few rows as hold them. The plan never depends on the number of ranks.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows = max(1, -(-sum(lengths) // (leaf_tokens * lanes)))
    while True:
        leaves = [(0, leaf, []) for leaf in range(rows * lanes)]  # a heap of (tokens, number, samples)
        for i in longest_first:
            load, leaf, chosen = leaves[0]
            heapq.heapreplace(leaves, (load + lengths[i], leaf, [*chosen, i]))
        if all(load <= leaf_tokens or len(chosen) == 1 for load, _, chosen in leaves):
            leaves.sort(key=lambda x: (-x[0], x[1]))  # the heaviest first, so that a row's leaves are alike
            used = -(-sum(load > 0 for load, _, _ in leaves) // lanes) * lanes  # long samples may leave rows empty
            return [sorted(chosen) for _, _, chosen in leaves[:used]]
        rows += 1 + rows // 8


# ---- from rewards to advantages -------------------------------------------------------------------------------------


def with_advantages(samples, rewards, c, groups=()):
    """
    The samples with their advantages, from rewards (P, G), and with returns if there is a critic. c: the config.
    groups: the step's rollout Groups, for an advantage in a file.
    """
    if c.advantage == "distill":  # minus the reverse KL, token by token: Lu et al. 2025, "On-policy distillation"
        return [s._replace(advantages=s.reference - s.logprobs) for s in samples]
    costs = [0.0] * len(samples)
    if c.kl_in_reward:  # of each token: Ziegler et al. 2019, equation 2; of the sample: Ahmadian et al. 2024
        costs = [c.kl_coef * kl(s.logprobs, s.reference, c.kl_estimator) for s in samples]
    if c.advantage == "gae":
        flat = rewards.flatten().tolist()
        gains = [critic.token_rewards(s, flat[s.of], c.credit) - cost for s, cost in zip(samples, costs)]
        return critic.advantages(samples, gains, c.gamma, c.gae_lambda)
    if c.credit == "turn":
        return turns.advantages(samples, partial(advantages_of, kind=c.advantage), rewards.shape[1], c.gamma)
    if c.kl_in_reward:
        total = torch.zeros_like(rewards)
        for s, cost in zip(samples, costs):
            total.view(-1)[s.of] += cost.sum()
        rewards = rewards - total
    own = own_function("advantage", c.advantage)
    advantages = own(**vars(c) | dict(rewards=rewards, groups=groups)) if own else advantages_of(rewards, c.advantage)
    each = advantages.flatten().tolist()
    return [s._replace(advantages=torch.full_like(s.logprobs, each[s.of])) for s in samples]


# ---- a leaf's loss, and the check -----------------------------------------------------------------------------------


# Each takes the model's Output for a leaf, and returns the leaf's part of a step's loss (see `aggregate` for `samples`
# and `tokens`) and the figures of its tokens, {metric: (M,)}. A forward pass goes in, numbers come out.


def policy_step_loss(output, leaf, c, samples, tokens):
    """The loss of an RL step, of the terms that the config asks for."""
    logprobs, entropy, values = output.logprobs, output.entropy, output.values
    counts = leaf.counts.tolist()
    figures = {"entropy": entropy}
    ours = dict(logprobs=logprobs, rollout_logprobs=leaf.logprobs, entropy=entropy, counts=counts)
    loss = own_function("loss", c.loss) or partial(policy_loss, c.loss)
    losses, figures["clip_fraction"] = loss(**vars(c) | leaf._asdict() | ours)
    if c.importance:
        w = importance_weights(leaf.old_logprobs, leaf.logprobs, c.importance, c.importance_floor, c.importance_cap)
        losses = losses * w
        figures |= dict(importance_mean=w, importance_not_one=w != 1)
    if max_staleness(c) or c.engine_bits != "fp32":
        moved = logprobs.detach() - leaf.logprobs
        ratio = torch.exp(moved)
        figures |= dict(
            logprob_distance=moved.abs(),
            staleness=leaf.staleness,
            ratio_mean=ratio,
            ratio_square=ratio.square(),
            kl_behaviour=kl(leaf.logprobs, logprobs.detach(), "k3"),
        )
    if c.entropy_coef:  # Schulman et al. 2017, equation 9
        losses = losses - c.entropy_coef * entropy
    if c.kl_coef or c.advantage == "distill":
        figures["kl_reference"] = kl(logprobs, leaf.reference, c.kl_estimator)
    if c.kl_coef and not c.kl_in_reward:
        losses = losses + c.kl_coef * figures["kl_reference"]
    if values is not None:
        figures["value_loss"] = critic.value_loss(values, leaf.values, leaf.returns, c.value_clip)
        losses = losses + c.value_coef * figures["value_loss"]
    return aggregate(losses, counts, c.loss_aggregation, samples, tokens, c.max_new_tokens), figures


def answer_loss(output, leaf, c, samples, tokens):
    """The negative log-likelihood of answers, the mean over all tokens."""
    return (-output.logprobs).sum() / tokens, dict(entropy=output.entropy)


class Objective(NamedTuple):
    phase: str  # its name in the ledger and in metrics.jsonl
    loss: Callable  # `policy_step_loss`, `answer_loss`, `pair_loss`
    unit: int = 1  # samples that must be in one leaf


POLICY = Objective("rl", policy_step_loss)
ANSWERS = Objective("sft", answer_loss)
PAIRS = Objective("rm", pair_loss, 2)


def check_logprobs(sample, logprobs, age):
    """
    The promise of this project, checked at every loss token of a sample: the trainer's log-probs (M,) are the engine's,
    as bits, where they were computed with the same weights: at tokens of staleness `age`. Returns [], or [(the sample's
    index in the batch, a line about its first token that differs, number of tokens that differ, largest distance)].
    """
    differ = (logprobs.view(torch.int32) != sample.logprobs.view(torch.int32)) & (sample.staleness == age)
    if not differ.any():
        return []
    i = int(differ.nonzero()[0])
    bits = [f"{x:.9g} (0x{int(x.view(torch.int32)) & 0xFFFFFFFF:08x})" for x in (sample.logprobs[i], logprobs[i])]
    line = f"{sample.name}, token {sample.loss_at[i] - sample.prompt_tokens}: engine {bits[0]}, trainer {bits[1]}"
    distances = (logprobs - sample.logprobs)[differ].abs()
    return [(sample.of, line, len(distances), float(distances.max()))]


def token_table(samples, figures):
    """
    {name: (M,)} of a batch's loss tokens, in the order of the samples: what engine and trainer say of each. figures: of
    each sample {name: (M,)}, the trainer's.
    """
    rows = [
        dict(
            rollout_logprobs=s.logprobs,
            position=s.loss_at - s.prompt_tokens,
            sample=torch.full_like(s.loss_at, s.of),
            **own,
        )
        for s, own in zip(samples, figures)
    ]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


# ---- the trainer ---------------------------------------------------------------------------------------------------


class Trainer:
    """
    A rank's share of the model and of AdamW's state, and what is done with them. `save` and all methods that take
    samples are collective over the trainers: each rank passes all the samples of a step, and works on its own leaves.

    c: the config as a namespace. hf, folder: the model's Hugging Face config, and where its weights are read from.
    checkpoint: the folder from which to go on, None without. saved: what it says of itself.
    """

    def __init__(self, c, ranks, hf, folder, device, checkpoint=None, saved={}):
        self.c = c
        self.sampling = sampling_of(c)
        self.mesh = ranks.mesh
        self.device = device
        self.rank = ranks.rank
        self.process_group = ranks.mesh.get_group()
        self.control = ranks.control
        # float32 master weights, cut by FSDP2: each rank keeps its rows of every parameter, and whole layers come
        # together only while they are computed with.
        lora = c.lora_rank and vars(c)
        self.model = build_model(hf, self.mesh, device, c.batch_invariant, c.advantage == "gae", lora, c.tp_split)
        if c.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        kind = adapters.Adapters if lora else folders.FullWeights
        self.parts = kind(self.model, c, self.mesh, device)
        self.routers = routers_of(self.model, c)
        self.shards = self.parts.trained
        self.policy = self.parts.policy
        # Heads begin with 0: so the first advantages come from the rewards alone, and no side of a pair is preferred.
        for s in self.shards:
            if s.name in folders.HEADS:
                s.data.zero_()
        self.parts.load(folder, checkpoint)
        # Plain tensors that share the shards' storage: AdamW is elementwise, so it needs no DTensor.
        self.weights = [torch.nn.Parameter(s.data) for s in self.shards]
        # As is usual, only matrices decay: norms and biases are not pulled towards 0.
        groups = [
            dict(params=[w for w in self.weights if (w.dim() > 1) == matrices], weight_decay=c.weight_decay * matrices)
            for matrices in (True, False)
        ]
        self.optimizer = kernels.adamw(groups, betas=(c.beta1, c.beta2))
        # AdamW would make its state at its first step; made here, it can be filled from a checkpoint.
        for w in self.weights:
            zeros = {name: torch.zeros_like(w) for name in MOMENTS}
            self.optimizer.state[w] = dict(step=torch.tensor(float(saved.get("optimizer_steps", 0))), **zeros)
        # {version: shards of the policy as the engines got it}: what tokens sampled with this version are checked with.
        self.versions = {version: self.snapshot() for version in saved.get("earlier", ())}
        self.mismatches = []  # what `check_logprobs` has found since the last update, each sample's on one rank
        self.token_table = {}  # `token_table` of the step
        if checkpoint:
            folders.load_weights(self.optimizer_state(self.versions), checkpoint / "optimizer", tied=False)
        if self.rank == 0:
            line = f"model: {self.model.num_parameters():,} parameters"
            if self.parts.frozen:
                line += f", of which {self.model.num_parameters(only_trainable=True):,} are trained"
            print(line, flush=True)
        # The reference: forward passes only, and so no optimizer. With LoRA it is the model itself with other adapters.
        self.frozen = None
        if c.kl_coef or c.advantage == "distill":
            self.anchor = self.parts.anchor() or ()
            self.frozen = self.model if self.anchor else self.reference_model(hf)

    def reference_model(self, hf):
        """The reference where that is a whole model."""
        c = self.c
        name = c.reference or c.init_from
        folder = folders.fetch_model(name, "reference")
        other = check_model(folder, vars(c), "reference")
        require(other.vocab_size == hf.vocab_size, f"reference={name!r}: needs the vocabulary of init_from's model")
        model = build_model(other, self.mesh, self.device, c.batch_invariant, tp_split=c.tp_split)
        folders.load_weights(sync.shards(model, self.mesh), folder, other.tie_word_embeddings)
        return model

    def optimizer_state(self, versions):
        """The shards that a checkpoint has beside the model: AdamW's moments, these versions, the critic's head."""
        state = [
            s._replace(name=f"{k}.{s.name}", data=self.optimizer.state[w][k])
            for s, w in zip(self.shards, self.weights)
            for k in MOMENTS
        ]
        for version, kept in versions.items():
            state += [s._replace(name=f"version {version}.{s.name}", data=s.data.to(self.device)) for s in kept]
        return state + [s for s in self.shards if s.name == "value_head"]

    def snapshot(self):
        """A copy of the policy's shards as the engines get them: in the compute dtype; adapters stay float32."""
        return [s._replace(data=s.data.to(self.parts.dtype, copy=True)) for s in self.policy]

    def published(self, version):
        """This rank's shards of what engines get as `version`: of the copy if one is kept, else of the weights now."""
        return self.parts.published(self.versions.get(version, self.policy))

    def keep(self, version):
        """Keeps a copy of the weights as `version`, and drops versions too old for any token still to be trained on."""
        if most := max_staleness(self.c):
            self.versions = {v: kept for v, kept in self.versions.items() if v >= version - most}
            # The newest is still to be sent; older ones wait in CPU memory, where there is room. Copied like this it is
            # pinned, and torch gives what the dropped ones had.
            older = {
                v: [s._replace(data=s.data.to("cpu", non_blocking=True)) for s in kept]
                for v, kept in self.versions.items()
            }
            self.versions = older | {version: self.snapshot()}

    @contextmanager
    def holding(self, others):
        """Inside, the policy has the weights `others` (shards); () for its own."""
        now = [s.data.clone() for s, _ in zip(self.policy, others)]
        for s, other in zip(self.policy, others):  # over the bus as they are: a CPU would be slow to convert them
            s.data.copy_(other.data.to(s.data.device, non_blocking=True))
        try:
            yield
        finally:
            for s, data in zip(self.policy, now):
                s.data.copy_(data)

    def save(self, ckpt, tokenizer, stop_tokens, record, step, flight):
        """
        Writes ckpt/step_000100, for step = 100, from which any number of ranks can go on with that step. flight: the
        groups in flight. record: the first rank's Record; None on others.
        """
        found = {*chain(*(self.optimizer.state[w] for w in self.weights))} - {"step"}
        cure = "name in MOMENTS what the optimizer keeps of a weight, or a resume begins without it"
        require(found == {*MOMENTS}, f"MOMENTS={MOMENTS}: the optimizer has {', '.join(sorted(found))}; {cure}")
        # A name that no reader looks for until all is on the disk: a kill leaves no half of a checkpoint.
        finished = ckpt / f"step_{step:06d}"
        unfinished = ckpt / f".step_{step:06d}"
        earlier = dict(self.versions)
        earlier.pop(step, None)  # it is the model itself
        if record:
            shutil.rmtree(unfinished, ignore_errors=True)
            for name in ("optimizer", "flight"):
                (unfinished / name).mkdir(parents=True)
            folders.save_tokenizer(unfinished, tokenizer, stop_tokens)
        sync.meet(self.control)  # the folders are there
        self.parts.save(unfinished)
        write_tensors(unfinished / "optimizer", "optimizer", self.optimizer_state(earlier), self.mesh)
        sync.meet(self.control)  # and the files
        if record:
            for i, group in enumerate(flight.groups):
                sync.write_group(sync.group_path(unfinished / "flight", i), *group)
            seal_checkpoint(
                unfinished,
                finished,
                step=step,
                optimizer_steps=int(self.optimizer.state[self.weights[0]]["step"]),
                earlier=[*earlier],
                begun=flight.begun,
                seen=[(*place, right) for place, right in flight.seen.items()],
                **record.state(),
            )
            delete_checkpoints(ckpt, checkpoints(ckpt)[: -self.c.keep_checkpoints])

    def passes(self, samples, model, objective=POLICY, weights=()):
        """
        Forward passes over this rank's leaves of a step: yields (a leaf's samples by index, the Leaf, its Output).
        Leaf i belongs to rank i % ranks: the ranks work on a row of leaves side by side. FSDP2's gathers and scatters
        need all of them, so an empty leaf is computed like any other. weights: shards that the policy has during these
        passes; () for its own.
        """
        c = self.c
        sampling = kernels.Sampling() if objective is ANSWERS else self.sampling
        lengths = [len(s.tokens) for s in samples]
        unit = objective.unit
        shared = c.batch_invariant and (c.share_prefixes or not torch.is_grad_enabled())
        if c.share_prefixes:  # a group goes into one leaf, or as much of it as is half of one
            unit *= max(1, min(c.group_size, len(samples) // (2 * c.lanes), c.leaf_tokens // (2 * max(lengths))))
        units = [sum(lengths[i : i + unit]) for i in range(0, len(lengths), unit)]
        planned = plan_leaves(units, c.leaf_tokens, c.lanes)
        with self.holding(weights):
            for numbers in planned[self.rank :: self.mesh.size()]:
                chosen = [i for k in numbers for i in range(len(samples))[k * unit : (k + 1) * unit]]
                leaf = pack([samples[i] for i in chosen], self.device)
                output = model.token_logprobs(leaf, sampling, shared)
                if hasattr(model, "reshard") and not torch.is_grad_enabled():
                    model.reshard()  # FSDP2 does it after a backward pass; there is none
                yield chosen, leaf, output

    @torch.no_grad()
    def check_past_versions(self, samples, step):
        """
        Notes what `check_logprobs` finds at tokens that were sampled with older weights than those of `step`: a pass
        with each version of them. Ends the run with one line if a version is not kept. Returns the samples, with what a
        sampling rule kept for these tokens: under other weights it would keep others.
        """
        checked = list(samples)
        ages = torch.cat([s.staleness for s in samples]).unique()
        for age in ages[ages > 0].tolist():
            cut = {i: part for i, s in enumerate(samples) if (part := tokens_of_age(s, age))}
            parts = [*cut.values()]
            token = f"{parts[0].name}, token {int(parts[0].loss_at[0]) - parts[0].prompt_tokens}"
            why = f"sampled with weights {step - age}; the oldest that are kept are {min(self.versions, default=step)}"
            require(step - age in self.versions, f"step {step}, {token}: {why}")
            outputs = self.outputs(parts, self.model, self.versions[step - age])
            for i, (logprobs, (rows, ids), *_) in zip(cut, outputs):
                if self.rank == 0:  # all ranks have them all
                    self.mismatches += check_logprobs(cut[i], logprobs, age)
                kept = torch.stack([(samples[i].staleness == age).nonzero()[rows, 0], ids])
                checked[i] = checked[i]._replace(kept=torch.cat([checked[i].kept, kept], 1))
        return checked

    @torch.no_grad()
    def outputs(self, samples, model, weights=()):
        """
        For each sample a model's log-probs (M,), what a sampling rule kept (2, K) and, with a critic, values (M,) and
        that after the last token.
        """
        mine = {}
        for chosen, leaf, found in self.passes(samples, model, weights=weights):
            counts = leaf.counts.tolist()
            kept = split_kept(leaf.kept if found.kept is None else found.kept, leaf.counts)
            columns = [found.logprobs.cpu().split(counts), kept]
            if found.values is not None:
                columns += [found.values.cpu().split(counts), found.last_values.tolist()]
            mine |= zip(chosen, zip(*columns))
        return self.in_order(mine)

    def in_order(self, mine):
        """What each rank has of its samples, {index: ..}, as a list on every rank: advantages are of a whole batch."""
        found = ChainMap(*sync.from_all_ranks(mine, self.control))
        return [found[i] for i in sorted(found)]

    def forward_only(self, samples):
        """
        Passes over a batch before its first update: the samples with the trainer's own log-probs (where importance
        weights need them), what a sampling rule kept, the critic's values and the reference's log-probs filled in.
        """
        c = self.c
        if c.importance or c.advantage == "gae" or self.sampling.cuts() and (self.frozen or c.updates_per_batch > 1):
            outputs = self.outputs(samples, self.model)
            samples = [
                s._replace(kept=kept, old_logprobs=logprobs if c.importance else s.old_logprobs)
                for s, (logprobs, kept, *_) in zip(samples, outputs)
            ]
        if c.advantage == "gae":  # after a sample that ended by itself nothing can be gained: its last value is 0
            samples = [
                s._replace(values=values, bootstrap=last if s.truncated else 0.0)
                for s, (*_, values, last) in zip(samples, outputs)
            ]
        if self.frozen:
            theirs = self.outputs(samples, self.frozen, self.anchor)
            samples = [s._replace(reference=output[0]) for s, output in zip(samples, theirs)]
        return samples

    @torch.no_grad()
    def dialled_choices(self, samples):
        """Which experts a mixture chooses in each leaf with weights rounded like the engine's; [] without a dial."""
        if self.c.engine_bits == "fp32" or self.c.lora_rank:
            return []
        rounded = [s._replace(data=sync.rounded_to(s.data, self.c.engine_bits)) for s in self.policy]
        return [self.routers.choices() for _ in self.passes(samples, self.model, weights=rounded)]

    def gradients(self, samples, objective=POLICY, check=False):
        """
        The gradients of a step's loss (this rank's rows of each parameter's), and the metrics of its loss tokens. Sums
        over leaves are made in an order that does not depend on the number of ranks. Under torch.no_grad there are no
        gradients. check: compare log-probs with the engine's at tokens that were sampled with these very weights.
        """
        # The denominators are the whole step's, so that leaves of any size add up to one mean.
        tokens = max(1, loss_tokens(samples))
        if objective.unit == 2:
            tokens = len(samples) // 2
            if not MODES[self.c.mode].scores:  # DPO needs the reference's log-probs
                samples = self.forward_only(samples)
        grads = sync.LeafSum(self.c.lanes // self.mesh.size(), self.model)
        rows = []
        self.token_figures = {}  # {index of a sample here: {name: (M,)}}: log-probs; in a dialled run all its figures
        if self.routers and check:
            self.routers.dialled = self.dialled_choices(samples)
        for chosen, leaf, output in self.passes(samples, self.model, objective):
            loss, figures = objective.loss(output, leaf, self.c, len(samples), tokens)
            if self.routers:
                share = len(leaf.ids) / sum(len(s.tokens) for s in samples) if chosen else 0
                loss = loss + self.routers.note(figures, leaf, share)
            if torch.is_grad_enabled():
                grads.backward(loss)
            if check:
                noted = dict(logprobs=output.logprobs) | (figures if self.c.engine_bits != "fp32" else {})
                columns = [x.detach().cpu().split(leaf.counts.tolist()) for x in noted.values()]
                for i, own in zip(chosen, zip(*columns)):
                    self.mismatches += check_logprobs(samples[i], own[0], age=0)
                    self.token_figures[i] = dict(zip(noted, own))
            rows.append(torch.stack([x.detach().double().sum() for x in (loss, *figures.values())]))
        # Each rank has a row of the table for each of its leaves; rows are put in their places by adding zeros.
        mine = torch.stack(rows)
        table = mine.new_zeros(len(rows) * self.mesh.size(), len(mine[0]))
        table[self.rank :: self.mesh.size()] = mine
        dist.all_reduce(table, group=self.process_group)
        loss, *sums = sync.tree_sum(table).tolist()
        metrics = {"loss": loss} | {name: x / tokens for name, x in zip(figures, sums)}
        if square := metrics.pop("ratio_square", None):
            mean_square = metrics["ratio_mean"] ** 2
            metrics["ratio_variance"] = square - mean_square
            metrics["effective_sample_size"] = mean_square / square
        if self.routers:
            metrics |= self.routers.metrics(self.process_group)
        return grads.total(), metrics

    def apply(self, grads, lr, where, loss=0.0):
        """
        Clips the gradients and takes AdamW's step with them: (their norm before the clip, {stage: {name: hash}}). Ends
        the run, with the weights unchanged, if the norm or the loss is not finite; `where` says in which step.
        """
        # Clip and AdamW are elementwise, and the norm is one tree: it does not matter where the shards are cut.
        norm = sync.grad_norm(grads, self.shards, self.process_group)
        found = f"the loss is {loss}, the gradient norm {norm}"
        require(math.isfinite(loss + norm), f"{where}: {found}; the weights are as they were")
        if self.c.grad_clip and norm > self.c.grad_clip:
            torch._foreach_mul_(grads, (self.c.grad_clip / norm).float())
        for w, g in zip(self.weights, grads):
            w.grad = g
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()  # or the parameters would hold this memory until the next step
        # The gradients are hashed as clipped: these are the numbers that moved the weights.
        stages = grads, self.weights, *([self.optimizer.state[w][k] for w in self.weights] for k in MOMENTS)
        gradients, weights, *moments = (sync.tensor_hashes(x, self.shards, self.process_group) for x in stages)
        optimizer = {name: "".join(moment[name] for moment in moments) for name in weights}
        return float(norm), dict(gradients=gradients, weights=weights, optimizer=optimizer)

    def update(self, samples, step, lr, objective=POLICY, check=False):
        """
        One optimizer step on the samples of a step: (metrics, {stage: hash or {name: hash}}). Ends the run with one
        line, and with the weights unchanged, if the loss or the gradient norm is not finite, or, with `check`,
        strict=True and engine_bits='fp32', if a log-prob differs.
        """
        grads, metrics = self.gradients(samples, objective, check)
        if check:
            # Each rank has seen its own leaves only; what is printed must be the same on any number of ranks: the first
            # sample of the batch that differs.
            mismatches = sorted(chain(*sync.from_all_ranks(self.mismatches, self.control)))
            self.mismatches = []
            differ = sum(count for *_, count, _ in mismatches)
            metrics |= dict(
                logprob_mismatch_tokens=differ,
                logprob_mismatch_max=max((distance for *_, distance in mismatches), default=0.0),
            )
            if self.c.engine_bits != "fp32":
                self.token_table = token_table(samples, self.in_order(self.token_figures))
            elif mismatches and self.c.strict:
                count = f"{differ} of {loss_tokens(samples)}"
                require(False, f"step {step}, {mismatches[0][1]}; {count} log-probs differ; --strict=False goes on")
        norm, hashes = self.apply(grads, lr, f"{objective.phase} step {step}", metrics["loss"])
        if objective is POLICY:
            hashes = {"advantages": sync.content_hash(*(s.advantages for s in samples))} | hashes
        return metrics | dict(grad_norm=norm, lr=lr), hashes


# ---- a step, and what is not one ------------------------------------------------------------------------------------


def learn(trainer, step, groups, c):
    """
    The algorithm: scored groups in, new weights in the trainer. Returns the metrics and hashes of `Trainer.update`.
    groups: of the whole step, the same on all trainers; c: the config. Collective over the trainers.
    """
    began = monotonic()
    samples = samples_of(groups, step, c.overlong_filter)
    # Before any weight moves, the trainer's log-probs are compared with the engine's: those of older weights in passes
    # of their own, the others in the first update.
    samples = trainer.check_past_versions(samples, step)
    metrics = dict(check_seconds=monotonic() - began)
    samples = trainer.forward_only(samples)
    scores = torch.stack([group.tensors["rewards"] for group in groups])  # (P, G)
    if c.overlong_cache:
        lengths = torch.stack([group.response_lengths() for group in groups])
        scores += overlong_penalty(lengths, c.max_new_tokens, c.overlong_cache)
    samples = with_advantages(samples, scores, c, groups)
    own = own_function("loss", c.loss)
    if hasattr(own, "before"):
        samples = own.before(trainer=trainer, samples=samples)
    rate = learning_rate_at(step, c.learning_rate, c.warmup_steps, c.lr_decay_steps, c.min_lr)
    for i in range(c.updates_per_batch):
        figures, hashes = trainer.update(samples, step, rate, check=i == 0)
        metrics |= figures  # the last update's, except the mismatch, which is the first's
    trainer.keep(step + 1)
    return metrics, hashes


def evaluate(queue, step, rows, c, version, record):
    """Records pass@k and the mean reward on the held-out rows, under the weights that the engines hold."""
    sampling = sampling_of(c)._replace(temperature=c.eval_temperature)
    groups = queue.sample(Job("eval", step, version, dict(enumerate(rows)), c.eval_samples, sampling))
    if record:
        scores = rewards.reward_metrics(groups)
        for source, own in {"": groups, **rewards.by_source(groups)}.items():
            rates = rewards.pass_rates(torch.stack([group.tensors["rewards"] for group in own]), c.pass_reward)
            scores |= {f"{source}/{metric}".lstrip("/"): x for metric, x in rates.items()}
        record.evaluation(step, scores, len(rows), record.hashes(groups))


def supervised_samples(rows, c, demonstrate=None):
    """
    Samples of rows that have answers, or pairs (two samples each); their log-probs are 0. demonstrate(rows): an agent's
    dialogues for the rows, (prompt, tokens after it, loss mask) each.
    """
    if demonstrate:
        known = demonstrate(rows)
    else:
        keys = [f"{side}_tokens" for side in rewards.sides(c.mode)]
        known = [(row["prompt_tokens"], row[key], [True] * len(row[key])) for row in rows for key in keys]
    tensors = (map(torch.tensor, dialogue) for dialogue in known)
    return [make_sample(prompt, response, mask, torch.zeros(len(response))) for prompt, response, mask in tensors]


def due(steps, every, last):
    """Whether what happens every `every` steps (0: never), at the start and at the end happens after this many."""
    return steps in (0, last) or every > 0 and steps % every == 0


# ---- the run --------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    c = types.SimpleNamespace(**config)
    folder = Path(out_dir)
    # joblib (through transformers) and tqdm leave semaphores in /dev/shm: the engine's exit kills the process that
    # would remove them. So neither may make one.
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"
    tqdm.set_lock(threading.RLock())
    sys.excepthook = partial(report_error, kept="nothing was written", cure="start again")
    end_with_a_line(int(os.environ.get("RANK", 0)))
    # What the mode means for the steps below. Who trains and who samples is in `ranks`.
    does = MODES[mode]
    supervised = does.steps == "supervised"
    publishes = does.trains and does.samples
    rl_steps = max_steps if does.steps == "rl" else 0
    sft_steps = warmup_sft_steps
    sft_schedule = sft_learning_rate, 20, 0, 0.0  # peak, warm-up, decay, minimum
    if supervised:
        sft_steps = max_steps
        sft_schedule = learning_rate, warmup_steps, lr_decay_steps, min_lr
    for key in OWN:
        own_function(key, config[key])
    scored_by = {
        name: rewards.load_reward(own["reward"], config)
        for name, own in sources_of(config).items()
        if does.samples  # else what a reward needs, a judge or a sandbox, may be missing
    }

    # ---- who this rank is, and what it works on. Nothing is computed before all of it is known to be usable: until
    # then the folder is nobody's, and a corrected command may have it.
    world = int(os.environ.get("WORLD_SIZE", 1))
    gpu = int(os.environ.get("LOCAL_RANK", 0))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chip = take_gpu(config, world, gpu) if place == "cuda" else ""
    ranks = sync.start_process_groups(*roles(config, world), place, rollout_tp)
    if not resumed:  # only now is it known whether torchrun has restarted us because a rank of another node died
        _, resumed, restarted = resolve(DEFAULTS | {"__file__": __file__}, DEFAULTS)
    # Do trainers and engines work side by side, or in turn?
    overlaps = publishes and lag > 0 and ranks.trainers < world
    concurrent = world if overlaps else ranks.trainers if ranks.mesh is not None else ranks.engines * rollout_tp
    # More threads than cores wait for each other by spinning; no bit depends on their number.
    torch.set_num_threads(threads or max(1, os.cpu_count() // concurrent))
    cores = share_cores(sync.from_all_ranks) if overlaps and place == "cpu" and rollout_tp == 1 and not threads else ""
    compute_dtype = torch.bfloat16 if place == "cuda" else torch.float32
    model = folder / "model" if init_from == "scratch" else init_from
    if ranks.rank == 0:
        # Keep it: the lock lasts as long as this file is open.
        lock = open_run(folder, config, resumed, restarted, chip)
        if init_from == "scratch":
            folders.make_scratch_model(model, config)
        folders.fetch_model(model)  # the others then find it on this disk
    check_shared(folder, ranks.rank)
    sys.excepthook = report_error  # from now on there is something to resume
    model_path = folders.fetch_model(model)
    hf = check_model(model_path, config)
    large = place == "cuda" or folders.large(model_path)
    if large:
        check_memory(hf, config, place, [judge.hf for judge in rewards.MODELS.values()])
    tokenizer, stop_tokens = folders.load_tokenizer(model_path)
    rewards.check_vocabulary(tokenizer)
    template_skipped = tokenizer.chat_template and not (chat_template or prompt_template or agent)
    if ranks.rank == 0:
        folders.say_ends(tokenizer, stop_tokens, chat_template or agent, system_prompt)
    episodes = None  # what an agent's runs have in place of samples of one turn
    if agent:
        from onecurve.agents.sampler import Agent

        episodes = Agent(config, model_path, tokenizer, stop_tokens)
    train_rows, eval_rows = rewards.load_sources(config, scored_by)
    if episodes:
        episodes.check_tools(next(chain(*train_rows.values(), eval_rows)))
    elif scored_by:
        rewards.check_answers(scored_by, chain(*train_rows.values(), eval_rows), config)
    for name, rows in train_rows.items():
        train_rows[name] = rewards.encode_prompts(rows, f"training {name}".strip(), tokenizer, config)
    eval_rows = rewards.encode_prompts(eval_rows, "held-out", tokenizer, config)
    if scored_by and not episodes and ranks.rank == 0:
        rewards.try_own(scored_by, chain(*train_rows.values(), eval_rows))
    if batch_invariant:
        kernels.enable_batch_invariant(torch.get_num_threads(), cores)

    # ---- the state of the loop, and where an interrupted run goes on. All else that a step needs is a function of the
    # config and the step's number: that is why so little has to be saved.
    run_id = sync.run_id(config)
    origin = dict(
        run=run_id,
        versions=library_versions(),
        device=one_device(place),
    )
    start = 0  # steps done: RL steps, or supervised ones with mode='sft' or 'rm'
    flight = Flight()
    saved = {}  # what the checkpoint says of itself
    latest = max(checkpoints(folder / "ckpt"), default=None) if resumed else None
    if latest:
        saved = read_checkpoint(latest, ranks.rank, world, **origin)
        start = saved["step"]
        groups = tuple(sync.read_group(path, hf.vocab_size) for path in sorted((latest / "flight").glob("*")))
        flight = Flight(saved["begun"], groups, {tuple(place): right for *place, right in saved["seen"]})
        if not lora_rank:  # an engine, too, starts from the checkpoint; adapters are no model
            model_path = latest
    sync.meet()  # every rank has checked its share before the first cuts the logs back
    record = Record(folder, saved, c, origin, episodes) if ranks.rank == 0 else None
    queue_path = Path(queue_dir or folder / "queue")
    if record:
        torn = 0 if queue_dir else clean_queue(queue_path, start)
        if resumed:
            print(f"resuming at step {start}; {torn} torn rollout files deleted", flush=True)
            if latest and start >= max_steps:
                print(f"nothing to do: all of max_steps={max_steps} are done", flush=True)
    sync.meet()

    # ---- what this rank has: a trainer, an engine, or both. `save` is collective over the trainers and
    # `transport.publish` over all ranks: so the config and the step alone decide when they are called.
    trainer = engine = sampler = transport = None
    if ranks.mesh is not None:
        trainer = Trainer(c, ranks, hf, model_path, place, latest, saved)
    if record and not saved:
        if place == "cuda":  # all CPUs have one digest, cards of one capability have one
            record.ledger.append(phase="device", step=0, device=origin["device"])
        if lora_rank:
            record.ledger.append(phase="base", step=0, weights=trainer.parts.base)

    def save(steps, flight):
        """Makes the checkpoint after this many steps."""
        if trainer and checkpoint_every:
            trainer.save(folder / "ckpt", tokenizer, stop_tokens, record, steps, flight)

    # ---- supervised steps: the warm-up before RL, or all that mode='sft', 'rm' or 'dpo' does. Meanwhile ranks without
    # a trainer start their engines.
    if trainer and (supervised or sft_steps and not saved):
        encode = partial(rewards.encode_answers, tokenizer=tokenizer, stop_tokens=stop_tokens, config=config)
        answered = train_rows if episodes else {name: encode(rows) for name, rows in train_rows.items()}
        objective = PAIRS._replace(phase=mode) if does.pairs else ANSWERS
        pairs = supervised_samples(encode(eval_rows), c) if does.pairs else []
        for i in range(start, sft_steps + 1):  # i steps are done
            if i > start or not saved:
                if pairs and due(i, eval_every, sft_steps):
                    evaluate_pairs(trainer, PAIRS, i, pairs, record)
                if supervised and due(i, checkpoint_every, sft_steps):
                    save(i, flight)
            if i < sft_steps:
                chosen = [answered[name][k] for name, k in rewards.draw_rows(answered, sft_batch, i, c, "sft")]
                samples = supervised_samples(chosen, c, episodes and episodes.demonstrate)
                metrics, hashes = trainer.update(samples, i, learning_rate_at(i, *sft_schedule), objective)
                if record:
                    record.supervised(objective.phase, i, samples, metrics, hashes)
    if trainer:
        trainer.keep(start)

    # ---- the engines, and the first weights for them. An engine starts from the same folder as the trainer, and still
    # gets the trainer's weights before its first sample: so it never samples with weights that were not checked.
    if ranks.engine is not None:
        engine = RolloutEngine(
            ranks.engine,
            model_path,
            hf,
            config,
            place,
            compute_dtype,
            folder / f"engine_{ranks.engine}.log",
            gpu,
            # its memory, while this rank trains
            lends=bool(trainer) and large,
            cores=cores,
            patches=episodes.patches if episodes else (),
        )
        sampler = (episodes.sampler if episodes else Sampler)(
            engine,
            config,
            run_id,
            ranks.engines,
            scored_by,
            partial(tokenizer.decode, skip_special_tokens=True),
            stop_tokens,
        )
    queue = sync.Queue(
        queue_path,
        sampler,
        run_id,
        engine_timeout + 15,
        [folder / f"engine_{i}.alive" for i in range(ranks.engines)],  # the heartbeats
        ranks.store,
        hf.vocab_size,
    )

    def version_for(step):
        """The version of the weights with which the samples of a step are made."""
        return max(0, step - lag) if ranks.trainers else 0

    def publish(version, hashes={}):
        transport.publish(version, hashes, trainer.published(version) if trainer else ())

    version = version_for(start)
    if publishes:
        transport = sync.WeightSync(
            weight_sync,
            ranks,
            trainer.parts.sent if trainer else (),
            engine,
            place,
            compute_dtype,
            overlaps,
            engine_bits,
        )
        publish(version)
    evaluates = eval_rows and (publishes or not does.steps)
    if evaluates and not (saved and does.steps):
        evaluate(queue, start, eval_rows, c, version, record)
    if not supervised and not saved:
        save(start, flight)

    # ---- the loop: sample, learn, publish, record. Ranks that only train wait in 1 for the files of the engines, ranks
    # that only sample wait in 3 for the weights; a rank that is both does one after the other.
    #
    # Without a lag, `ahead` is 0 and `sampled` is `s`. With one, samples are that many steps ahead: so the loop begins
    # before `start`, with samples alone. A resume makes them again with the same versions of the weights, and those
    # whose files are there are only read.
    # By how many steps this rank samples before it learns. One that only trains reads files when they are due.
    ahead = lag if engine or (ranks.engines and not overlaps) else 0
    batches = {}  # {step: what was sampled for it}
    alarm = ""
    alarm_group = dist.new_group(backend="gloo", timeout=sync.FOREVER) if watch else None
    bar = tqdm(
        total=rl_steps,
        initial=start,
        disable=not (record and rl_steps),
        unit="step",
        mininterval=0.5,
    )
    for s in range(start - lag, rl_steps):
        times = [monotonic()]
        # 1. Sample: the engines generate, score and write one file per prompt; every rank reads them all, since what
        #    is sampled next may depend on what came (dynamic sampling, partial rollouts).
        sampled = s + ahead
        if start <= sampled < rl_steps:
            batches[sampled] = sample_step(queue, sampled, train_rows, c, version_for(sampled), flight)
            flight = batches[sampled].flight
        batch = batches.pop(s, None)  # none before `start`
        if batch and engine:
            engine.sleep()  # until the next weights come
        times.append(monotonic())
        # 2. Learn.
        metrics = {}
        hashes = {}
        if batch and trainer:
            metrics, hashes = learn(trainer, s, batch.groups, c)
        times.append(monotonic())
        # 3. Publish: every engine gets the weights and proves by their hashes that it has them; where the roles overlap
        #    this is a thread's work, and the proof comes later.
        if transport and s >= 0:
            publish(s + 1, hashes.get("weights", {}))
        if not batch:
            continue
        times.append(monotonic())
        # 4. Record what was done, as hashes in the ledger and as figures in the metrics.
        if record:
            metrics |= rewards.reward_metrics(batch.sampled)
            if watch:
                metrics |= text_metrics(batch.sampled)
            line = record.step(s, batch, metrics, hashes, times)
            if trainer and trainer.token_table:
                own = folder / "queue" / f"rl_{s:06d}"
                own.mkdir(parents=True, exist_ok=True)  # a replay's rollouts are elsewhere
                write_file(own / "trainer.safetensors", trainer.token_table)
            bar.set_postfix(reward=f"{line['reward_mean']:.3f}", mismatch=line.get("logprob_mismatch_tokens"))
            bar.update()
            if why := nothing_to_learn(record.steps, advantage, template_skipped):
                tqdm.write(f"warning: {why}", file=sys.stderr)
        if watch:
            alarm = sync.from_all_ranks(record and hacking(record.steps, reward), alarm_group)[0]
        # 5. Now and then look at the held-out prompts, and save all that is needed to go on from here.
        if evaluates and due(s + 1, eval_every, rl_steps):
            evaluate(queue, s + 1, eval_rows, c, s + 1, record)
        if alarm or due(s + 1, checkpoint_every, rl_steps):
            save(s + 1, batch.flight)
        if alarm:
            break
    bar.close()
    if transport:
        transport.finish()
    if record and alarm:
        print(record.alarm(alarm), file=sys.stderr)
    sync.meet()
    if record:  # before the libraries shut down, which may fail
        print(f"digest {(record.ledger if does.steps else record.evaluations).digest}", flush=True)
    sync.meet()
    if transport:
        transport.close()
    dist.destroy_process_group()
    if engine:
        engine.close()
    if alarm:
        sys.exit(3)
