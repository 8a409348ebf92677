"""
Other systems' samples for tools/referee.py: JSON lines of our own, and what TRL, vLLM, prime-rl, verl and slime write
(docs/referee.md). Nothing is unpickled. No tool by itself.
"""

import json
from types import SimpleNamespace

import runs  # noqa: F401 (it lets the files of the root be imported)
from safetensors import SafetensorError
from safetensors.torch import load_file

from configurator import fail, require

NAMES = {  # our name of a column: those of TRL, vLLM, verl, slime and prime-rl
    "prompt_ids": ("prompt_token_ids", "prompts"),
    "response_ids": ("completion_ids", "completion_token_ids", "responses"),
    "tokens": ("input_ids", "token_ids"),  # prompt and response
    "logprobs": ("sampling_per_token_logps", "rollout_log_probs", "inference_logprobs"),
    "trainer_logprobs": ("old_per_token_logps", "old_log_probs"),
    "mask": ("completion_mask", "response_mask", "loss_mask"),
    "advantage": ("advantages",),
    "reward": ("rewards", "score"),
}
PER_TOKEN = ("logprobs", "trainer_logprobs", "mask", "turn")


def unpacked(row):
    """The samples in an object: of a request with several outputs, of a batch in columns, or the one that it is."""
    outputs = row.get("outputs") or row.get("choices")
    for output in outputs or ():
        ids = dict(prompt_ids=row.get("prompt_token_ids") or output["prompt_token_ids"])
        yield from unpacked(output | ids | dict(response_ids=output.get("token_ids"), token_ids=None))
    if outputs:
        return
    row = row | {ours: row[name] for ours, names in NAMES.items() for name in names if row.get(name) is not None}
    ids = row.get("response_ids") or row["tokens"]
    if isinstance(ids[0], list):
        for i in range(len(ids)):
            yield {name: x[i] for name, x in row.items() if isinstance(x, list) and len(x) == len(ids)}
    else:
        yield row


def numbers(column):
    """The numbers in an OpenAI endpoint's logprobs, in vLLM's [{token: {logprob}}], in TRL's [[the best]]."""
    if isinstance(column, dict):
        column = column.get("token_logprobs") or column["content"]
    found = []
    for x in column:
        while isinstance(x, (dict, list)):
            x = x[0] if isinstance(x, list) else x.get("logprob", next(iter(x.values())))
        found.append(0.0 if x is None else x)
    return found


def sample_of(row):
    """A sample: prompt, response, and PER_TOKEN without padding, None if not given."""
    row = dict.fromkeys([*NAMES, "turn"]) | row
    tokens, mask = row["tokens"], row["mask"]
    if tokens and not row["response_ids"]:
        start = mask.index(True)  # prime-rl: all columns are of the whole sequence
        if "response_length" in row:  # slime: they are of the response
            start = len(tokens) - row["response_length"]
        else:
            row |= {name: row[name][start:] for name in PER_TOKEN if row[name]}
        row |= dict(prompt_ids=tokens[:start], response_ids=tokens[start:])
    prompt, response = row["prompt_ids"], row["response_ids"]
    there = [1] * len(prompt + response)
    if "attention_mask" in row:  # verl
        there = row["attention_mask"]
    elif "prompt_mask" in row:  # TRL
        there = row["prompt_mask"] + mask
    n = max([i for i, x in enumerate(there[len(prompt) :], 1) if x], default=0)
    for name in PER_TOKEN:
        if row[name]:
            row[name] = numbers(row[name])[:n]
            if len(row[name]) < n:
                raise ValueError(f"{n} tokens and {len(row[name])} {name}")
    row |= dict(prompt=[x for x, kept in zip(prompt, there) if kept], response=response[:n])
    return SimpleNamespace(**row)


def objects(path):
    """(an object, where it stands) of a file, or of all in a folder."""
    if path.is_dir():
        for inside in sorted(path.rglob("*")):
            if inside.suffix in (".jsonl", ".json", ".safetensors"):
                yield from objects(inside)
    elif path.suffix == ".safetensors":
        yield {name: x.tolist() for name, x in load_file(path).items() if x.dim()}, path
    else:
        text = path.read_text()
        for i, line in enumerate(text.splitlines() if path.suffix == ".jsonl" else [text], 1):
            rows = json.loads(line)
            for row in rows if isinstance(rows, list) else [rows]:
                yield row, f"{path}, line {i}"


def read(path):
    """The samples in a file or folder. Ends the process with one line if it cannot be read or has none."""
    found, where = [], path
    wanted = "JSON lines or safetensors, with prompt_ids and response_ids, or other names for them; no pickles (.pt)"
    try:
        for packed, where in objects(path):
            found += [sample_of(row) for row in unpacked(packed)]
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, AttributeError) as e:
        fail(f"{where}: wants {wanted}: {type(e).__name__}: {e}")
    found = [s for s in found if s.prompt and s.response]
    require(found, f"{path}: no samples in it")
    return found
