"""
A watch for reward hacking: pure functions of a run's metrics and samples, and so as repeatable as the run.
"""

from itertools import pairwise
from statistics import fmean

import torch.distributed as dist

from configurator import GROUP_BASELINES
from onecurve.run.checkpoint import HEALTHY
from rewards import terms_of
from sync import FOREVER, from_all_ranks

WATCHED = HEALTHY // 2  # steps of a mean
# A signal is, of means over WATCHED steps,
KL_TIMES = 4.0
KL_LEAST = 0.02  # a KL to the reference above KL_LEAST nats per token and KL_TIMES the mean before
SHARE = 0.1  # less than this share of the start's diversity
MORE = 0.5  # a share (repeated bigrams, symbols, samples cut off) higher than at the start by more than this
LONGER = 4.0  # responses more than this number of times as long as at the start
SHORTER = 0.3  # or less than this share as long, where prompts are left with one response each
GAP = 0.2  # a gap of training reward and truth larger than the smallest so far by more than this


def text_metrics(groups):
    """
    {metric: value} of the responses of Groups: different ones per prompt, the share of different bigrams among all
    (distinct-2: Li et al. 2016, arXiv:1510.03055), the mean share that a sample repeats, and the share of
    characters that are neither letters, digits nor white space.
    """
    texts = []
    bigrams = []
    repeated = []
    for group in groups:
        texts += group.meta["responses"]
        for ids, mask in group.rows("tokens", "loss_mask"):
            pairs = [*pairwise(ids[mask].tolist())]
            bigrams += pairs
            repeated.append(1 - len({*pairs}) / len(pairs) if pairs else 0)
    characters = "".join(texts)
    symbols = sum(not (c.isalnum() or c.isspace()) for c in characters)
    return dict(
        unique_answers=len({*texts}) / len(groups),
        distinct_2=len({*bigrams}) / max(1, len(bigrams)),
        repetition=fmean(repeated),
        symbols=symbols / max(1, len(characters)),
    )


def nothing_to_learn(steps, c, template_skipped):
    """
    A line with the likeliest cause, after each WATCHED RL steps in which no weight moved, or in which every group had
    equal rewards and nothing else is compared; else ''. steps: as in `hacking`; c: the config.
    """
    last = steps[-WATCHED:]
    equal = all(x["zero_std_groups"] == c.prompts_per_step for x in last)
    still = all(x.get("lr") == 0 or x.get("grad_norm") == 0 for x in last)
    in_groups = c.advantage in GROUP_BASELINES  # a file's may be anything
    in_groups &= not (c.kl_in_reward or c.overlong_cache or c.credit == "turn")  # equal rewards then count unequally
    if not last or len(steps) % WATCHED or not (still or (equal and in_groups)):
        return ""
    cause = "the prompts are too easy or too hard for this model"
    if not equal:
        cause = "the loss leaves every token out"
    elif not any(x["reward_std"] for x in last):
        cause = f"all are {last[-1]['reward_mean']:g}; is the reward made for these answers?"
        if template_skipped:
            cause += " The prompts do without the model's chat template; chat_template=True uses it"
    if all(x["truncated_fraction"] == 1 for x in last):
        cause = "all samples are cut off; use a larger max_new_tokens, or a model that ends its answers"
    if not equal and last[-1]["lr"] == 0:
        cause = "learning_rate is 0"
    what = "the rewards of every group are equal" if equal else "no weight moved"
    return f"nothing was learned in {WATCHED} steps, as {what}: {cause}"


def hacking(steps, reward=""):
    """
    A signal in words that the reward is gamed and not earned, or '', from the metrics of RL steps (dicts, the newest
    last). Means over the last WATCHED steps are compared with those over the steps before and over the first ones.
    reward: the run's; the gap to each of its terms of weight 0, which are only recorded, is compared, too.

    Such signals see the ways in which most hacks change a run. They miss a hack that stays as diverse, as long and as
    near to the reference as honest answers, unless the truth is watched; and a truth can be gamed like any reward.
    Honest learning that gives up variety for good, or finds a new format, looks like a hack to them.
    """
    steps = [x for x in steps if "unique_answers" in x]  # a resume may have begun the watch
    if len(steps) < 3 * WATCHED:
        return ""
    start = steps[:WATCHED]
    before = steps[-2 * WATCHED : -WATCHED]
    now = steps[-WATCHED:]

    def mean(part, name):
        return fmean(x[name] for x in part)

    rises = mean(now, "reward_mean") > mean(before, "reward_mean")
    least = {name: SHARE * mean(start, name) for name in ("unique_answers", "distinct_2")}
    most = {name: MORE + mean(start, name) for name in ("repetition", "symbols", "truncated_fraction")}
    most["response_length_mean"] = LONGER * mean(start, "response_length_mean")
    if rises and all("kl_reference" in x for x in before + now):  # a watch that turns back begins to measure it
        most["kl_reference"] = max(KL_LEAST, KL_TIMES * mean(before, "kl_reference"))
    # Prompts are left with one response each, as they are, too, when short answers are honestly learned.
    alike, varied = (mean(part, "unique_answers") - 1 for part in (now, start))
    if alike < SHARE * varied:
        least["response_length_mean"] = SHORTER * mean(start, "response_length_mean")
    signals = [(name, mean(now, name), "<", bound) for name, bound in least.items()]
    signals += [(name, mean(now, name), ">", bound) for name, bound in most.items()]
    for weight, name in terms_of(reward):
        if weight == 0 and f"reward_{name}" in start[0]:  # a truth
            parts = (steps[end - WATCHED : end] for end in range(len(steps), WATCHED - 1, -WATCHED))
            gap, *earlier = [mean(part, "reward_mean") - mean(part, f"reward_{name}") for part in parts]
            signals.append((f"reward_mean - reward_{name}", gap, ">", GAP + min(earlier)))
    for name, value, sign, bound in signals:
        if value < bound if sign == "<" else value > bound:
            return f"{name} {value:.4g} {sign} {bound:.4g}"
    return ""


class Watch:
    """Ends a run whose reward looks gamed (--watch=stop). record: the first rank's; None on others."""

    def __init__(self, c, record):
        self.c = c
        self.record = record
        # A separate group: a thread that sends weights may be in the default one.
        self.group = dist.new_group(backend="gloo", timeout=FOREVER) if c.watch else None

    def alarm(self):
        """The signal, on every rank; '' without one. Collective over all ranks."""
        if not self.c.watch:
            return ""
        return from_all_ranks(self.record and hacking(self.record.steps, self.c.reward), self.group)[0]
