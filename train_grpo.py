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
import types
from collections import ChainMap, namedtuple
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import monotonic
from typing import NamedTuple

from configurator import MODES, block, keys_of, load_features, require, resolve
from onecurve.run.start import end_with_parent, lean_imports
from onecurve.run.versions import check_versions
from onecurve.sglang.start import start_engine_early

# ------------------------------------------------------------------------------------------------------------------
# The common keys. Those of a feature are in onecurve/keys/, a file for each feature or for some that go together.

# the run
out_dir = "out/run"  # everything the run writes
# a model folder, hub name or GGUF file; 'scratch': a small Qwen3 made here; 'resume': continue in out_dir
init_from = "scratch"
# grpo: sample and train. Modes without an engine: replay trains again on the rollouts in queue_dir, sft trains on the
# data's answers, rm a reward model on the data's pairs, dpo the model itself on such pairs (kl_coef is DPO's beta).
# Modes without a trainer: rollout generates and scores, eval samples and scores the held-out prompts only
mode = "grpo"
max_steps = 100  # RL steps; with mode='sft', 'rm' or 'dpo' supervised steps
seed = 1  # of the data order, the samples and a scratch model
device = ""  # 'cpu' or 'cuda'; '': cuda where there is one
# 'bfloat16', on cards alone, or 'float32', in which a card has the CPU's digest; '': the first on a card
dtype = ""
threads = 0  # CPU threads of a trainer or an engine; 0: the cores, shared by those that work. Changes no bit
# the data
# a hub name, a .jsonl, .json or .parquet file, 'my_file.py:my_function', which returns rows, 'reasoning_gym:countdown';
# made here: 'programs', and 'arithmetic', sums of two numbers from 0 up to 99, or 'arithmetic:10:50', from 10 up to 49
dataset = "arithmetic"
dataset_config = ""  # configuration of a hub data set, such as 'main'; arguments of a function or of a gym's task
split = "train"
prompt_column = "prompt"
answer_column = "answer"
prompt_template = ""  # such as 'Q: {prompt}\nA:', with any column's name in braces; '': the prompt column as it is
# apply the tokenizer's chat template to the prompt: a user's message, or a list of messages
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
eval_split = ""  # a hub data set's split, a file or a function; '': eval_size rows of `split`, first of a fixed shuffle
eval_size = 256  # held-out prompts; 0: no evaluation
eval_every = 0  # steps between evaluations; 0: only before the first step and after the last
eval_samples = 1  # samples per held-out prompt
eval_temperature = 1.0  # 0: greedy
pass_reward = 1.0  # a sample with at least this reward is right: for pass@k, easy and hard groups, a curriculum
# who does what
rollout_ranks = 1  # number of ranks, taken from the end, that sample; the others train
colocate = False  # every rank samples and trains, one after the other (a single process always does)
rollout_tp = 1  # number of sampling ranks that share an engine, for models larger than a GPU (tensor parallel)
lanes = 8  # leaves of a row, which trainers compute side by side: a power of two. It fixes the order of sums
leaf_tokens = 16384  # most tokens of a micro-batch ("leaf"); a longer sample gets its own leaf
gradient_checkpointing = False  # keep one activation per layer and compute the others again; changes no bit
# compute a prefix that samples of a leaf share, such as a group's prompt, only once in the update, too: it is much of
# the work where answers are short. The gradients are then added in another order
share_prefixes = False
# checkpoints, the record
checkpoint_every = 50  # steps between checkpoints, beside those after the warm-up and the last step; 0: no checkpoints
keep_checkpoints = 2  # number of checkpoints that are kept, the last ones
keep_rollouts = 0  # training steps whose rollout files are kept; 0: all
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
    config, resumed, restarted = resolve(__file__, DEFAULTS)
    check_versions()
    if config["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # SGLang takes a card's kernels wherever torch sees a card

with lean_imports(aloud=__name__ == "__main__" and os.environ.get("RANK", "0") == "0"):
    import torch
    import torch.distributed as dist
    from torch import Tensor

    import kernels
    import sync
    from onecurve.algorithms import critic, turns
    from onecurve.algorithms.kept import pack_kept, split_kept
    from onecurve.algorithms.reference import Reference
    from onecurve.algorithms.supervised import Objective, loss_tokens, teach
    from onecurve.graders.watch import Watch
    from onecurve.models import adapters, folders
    from onecurve.models.dense import build_model
    from onecurve.models.moe import routers_of
    from onecurve.run.dial import dial_of
    from onecurve.run.observers import off_policy_of
    from onecurve.run.own import own_function
    from onecurve.run.past import PastWeights
    from onecurve.run.save import MOMENTS, load_optimizer
    from onecurve.run.scores import by_source, pass_rates, reward_metrics
    from onecurve.run.setup import Run, Task, due, prepare_process
    from rollout_server import Job, groups_of, sample_step, sampling_of, start_sampler
if __name__ == "__main__":
    start_engine_early(config)

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

    With `importance`, old_logprob is the trainer's before the first update; else it is the engine's.

    A loss in a file returns the same. It gets by name these arguments, rollout_logprobs (the engine's), entropy (M,),
    the other columns of a Leaf (reference, mark, ..), and every key of the config.
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
    A leaf's part of a step's loss; `samples` and `tokens` are the numbers of samples and loss tokens of the whole step.
    The parts of all leaves add up to

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
    from onecurve.cpu.loops import cos_sin  # a libm's cosine depends on the machine

    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return min_lr + (peak - min_lr) * 0.5 * (1 + cos_sin(math.pi * done)[0])


# ---- samples, and the leaves they are packed into -------------------------------------------------------------------


class Sample(NamedTuple):
    tokens: Tensor  # (T,) prompt and response
    prompt_tokens: int  # number of prompt tokens among them
    loss_at: Tensor  # (M,) indices of the loss tokens in `tokens`; the tensors below are of these tokens alone
    turn: Tensor  # (M,) index of each token's turn
    staleness: Tensor  # (M,) steps from the weights that sampled the token to those that are trained now
    logprobs: Tensor  # (M,) the engine's
    old_logprobs: Tensor  # (M,) the ratio's denominator: the engine's, or the trainer's before the first update
    advantages: Tensor  # (M,)
    reference: Tensor  # (M,) log-probs of the reference
    values: Tensor  # (M,) of the critic before the first update
    returns: Tensor  # (M,) what the critic learns
    mark: Tensor  # (M,) set by the function `before` of a loss in a file
    bootstrap: float = 0.0  # the critic's value after the last token; 0 unless cut off
    name: str = ""  # 'prompt 3, sample 5', for errors
    truncated: bool = False  # cut off at max_new_tokens
    of: int = 0  # index of the sample in the batch; an agent's forks share it, as dialogues of one sample
    turn_rewards: Tensor = torch.zeros(1)  # (turns,)
    kept: Tensor = torch.zeros(2, 0).long()  # (2, K) pairs of a loss token and an id: what its sampling rule kept

    def only(self, chosen):
        """The sample with a loss on these loss tokens (M,) only, cut after the last of them."""
        columns = {name: getattr(self, name)[chosen] for name in ("loss_at", "turn", *COLUMNS)}
        return self._replace(tokens=self.tokens[: columns["loss_at"][-1] + 1], **columns)


COLUMNS = "staleness logprobs old_logprobs advantages reference values returns mark".split()  # of Sample and Leaf
LEAF = [  # the fields of a Leaf
    "ids",  # (N,) samples end to end: no padding, so none can leak
    "positions",  # (N,) of each token in its sample
    "predictors",  # (M,) index of the token before each loss token: its output predicts that one
    "targets",  # (M,) ids of the loss tokens
    *COLUMNS,  # (M,) as in Sample
    "kept",  # (2, K) as in Sample
    "counts",  # [loss tokens of each sample]: known without a wait for the card
    "plan",  # a kernels.Plan of the samples' tokens
]
Leaf = namedtuple("Leaf", LEAF)


def make_sample(prompt, response, loss_mask, logprobs, turn=None, staleness=None, **others):
    """
    A Sample of a prompt and a response (R,); loss_mask (R,) says which tokens have a loss. logprobs, turn, staleness:
    (R,); None: 0. others: the last fields of a Sample. Columns that are not known yet are 0; old_logprobs are the
    engine's.
    """
    at = loss_mask.nonzero()[:, 0]
    zeros = torch.zeros(len(at))
    turn, staleness = (zeros.long() if x is None else x[at] for x in (turn, staleness))
    logprobs = logprobs[at]
    columns = dict.fromkeys(COLUMNS, zeros) | dict(staleness=staleness, logprobs=logprobs, old_logprobs=logprobs)
    tokens = torch.cat([prompt, response])
    return Sample(tokens, len(prompt), loss_at=len(prompt) + at, turn=turn, **columns, **others)


# One token without loss fills an empty leaf: its rank must take part in the other ranks' collectives.
nothing = torch.zeros(0)
FILLER = make_sample(torch.zeros(1).long(), nothing.long(), nothing, nothing)


def samples_of(groups, step, overlong_filter=False):
    """
    The samples of rollout Groups in order, for training at `step`. overlong_filter: samples cut off have no loss.
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


def pack(samples, device, shared=False):
    """
    Samples end to end as one Leaf on the device, with the loss tokens picked out; a FILLER if there are none. shared: a
    prefix that samples share is computed once, by our operators alone.
    """
    every = Sample(*zip(*(samples or [FILLER])))  # its fields are tuples: of each field, that of every sample
    ids = torch.cat(every.tokens)
    lengths = torch.tensor([len(x) for x in every.tokens])
    counts = torch.tensor([len(x) for x in every.loss_at])
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(ids)) - starts.repeat_interleave(lengths)
    at = torch.cat(every.loss_at) + starts.repeat_interleave(counts)
    columns = [torch.cat(getattr(every, name)) for name in COLUMNS]
    fields = ids, positions, at - 1, ids[at], *columns, pack_kept(every.kept, counts)
    there = (x.to(device, non_blocking=True) for x in fields)  # up to 64 KB no copy waits for the card
    return Leaf(*there, counts.tolist(), kernels.packed_plan(lengths, device, ids if shared else None))


def plan_leaves(lengths, leaf_tokens, lanes):
    """
    Packs samples of these lengths (tokens) into leaves of at most leaf_tokens: lists of indices, `lanes` of them to a
    row, row after row. A longer sample gets its own leaf; a leaf may be empty. The ranks that share a row wait for
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
    """The loss of an RL step, with the terms that the config sets."""
    logprobs, entropy, values = output.logprobs, output.entropy, output.values
    figures = {"entropy": entropy}
    ours = dict(logprobs=logprobs, rollout_logprobs=leaf.logprobs, entropy=entropy)
    loss = own_function("loss", c.loss) or partial(policy_loss, c.loss)
    losses, figures["clip_fraction"] = loss(**vars(c) | leaf._asdict() | ours)
    if c.importance:
        w = importance_weights(leaf.old_logprobs, leaf.logprobs, c.importance, c.importance_floor, c.importance_cap)
        losses = losses * w
        figures |= dict(importance_mean=w, importance_not_one=w != 1)
    if c.entropy_coef:  # Schulman et al. 2017, equation 9
        losses = losses - c.entropy_coef * entropy
    if c.kl_coef or c.advantage == "distill":
        figures["kl_reference"] = kl(logprobs, leaf.reference, c.kl_estimator)
    if c.kl_coef and not c.kl_in_reward:
        losses = losses + c.kl_coef * figures["kl_reference"]
    if values is not None:
        figures["value_loss"] = critic.value_loss(values, leaf.values, leaf.returns, c.value_clip)
        losses = losses + c.value_coef * figures["value_loss"]
    return aggregate(losses, leaf.counts, c.loss_aggregation, samples, tokens, c.max_new_tokens), figures


POLICY = Objective("rl", policy_step_loss)


def check_bits(leaf, logprobs, age):
    """
    The promise of this project: where trainer and engine used the same weights, which is at tokens of staleness `age`,
    their log-probs (M,) have the same bits. Returns which loss tokens of a Leaf or a Sample differ (M,).
    """
    return (logprobs.view(torch.int32) != leaf.logprobs.view(torch.int32)) & (leaf.staleness == age)


def mismatch(sample, logprobs, differ):
    """(the sample's index in the batch, a line about its first token that differs, how many do, largest distance)."""
    i = int(differ.nonzero()[0])
    bits = [f"{x:.9g} (0x{int(x.view(torch.int32)) & 0xFFFFFFFF:08x})" for x in (sample.logprobs[i], logprobs[i])]
    line = f"{sample.name}, token {sample.loss_at[i] - sample.prompt_tokens}: engine {bits[0]}, trainer {bits[1]}"
    distances = (logprobs - sample.logprobs)[differ].abs()
    return sample.of, line, len(distances), float(distances.max())


# ---- the trainer ---------------------------------------------------------------------------------------------------


class Trainer:
    """
    A rank's share of the model and of AdamW's state, and the work on them. All methods that take samples are
    collective over the trainers: each rank passes all the samples of a step, and works on its own leaves.

    c: the config as a namespace. hf, folder: the model's Hugging Face config, and where its weights are read from.
    checkpoint: the folder to resume from, or None. saved: its record.
    """

    def __init__(self, c, ranks, hf, folder, device, checkpoint=None, saved={}):
        self.c = c
        # Of a data set's pairs nothing was drawn: like answers they are scored without a rule, at temperature 1.
        self.sampling = sampling_of(c) if MODES[c.mode].steps == "rl" else kernels.Sampling()
        self.mesh = ranks.mesh
        self.device = device
        self.rank = ranks.rank
        self.process_group = ranks.mesh.get_group()
        self.control = ranks.control
        # Float32 master weights. Of several ranks each keeps its rows of every parameter, as FSDP2 cuts them, and whole
        # layers come together only while they are computed with.
        lora = c.lora_rank and vars(c)
        self.model = build_model(hf, self.mesh, device, c.batch_invariant, c.advantage == "gae", lora, c.tp_split)
        if c.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        kind = adapters.Adapters if lora else folders.FullWeights
        self.parts = kind(self.model, c, self.mesh, device)
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
        self.optimizer = kernels.AdamW(groups, betas=(c.beta1, c.beta2))
        # AdamW would make its state at its first step; made here, it can be filled from a checkpoint.
        for w in self.weights:
            zeros = {name: torch.zeros_like(w) for name in MOMENTS}
            self.optimizer.state[w] = dict(step=torch.tensor(float(saved.get("optimizer_steps", 0))), **zeros)
        self.past = PastWeights(self, saved.get("earlier", ()))
        if checkpoint:
            load_optimizer(self, checkpoint)
        self.reference = Reference(self, hf) if c.kl_coef or c.advantage == "distill" else None
        self.observers = [*off_policy_of(c), *routers_of(self), *dial_of(self)]  # none in a plain run
        self.compared = []  # since the last update: of each leaf, (its samples, log-probs, which of them differ)

    def published(self, version):
        """This rank's shards of the weights that engines get as `version`: of a kept copy, else of the current ones."""
        return self.parts.published(self.past.versions[version] if self.past.most else self.policy)

    @contextmanager
    def holding(self, others):
        """Inside, the policy has the weights `others` (shards); () for its own."""
        now = [s.data.clone() for s, _ in zip(self.policy, others)]
        for s, other in zip(self.policy, others):  # over the bus as they are: a CPU would be slow to convert them
            s.data.copy_(other.data.to(s.data.device, non_blocking=True))
        self.parts.fill_model()  # every use of the model begins here, so not again at the end
        try:
            yield
        finally:
            for s, data in zip(self.policy, now):
                s.data.copy_(data)

    def passes(self, samples, model, objective=POLICY, weights=()):
        """
        Forward passes over this rank's leaves of a step: yields (a leaf's samples by index, the Leaf, its Output).
        Leaf i belongs to rank i % ranks: the ranks work on a row of leaves side by side. FSDP2's gathers and scatters
        need all of them, so an empty leaf is computed like any other. weights: shards that the policy has during these
        passes; () for its own.
        """
        c = self.c
        sampling = self.sampling if objective.sampled else kernels.Sampling()
        lengths = [len(s.tokens) for s in samples]
        unit = objective.unit
        shared = c.batch_invariant and (c.share_prefixes or not torch.is_grad_enabled())
        if c.share_prefixes:  # a group goes into one leaf, or in units of at most half a leaf
            longest = max(lengths, default=1)
            unit *= max(1, min(c.group_size, len(samples) // (2 * c.lanes), c.leaf_tokens // (2 * longest)))
        units = [sum(lengths[i : i + unit]) for i in range(0, len(lengths), unit)]
        planned = plan_leaves(units, c.leaf_tokens, c.lanes)
        with self.holding(weights):
            for numbers in planned[self.rank :: self.mesh.size()]:
                chosen = [i for k in numbers for i in range(len(samples))[k * unit : (k + 1) * unit]]
                leaf = pack([samples[i] for i in chosen], self.device, shared)
                output = model.token_logprobs(leaf, sampling)
                if hasattr(model, "reshard") and not torch.is_grad_enabled():
                    model.reshard()  # FSDP2 does it after a backward pass; there is none
                yield chosen, leaf, output

    @torch.no_grad()
    def outputs(self, samples, model, weights=()):
        """
        For each sample a model's log-probs (M,), what a sampling rule kept (2, K) and, with a critic, values (M,) and
        that after the last token.
        """
        mine = {}
        for chosen, leaf, found in [*self.passes(samples, model, weights=weights)]:  # all are begun first
            kept = split_kept(leaf.kept if found.kept is None else found.kept, leaf.counts)
            columns = [found.logprobs.cpu().split(leaf.counts), kept]
            if found.values is not None:
                columns += [found.values.cpu().split(leaf.counts), found.last_values.tolist()]
            mine |= zip(chosen, zip(*columns))
        return self.in_order(mine)

    def in_order(self, mine):
        """Gathers each rank's {index: ..} into one list, on every rank: advantages need the whole batch."""
        found = ChainMap(*sync.from_all_ranks(mine, self.control))
        return [found[i] for i in sorted(found)]

    def forward_only(self, samples):
        """
        Passes over a batch before its first update, which fill in the trainer's own log-probs (where importance weights
        need them), what a sampling rule kept, the critic's values and the reference's log-probs.
        """
        c = self.c
        again = self.reference or c.updates_per_batch > 1  # log-probs are computed again, by other weights
        if c.importance or c.advantage == "gae" or self.sampling.cuts() and again:
            outputs = self.outputs(samples, self.model)
            samples = [
                s._replace(kept=kept, old_logprobs=logprobs if c.importance else s.old_logprobs)
                for s, (logprobs, kept, *_) in zip(samples, outputs)
            ]
        if c.advantage == "gae":
            samples = critic.with_values(samples, outputs)
        return self.reference.fill(samples) if self.reference else samples

    def compare(self, leaf, samples, logprobs, age=0):
        """Has log-probs (M,) compared by `check_bits`. leaf: the Leaf of the samples, or the only Sample."""
        self.compared.append((samples, logprobs.detach(), check_bits(leaf, logprobs, age)))

    def mismatches(self):
        """What differs of all that was compared since the last call. On a card the host waits for it only here."""
        found = []
        for samples, logprobs, differ in self.compared:
            counts = [len(s.loss_at) for s in samples]
            parts = zip(samples, logprobs.cpu().split(counts), differ.cpu().split(counts))
            found += [mismatch(*part) for part in parts if part[2].any()]
        self.compared = []
        return found

    def gradients(self, samples, objective=POLICY, check=False):
        """
        The gradients of a step's loss (this rank's rows of each parameter's), and the metrics of its loss tokens. Sums
        over leaves are made in an order that does not depend on the number of ranks. Under torch.no_grad there are no
        gradients. check: compare log-probs with the engine's at tokens that were sampled with these very weights.
        """
        tokens = max(1, objective.count(samples))  # of the whole step, so that leaves of any size add up to one mean
        grads = sync.LeafSum(self.c.lanes // self.mesh.size(), self.model)
        rows = []
        for observer in self.observers:
            observer.before(samples, objective.phase, check)
        for chosen, leaf, output in self.passes(samples, self.model, objective):
            loss, figures = objective.loss(output, leaf, self.c, len(samples), tokens)
            for observer in self.observers:
                loss = observer.note(loss, chosen, leaf, output, figures)
            if torch.is_grad_enabled():
                grads.backward(loss)
            if check:
                self.compare(leaf, [samples[i] for i in chosen], output.logprobs)
            rows.append(torch.stack([x.detach().double().sum() for x in (loss, *figures.values())]))
        # Each rank has a row of the table for each of its leaves; rows are put in their places by adding zeros.
        mine = torch.stack(rows)
        table = mine.new_zeros(len(rows) * self.mesh.size(), len(mine[0]))
        table[self.rank :: self.mesh.size()] = mine
        dist.all_reduce(table, group=self.process_group)
        loss, *sums = sync.tree_sum(table).tolist()
        metrics = {"loss": loss} | {name: x / tokens for name, x in zip(figures, sums)}
        for observer in self.observers:
            metrics |= observer.metrics(metrics)
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
            torch._foreach_mul_(grads, self.c.grad_clip / norm)
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
        return norm, dict(gradients=gradients, weights=weights, optimizer=optimizer)

    def update(self, samples, step, lr, objective=POLICY, check=False):
        """
        One optimizer step on the samples of a step: (metrics, {stage: hash or {name: hash}}). Ends the run with one
        line, and with the weights unchanged, if the loss or the gradient norm is not finite, or, with `check`,
        strict=True and engine_bits='fp32', if a log-prob differs.
        """
        grads, metrics = self.gradients(samples, objective, check)
        if check:
            # Each rank has seen only its own leaves, but any number of ranks must print the same line: that of the
            # batch's first sample that differs.
            mismatches = sorted(chain(*sync.from_all_ranks(self.mismatches(), self.control)))
            differ = sum(count for *_, count, _ in mismatches)
            metrics |= dict(
                logprob_mismatch_tokens=differ,
                logprob_mismatch_max=max((distance for *_, distance in mismatches), default=0.0),
            )
            if mismatches and self.c.strict and self.c.engine_bits == "fp32":
                count = f"{differ} of {loss_tokens(samples)}"
                require(False, f"step {step}, {mismatches[0][1]}; {count} log-probs differ; --strict=False goes on")
        norm, hashes = self.apply(grads, lr, f"{objective.phase} step {step}", metrics["loss"])
        if objective is POLICY:
            hashes = {"advantages": sync.content_hash(*(s.advantages for s in samples))} | hashes
        return metrics | dict(grad_norm=norm, lr=lr), hashes


# ---- learning and evaluation ----------------------------------------------------------------------------------------


def learn(trainer, step, groups, c):
    """
    The algorithm: scored groups in, new weights in the trainer. Returns the metrics and hashes of `Trainer.update`.
    groups: of the whole step, the same on all trainers; c: the config. Collective over the trainers.
    """
    samples = samples_of(groups, step, c.overlong_filter)
    began = monotonic()
    # Before any weight moves, the trainer's log-probs are compared with the engine's: those of older weights in
    # separate passes, the others in the first update.
    samples = trainer.past.check(samples, step)
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
    trainer.past.keep(step + 1)
    return metrics, hashes


def evaluate(sample, step, rows, c, version, record):
    """Records pass@k and the mean reward on the held-out rows, under the weights that the engines hold."""
    sampling = sampling_of(c)._replace(temperature=c.eval_temperature)
    groups = sample(Job("eval", step, version, dict(enumerate(rows)), c.eval_samples, sampling))
    if record:
        scores = reward_metrics(groups)
        for source, own in {"": groups, **by_source(groups)}.items():
            rates = pass_rates(torch.stack([group.tensors["rewards"] for group in own]), c.pass_reward)
            scores |= {f"{source}/{metric}".lstrip("/"): x for metric, x in rates.items()}
        record.evaluation(step, scores, len(rows), record.hashes(groups))


# ---- the run --------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    c = types.SimpleNamespace(**config)
    prepare_process()
    # ---- this rank's parts. Nothing is computed before all of them are known to be usable.
    task = Task(c)  # the data and its rewards
    run = Run(c, task, resumed, restarted, partial(resolve, __file__, DEFAULTS))
    ranks = run.ranks
    trainer = None
    if ranks.mesh is not None:
        trainer = Trainer(c, ranks, run.hf, run.model_path, run.device, run.checkpoint, run.saved)
    run.begin(trainer)
    if trainer and run.supervised_left:  # meanwhile ranks without a trainer start their engines
        teach(trainer, run, task, make_sample, learning_rate_at)
    if trainer:
        trainer.past.keep(run.start)
    # An engine starts from the same folder as the trainer, and still gets the trainer's weights before its first
    # sample: so it never samples with weights that were not checked.
    sampler = start_sampler(run, task, lends=bool(trainer)) if ranks.engine is not None else None
    sample = partial(groups_of, run.queue(), sampler)  # Job -> its Groups, on every rank
    weights = run.weight_sync(trainer, sampler) if run.publishes else None
    version = run.version_for(run.start)
    if weights:
        weights.publish(version, {}, trainer.published(version) if trainer else ())
    if run.evaluates and not (run.saved and run.does.steps):
        evaluate(sample, run.start, task.eval_rows, c, version, run.record)
    if not run.supervised and not run.saved:
        run.save(trainer, run.start)

    # ---- the loop: sample, learn, publish, record. Ranks that only train wait in 1 for the files of the engines, ranks
    # that only sample wait in 3 for the weights; a rank that is both does one after the other.
    #
    # `ahead` is the number of steps that this rank samples ahead: 0 without a lag, and where a rank only trains, which
    # reads files when they are due. With a lag the loop begins before `start`, with samples alone. A resume makes these
    # again with the same versions of the weights, or reads them where their files exist.
    ahead = c.lag if sampler else 0
    flight = run.flight
    batches = {}  # {step: what was sampled for it}
    watch = Watch(c, run.record)
    alarm = ""
    if run.record:
        run.record.open_bar(run.start, run.steps)
    for s in range(run.start - c.lag, run.steps):
        times = [monotonic()]
        # 1. Sample: the engines generate, score and write one file per prompt; every rank reads them all, since the
        #    next samples may depend on them (dynamic sampling, partial rollouts).
        t = s + ahead
        if run.start <= t < run.steps:
            batches[t] = sample_step(sample, t, task.train_rows, c, run.version_for(t), flight)
            flight = batches[t].flight
        batch = batches.pop(s, None)  # none before `start`
        if batch and sampler:
            sampler.engine.sleep()  # until the next weights come
        times.append(monotonic())
        # 2. Learn.
        metrics, hashes = learn(trainer, s, batch.groups, c) if batch and trainer else ({}, {})
        times.append(monotonic())
        # 3. Publish: every engine gets the weights and proves by their hashes that it has them; where the roles
        #    overlap, a thread does this and the proof comes later.
        if weights and s >= 0:  # before step 0 the engines have version 0 already
            weights.publish(s + 1, hashes.get("weights", {}), trainer.published(s + 1) if trainer else ())
        if not batch:
            continue
        times.append(monotonic())
        # 4. Record what was done, as hashes in the ledger and as figures in the metrics.
        if run.record:
            run.record.step(s, batch, metrics, hashes, times)
        # 5. At intervals, evaluate on the held-out prompts and save a checkpoint.
        alarm = watch.alarm()
        if run.evaluates and due(s + 1, c.eval_every, run.steps):
            evaluate(sample, s + 1, task.eval_rows, c, s + 1, run.record)
        if alarm or due(s + 1, c.checkpoint_every, run.steps):
            run.save(trainer, s + 1, batch.flight)
        if alarm:
            break
    run.end(sampler, weights, alarm)
