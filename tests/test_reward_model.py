"""
A reward model: Bradley-Terry's loss, the runs that train one, its scores, and runs that are rewarded by them.

    pytest tests/test_reward_model.py
"""

import json
import math
import random
import shutil
import signal
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import digest, error_line, finish, launch_warm
from safetensors.torch import load_file
from trials import killed_in_step_13, lines, replay_of

import rewards
import train_grpo as train
from onecurve.algorithms.answers import encode_answers
from onecurve.algorithms.pairs import evaluate_pairs, preference_loss
from onecurve.algorithms.supervised import ANSWERS, PAIRS, supervised_samples
from onecurve.graders import checks
from onecurve.graders.judges import RewardModel
from onecurve.models import folders
from onecurve.models.dense import check_model
from onecurve.models.folders import make_scratch_model
from rollout_server import RolloutEngine
from sync import Ranks, RunError

DEFAULTS = train.DEFAULTS | dict(
    scratch_args="num_hidden_layers=2, hidden_size=64, intermediate_size=128", lanes=4, leaf_tokens=40
)
CONFIG = DEFAULTS | dict(mode="rm")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(folder, DEFAULTS)
    return folder


@pytest.fixture(scope="module")
def judge(scratch, tmp_path_factory):
    """The folder of a reward model with a head of random numbers, as Hugging Face writes it."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("judge")
    shutil.copytree(scratch, folder, dirs_exist_ok=True)
    model = AutoModelForSequenceClassification.from_pretrained(scratch, num_labels=1)
    model.score.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def our_operators():
    train.kernels.enable_batch_invariant()
    yield
    train.kernels.disable_batch_invariant()


def make_trainer(mesh, folder, **change):
    c = types.SimpleNamespace(**CONFIG | change)
    return train.Trainer(c, Ranks(0, 1, 1, 0, mesh, None), check_model(folder, vars(c)), folder, "cpu")


def make_pairs(n):
    """2n samples of random tokens, a pair's with one prompt; 3 to 30 tokens each."""
    rng = random.Random(0)
    rows = []
    for _ in range(n):
        lengths = rng.randrange(1, 15), rng.randrange(2, 16), rng.randrange(2, 16)
        prompt, chosen, rejected = ([rng.randrange(2, 98) for _ in range(length)] for length in lengths)
        rows.append(dict(prompt_tokens=prompt, chosen_tokens=chosen, rejected_tokens=rejected))
    return supervised_samples(rows, types.SimpleNamespace(**CONFIG), train.make_sample)


def read_head(trainer, folder):
    """Gives the trainer the head of a reward model: training begins with zeros."""
    trainer.model.score.weight.detach().copy_(load_file(folder / "model.safetensors")["score.weight"])
    return trainer


# ---- the loss


def test_the_loss_and_its_gradient_are_those_of_a_loop_at_any_distance(our_operators):
    margins = [0.0, 0.5, -0.5, 3, -3, 20, -20, 200, -200]
    scores = torch.tensor([x for m in margins for x in (m + 1.5, 1.5)], requires_grad=True)
    losses, margin = preference_loss(scores)
    assert margin.tolist() == margins
    exact = [max(-m, 0) + math.log1p(math.exp(-abs(m))) for m in margins]  # -log sigmoid(m)
    assert losses.tolist() == pytest.approx(exact, rel=1e-6, abs=1e-7)
    losses.sum().backward()
    slope = [-1 / (1 + math.exp(min(m, 700))) for m in margins]
    assert scores.grad[::2].tolist() == pytest.approx(slope, rel=1e-6, abs=1e-30)
    assert torch.equal(scores.grad[1::2], -scores.grad[::2]) and scores.grad[0] == -0.5


def test_a_leaf_without_a_pair_has_no_loss_and_a_gradient_of_zeros(our_operators):
    scores = torch.ones(1, requires_grad=True)  # a FILLER's
    losses, _ = preference_loss(scores)
    losses.sum().backward()
    assert losses.shape == (0,) and scores.grad.tolist() == [0.0]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_scores_loss_and_gradients_are_those_of_plain_transformers(mesh, scratch, judge, batch_invariant):
    """Against float64, through leaves, the sum and our operators."""
    from transformers import AutoModelForSequenceClassification

    if batch_invariant:
        train.kernels.enable_batch_invariant()
    try:
        trainer = read_head(make_trainer(mesh, scratch, batch_invariant=batch_invariant), judge)
        samples = make_pairs(9)
        grads, metrics = trainer.gradients(samples, PAIRS)
        found = []
        evaluated = types.SimpleNamespace(gradients=lambda *args: found.append(trainer.gradients(*args)) or found[0])
        evaluate_pairs(evaluated, PAIRS, 0, samples, None)
        assert found == [(None, metrics)]  # the same figures, and no gradient is asked for
    finally:
        train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64)
    scores = torch.stack([plain(s.tokens[None]).logits[0, 0] for s in samples])
    margin = scores[::2] - scores[1::2]
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    loss.backward()
    loss = loss.detach()
    margin = margin.detach()
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5) and abs(metrics["loss"] - math.log(2)) > 0.1
    assert metrics["margin"] == pytest.approx(float(margin.mean()), abs=1e-5)
    assert metrics["accuracy"] == float((margin > 0).double().mean()) and 0 < metrics["accuracy"] < 1
    for shard, grad in zip(trainer.shards, grads, strict=True):
        expected = plain.get_parameter(shard.name).grad
        largest = float(expected.abs().max())  # sums in float32 are off by parts of their largest summands
        close = torch.allclose(grad.double(), expected, atol=max(1e-6, 1e-6 * largest), rtol=1e-3)
        assert largest > 1e-4 and close, shard.name


def test_training_begins_undecided_and_the_head_moves_first(mesh, scratch, our_operators):
    trainer = make_trainer(mesh, scratch)
    samples = make_pairs(4)
    metrics, hashes = trainer.update(samples, 0, 1e-2, PAIRS)
    assert metrics["loss"] == pytest.approx(math.log(2)) and metrics["margin"] == metrics["accuracy"] == 0
    assert len(set(hashes["gradients"].values())) == 2  # zeros, and the head's
    assert trainer.update(samples, 1, 1e-2, PAIRS)[0]["loss"] < metrics["loss"]


# ---- pairs


def test_a_pair_is_in_one_leaf_chosen_first_and_leaves_keep_their_bound(mesh, scratch, our_operators):
    samples = make_pairs(40)
    trainer = make_trainer(mesh, scratch, leaf_tokens=70)
    with torch.no_grad():
        leaves = [(chosen, len(leaf.ids)) for chosen, leaf, _ in trainer.passes(samples, trainer.model, PAIRS)]
        apart = [chosen for chosen, _, _ in trainer.passes(samples, trainer.model, ANSWERS)]
    assert sorted(i for chosen, _ in leaves for i in chosen) == list(range(80)) and len(leaves) > 8
    for chosen, tokens in leaves:
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(chosen[::2], chosen[1::2], strict=True))
        assert tokens <= 70 or len(chosen) <= 2
    assert any(i ^ 1 not in chosen for chosen in apart for i in chosen)  # answers go anywhere


def test_the_gradient_of_pairs_sees_the_leaves_but_no_empty_lanes(mesh, scratch, judge, our_operators):
    trainer = read_head(make_trainer(mesh, scratch), judge)
    samples = make_pairs(6)
    found = []
    for change in (dict(lanes=1, leaf_tokens=9999), dict(lanes=4, leaf_tokens=9999), dict(lanes=4, leaf_tokens=1)):
        trainer.c = types.SimpleNamespace(**CONFIG | change)
        few = samples if change["leaf_tokens"] == 1 else samples[:2]
        found.append([g.clone() for g in trainer.gradients(few, PAIRS)[0]])
    assert all(torch.equal(a, b) for a, b in zip(*found[:2])) and max(g.abs().max() for g in found[0]) > 1e-3
    trainer.c.leaf_tokens = 9999
    close = trainer.gradients(samples, PAIRS)[0]
    assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-3) for a, b in zip(close, found[2]))
    assert not all(torch.equal(a, b) for a, b in zip(close, found[2]))


def test_sums_are_paired_with_others_of_as_many_digits_in_every_run():
    rows, held_out = rewards.load_rows(CONFIG | dict(dataset="arithmetic:0:50"))
    assert (rows, held_out) == rewards.load_rows(CONFIG | dict(dataset="arithmetic:0:50", seed=2))
    assert rows[0].keys() == {"prompt", "chosen", "rejected"}
    for ours, others in zip((rows, held_out), rewards.load_rows(DEFAULTS | dict(dataset="arithmetic:0:50"))):
        assert [(r["prompt"], r["chosen"]) for r in ours] == [(r["prompt"], r["answer"]) for r in others]
    sides = [zip(row["chosen"], row["rejected"], strict=True) for row in rows + held_out]
    changed = Counter(tuple(a != b for a, b in pair) for pair in sides)
    assert set(changed) == {(True,), (True, False), (False, True), (True, True)}
    assert min(changed[k] for k in changed if len(k) == 2) > 700


# ---- scores


TEXTS = [(f"{a}+{b}=", str(a * b)) for a in range(12) for b in range(9)]


def bits(scores):
    return torch.tensor(scores).view(torch.int32).tolist()


def test_scores_are_those_of_transformers_with_equal_bits_in_any_batch(judge, our_operators):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = RewardModel(judge, DEFAULTS)
    alone = [model(*texts, "") for texts in TEXTS]
    order = random.Random(0).sample(range(len(TEXTS)), len(TEXTS))
    shuffled = dict(zip(order, model._scores([TEXTS[i] for i in order])))
    assert bits(model._scores(TEXTS)) == bits(alone) == bits([shuffled[i] for i in range(len(TEXTS))])
    assert len(set(alone)) > 100
    train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    padded = tokenizer([f"{x}{y}<eos>" for x, y in TEXTS], return_tensors="pt", padding=True)
    assert padded["attention_mask"].min() == 0
    with torch.no_grad():
        assert plain(**padded).logits[:, 0].tolist() == pytest.approx(alone, abs=1e-5)
    torchs_own = RewardModel(judge, DEFAULTS | dict(batch_invariant=False))
    assert bits(torchs_own._scores(TEXTS)) != bits([torchs_own(*texts, "") for texts in TEXTS])  # the control


def test_waiting_texts_are_scored_in_one_pass_equal_ones_once(judge, our_operators):
    model = RewardModel(judge, DEFAULTS)
    batches = []
    alone = model._scores(TEXTS)
    scores = model._scores

    def counted(texts):
        batches.append(len(texts))
        return scores(texts)

    model._scores = counted
    with ThreadPoolExecutor(64) as threads:
        found = list(threads.map(lambda texts: model(*texts, ""), TEXTS * 4))
    assert bits(found) == bits(alone) * 4 and sum(batches) == len(TEXTS) and max(batches) > 8
    model.known = dict.fromkeys(range(10_001))
    assert bits([model(*TEXTS[5], "")]) == bits(alone[5:6]) and len(model.known) == 1  # it forgets


def test_it_is_loaded_before_the_engine_starts(judge, tmp_path, monkeypatch):
    """It was loaded at the first score, when the engine had taken its share of the card and left no room for it."""
    model = RewardModel(judge, DEFAULTS)
    loaded = []
    monkeypatch.setattr("rollout_server.start_engine", lambda *_: loaded.append(model.model is not None) or 1 / 0)
    with pytest.raises(RunError, match="did not start: division by zero"):
        RolloutEngine(0, judge, model.hf, DEFAULTS, "cpu", torch.float32, tmp_path / "engine.log", models=[model])
    assert loaded == [True]


def test_an_error_reaches_all_that_wait(judge, our_operators):
    model = RewardModel(judge, DEFAULTS)
    model._scores = lambda texts: 1 / 0
    with ThreadPoolExecutor(64) as threads:
        calls = [threads.submit(model, *texts, "") for texts in TEXTS]
        assert all(isinstance(call.exception(timeout=30), ZeroDivisionError) for call in calls)


def test_a_model_whose_padding_is_its_eos_is_read_before_it(judge, tmp_path, our_operators):
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(judge, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(pad_token_id=1)))
    ours = RewardModel(tmp_path, DEFAULTS)("1+2=", "3", "")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([RewardModel(judge, DEFAULTS).tokenizer("1+2=3<eos>")["input_ids"]])
    assert plain(ids).logits.item() == pytest.approx(ours, abs=1e-5) != RewardModel(judge, DEFAULTS)("1+2=", "3", "")
    hf = check_model(tmp_path, DEFAULTS, "reward")
    assert hf.pad_token_id == hf.eos_token_id == 1


# ---- what is refused


def refusal(capsys, monkeypatch, run):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as e:
        run()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1
    return err


def test_what_is_no_reward_model_of_the_policys_is_refused_at_the_start(scratch, judge, tmp_path, capsys, monkeypatch):
    from transformers import AutoTokenizer

    def load(spec, **change):
        return refusal(capsys, monkeypatch, lambda: rewards.load_reward(spec, DEFAULTS | change))

    for name in ("two", "bare"):
        shutil.copytree(judge, tmp_path / name)
    config = json.loads((judge / "config.json").read_text())
    two = config | dict(id2label={"0": "bad", "1": "good"}, label2id=dict(bad=0, good=1))
    (tmp_path / "two" / "config.json").write_text(json.dumps(two))
    assert "no such folder': neither a model folder nor" in load("model:no such folder")
    assert f"reward='{scratch}': a language model; a reward model is wanted" in load(f"numeric + 0.5*model:{scratch}")
    assert "two': it gives 2 numbers" in load(f"model:{tmp_path}/two")
    assert "the model has 4096 positions" in load(f"model:{judge}", max_new_tokens=5000)
    for change in (dict(), dict(advantage="distill", reference=str(judge))):
        run = lambda c=change: check_model(judge, DEFAULTS | c)  # noqa: E731
        assert "a reward model, which writes nothing" in refusal(capsys, monkeypatch, run)
    loaded = {"": rewards.load_reward(f"model:{judge} + 0*numeric", DEFAULTS)}
    tokenizer = AutoTokenizer.from_pretrained(scratch)
    checks.check_vocabulary(loaded, tokenizer)
    tokenizer.add_tokens(["<tool>"])
    err = refusal(capsys, monkeypatch, lambda: checks.check_vocabulary(loaded, tokenizer))
    assert f"reward='model:{judge}': of another vocabulary than the policy" in err


def test_a_folder_without_a_head_is_refused_at_the_start(judge, tmp_path, capsys, monkeypatch):
    from safetensors.torch import save_file

    shutil.copytree(judge, tmp_path, dirs_exist_ok=True)
    weights = load_file(judge / "model.safetensors")
    save_file({k: x for k, x in weights.items() if k != "score.weight"}, tmp_path / "model.safetensors")
    err = refusal(capsys, monkeypatch, lambda: RewardModel(tmp_path, DEFAULTS))
    assert f"reward='{tmp_path}': no score.weight in its safetensors files" in err


@pytest.mark.parametrize(
    "row,change,message",
    [
        (dict(rejected="4"), {}, "mode='rm': a pair of prompt '2+2=' has equal sides, '4'; drop"),
        (dict(rejected=["5"]), {}, "rejected_column='rejected': for prompt '2+2=' it is no text but ['5']; use"),
        ({}, dict(chosen_column="best"), "chosen_column='best': the data set has the columns chosen, prompt, rejected"),
        (dict(chosen="4" * 300), {}, "max_new_tokens=256: all 1 chosen texts are longer (or empty)"),
        (None, {}, "pairs.jsonl': no such file, or an empty one"),
    ],
)
def test_pairs_that_are_none_are_refused(scratch, tmp_path, capsys, monkeypatch, row, change, message):
    config = CONFIG | dict(dataset=str(tmp_path / "pairs.jsonl"), eval_size=0) | change
    rows = [] if row is None else [dict(prompt="2+2=", chosen="4", rejected="5") | row]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    tokenizer, stop = folders.load_tokenizer(scratch)
    run = lambda: encode_answers(rewards.load_rows(config)[0], tokenizer, stop, config)  # noqa: E731
    assert message in refusal(capsys, monkeypatch, run)


# ---- runs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Flags of a run on pairs of which the chosen one begins as the prompt does."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    with open(path, "w") as f:
        for _ in range(700):
            a, b = rng.sample("12345", 2)
            rest = ["".join(rng.choices("0123456789", k=rng.randrange(1, 4))) for _ in range(3)]
            f.write(json.dumps(dict(question=f"{a}+{rest[0]}=", good=a + rest[1], bad=b + rest[2])) + "\n")
    columns = "--prompt_column=question --chosen_column=good --rejected_column=bad".split()
    sizes = "--mode=rm --eval_size=100 --max_steps=80 --learning_rate=2e-3 --checkpoint_every=10".split()
    return [f"--dataset={path}", *columns, *sizes]


@pytest.fixture(scope="module")
def trained(once, pairs):
    return once("reward_model", lambda folder: finish(folder, *pairs, launch=launch_warm))


def test_a_run_learns_what_is_preferred_and_says_so_of_held_out_pairs(trained):
    folder, output = trained
    before, after = lines(folder, "metrics.jsonl", "eval")
    assert (before["step"], after["step"]) == (0, 80) and before["eval_loss"] == pytest.approx(math.log(2))
    assert after["eval_accuracy"] > 0.85 and after["eval_margin"] > 1, after
    steps = lines(folder, "metrics.jsonl", "rm")
    assert len(steps) == 80 and sum(m["accuracy"] for m in steps[-10:]) > 8 > sum(m["accuracy"] for m in steps[:10])
    line = f"held out after 80 steps: eval_accuracy {after['eval_accuracy']:.4f} +- "
    assert line in output and "(100 pairs, loss " in output and "SGLang" not in output


def test_one_and_two_trainers_a_kill_and_a_resume_have_one_ledger(trained, pairs, tmp_path):
    two = dict(ranks=2, launch=launch_warm)
    status, output = launch_warm(tmp_path / "run", *pairs, "--threads=1", ranks=2, broken=killed_in_step_13)
    assert status == -signal.SIGKILL, output[-4000:]
    output = finish(tmp_path / "run", *pairs, "--threads=1", "--init_from=resume", **two)
    assert "resuming at step 10" in output and digest(output) == digest(trained[1])
    ours, other = ((folder / "ledger.jsonl").read_bytes() for folder in (tmp_path / "run", trained[0]))
    assert ours == other and len(ours.splitlines()) == 80
    weights = [
        load_file(folder / "ckpt/step_000080/model-00001-of-00001.safetensors")
        for folder in (tmp_path / "run", trained[0])
    ]
    assert weights[0]["score.weight"].shape == (1, 64) and all(
        torch.equal(x, weights[1][k]) for k, x in weights[0].items()
    )


def test_a_resume_as_another_kind_of_run_is_refused(trained, pairs):
    status, output = launch_warm(trained[0], *pairs, "--init_from=resume", "--mode=sft")
    assert status == 2 and "mode='sft': the run has 'rm'; use another out_dir" in error_line(output)


def test_dpo_learns_from_the_pairs_with_one_digest_also_resumed(trained, pairs, tmp_path):
    flags = [*pairs, "--mode=dpo", "--kl_coef=0.1", f"--init_from={trained[0]}/model", "--max_steps=20"]
    one = finish(tmp_path / "one", *flags, launch=launch_warm)
    finish(tmp_path / "two", *flags, "--max_steps=10", ranks=2, launch=launch_warm)
    resumed = finish(tmp_path / "two", *flags, "--init_from=resume", launch=launch_warm)
    assert digest(one) == digest(resumed)
    before, after = lines(tmp_path / "one", "metrics.jsonl", "eval")
    assert before["eval_loss"] == pytest.approx(math.log(2)) and before["eval_margin"] == 0.0
    assert after["eval_accuracy"] > 0.85 and after["eval_margin"] > 0.2, after
    steps = lines(tmp_path / "one", "metrics.jsonl", "dpo")
    assert len(steps) == 20 and steps[-1]["loss"] < 0.6 and "SGLang" not in one


def test_a_checkpoint_is_a_folder_that_transformers_scores_with_alike(trained, our_operators):
    from transformers import AutoModelForSequenceClassification

    folder = trained[0] / "ckpt" / "step_000080"
    model = RewardModel(folder, DEFAULTS)
    held_out = [("3+17=", "312<eos>"), ("3+17=", "512<eos>"), ("4+1=", "4<eos>")]
    ours = [model(prompt, text.removesuffix("<eos>"), "") for prompt, text in held_out]
    train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    assert type(plain).__name__ == "Qwen3ForSequenceClassification" and plain.config.num_labels == 1
    padded = model.tokenizer([x + y for x, y in held_out], return_tensors="pt", padding=True)
    assert plain(**padded).logits[:, 0].tolist() == pytest.approx(ours, abs=1e-5) and ours[0] > ours[1] + 1


def test_runs_rewarded_by_a_model_have_one_ledger_and_so_has_their_replay(trained, tmp_path):
    reward = f"--reward=model:{trained[0]}/ckpt/step_000080 + 0*numeric"
    flags = (reward, "--max_steps=3", "--warmup_sft_steps=0", "--checkpoint_every=0", "--pass_reward=0")
    flags += ("--advantage=gae", "--kl_coef=0.05", "--kl_in_reward", f"--init_from={trained[0]}/model")
    others = "--rollout_ranks=2", "--engine_args=disable_radix_cache=True"
    outputs = [
        finish(tmp_path / "a", *flags, launch=launch_warm),
        finish(tmp_path / "b", *flags, *others, ranks=4, launch=launch_warm),
    ]
    outputs.append(finish(tmp_path / "c", *flags, *replay_of(tmp_path / "a"), launch=launch_warm))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in "abc"]
    assert ledgers[0] == ledgers[1] == ledgers[2] and len({*map(digest, outputs)}) == 1
    steps = lines(tmp_path / "a", "metrics.jsonl", "rl")
    names = f"reward_model:{trained[0]}/ckpt/step_000080", "reward_numeric"
    assert all(m["logprob_mismatch_tokens"] == 0 and m["reward_std"] > 0.1 for m in steps)
    assert all(m[names[0]] == pytest.approx(m["reward_mean"]) and 0 <= m[names[1]] <= 1 for m in steps)
