"""
Other systems' samples for tools/referee.py: JSON lines of our own, and what TRL, vLLM, prime-rl, verl and slime write
(docs/referee.md). Nothing is unpickled. No tool by itself.
"""

import json
import types

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
PER_TOKEN = ("logprobs", "trainer_logprobs", "mask", "turn", "advantage")


def numbers(column):
    """The numbers in an OpenAI endpoint's logprobs, in vLLM's [{token: {logprob}}], in TRL's [[the best]]."""
    if isinstance(column, dict):
        column = column.get("token_logprobs") or column.get("content") or []
    found = []
    for x in column:
        while isinstance(x, (dict, list)):
            x = x[0] if isinstance(x, list) else x.get("logprob", next(iter(x.values())))
        found.append(0.0 if x is None else x)
    return found


def unpacked(row):
    """The samples in an object: of a request with several outputs, of a batch in columns, or the one that it is."""
    for output in row.get("outputs") or row.get("choices") or ():
        known = dict(prompt_ids=row.get("prompt_token_ids"), response_ids=output.get("token_ids"))
        yield from unpacked(known | {k: x for k, x in output.items() if k != "token_ids" and x})
    if row.get("outputs") or row.get("choices"):
        return
    row = row | {ours: row[name] for ours, names in NAMES.items() for name in names if row.get(name) is not None}
    ids = row.get("response_ids") or row.get("tokens") or [0]
    if not isinstance(ids[0], list):
        yield row
        return
    for i in range(len(ids)):
        yield {k: x[i] for k, x in row.items() if isinstance(x, list) and len(x) == len(ids)}


def sample_of(row, where):
    """A sample: prompt, response, and PER_TOKEN without padding, None if not given. where: for the error line."""
    tokens, mask = row.get("tokens"), row.get("mask")
    if tokens and "response_ids" not in row:
        start = 0
        if "response_length" in row:  # slime: other columns are of the response
            start = len(tokens) - row["response_length"]
        elif mask and any(mask):  # prime-rl: all columns are of the whole sequence
            start = [*map(bool, mask)].index(True)
            row = row | {k: row[k][start:] for k in PER_TOKEN if isinstance(row.get(k), list)}
        row = row | dict(prompt_ids=tokens[:start], response_ids=tokens[start:])
    prompt, response = row.get("prompt_ids"), row.get("response_ids")
    require(prompt and response is not None, f"{where}: no prompt_ids and response_ids, nor other names for them")
    there = [1] * (len(prompt) + len(response))
    if "attention_mask" in row:  # verl
        there = row["attention_mask"]
    elif "prompt_mask" in row:  # TRL
        there = row["prompt_mask"] + mask
    last = [i for i, x in enumerate(there[len(prompt) :], 1) if x]
    n = last[-1] if last else 0
    sample = dict.fromkeys((*PER_TOKEN, "reward")) | row
    for name in PER_TOKEN:
        if isinstance(sample[name], (list, dict)):
            column = numbers(sample[name])
            require(
                len(column) >= n, f"{where}: {n} tokens in the response and {len(column)} {name}; one each is needed"
            )
            sample[name] = column[:n]
    sample |= dict(prompt=[x for x, kept in zip(prompt, there) if kept], response=response[:n])
    return types.SimpleNamespace(**sample)


def objects(path):
    """(an object, where it stands) of a file, or of all in a folder."""
    if path.is_dir():
        for inside in sorted(path.rglob("*")):
            if inside.suffix in (".jsonl", ".json", ".safetensors"):
                yield from objects(inside)
        return
    cure = "neither JSON lines nor safetensors; pickles (.pt) are not opened: write their rows as JSON lines"
    if path.suffix == ".safetensors":
        try:
            yield {k: x.tolist() for k, x in load_file(path).items() if x.dim()}, str(path)
        except (SafetensorError, OSError) as e:
            fail(f"{path}: {e}")
        return
    try:
        text = path.read_text()
    except (OSError, ValueError):
        fail(f"{path}: {cure}")
    for i, line in enumerate(text.splitlines() if path.suffix == ".jsonl" else [text], 1):
        try:
            rows = json.loads(line)
        except ValueError:
            fail(f"{path}, line {i}: {cure}")
        for row in rows if isinstance(rows, list) else [rows]:
            require(isinstance(row, dict), f"{path}, line {i}: not an object of JSON")
            yield row, f"{path}, line {i}"


def read(path):
    """The samples in a file or folder. Ends the process with one line if there are none."""
    require(path.exists(), f"{path}: no such file or folder")
    found = [sample_of(row, where) for packed, where in objects(path) for row in unpacked(packed)]
    found = [s for s in found if s.response]
    require(found, f"{path}: no samples in it")
    return found
