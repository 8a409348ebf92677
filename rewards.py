"""
Tasks: scores, and the rows of a data set with their prompts. A reward is a pure function

    reward(prompt: str, response: str, answer: str) -> float, or (float, a dict of notes for the rollout file)

of its arguments alone: a clock, a random number or the order of a set of strings (it changes with PYTHONHASHSEED) would
end the promise that a run can be repeated bit for bit. One of yours that has a parameter `row` gets by that name the
data set's row, a dict of all its columns. `load_reward("numeric + 0.2*format + my_rewards.py:short")`
gives a weighted sum of such functions, built in or yours; `score` calls it and names the culprit when it fails.
What takes other processes or models is in onecurve/graders/: `code` in sandbox.py, `judge`, `math` and 'model:folder'
in judges.py, `reasoning_gym` in gym.py.

Sources: GSM8K and its `#### 42` are from Cobbe et al. 2021 (arXiv:2110.14168), \\boxed{42} from MATH, Hendrycks et al.
2021 (arXiv:2103.03874), the <think> format from DeepSeek-R1 (arXiv:2501.12948).
"""

import importlib.util
import inspect
import json
import math
import os
import re
import sys
import threading
from contextlib import nullcontext
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from traceback import extract_tb

import torch

from configurator import MODES, named_arguments, printable, require, suggestion
from onecurve.keys.prompts import SUMS, sources_of
from onecurve.keys.seeds import seed_of
from sync import content_hash, reason


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is no finite number. The message is one line."""


# ------------------------------------------------------------------------------------------------------------------
# the built-in rewards

# A model may write anything, and an engine waits while it is read: so the alternatives of a pattern are disjoint and no
# + stands inside a *, else some text would take exponential time. ASCII: \d would mean the digits of every script.
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"  # 1,234.5 or 1234.5 or .5
SIGN = r"(?:(?<![\w)}])[-+])?"  # in 50-8 and (a)-8 the minus is an operation
NUMBER = re.compile(rf"({SIGN})(?:\\?\$)?({DIGITS})(?: ?/ ?({DIGITS}))?(?:\\?%)?", re.ASCII)
MARK = re.compile(r"#{4,}\s*([^\n#]*)|\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
ANSWER_IS = re.compile("answer is", re.IGNORECASE)
FRAC = re.compile(r"(?<!\d)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", re.ASCII)  # not in 5\frac{1}{2}, which is no 51/2
LENGTH_MAX = 1000  # characters of a number; int() refuses 4300 digits, and takes quadratic time on the way there


def _plain(text):
    """`text` with LaTeX's fractions and thousands and the typographic minus written as NUMBER reads them."""
    return FRAC.sub(r"\1/\2", text.replace("\u2212", "-").replace("{,}", ","))


def exact_value(number):
    """The exact value of a NUMBER match: 42, 42.0 and 84/2 are equal. None if it divides by 0 or is too long."""
    sign, top, bottom = (part.replace(",", "") for part in number.groups(default=""))
    if len(number[0]) > LENGTH_MAX or (bottom and not Fraction(bottom)):
        return None
    return Fraction(sign + top) / Fraction(bottom or 1)


def final_number(text):
    """
    The number a response ends up with, as a Fraction, or None. Whichever comes last of `#### 42` and `\\boxed{42}`
    decides, even when no number is in it; else the first number after the last "answer is"; else the last number.
    Units are dropped ($42, 42%, 42 km). Not read: powers, mixed numbers (1 1/2), words.
    """
    text = _plain(text)
    if marked := MARK.findall(text):
        text = "".join(marked[-1])
        which = 0  # one of the two groups is empty
    else:
        *before, text = ANSWER_IS.split(text)
        which = 0 if before else -1
    numbers = list(NUMBER.finditer(text))
    return exact_value(numbers[which]) if numbers else None


def numeric(prompt, response, answer):
    """1.0 if the response's final number equals the answer's: a plain number, or a text that ends in `#### 42`."""
    return float(final_number(response) == expected_number(answer))


def expected_number(answer):
    """The number of a data set's answer. Raises ValueError."""
    number = NUMBER.fullmatch(_plain(answer).rpartition("####")[2].strip())
    expected = number and exact_value(number)
    if expected is None:  # a data set of another kind would otherwise score 0 (or worse, 1) without a word
        raise ValueError(f"answer {answer[-40:]!r} is neither a number nor ends in '#### 42'")
    return expected


numeric.reads = expected_number


def exact(prompt, response, answer):
    """1.0 if response and answer are the same text; white space around them does not count."""
    return float(response.strip() == answer.strip())


def format(prompt, response, answer):  # hides Python's format(), which nothing here calls
    """
    1.0 for `<think>...</think>` and then a non-empty answer, with one pair of tags and nothing before it. The thought
    may be empty. A prompt that ends in <think>, as some chat templates do, has opened the pair already.
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    thought, _, rest = response.partition("</think>")
    one_pair = response.count("<think>") == response.count("</think>") == 1
    return float(one_pair and thought.lstrip().startswith("<think>") and rest.strip() != "")


# ------------------------------------------------------------------------------------------------------------------
# from a config's string to a function, and its call

BUILT_IN = {"exact": exact, "format": format, "numeric": numeric}
ELSEWHERE = {
    "code": "onecurve.graders.sandbox",
    "judge": "onecurve.graders.judges",
    "math": "onecurve.graders.judges",
    "reasoning_gym": "onecurve.graders.gym",
}
SETTINGS = {}  # the run's config, for what is built in
MODELS = {}  # {term such as 'model:folder': RewardModel}
ONE_AT_A_TIME = threading.Lock()


def terms_of(spec):
    """
    [(weight, name)] of a reward: terms joined by +, each a built-in name, path/to/file.py:function or model:folder,
    each optionally weighted (0.2*format; 0*format is only noted). Raises ValueError.
    """
    terms = []
    for term in spec.split("+"):
        weight, star, name = (part.strip() for part in term.rpartition("*"))
        if star and not re.fullmatch(r"-?\d*\.?\d+(e-?\d\d?)?", weight):
            raise ValueError(f"weight {weight!r} is not a number, as in 0.2*format (and a path cannot contain *)")
        terms.append((float(weight or 1), name))
    return terms


def load_reward(spec, config={}):
    """
    The reward function for `spec` (see `terms_of`). A file is looked up in the working directory, then beside this
    file; a path cannot contain + or *. The function returns (the sum, {term: {"reward": number, ..}}). Its `prompt` is
    what the model reads; a function of the user's gets `written`, the prompt as it is in the data.
    config: the run's. Ends the run with one line if there is no such function, or if what it needs is not there.
    """
    SETTINGS.update(config)
    try:
        terms = [(weight, name, find_reward(name)) for weight, name in terms_of(spec)]
    except ValueError as error:
        require(False, f"reward={spec!r}: {error}")

    wanted = {name: {"row", "prompt_text"} & {*parameters_of(f)} for _, name, f in terms if ".py:" in name}

    def weighted_sum(prompt, response, answer, written=None, row=None, terms=terms):
        more = dict(row=row, prompt_text=prompt)
        noted = {}
        summands = []
        for weight, name, f in terms:
            # User code is not asked to be thread-safe; what is built in may wait for another process or machine.
            with ONE_AT_A_TIME if ".py:" in name else nullcontext():
                shown = written if name in wanted and written is not None else prompt
                value, notes = verdict(f(shown, response, answer, **{x: more[x] for x in wanted.get(name, ())}), name)
            summands.append(weight * value)
            noted[name] = {"reward": value, **notes}
        return math.fsum(summands), noted  # it rounds once, at the end; sum() gives other bits in Python 3.12

    weighted_sum.reads = [f.reads for _, _, f in terms if hasattr(f, "reads")]
    weighted_sum.waits = any(name in ELSEWHERE for _, name, _ in terms)
    weighted_sum.reads_row = any("row" in names for names in wanted.values())
    weighted_sum.own = partial(weighted_sum, terms=[term for term in terms if ".py:" in term[1]])
    return weighted_sum


def parameters_of(function):
    """The names of a function's parameters; none where Python does not know them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of something written in C
        return ()


def find_reward(name):
    """The reward function of this name. Raises ValueError, with a cure, if there is none or it lacks what it needs."""
    if name.startswith("model:"):
        from onecurve.graders.judges import RewardModel

        MODELS[name] = RewardModel(name.removeprefix("model:"), SETTINGS)
        return MODELS[name]
    if name in ELSEWHERE:
        function = getattr(importlib.import_module(ELSEWHERE[name]), name)
        function.check()
        return function
    return find_function(name, BUILT_IN | ELSEWHERE, "reward")


def check_answers(rewards, rows, config):
    """Ends the run with one line at the first row whose answer its source's reward, a built-in one, cannot read."""
    for row in rows:
        source = row.get("source", "")
        try:
            for reads in rewards[source].reads:
                reads(row["answer"])
        except ValueError as error:
            column = sources_of(config)[source]["answer_column"]
            where = f"for prompt {row['prompt']!r:.60}"
            require(False, f"answer_column={column!r}: {where}: {error}; use another column or reward")


def try_own(rewards, rows):
    """Ends the run with one line if a reward of the user's fails on the first row of its source, taken as answered."""
    first = {}
    for row in rows:
        first.setdefault(row.get("source", ""), row)
    for source, row in first.items():
        try:
            own = partial(rewards[source].own, written=row["prompt"], row=row.get("columns"))
            score(own, text_of(row), row["answer"], row["answer"], "the first row, with its answer as the response")
        except RewardError as error:
            require(False, str(error))


def check_vocabulary(tokenizer):
    """Ends the run with one line if a reward model has another vocabulary than the policy."""
    for name, model in MODELS.items():
        why = "of another vocabulary than the policy; use one that --mode=rm made of the same model"
        require(model.tokenizer.get_vocab() == tokenizer.get_vocab(), f"reward={name!r}: {why}")


def score_all(calls):
    """What `score` returns for each of these tuples of its arguments; reward models see them all at once."""
    for model in MODELS.values():
        model.expect([(prompt, response) for _, prompt, response, *_ in calls])
    return [score(*call) for call in calls]


def score(reward, prompt, response, answer, where):
    """
    What reward(prompt, response, answer) returns as a finite float and a dict of what to note with it; or RewardError,
    with `where` to say which sample it was.
    """
    try:
        return verdict(reward(prompt, response, answer), "it")
    except (Exception, SystemExit) as error:  # an exit() in a reward would end the run as if it had succeeded
        raise RewardError(f"reward failed on {where}: {describe(error)}; response {response!r:.80}") from error


def verdict(returned, name):
    """(finite float, notes) of what the function `name` returned: a number, or a number and a dict of notes."""
    value, notes = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    return finite(value, name), notes


def reward_metrics(groups):
    """
    {metric: value} of what was noted with the rewards of groups [(tensors, meta)]: the mean of each of several terms,
    how many verdicts were a limit of time or space, and how many so near to one that another run may differ there.
    """
    noted = [terms for _, meta in groups for terms in meta.get("noted", ())]
    names = dict.fromkeys(chain(*noted))
    metrics = {}
    for name in names if len(names) > 1 else ():
        metrics[f"reward_{name}"] = fmean(terms[name]["reward"] for terms in noted if name in terms)
    limited = [notes for terms in noted for notes in terms.values() if "verdict" in notes]
    if limited:
        metrics["limits"] = sum(notes["verdict"] == "limit" for notes in limited)
        metrics["near_limit"] = sum(notes["near_limit"] for notes in limited)
    for source, own in by_source(groups).items():
        metrics[f"{source}/reward_mean"] = fmean(group.tensors["rewards"].mean().item() for group in own)
    return metrics


def by_source(groups):
    """{name of a source: its Groups}; {} where the data has no names."""
    sources = {}
    for group in groups:
        if name := group[1].get("source"):
            sources.setdefault(name, []).append(group)
    return sources


def finite(value, name):
    """What the function `name` returned, as a float. Raises TypeError; for "1.0" too, which float() would accept."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch, of two elements
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"{name} returned {value!r}, not a finite number")
    return number


def find_function(name, built_in, what):
    """The function called `name`, one of `built_in` or from a file, which is run only once. Raises ValueError."""
    if name in built_in:
        return built_in[name]
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        known = f"Use {', '.join(built_in)}{' or ' * bool(built_in)}'my_file.py:my_function' (no + or * in the path)"
        raise ValueError(f"no such {what} as {name!r}{suggestion(name, built_in) or '.'} {known}")
    folders = Path.cwd(), Path(__file__).resolve().parent
    path = next(filter(Path.is_file, (folder / file for folder in folders)), None)
    if path is None:
        raise ValueError(f"no file {file} in {' or '.join(dict.fromkeys(map(str, folders)))}")

    key = str(path.resolve())  # the module's name, not the stem, which two files may share; dataclasses need it, too
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, key)
        sys.modules[key] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise ValueError(f"{file} does not load: {describe(error)}") from error
    functions = {key: x for key, x in vars(sys.modules[key]).items() if callable(x)}
    if attribute not in functions:
        raise ValueError(f"{file} has no function {attribute!r}{suggestion(attribute, functions)}")
    return functions[attribute]


@lru_cache
def own_function(key, name):
    """
    The user's function that a key names as 'mine.py:f', to be called with named arguments; None for a built-in name.
    Ends the run with one line if there is no such function, if it or its attribute `before` raises, or if it returns
    other shapes than that of the log-probs (a loss, and what it clips) or of the rewards (an advantage).
    """
    if ".py:" not in name:
        return None
    try:
        function = find_function(name, {}, key)
    except ValueError as error:
        require(False, f"{key}={name!r}: {error}")

    def guarded(call=function, **inputs):
        try:
            returned = call(**inputs)
            if call is function:
                # raises unless all have one shape
                torch.stack([inputs["logprobs"], *returned] if key == "loss" else [inputs["rewards"], returned])
        except Exception as error:
            require(False, f"{key}={name!r}: {describe(error)}")
        return returned

    if hasattr(function, "before"):
        guarded.before = partial(guarded, function.before)
    return guarded


def describe(error):
    """One line for an exception, with the deepest line in the user's own file, not the one in a library it called."""
    others = (
        "<frozen importlib",
        os.path.dirname(os.__file__),
        __file__,
        str(Path(__file__).with_name("onecurve")),
    )
    own = ""
    place = ""
    for file, line, *_ in extract_tb(error.__traceback__):
        if file == own or not (own or file.startswith(others)):
            own = file
            place = f" ({Path(file).name}:{line})"
    return printable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) + place


def pass_at_k(n, right, k):
    """Unbiased chance that any of k samples is right, if `right` of n were: Chen et al. 2021, equation 1."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def pass_rates(rewards, pass_reward):
    """{metric: value} of rewards (P, n): the mean, and pass@k for k = 1, 2, 4 .. n with 95 % intervals over prompts."""
    n = rewards.shape[1]
    right = (rewards >= pass_reward).sum(1).tolist()
    scores = {"eval_reward_mean": float(rewards.double().mean())}
    for i in range(n.bit_length()):
        k = 2**i
        chances = torch.tensor([pass_at_k(n, m, k) for m in right], dtype=torch.float64)
        scores[f"pass@{k}"] = float(chances.mean())
        # 95 % of the normal distribution of a mean over prompts: Miller 2024 (arXiv:2411.00640), section 2
        scores[f"pass@{k}_ci95"] = 1.96 * float(chances.std()) / math.sqrt(len(right))
    return scores


def pair_rates(figures, n):
    """{metric: value} of the figures of n held-out pairs, with a 95 % interval of the share in the right order."""
    share = figures["accuracy"]
    ci95 = 1.96 * math.sqrt(share * (1 - share) / max(1, n - 1))
    return {f"eval_{name}": x for name, x in figures.items()} | {"eval_accuracy_ci95": ci95}


# ------------------------------------------------------------------------------------------------------------------
# data


def arithmetic(low=0, high=100):
    """
    Rows {"prompt": "17+25=", "answer": "42", "a": 17, "b": 25} of all sums of two numbers in [low, high), in their
    order.
    """
    numbers = range(low, high)
    return [dict(prompt=f"{a}+{b}=", answer=str(a + b), a=a, b=b) for a in numbers for b in numbers]


def sides(mode):
    """The names of a row's responses: ("chosen", "rejected") where a mode learns from pairs, else ("answer",)."""
    return ("chosen", "rejected") if MODES[mode].pairs else ("answer",)


def with_wrong_sum(row):
    """A pair from a sum's row: its answer, and the answer with digits changed as a hash of the prompt says."""
    right = row["answer"]
    h = int(content_hash(row["prompt"]), 16)
    h, changed = divmod(h, 2 ** len(right) - 1)  # a bit for each digit; 0 stands for all of them
    wrong = ""
    for i, digit in enumerate(right):
        h, by = divmod(h, 9)
        is_changed = changed == 0 or changed >> i & 1
        wrong += str((int(digit) + (1 + by) * is_changed) % 10)
    return dict(prompt=row["prompt"], chosen=right, rejected=wrong)


def chance(*key):
    """A generator of random numbers that follow from a hash of the key."""
    return torch.Generator().manual_seed(int(content_hash(key), 16) % 2**63)


@lru_cache(maxsize=2)
def permutation(n, *key):
    """A random order of 0 .. n-1, drawn from a hash of the key."""
    return torch.randperm(n, generator=chance(*key)).tolist()


def rows_of_step(n, per_step, step, *key):
    """
    Indices of the rows of a step: the data in a new order every epoch, epochs end to end. A function of the step's
    number, so there is no iterator to save.
    """
    places = (divmod(step * per_step + i, n) for i in range(per_step))
    return [permutation(n, *key, epoch)[place] for epoch, place in places]


def learnable_rows(right, curriculum, samples, per_step, *key):
    """
    Indices of a step's rows, each drawn once, by the weights 1 + curriculum * 4 p (1 - p): p is the share of samples
    that were right when the row was last seen (Foster et al. 2025, arXiv:2502.12272: its learnability). right:
    for each row how many of its `samples` were; None before any: as if half were. Whole numbers only: no rounding.
    """
    spread = [4 * m * (samples - m) if m is not None else samples**2 for m in right]
    weights = torch.tensor([samples**2 + curriculum * x for x in spread])
    source = chance(*key)
    left = weights.clone()
    rows = []
    for _ in range(per_step):
        if not left.any():  # more than there are: each once more
            left = weights.clone()
        ends = left.cumsum(0)
        drawn = torch.randint(int(ends[-1]), (1,), generator=source)
        rows.append(int(torch.searchsorted(ends, drawn, right=True)))
        left[rows[-1]] = 0
    return rows


def draw_rows(sources, count, step, c, stream, seen={}):
    """
    The places [(source, index)] of a step's `count` rows in sources {name: rows}: of each source its share by weight.
    seen: for a curriculum, {place: number of right samples when last seen}.
    """
    weights = {name: source["weight"] for name, source in sources_of(vars(c)).items()}
    places = []
    for name, rows in sources.items():
        share = count * weights[name] // sum(weights.values())
        key = [seed_of(vars(c), "data"), stream, *filter(None, [name])]
        chosen = rows_of_step(len(rows), share, step, *key)
        if c.curriculum and stream == "rl":
            right = [seen.get((name, i)) for i in range(len(rows))]
            chosen = learnable_rows(right, c.curriculum, c.group_size, share, *key, step)
        places += [(name, i) for i in chosen]
    return places


FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # as `datasets` calls their formats


def load_split(name, configuration, split):
    """
    The rows of a file or of a function in one, which is the data set `name` or else `split`, or of a split of a hub
    data set. Ends the run with one line if it cannot be read.
    """
    for made_by in (split, name):
        if ".py:" in made_by:
            try:
                return find_function(made_by, {}, "data set")(**named_arguments(configuration))
            except Exception as e:
                require(False, f"dataset={made_by!r}: {e if isinstance(e, ValueError) else describe(e)}")
    import datasets

    datasets.disable_progress_bars()
    name = split if Path(split).suffix in FILES else name
    kind = FILES.get(Path(name).suffix)
    require(kind or not Path(name).is_file(), f"dataset={name!r}: a file, but not one of {', '.join(FILES)}")
    there = not kind or Path(name).is_file() and Path(name).stat().st_size
    require(there, f"dataset={name!r}: no such file, or an empty one")
    try:
        if kind:
            return datasets.load_dataset(kind, data_files=name, split="train")
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as e:
        for i, line in enumerate(Path(name).read_bytes().split(b"\n") if name.endswith(".jsonl") else (), 1):
            try:
                json.loads(line or b"{}")
            except ValueError as broken:
                require(False, f"dataset={name!r}: line {i}: {getattr(broken, 'msg', broken)}")
        require(False, f"dataset={name!r}: cannot load split {split!r}: {reason(e)}")


def load_sources(config, scored_by={}):
    """
    ({source: training rows}, held-out rows of all sources): `load_rows`, and with names a row says its source.
    scored_by: {source: its reward}; where that reads rows, "columns" has a row as it is in the data set.
    """
    training = {}
    held_out = []
    for name, source in sources_of(config).items():
        source["reads_row"] = name in scored_by and scored_by[name].reads_row
        rows, others = load_rows(source)
        for row in chain(rows, others) if name else ():
            row["source"] = name
        if source["weight"]:
            training[name] = rows
        held_out += others
    return training, held_out


def load_rows(config):
    """
    (training rows, held-out rows) of a source, dicts with prompt and answer (str), or of pairs chosen and rejected.
    """
    size = config["eval_size"]
    data, held_out = read_data(config)
    require(len(data), f"dataset={config['dataset']!r}: has no rows; use another, or another split")
    used = ["prompt_column", *(f"{side}_column" for side in sides(config["mode"]))]
    if config["sft_column"]:
        used.append("sft_column")
    for rows, what in ((data, "data set"), (size and held_out or data, "held-out set")):
        columns = sorted(rows[0])
        for key in used:
            there = config[key] in columns or cell(rows[0], config[key]) is not None
            require(there, f"{key}={config[key]!r}: the {what} has the columns {', '.join(columns)}")
    trained_on = config.get("weight", 1) > 0
    if held_out is None:
        enough = size < len(data) or not trained_on
        require(enough, f"eval_size={size}: dataset={config['dataset']!r} has {len(data)} rows in all; use less")
        order = permutation(len(data), "held out")  # the same for every seed
        held_out = [data[i] for i in order[:size]]
        data = [data[i] for i in order[size:]]
    training = [row_of(x, config) for x in (data if trained_on else ())]
    return training, [row_of(x, config) for x in islice(held_out, size)]


def read_data(config):
    """(all rows of a source as its data set has them, its held-out rows, or None where these are a part of them)."""
    name = config["dataset"]
    if sums := re.fullmatch(SUMS, name):
        data = arithmetic(*map(int, filter(None, sums.groups())))
        return [with_wrong_sum(row) for row in data] if MODES[config["mode"]].pairs else data, None
    if name == "programs":
        from onecurve.graders import sandbox

        return sandbox.programs(), None
    if name.startswith("reasoning_gym:"):
        from onecurve.graders import gym

        return gym.rows(name, config["dataset_config"]), None
    load = partial(load_split, name, config["dataset_config"])
    return load(config["split"]), load(config["eval_split"]) if config["eval_split"] else None


def row_of(example, config):
    """The row of one in a data set. Its prompt is a text, or with chat_template a list of messages."""
    column = config["prompt_column"]
    prompt = example[column]
    if template := config["prompt_template"]:
        try:
            prompt = template.format(**example)
        except (KeyError, IndexError, ValueError) as e:
            problem = f"{type(e).__name__}: {e}; the data set has the columns {', '.join(sorted(example))}"
            problem += "; a brace that is text is {{ or }}"
            require(False, f"prompt_template={template!r}: {problem}")
    messages = isinstance(prompt, list) and prompt and all(is_message(x) for x in prompt)
    cure = "--chat_template, for a list of messages" if messages else "a column of texts, or of lists of messages"
    fits = isinstance(prompt, (str, int, float)) or messages and config["chat_template"]
    require(fits, f"prompt_column={column!r}: no text: {prompt!r:.60}; use {cure}")
    row = dict(example) if config["agent"] else {}  # an agent gets all columns
    if config.get("reads_row"):
        row["columns"] = dict(example)
    row["prompt"] = prompt if messages else str(prompt)
    texts = sides(config["mode"])
    for side in texts:
        column = config[f"{side}_column"]
        text = cell(example, column)
        why = f"for prompt {prompt!r:.60} it is no text but {text!r:.60}; use a column of responses"
        fits = isinstance(text, str) or len(texts) == 1 and isinstance(text, (int, float, list))
        require(fits, f"{side}_column={column!r}: {why}")
        row[side] = str(text)
    if config["sft_column"]:
        row["shown_answer"] = str(cell(example, config["sft_column"]))
    return row


def cell(example, column):
    """A row's value in a column, or in a field of one, such as 'reward_model.ground_truth'; None if it has none."""
    if column in example:
        return example[column]
    first, _, rest = column.partition(".")
    return cell(example[first], rest) if isinstance(example.get(first), dict) else None


def is_message(x):
    return isinstance(x, dict) and isinstance(x.get("role"), str) and isinstance(x.get("content"), str)


def prompt_ids(prompts, tokenizer, config):
    """The ids of each prompt; a chat template has written its special tokens itself, so none are added to it."""
    return tokenizer(prompts, add_special_tokens=not config["chat_template"])["input_ids"] if prompts else []


def answer_ids(texts, tokenizer, stop_tokens):
    """The ids of each whole response, with an EOS."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [ids + stop_tokens[:1] for ids in encoded]


def encode_prompts(rows, what, tokenizer, config):
    """Adds prompt_tokens to each row and drops rows with too many, with a line. what: 'training' or 'held-out'."""
    if config["chat_template"]:
        require(tokenizer.chat_template, "chat_template=True: the model's tokenizer has none; use prompt_template")
        options = named_arguments(config["chat_template_args"]) | dict(tokenize=False, add_generation_prompt=True)
        system = [dict(role="system", content=config["system_prompt"])] if config["system_prompt"] else []
        for row in rows:
            messages = row["prompt"]
            if isinstance(messages, str):
                messages = [dict(role="user", content=messages)]
            if messages[0]["role"] != "system":
                messages = system + messages
            row["prompt_text"] = tokenizer.apply_chat_template(messages, **options)
    ids = prompt_ids([*map(text_of, rows)], tokenizer, config)
    return _with_ids(rows, "prompt_tokens", ids, "max_prompt_tokens", f"{what} prompts", config)


def text_of(row):
    """A row's prompt as the model reads it: with chat_template what the template made of it."""
    return row.get("prompt_text", row["prompt"])


def encode_answers(rows, tokenizer, stop_tokens, config):
    """
    The rows with answer_tokens, or chosen_tokens and rejected_tokens, which end with an EOS; without those of more
    tokens than a sample may have. Ends the run with one line at a pair whose sides are the same tokens.
    """
    texts = sides(config["mode"])
    for side in texts:
        ids = answer_ids([row.get(f"shown_{side}", row[side]) for row in rows], tokenizer, stop_tokens)
        rows = _with_ids(rows, f"{side}_tokens", ids, "max_new_tokens", f"{side} texts", config)
    for row in rows if len(texts) == 2 else ():
        where = f"a pair of prompt {row['prompt']!r:.60} has equal sides"
        differ = row["chosen_tokens"] != row["rejected_tokens"]
        require(differ, f"mode={config['mode']!r}: {where}, {row['rejected']!r:.60}; drop such pairs")
    return rows


def _with_ids(rows, field, ids, key, what, config):
    """The rows with their ids in a field, without those of more than config[key] ids or none."""
    for row, own in zip(rows, ids):
        row[field] = own
    kept = [row for row in rows if 0 < len(row[field]) <= config[key]]
    require(kept or not rows, f"{key}={config[key]}: all {len(rows)} {what} are longer (or empty); use more")
    if len(kept) < len(rows) and os.environ.get("RANK", "0") == "0":
        dropped = len(rows) - len(kept)
        empty = sum(not row[field] for row in rows)
        counts = {"empty": empty, f"over {key}={config[key]}": dropped - empty}
        causes = ", ".join(f"{n} {cause}" for cause, n in counts.items() if n)
        print(f"dropped {dropped} of {len(rows)} {what}: {causes}")
    return kept
