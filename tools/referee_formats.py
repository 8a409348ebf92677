"""
Other systems' samples for tools/referee.py: JSON lines of our own, and what TRL, vLLM, prime-rl, verl and slime write
(docs/referee.md). Nothing is unpickled. No tool by itself.

The names are those of TRL's GRPOTrainer._generate_and_score_completions; vLLM's RequestOutput and CompletionOutput
(vllm/outputs.py) and its OpenAI server with return_token_ids; prime-rl's trainer/rl/token_export.py, whose columns are
of the whole sequence; verl's DataProto, from trainer/ppo/ray_trainer.py; slime's Sample (slime/utils/types.py) and its
training data (slime/observability/train_data_utils.py), whose columns are of the response.
"""

import json
import math
from types import SimpleNamespace

import runs  # noqa: F401 (it lets the files of the root be imported)
from safetensors.torch import load_file

from configurator import fail, require

NAMES = {  # our name of a column: theirs
    "prompt_ids": "prompt_token_ids prompts",
    "response_ids": "completion_ids responses",
    "tokens": "input_ids token_ids",  # prompt and response
    "logprobs": "sampling_per_token_logps rollout_log_probs inference_logprobs",
    "trainer_logprobs": "old_per_token_logps old_log_probs log_probs",
    "mask": "completion_mask response_mask loss_mask loss_masks",
    "advantage": "advantages",
    "reward": "rewards score",
    "response_length": "response_lengths",
}
PER_TOKEN = dict(logprobs=math.nan, trainer_logprobs=math.nan, mask=1, turn=0, advantage=None)  # where not given
WANTED = "JSON lines or safetensors, with prompt_ids and response_ids, or other names for them; no pickles (.pt)"


def unpacked(row):
    """The samples in an object: of a request or a dump with several, of a batch in columns, or the one that it is."""
    inner = row.get("outputs") or row.get("choices") or row.get("samples")
    for one in inner or ():
        prompt = dict(prompt_ids=row.get("prompt_token_ids"))
        yield from unpacked(prompt | one | dict(response_ids=one.get("token_ids")))
    if inner:
        return
    row = row | {ours: row[x] for ours, names in NAMES.items() for x in names.split() if row.get(x) is not None}
    ids = row.get("response_ids") or row["tokens"]
    if isinstance(ids[0], list):
        for i in range(len(ids)):
            yield {name: x[i] for name, x in row.items() if isinstance(x, list) and len(x) == len(ids)}
    else:
        yield row


def numbers(column):
    """The numbers in an endpoint's logprobs, in vLLM's [{token: {logprob}}], in TRL's [[the best]]; nan for null."""
    if isinstance(column, dict):
        column = column.get("token_logprobs") or column["content"]
    found = []
    for x in column:
        while isinstance(x, (dict, list)):
            x = x[0] if isinstance(x, list) else x.get("logprob", next(iter(x.values())))
        found.append(math.nan if x is None else x)
    return found


def sample_of(row):
    """A sample: prompt, response, and PER_TOKEN without padding."""
    row = dict.fromkeys([*NAMES, *PER_TOKEN]) | row
    tokens = row["tokens"]
    if not row["response_ids"]:
        start = len(tokens) - row["response_length"] if row["response_length"] else row["mask"].index(True)
        row |= dict(prompt_ids=tokens[:start], response_ids=tokens[start:])
    prompt, response = row["prompt_ids"], row["response_ids"]
    there = row.get("attention_mask") or [1] * len(prompt + response)  # verl's
    if "prompt_mask" in row:  # TRL's
        there = row["prompt_mask"] + row["mask"]
    n = sum(there[len(prompt) :])
    for name, default in PER_TOKEN.items():
        if isinstance(row[name], (list, dict)):
            row[name] = numbers(row[name])[-len(response) :][:n]  # prime-rl's are of the prompt, too
            if len(row[name]) < n:
                raise ValueError(f"{n} tokens and {len(row[name])} {name}")
        elif default is not None:
            row[name] = [default] * n
    row |= dict(prompt=[x for x, kept in zip(prompt, there) if kept], response=response[:n])
    wrong = [x for x in row["prompt"] + row["response"] if type(x) is not int or x < 0]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no token")
    columns = [row[name] for name in PER_TOKEN if isinstance(row[name], list)]
    wrong = [x for column in columns for x in column if not isinstance(x, (int, float))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no number")
    return SimpleNamespace(**row)


def objects(path):
    """The objects in a file."""
    if path.suffix == ".safetensors":
        return [{name: x.tolist() for name, x in load_file(path).items() if x.dim()}]
    lines = map(json.loads, path.read_text().splitlines())
    return [row for line in lines for row in (line if isinstance(line, list) else [line])]


def read(path):
    """The samples in a file or folder. Ends the process with one line if it cannot be read or has none."""
    files = [x for x in sorted(path.rglob("*")) if x.suffix in (".jsonl", ".json", ".safetensors")]
    found = []
    for file in files if path.is_dir() else [path]:
        try:
            for packed in objects(file):
                found += map(sample_of, unpacked(packed))
        except Exception as e:  # whatever a stranger's file may lead to
            fail(f"{path}: wants {WANTED}: {type(e).__name__} in {file.name} after {len(found)} samples: {e}")
    found = [s for s in found if s.prompt and s.response]
    require(found, f"{path}: no samples in it; wants {WANTED}")
    return found
