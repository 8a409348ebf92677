"""
Other systems' samples for tools/referee.py: JSON lines of our own, and what TRL, vLLM, prime-rl, verl and slime write
(docs/referee.md). Nothing is unpickled. No tool by itself.
"""

import json
import types

import runs  # noqa: F401 (it lets the files of the root be imported)

from configurator import fail, require

# our name of a column: theirs. TRL, vLLM, verl, slime, prime-rl
NAMES = {
    "prompt_ids": ("prompt_token_ids", "prompts"),
    "response_ids": ("completion_ids", "completion_token_ids", "output_ids", "responses"),
    "tokens": ("input_ids", "token_ids"),
    "logprobs": ("sampling_per_token_logps", "rollout_log_probs", "inference_logprobs", "completion_logprobs"),
    "trainer_logprobs": ("old_per_token_logps", "old_log_probs", "train_log_probs"),
    "mask": ("completion_mask", "response_mask", "loss_mask"),
    "advantage": ("advantages",),
    "reward": ("rewards", "score"),
}
PER_TOKEN = ("logprobs", "trainer_logprobs", "mask", "turn", "advantage")


def renamed(row):
    return {ours: row[name] for ours, names in NAMES.items() for name in (*names, ours) if row.get(name) is not None}


def values(logprobs):
    """Numbers of an OpenAI endpoint's logprobs, of vLLM's {token: {logprob}} or of lists of the best."""
    if isinstance(logprobs, dict):
        logprobs = logprobs.get("token_logprobs") or logprobs.get("content")
    while logprobs and not isinstance(logprobs[0], (int, float)):
        first = [x if isinstance(x, list) else [x.get("logprob", x)] if "logprob" in x else [*x.values()] for x in logprobs]
        logprobs = [x[0] for x in first]
    return logprobs


def unpacked(row):
    """The samples of one JSON object: of a batch of them, of a request with several outputs, or the one that it is."""
    for child in row.get("outputs") or row.get("choices") or ():
        own = {"response_ids": child.get("token_ids")} | child
        yield from unpacked({"prompt_ids": row.get("prompt_token_ids")} | {k: v for k, v in own.items() if v})
    if row.get("outputs") or row.get("choices"):
        return
    more = {k: row[k] for k in ("turn", "prompt_mask", "attention_mask", "response_length", "group") if k in row}
    row = renamed(row) | more
    if isinstance((row.get("response_ids") or row.get("tokens") or [0])[0], list):  # columns of a batch
        size = len(row.get("response_ids") or row["tokens"])
        columns = {k: x for k, x in row.items() if isinstance(x, list) and len(x) == size}
        for i in range(size):
            yield from unpacked({k: x[i] for k, x in columns.items()})
        return
    yield row


def sample_of(row, where):
    """A sample as a namespace, its tokens without padding. where: for the error line."""
    tokens, response = row.get("tokens"), row.get("response_ids")
    mask = row.get("mask")
    if tokens and "response_length" in row:  # slime
        row |= dict(prompt_ids=tokens[: -row["response_length"]], response_ids=tokens[-row["response_length"] :])
    elif tokens and not response and mask and any(mask):  # prime-rl: columns of the whole sequence
        first = mask.index(True) if True in mask else mask.index(1)
        row |= dict(prompt_ids=tokens[:first], response_ids=tokens[first:])
        row |= {k: row[k][first:] for k in PER_TOKEN if isinstance(row.get(k), list)}
    prompt, response = row.get("prompt_ids"), row.get("response_ids")
    require(prompt and response, f"{where}: no prompt_ids and response_ids, nor names that are known for them")
    padded = row.get("attention_mask") or [*row.get("prompt_mask", [1] * len(prompt)), *[1] * len(response)]
    prompt = [x for x, there in zip(prompt, padded) if there]
    if "attention_mask" in row:
        kept = padded[-len(response) :]
    else:
        kept = mask if row.get("prompt_mask") and mask else [1] * len(response)
    n = max((i + 1 for i, there in enumerate(kept) if there), default=0)
    sample = dict.fromkeys((*PER_TOKEN, "reward", "group")) | row | dict(prompt=prompt, response=response[:n], extra=None)
    for name in PER_TOKEN:
        if isinstance(sample[name], (list, dict)):
            column = values(sample[name])
            if name == "logprobs" and len(column) == n + 1:
                sample["extra"] = column[n]
            require(len(column) >= n, f"{where}: {n} response tokens and {len(column)} {name}; one per token is needed")
            sample[name] = [0.0 if x is None else x for x in column[:n]]
    return types.SimpleNamespace(**sample)


def objects(path):
    """(a JSON object or columns, where it stands) of all in a file or folder."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".json", ".safetensors"))
        require(inside, f"{path}: no .jsonl, .json or .safetensors file in it")
        for p in inside:
            yield from objects(p)
    elif path.suffix in (".pt", ".pkl", ".pickle", ".bin"):
        fail(f"{path}: reading a pickle runs what is in it; write its rows as JSON lines in your own environment")
    elif path.suffix == ".safetensors":
        yield from of_safetensors(path)
    else:
        try:
            text = path.read_text()
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        except (OSError, ValueError) as e:
            fail(f"{path}: {getattr(e, 'strerror', None) or 'not a text of JSON'}")
        for i, line in enumerate(lines, 1):
            try:
                read = json.loads(line) if line.strip() else []
            except ValueError as e:
                fail(f"{path}, line {i}: not JSON: {e}")
            for row in read if isinstance(read, list) else [read]:
                require(isinstance(row, dict), f"{path}, line {i}: {row!r:.40}: not a JSON object")
                yield row, f"{path}, line {i}"


def of_safetensors(path):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        columns = load_file(path)
    except (SafetensorError, OSError) as e:
        fail(f"{path}: not a safetensors file: {e}")
    if "prompt_tokens" in columns:  # a rollout file of ours
        lengths = columns["lengths"].tolist()
        parts = {k: columns[k].split(lengths) for k in ("tokens", "logprobs", "loss_mask")}
        prompt = columns["prompt_tokens"].tolist()
        for i, response in enumerate(parts.pop("tokens")):
            row = {k: x[i].tolist() for k, x in parts.items()}
            reward = float(columns["rewards"][i]) if len(columns["rewards"]) == len(lengths) else None
            yield row | dict(prompt_ids=prompt, response_ids=response.tolist(), reward=reward, group=str(path)), str(path)
    else:
        yield {k: x.tolist() for k, x in columns.items() if x.dim()}, str(path)


def read(path):
    """The samples of a file or a folder; ends the process with one line if there are none."""
    require(path.exists(), f"{path}: no such file or folder")
    samples = [sample_of(row, where) for whole, where in objects(path) for row in unpacked(whole)]
    samples = [s for s in samples if s.response]
    require(samples, f"{path}: no samples in it")
    return samples
