"""
What check.py knows of each exercise: the project's own function, inputs from the smallest on, wrong answers
that are often given, each with a sentence, and where a run calls the function.

A wrong answer is known by what it returns: a `Mistake` has a function that returns the same.
"""

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
import rewards
import train_grpo
from onecurve.algorithms.critic import gae
from onecurve.cpu import host

# The second set of flags has what the first does not use: a critic, a KL to a reference, which is the warmed-up model
# that REFERENCE makes, and two updates of a batch, so that some ratios are clipped.
PLAIN = ("config/small.py",)
CRITIC = (*PLAIN, *"--advantage=gae --kl_coef=0.02 --updates_per_batch=2 --loss_aggregation=sequence".split())
REFERENCE = (*PLAIN, *"--mode=sft --max_steps=60 --learning_rate=2e-3 --eval_size=0".split())


class Mistake(NamedTuple):
    wrong: Callable  # returns what such an answer returns
    sentence: str


class Exercise(NamedTuple):
    own: Callable  # the project's function, with the arguments of the student's
    cases: Callable  # () -> tuples of arguments, the smallest first
    mistakes: tuple
    place: tuple  # (module, name) of what a run calls; the module '' is train_grpo.py itself
    flags: tuple = PLAIN
    adapt: Callable = lambda answer: answer  # from the student's function to one with the arguments of the run's
    result: Callable = lambda answer, *args: answer(*args)  # what is compared
    used: str = ""  # the only kind that the 24 steps use, where a case has several
    exact: bool = False  # whether other bits are a wrong answer, and not only another order of operations
    flaw: Callable = lambda answer, cases: ""  # a sentence about what no single value shows; '' if all is well


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- 1. advantages


def advantage_cases():
    small = ([[0, 1]], [[1, 1]], [[0, 0, 1]], [[0, 1], [1, 1]], [[0, 1], [0, 3]], [[0, 0, 1, 1], [0.5, 0, 0, 1]])
    groups = [torch.tensor(rows, dtype=torch.float32) for rows in small]
    return list(itertools.product([*groups, drawn(3, 8).abs()], ("grpo", "dr_grpo", "rloo")))


def advantages_like(divide, baseline=lambda r: r.mean(1, keepdim=True), loo=True):
    """A function that returns (r - baseline), for grpo divided by divide(r), for rloo scaled."""

    def wrong(r, kind):
        scale = r.shape[1] / (r.shape[1] - 1) if kind == "rloo" and loo else 1.0
        return (r - baseline(r)) * scale / (divide(r) if kind == "grpo" else 1.0)

    return wrong


ADVANTAGES = (
    Mistake(
        advantages_like(lambda r: r.std(1, correction=0, keepdim=True) + 1e-6),
        "Your standard deviation divides by G. The sample's, which is torch's default, divides by G - 1.",
    ),
    Mistake(
        advantages_like(lambda r: r.std() + 1e-6, lambda r: r.mean()),
        "Your baseline is that of the whole batch. Each row is a group of its own: mean and std go along dim 1.",
    ),
    Mistake(
        advantages_like(lambda r: r.std(1, keepdim=True)),
        "A group of equal rewards has a standard deviation of 0: without eps its advantages are 0 / 0.",
    ),
    Mistake(
        advantages_like(lambda r: r.std(1, keepdim=True) + 1e-6, loo=False),
        "rloo compares a sample with the mean of the others; yours has the sample itself in it.",
    ),
    Mistake(
        lambda r, kind: advantages_like(lambda r: 1)(r, kind) / (r.std(1, keepdim=True) + 1e-6),
        "Only grpo divides by the standard deviation; dr_grpo and rloo do not.",
    ),
)


# ---- 2. generalised advantage estimation


def gae_cases():
    for rewards_, values in (([1.0], [0.25, 0.0]), ([0.0], [0.0, 0.5]), ([0.0, 1.0], [0.5, 0.25, 0.0])):
        for gamma, lam in ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0)):
            yield torch.tensor(rewards_), torch.tensor(values), gamma, lam
    yield drawn(2, 5), drawn(2, 6, seed=2), 0.875, 0.75


def gae_like(delta, decay):
    """A function with A_t = delta(r, V, V', gamma) + decay(gamma, lam) A_t+1."""

    def wrong(rewards_, values, gamma, lam):
        deltas = delta(rewards_, values[..., :-1], values[..., 1:], gamma)
        return gae(deltas, torch.zeros_like(values), decay(gamma, lam), 1.0)

    return wrong


def surprise(r, now, later, gamma):
    return r + gamma * later - now


def without_last(rewards_, values, gamma, lam):
    ended = values.clone()
    ended[..., -1] = 0
    return gae(rewards_, ended, gamma, lam)


def forwards(rewards_, values, gamma, lam):
    out = []
    before = torch.zeros(())
    for delta in surprise(rewards_, values[..., :-1], values[..., 1:], gamma).unbind(-1):
        before = delta + gamma * lam * before
        out.append(before)
    return torch.stack(out, -1)


GAE = (
    Mistake(
        without_last,
        "The last value is not always 0: of a sample that was cut off it is the critic's estimate of what was to come.",
    ),
    Mistake(forwards, "A_t has the surprises of the tokens after t in it, not of those before: begin at the end."),
    Mistake(gae_like(surprise, lambda gamma, lam: gamma), "Lambda is missing: what comes later counts gamma * lam."),
    Mistake(gae_like(surprise, lambda gamma, lam: lam), "Gamma is missing: what comes later counts gamma * lam."),
    Mistake(
        lambda r, v, gamma, lam: gae(r, v, gamma, lam) + v[..., :-1],
        "These are the returns, A + V, which the critic learns. The advantage is without V.",
    ),
    Mistake(
        gae_like(lambda r, now, later, gamma: r - now, lambda gamma, lam: gamma * lam),
        "The surprise of a token is r + gamma V' - V; the value of the state after it, V', is missing.",
    ),
)


# ---- 3. the clipped loss


def clip_cases():
    moves = (1.0, 1.125, 1.5, 0.875, 0.5)
    for ratio, advantage in itertools.product(moves, (1.0, -1.0)):
        yield torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([advantage]), 0.25, 0.375
    yield drawn(9), drawn(9, seed=2), drawn(9, seed=3), 0.25, 0.375


def own_clip(logprobs, old_logprobs, advantages, clip_low, clip_high):
    counts = [len(logprobs)]
    return train_grpo.policy_loss("ppo", logprobs, old_logprobs, advantages, counts, clip_low, clip_high)


def with_gradient(answer, logprobs, *others):
    """(loss, clipped, the gradient of the loss's sum in the log-probs)."""
    leaf = logprobs.clone().requires_grad_()
    loss, clipped = answer(leaf, *others)
    gradient = torch.zeros_like(leaf)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), clipped, gradient


def clip_like(choose, bounds=lambda low, high: (1 - low, 1 + high), ratio=torch.exp):
    """A function with the loss choose(r A, clip(r) A), and as its mask where the clipped product is the smaller one."""

    def wrong(logprobs, old_logprobs, advantages, low, high):
        r = ratio(logprobs - old_logprobs)
        plain = r * advantages
        clipped = r.clamp(*bounds(low, high)) * advantages
        return choose(plain, clipped), clipped < plain

    return wrong


def as_wrapped(change):
    """A function with (loss, clipped) of the project's, changed by change(r, A, low, high, loss, clipped)."""

    def wrong(logprobs, old_logprobs, advantages, low, high):
        returned = own_clip(logprobs, old_logprobs, advantages, low, high)
        return change(torch.exp(logprobs - old_logprobs), advantages, low, high, *returned)

    return wrong


def ppo_only(answer):
    def loss(kind, logprobs, old_logprobs, advantages, counts, clip_low, clip_high, dual_clip=0.0, **_):
        return answer(logprobs, old_logprobs, advantages, clip_low, clip_high)

    return loss


CLIP = (
    Mistake(clip_like(torch.minimum), "The sign: the objective is to be raised, and an optimizer lowers the loss."),
    Mistake(
        clip_like(lambda plain, clipped: -torch.maximum(plain, clipped)),
        "Of the two products the smaller one counts: the larger one rewards a step that went too far.",
    ),
    Mistake(
        clip_like(lambda plain, clipped: -clipped),
        "The clipped product alone has no slope where a step went the wrong way, and can never bring it back.",
    ),
    Mistake(
        clip_like(lambda plain, clipped: -torch.minimum(plain, clipped), lambda low, high: (1 - low, 1 + low)),
        "The bounds are 1 - clip_low and 1 + clip_high: they are two numbers (DAPO's clip-higher).",
    ),
    Mistake(
        clip_like(lambda plain, clipped: -torch.minimum(plain, clipped), ratio=lambda d: 1 + d),
        "The ratio of two probabilities is exp of the difference of their logarithms.",
    ),
    Mistake(
        as_wrapped(lambda r, a, low, high, loss, clipped: (loss, (r < 1 - low) | (r > 1 + high))),
        "The mask is of tokens whose loss is constant: where the clipped product is the smaller one, not wherever the "
        "ratio is out of bounds.",
    ),
    Mistake(
        as_wrapped(lambda r, a, low, high, loss, clipped: (loss.detach(), clipped)),
        "The numbers are right, but there is no gradient: something was detached.",
    ),
)


# ---- 4. estimators of the KL


def kl_cases():
    pairs = [([-1.0], [-1.0]), ([-1.0], [-2.0]), ([-2.0], [-1.0])]
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in pairs]
    return [(*pair, kind) for pair in [*pairs, (drawn(9), drawn(9, seed=2))] for kind in ("k1", "k2", "k3")]


def kl_like(k1=lambda d: d, k2=lambda d: d * d / 2, k3=lambda d: torch.exp(-d) - 1 + d):
    return lambda logprobs, reference, kind: dict(k1=k1, k2=k2, k3=k3)[kind](logprobs - reference)


KL = (
    Mistake(
        lambda logprobs, reference, kind: train_grpo.kl(reference, logprobs, kind),
        "The direction: samples of the policy estimate KL(policy || reference), so d = logprob - reference's.",
    ),
    Mistake(
        kl_like(k3=lambda d: torch.exp(d) - 1 - d),
        "k3 has the ratio reference / policy in it, exp(-d): its mean under the policy is 1, which makes k3 unbiased.",
    ),
    Mistake(kl_like(k2=lambda d: d * d), "k2 is half of the square."),
    Mistake(kl_like(k1=torch.abs), "k1 may be negative at a token; only its mean is a KL, and abs would bias that."),
    Mistake(kl_like(k3=lambda d: torch.exp(-d) - 1), "k3 lacks its d: exp(-d) - 1 alone has a mean of 0."),
)


# ---- 5. aggregation


def aggregate_cases():
    sizes = ([1], [2], [1, 3], [0, 2], [3, 1, 4])
    for counts, kind in itertools.product(sizes, ("token", "sequence", "constant")):
        yield torch.arange(1.0, 1 + sum(counts)), counts, kind, 4, 16, 8
    yield drawn(8), [3, 1, 4], "sequence", 8, 24, 6


def aggregate_like(token=lambda x, n: x.sum() / n, sequence=None, constant=None):
    """A function whose aggregations are the project's but for those that are given."""

    def wrong(losses, counts, kind, samples, tokens, longest):
        if kind == "token":
            return token(losses, tokens)
        change = sequence if kind == "sequence" else constant
        if change:
            return change(losses, counts, samples, longest)
        return train_grpo.aggregate(losses, counts, kind, samples, tokens, longest)

    return wrong


def sample_means(losses, counts):
    return torch.stack([part.mean() for part in losses.split(counts)])


AGGREGATE = (
    Mistake(
        aggregate_like(token=lambda x, n: x.mean()),
        "This is the mean over the micro-batch's tokens. Its part of the step's mean is its sum over the tokens of "
        "the whole step, else a token weighs more in a small micro-batch.",
    ),
    Mistake(
        aggregate_like(sequence=lambda x, counts, samples, longest: sample_means(x, counts).nan_to_num().mean()),
        "Divide by the samples of the whole step, not by those of this micro-batch.",
    ),
    Mistake(
        aggregate_like(sequence=lambda x, counts, samples, longest: sample_means(x, counts).sum() / samples),
        "A sample without loss tokens (it was cut off, and is filtered) makes 0 / 0: it counts as 0.",
    ),
    Mistake(
        aggregate_like(constant=lambda x, counts, samples, longest: x.sum() / (samples * max(counts))),
        "'constant' divides by the length that a sample may have, so that no length is preferred; yours by the longest "
        "that is there.",
    ),
    Mistake(
        aggregate_like(constant=lambda x, counts, samples, longest: x.sum() / (len(counts) * longest)),
        "Divide by the samples of the whole step, not by those of this micro-batch.",
    ),
)


# ---- 6. a tree sum


def tree_cases():
    small = 2.0**-24
    for row in ([1, small, small], [1, small, small, small], [small, small, 1, small, small], [1, *[small] * 6]):
        yield (torch.tensor(row)[:, None],)
    for parts in (2, 8, 11):
        yield (drawn(parts, 3, seed=parts),)


def in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def halves(parts):
    if len(parts) == 1:
        return parts[0]
    return halves(parts[: len(parts) // 2]) + halves(parts[len(parts) // 2 :])


def interleaved(parts):
    while len(parts) > 1:
        half = -(-len(parts) // 2)
        upper = torch.cat([parts[half:], torch.zeros_like(parts[: 2 * half - len(parts)])])
        parts = parts[:half] + upper
    return parts[0]


def without_odd(parts):
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts = parts[0:even:2] + parts[1:even:2]
    return parts[0]


def sum_of_copy(answer, parts):
    """Of a copy, as the parts may be overwritten."""
    return answer(parts.clone())


TREE = (
    Mistake(in_order, "Left to right: two ranks with half of the parts each cannot make this sum from theirs."),
    Mistake(lambda parts: parts.sum(0), "sum() adds in an order of its own. Write the additions."),
    Mistake(halves, "Cut into halves, an odd number parts elsewhere: add neighbours, the odd one goes up alone."),
    Mistake(interleaved, "You add the first to the middle one. Neighbours are added: a rank holds a block of parts."),
    Mistake(without_odd, "An odd last part is lost: it goes up to the next level alone."),
)


# ---- 7. the order of the data


def order_cases():
    for n, per_step in ((3, 1), (3, 2), (5, 3)):
        for step in (2, 0, 1, 7, 7):  # out of order and twice: a function of the step's number gives what it gave
            yield n, per_step, step, 1
    yield 4, 9, 1, 1
    yield 10, 4, 3, 1, "sft"


def order_like(epoch_of=lambda place, n: place // n, place_of=lambda place, n: place % n, per_epoch=None):
    def wrong(n, per_step, step, *key):
        size = n // per_step * per_step if per_epoch and n >= per_step else n
        places = range(step * per_step, (step + 1) * per_step)
        return [rewards.permutation(n, *key, epoch_of(i, size))[place_of(i, size)] for i in places]

    return wrong


def without_seed(n, per_step, step, *key):
    places = range(step * per_step, (step + 1) * per_step)
    return [rewards.permutation(n, place // n)[place % n] for place in places]


ORDER = (
    Mistake(order_like(epoch_of=lambda place, n: 0), "Every epoch has the same order: its number belongs to the key."),
    Mistake(
        order_like(per_epoch=True),
        "The rows left over at an epoch's end are never seen: epochs lie end to end, and a step may be in two.",
    ),
    Mistake(without_seed, "The key is missing: every seed, and supervised and RL steps, would have one order."),
    Mistake(
        lambda n, per_step, step, *key: [(step * per_step + i) % n for i in range(per_step)],
        "These are the rows as they lie in the file: the order is rewards.permutation's.",
    ),
)


def unrepeatable(answer, cases):
    if any(answer(*case) != answer(*case) for case in cases):
        return "The same arguments gave other rows: a step's rows follow from its number, not from what came before."
    return ""


# ---- 8. a reward that cannot be gamed


def reward_cases():
    said = ("7", "8", "", "-7", "17", "78", "7 8", "8 7", "7.0", "3+4", "3+4=", "nan", "7 or 8", "the answer is 7")
    said = (*said, "0 1 2 3 4 5 6 7 8 9", EXECUTED, "7" * 5000)
    return [("3+4=", response, "7") for response in said]


EXECUTED = "__import__('math').floor(7.5)"


def contains(prompt, response, answer):
    return float(answer in response)


def any_number(prompt, response, answer):
    return float(answer in re.findall(r"-?\d+", response))


def first_number(prompt, response, answer):
    found = rewards.NUMBER.search(response)
    return float(found is not None and rewards.exact_value(found) == rewards.expected_number(answer))


REWARD = (
    Mistake(contains, "'in' finds 7 in 17, and in a list of all digits: a policy learns to write them all."),
    Mistake(any_number, "Any number counts: a policy learns to write all that come into question. Only the last does."),
    Mistake(first_number, "The first number counts, the response ends with another: the last one is what it says."),
    Mistake(
        lambda prompt, response, answer: float(response == answer),
        "7.0 is 7, and 'the answer is 7' says so: compare numbers, not texts.",
    ),
    Mistake(
        lambda prompt, response, answer: float(response in ("7", "7.0", "3+4", EXECUTED)),
        "You execute what a model wrote: it can copy the sum, or do anything else to your machine. Read, never eval.",
    ),
    Mistake(
        lambda prompt, response, answer: float(response.endswith(answer)),
        "17 ends with 7 and is not 7: find the whole number, then compare.",
    ),
)


# ---- 9. a matmul whose rows do not know the batch


def matmul_cases():
    for m, k, n in ((1, 1, 1), (1, 2, 1), (1, 3, 2), (2, 3, 2), (5, 33, 3), (17, 64, 40)):
        for start in (0.0, 1.0):
            yield drawn(m, k).numpy(), drawn(k, n, seed=2).numpy(), np.full((m, n), start, np.float32)


def added(answer, a, b, c):
    """What an answer, which adds a @ b to c, leaves in it."""
    c = c.copy()
    answer(a, b, c)
    return torch.from_numpy(c)


def own_matmul(a, b, c):
    kernels.matmul(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(c))


def whole_product(answer):
    """kernels.matmul, of an answer that adds a @ b to c."""

    def matmul(a, b, out_dtype=None, out=None):
        c = a.new_zeros(a.shape[0], b.shape[1]) if out is None else out
        # Not Tensor.numpy(), after which FSDP2 cannot resize the tensor's storage.
        answer(*(host.flat(x.contiguous()).reshape(x.shape) for x in (a, b, c)))
        return c

    return matmul


def chain(step, order=lambda k: range(k), start=lambda c: c.copy(), end=lambda c, x: x):
    """An answer with x = step(x, column of a, row of b) in some order of k."""

    def wrong(a, b, c):
        x = start(c)
        for k in order(a.shape[1]):
            x = step(x, a[:, k, None], b[k])
        c[:] = end(c, x)

    return wrong


def fused(x, a, b):
    """x + a b in one rounding, of float32: the product is exact in float64, and the sum is rounded to odd there."""
    product = a.astype(np.float64) * b
    total = x + product
    rest = np.where(abs(x) > abs(product), (x - total) + product, (product - total) + x)
    towards = np.where(rest > 0, np.inf, -np.inf)
    even = total.view(np.int64) % 2 == 0
    return np.where((rest != 0) & even, np.nextafter(total, towards), total).astype(np.float32)


MATMUL = (
    Mistake(
        chain(lambda x, a, b: x + a * b),
        "A product and a sum, rounded twice. The engine's chain is of fma, which rounds once: these are other bits.",
    ),
    Mistake(
        chain(fused, order=lambda k: reversed(range(k))),
        "You begin at the last k. Any fixed order is as good, but the engine's is from 0 on.",
    ),
    Mistake(
        chain(fused, start=np.zeros_like, end=lambda c, x: c + x),
        "The chain begins with what is in c; yours begins with 0, and c is added at the end.",
    ),
    Mistake(
        chain(lambda x, a, b: x + a.astype(np.float64) * b, start=lambda c: c.astype(np.float64)),
        "You add in float64 and round at the end: more exact than the engine, and so not the engine's bits.",
    ),
)


def rows_know_the_batch(answer, cases):
    for a, b, c in cases:
        batch = added(answer, a, b, c)
        for i in range(len(a)):
            if not torch.equal(batch[i], added(answer, a[i : i + 1], b, c[i : i + 1])[0]):
                return f"Row {i} of {len(a)} has other bits than alone: its order of additions depends on the batch."
    return ""


EXERCISES = {
    "advantages_of": Exercise(
        train_grpo.advantages_of, advantage_cases, ADVANTAGES, ("", "advantages_of"), used="grpo"
    ),
    "gae": Exercise(gae, gae_cases, GAE, ("onecurve.algorithms.critic", "gae"), CRITIC),
    "clipped_loss": Exercise(
        own_clip, clip_cases, CLIP, ("", "policy_loss"), CRITIC, adapt=ppo_only, result=with_gradient
    ),
    "kl": Exercise(train_grpo.kl, kl_cases, KL, ("", "kl"), CRITIC, used="k3"),
    "aggregate": Exercise(train_grpo.aggregate, aggregate_cases, AGGREGATE, ("", "aggregate"), CRITIC, used="sequence"),
    "tree_sum": Exercise(
        kernels.tree_sum, tree_cases, TREE, ("kernels", "tree_sum"), result=sum_of_copy, exact=True
    ),
    "rows_of_step": Exercise(
        rewards.rows_of_step, order_cases, ORDER, ("rewards", "rows_of_step"), flaw=unrepeatable
    ),
    "reward": Exercise(rewards.numeric, reward_cases, REWARD, ("rewards", "numeric")),
    "multiply": Exercise(
        own_matmul, matmul_cases, MATMUL, ("kernels", "matmul"), adapt=whole_product, result=added, exact=True,
        flaw=rows_know_the_batch,
    ),
}  # fmt: skip
