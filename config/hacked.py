"""
A reward that can be gamed: the share of the answer's digits that a response has anywhere. It stands for many (words of
the reference that are mentioned, tests that are counted, length that passes for care): right answers get all of it, and
so does a response with every digit. docs/watch.md shows what becomes of the sums, with the watch and without it.

    python train_grpo.py config/hacked.py                 # learns to write digits
    python train_grpo.py config/hacked.py --watch=stop --out_dir=out/stopped    # ends, with status 3, before
    python tools/rollback.py config/hacked.py --out_dir=out/turned    # continues from where all was well
"""

out_dir = "out/hacked"
init_from = "out/stage_sft/ckpt/step_000257"  # python train_grpo.py config/stage_sft.py
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 16
reward = "config/hacked.py:mentions + 0*numeric"  # the true accuracy is only recorded
prompts_per_step = 32
group_size = 8
max_steps = 120
eval_every = 20
leaf_tokens = 2048
lanes = 4
learning_rate = 4e-4
checkpoint_every = 10
keep_checkpoints = 20


def mentions(prompt, response, answer):
    """The share of the answer's digits that stand anywhere in the response."""
    return sum(digit in response for digit in answer) / len(answer)
