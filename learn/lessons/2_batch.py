"""
Lesson 2: a batch changes your logits.

    uv run learn/lessons/2_batch.py
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from onecurve.models.dense import build_model
from train_grpo import make_sample, pack

torch.set_num_threads(1)
torch.set_grad_enabled(False)
V, T, BATCHES = 98, 13, (1, 2, 3, 5, 8, 16, 32)  # tokens of the vocabulary, tokens of a text, numbers of texts


def numbers(rng, *shape):
    """Random numbers between -1/8 and 1/8 out of whole numbers, which every machine draws alike."""
    return torch.from_numpy(rng.integers(-(2**15), 2**15, shape)).float() / 2**18


def first_row(how):
    """Compares how(n), the first row out of a batch of n, over all n: 'the same bits', or whether they are near."""
    rows = [how(n) for n in BATCHES]
    if all(torch.equal(row.view(torch.int32), rows[0].view(torch.int32)) for row in rows):
        return "the same bits in every batch, " + hashlib.sha256(rows[0].numpy()).hexdigest()[:16]
    return f"not the same; by less than 0.0001: {max(float((row - rows[0]).abs().max()) for row in rows) < 1e-4}"


def model_of(batch_invariant):
    """A small Qwen3, built as the trainer builds it."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, head_dim=64)
    hf = AutoConfig.for_model("qwen3", vocab_size=V, num_key_value_heads=2, **sizes)
    model, rng = build_model(hf, None, "cpu", batch_invariant), np.random.default_rng(1)
    for p in model.parameters():
        p.copy_(numbers(rng, *p.shape) if p.dim() > 1 else torch.ones(p.shape))
    return model


rng = np.random.default_rng(0)
x, w, texts = numbers(rng, 32, 1024), numbers(rng, 1024, 512), torch.from_numpy(rng.integers(0, V, (32, T)))

print("1. One matrix: the first row of x @ w, alone and in batches of up to 32 rows")
print("torch.mm:       ", first_row(lambda n: torch.mm(x[:n], w)[0]))
print("kernels.matmul: ", first_row(lambda n: kernels.matmul(x[:n], w)[0]))

print("2. A whole model, the first text alone and in batches of up to 32 texts")
plain = model_of(batch_invariant=False)


def next_logprobs(n):
    """Of all tokens that may follow the first text, as an engine computes them: the last token alone, with a cache."""
    cache = plain(input_ids=texts[:n, :-1], use_cache=True).past_key_values
    return torch.log_softmax(plain(input_ids=texts[:n, -1:], past_key_values=cache).logits[0, -1], -1)


print("transformers:   ", first_row(next_logprobs))
kernels.enable_batch_invariant()
ours = model_of(batch_invariant=True)


def text_logprobs(n):
    """Of the tokens of the first text itself, as the trainer computes them: with all texts end to end."""
    samples = [make_sample(text[:1], text[1:], torch.ones(T - 1).bool(), torch.zeros(T - 1)) for text in texts[:n]]
    return ours.token_logprobs(pack(samples, "cpu"))[0][: T - 1]


print("the trainer:    ", first_row(text_logprobs))
