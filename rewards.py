"""
Data in, scores out: rows with their prompts, and rewards of responses to them. A reward is a pure function

    reward(prompt: str, response: str, answer: str) -> float, or (float, a dict of notes for the rollout file)

of its arguments alone: a clock, a random number or the order of a set of strings (it changes with PYTHONHASHSEED) would
end the promise that a run can be repeated bit for bit. A function of yours with a parameter `row` also gets the data
set's row, a dict of all its columns. `load_reward("numeric + 0.2*format + my_rewards.py:short")`
gives a weighted sum of such functions, built in or yours; `score` calls it and names the culprit when it fails.

Elsewhere: rewards that need other processes or models, and checks before a run, in onecurve/graders/; functions of your
files in onecurve/run/own.py; metrics of rewards in onecurve/run/scores.py; answers and pairs to train on, and the
curriculum, in onecurve/algorithms/.

Sources: GSM8K and its `#### 42` are from Cobbe et al. 2021 (arXiv:2110.14168), \\boxed{42} from MATH, Hendrycks et al.
2021 (arXiv:2103.03874), the <think> format from DeepSeek-R1 (arXiv:2501.12948).
"""

import glob
import json
import math
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from configurator import MODES, named_arguments, require
from onecurve.algorithms.curriculum import learnable_rows
from onecurve.algorithms.pairs import sides, with_wrong_sum
from onecurve.keys.prompts import SUMS, sources_of
from onecurve.keys.seeds import seed_of
from onecurve.run.own import describe, find_function, left_alone, parameters_of, run_of
from sync import content_hash, reason

# ------------------------------------------------------------------------------------------------------------------
# the rows of data sets


def load_sources(config, scored_by={}):
    """
    ({source: training rows}, held-out rows of all sources): `load_rows`, and with names a row says its source.
    scored_by: {source: its reward}; where that reads rows, or with an agent, "columns" has a row as it is in the data
    set.
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
    there = not size or held_out is None or len(held_out)
    require(there, f"eval_split={config['eval_split']!r}: has no rows; use another, or --eval_size=0")
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
    sums = re.fullmatch(SUMS, name)
    made_here = sums or name == "programs" or name.startswith("reasoning_gym:")
    for key, default in dict(split="train", eval_split="").items():  # or what is trained on could be held out
        elsewhere = is_own(config[key]) and not (made_here and key == "split")  # where it is not read
        fits = config[key] == default or elsewhere or not (made_here or is_own(name))
        why = f"dataset={name!r} has no splits; use {default!r}, or a file or function with these rows"
        require(fits, f"{key}={config[key]!r}: {why}")
    configuration = config["dataset_config"]
    functions = [x for x in (name, config["split"], config["eval_split"]) if ".py:" in x]
    configured = functions or not (sums or name == "programs" or is_own(name))
    require(configured or not configuration, f"dataset_config={configuration!r}: dataset={name!r} has none; use ''")
    load = partial(load_split, name, configuration)
    held_out = load(config["eval_split"]) if config["eval_split"] else None
    if sums:
        data = arithmetic(*map(int, filter(None, sums.groups())))
        data = [with_wrong_sum(row) for row in data] if MODES[config["mode"]].pairs else data
    elif name == "programs":
        data = resolve_name("onecurve.graders.sandbox:programs")()
    elif made_here:
        data = resolve_name("onecurve.graders.gym:rows")(name, configuration)
    else:
        data = load(config["split"])
    return data, held_out


def arithmetic(low=0, high=100):
    """
    Rows {"prompt": "17+25=", "answer": "42", "a": 17, "b": 25} of all sums of two numbers in [low, high), in their
    order.
    """
    numbers = range(low, high)
    require(len(numbers) <= 2000, f"dataset='arithmetic:{low}:{high}': of {len(numbers)} numbers; use 2000 or less")
    return [dict(prompt=f"{a}+{b}=", answer=str(a + b), a=a, b=b) for a in numbers for b in numbers]


FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # as `datasets` calls their formats


def is_own(name):
    """Whether a data set, or a split, is a file or a function in one."""
    return ".py:" in name or Path(name).suffix in FILES


def load_split(name, configuration, split):
    """
    The rows of a split of a hub data set, or of a file or a function in a file, named by the data set's `name` or by
    `split`. Ends the run with one line if it cannot be read.
    """
    for made_by in (split, name):
        if ".py:" in made_by:
            try:
                rows = list(find_function(made_by, "data set")(**named_arguments(configuration)))
                if not all(isinstance(row, dict) and all(isinstance(key, str) for key in row) for row in rows):
                    raise ValueError("wants rows that are dicts, such as {'prompt': '1+2=', 'answer': '3'}")
                return rows
            except (Exception, SystemExit) as e:
                require(False, f"dataset={made_by!r}: {e if isinstance(e, ValueError) else describe(e)}")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is ours to tell, in one line
    name = split if Path(split).suffix in FILES else name
    kind = FILES.get(Path(name).suffix)
    require(kind or not Path(name).is_file(), f"dataset={name!r}: a file, but not one of {', '.join(FILES)}")
    there = not kind or Path(name).is_file() and Path(name).stat().st_size
    require(there, f"dataset={name!r}: no such file, or an empty one")
    if kind == "json":
        with open(name, "rb") as file:
            null = re.match(rb"[\s\[\xef\xbb\xbf]*null", file.read(99))
        require(not null, f"dataset={name!r}: its first row is null")  # a segmentation fault of pyarrow's
    try:
        if kind:
            rows = datasets.load_dataset(kind, data_files=glob.escape(name), split="train")
            rows.data.validate(full=True)  # of texts that are not UTF-8 it raises, as their rows would later
            return rows
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as e:
        for i, line in enumerate(Path(name).read_bytes().split(b"\n") if name.endswith(".jsonl") else (), 1):
            try:
                json.loads(line or b"{}")
            except ValueError as broken:
                require(False, f"dataset={name!r}: line {i}: {getattr(broken, 'msg', broken)}")
        require(False, f"dataset={name!r}: cannot load split {split!r}: {reason(kind and e.__cause__ or e)}")


def row_of(example, config):
    """The row of a data set's example. Its prompt is a text, or with chat_template a list of messages."""
    column = config["prompt_column"]
    prompt = cell(example, column)
    if template := config["prompt_template"]:
        try:
            prompt = template.format(**example)
        except (LookupError, ValueError, AttributeError, TypeError) as e:
            problem = f"{type(e).__name__}: {e}; the data set has the columns {', '.join(sorted(example))}"
            problem += "; a brace that is text is {{ or }}"
            require(False, f"prompt_template={template!r}: {problem}")
    messages = isinstance(prompt, list) and prompt and all(is_message(x) for x in prompt)
    cure = "--chat_template, for a list of messages" if messages else "a column of texts, or of lists of messages"
    fits = isinstance(prompt, (str, int, float)) or messages and config["chat_template"]
    require(fits, f"prompt_column={column!r}: no text: {prompt!r:.60}; use {cure}")
    row = {}
    if config["agent"]:  # it gets all columns, as its rollout file keeps them, and no field of ours
        try:
            row["columns"] = json.loads(json.dumps(example))
        except (TypeError, ValueError) as e:
            require(False, f"agent={config['agent']!r}: a column for prompt {prompt!r:.60}: {e}; leave it out")
    elif config.get("reads_row"):
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
    if config["agent"]:
        row["columns"] |= dict(prompt=row["prompt"], answer=row["answer"])
    return row


def cell(example, column):
    """A row's value in a column, or in a field of one, such as 'reward_model.ground_truth'; None if it has none."""
    if column in example:
        return example[column]
    first, _, rest = column.partition(".")
    return cell(example[first], rest) if isinstance(example.get(first), dict) else None


def is_message(x):
    return isinstance(x, dict) and isinstance(x.get("role"), str) and isinstance(x.get("content"), str)


# ------------------------------------------------------------------------------------------------------------------
# their prompts as tokens


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
            try:
                row["prompt_text"] = tokenizer.apply_chat_template(messages, **options)
            except Exception as e:  # a template may raise anything
                require(False, f"chat_template=True: for prompt {row['prompt']!r:.60}: {reason(e)}")
    ids = prompt_ids([*map(text_of, rows)], tokenizer, config)
    return with_ids(rows, "prompt_tokens", ids, "max_prompt_tokens", f"{what} prompts", config)


def prompt_ids(prompts, tokenizer, config):
    """The ids of each prompt; a chat template has written its special tokens itself, so none are added to it."""
    return tokenizer(prompts, add_special_tokens=not config["chat_template"])["input_ids"] if prompts else []


def text_of(row):
    """A row's prompt as the model reads it: with chat_template the template's text."""
    return row.get("prompt_text", row["prompt"])


def with_ids(rows, field, ids, key, what, config):
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


# ------------------------------------------------------------------------------------------------------------------
# their order


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
            chosen = learnable_rows(right, c.curriculum, c.group_size, share, chance(*key, step))
        places += [(name, i) for i in chosen]
    return places


def rows_of_step(n, per_step, step, *key):
    """
    Indices of the rows of a step: the data in a new order every epoch, epochs end to end. A function of the step's
    number, so there is no iterator to save.
    """
    places = (divmod(step * per_step + i, n) for i in range(per_step))
    return [permutation(n, *key, epoch)[place] for epoch, place in places]


@lru_cache(maxsize=2)
def permutation(n, *key):
    """A random order of 0 .. n-1, drawn from a hash of the key."""
    return torch.randperm(n, generator=chance(*key)).tolist()


def chance(*key):
    """A generator of random numbers that follow from a hash of the key."""
    return torch.Generator().manual_seed(int(content_hash(key), 16) % 2**63)


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


def exact_value(number):
    """The exact value of a NUMBER match: 42, 42.0 and 84/2 are equal. None if it divides by 0 or is too long."""
    sign, top, bottom = (part.replace(",", "") for part in number.groups(default=""))
    if len(number[0]) > LENGTH_MAX or (bottom and not Fraction(bottom)):
        return None
    return Fraction(sign + top) / Fraction(bottom or 1)


def _plain(text):
    """`text` with LaTeX's fractions and thousands and the typographic minus written as NUMBER reads them."""
    return FRAC.sub(r"\1/\2", text.replace("\u2212", "-").replace("{,}", ","))


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
# from a config's string to a function


class Reward(NamedTuple):
    """A reward function, and what else a run must know about it."""

    call: Callable  # (prompt, response, answer) -> float, or (float, notes)
    reads: Callable = str  # raises ValueError for an answer that the function cannot read
    waits: bool = False  # for another process or machine: samples are scored side by side
    model: object = None  # a reward model: it scores all samples of a prompt in one pass
    own: bool = False  # the user's: its prompt is the one in the data
    wants: frozenset = frozenset()  # those of `row` and `prompt_text` that are parameters of the user's function


BUILT_IN = {  # a Reward, or the function that makes it of the config
    "exact": Reward(exact),
    "format": Reward(format),
    "numeric": Reward(numeric, reads=expected_number),
    "code": "onecurve.graders.sandbox:make",
    "judge": "onecurve.graders.judges:make_judge",
    "math": "onecurve.graders.judges:make_math",
    "reasoning_gym": "onecurve.graders.gym:make",
}
ONE_AT_A_TIME = threading.Lock()
MOST = torch.finfo(torch.float32).max  # a group's rewards are float32


@dataclass
class WeightedSum:
    """The reward of a source of data: called, it returns (the sum, {term: {"reward": number, ..}})."""

    terms: list  # of (weight, name, Reward)

    def __call__(self, prompt, response, answer, written=None, row=None):
        """prompt: as the model reads it; written: as it is in the data, which a function of the user's gets."""
        more = dict(row=row, prompt_text=prompt)
        noted = {}
        summands = []
        for weight, name, reward in self.terms:
            shown = written if reward.own and written is not None else prompt
            value, notes = verdict(reward.call(shown, response, answer, **{x: more[x] for x in reward.wants}), name)
            summands.append(weight * value)
            noted[name] = {**notes, "reward": value}
        return math.fsum(summands), noted  # it rounds once, at the end; sum() gives other bits in Python 3.12

    @property
    def waits(self):
        return any(reward.waits for _, _, reward in self.terms)

    @property
    def reads_row(self):
        return any("row" in reward.wants for _, _, reward in self.terms)


def load_reward(spec, config={}):
    """
    The WeightedSum for `spec` (see `terms_of`). A file is looked up in the working directory, then beside this file; a
    path cannot contain + or *. config: the run's. Ends the run with one line if there is no such function, or if
    something that it needs is missing.
    """
    try:
        return WeightedSum([(weight, name, find_reward(name, config)) for weight, name in terms_of(spec)])
    except ValueError as error:
        require(False, f"reward={spec!r}: {error}")


def find_reward(name, config):
    """The Reward of this name. Raises ValueError, with a cure, if there is none or it lacks what it needs."""
    if name.startswith("model:"):
        return resolve_name("onecurve.graders.judges:make_model")(name.removeprefix("model:"), config)
    found = BUILT_IN.get(name) or own_reward(name, config)
    return resolve_name(found)(config) if isinstance(found, str) else found


def own_reward(name, config):
    """The Reward of a function in the user's file. One thread at a time calls it: it need not be thread-safe."""
    function = find_function(name, "reward", BUILT_IN)

    def call(*texts, **more):
        with ONE_AT_A_TIME, run_of(config), left_alone():
            return function(*texts, **more)

    return Reward(call, own=True, wants={"row", "prompt_text"} & {*parameters_of(function)})


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


# ------------------------------------------------------------------------------------------------------------------
# calls


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is no finite number. The message is one line."""


def score_all(reward, row, samples):
    """The results of `score` for a row's samples [(response, where)]; a reward model sees them all at once."""
    prompt = text_of(row)
    for _, _, term in reward.terms:
        if term.model:
            term.model.expect([(prompt, response) for response, _ in samples])
    call = partial(reward, written=row["prompt"], row=row.get("columns"))
    return [score(call, prompt, response, row["answer"], where) for response, where in samples]


def score(reward, prompt, response, answer, where):
    """
    reward(prompt, response, answer) as a finite float and a dict of notes, as JSON keeps them. Raises RewardError,
    which names the sample by `where`.
    """
    try:
        value, notes = verdict(reward(prompt, response, answer), "it")
        return value, json.loads(json.dumps(notes))
    except (Exception, SystemExit) as error:  # an exit() in a reward would end the run as if it had succeeded
        raise RewardError(f"reward failed on {where}: {describe(error)}; response {response!r:.80}") from error


def verdict(returned, name):
    """(finite float, notes) of the return value of the function `name`: a number, or a number and a dict of notes."""
    noted = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
    value, notes = returned if noted else (returned, {})
    return finite(value, name), notes


def finite(value, name):
    """The return value of the function `name` as a float. Raises TypeError; for "1.0" too, which float() accepts."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch, of two elements
        number = math.nan
    if not abs(number) <= MOST:  # nan is not
        raise TypeError(f"{name} returned {value!r}, not a finite number of float32")
    return number
