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
import test_trainer
import torch
from conftest import digest, finish, launch_warm, shared
from pytest import approx
from referee_others import write_rows
from safetensors.torch import load_file, save_file
from test_trainer import DEFAULTS, close, equal, make_pairs, make_trainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trials import killed_in_step_13, lines, replay_of

import rewards
import train_grpo as train
from onecurve.algorithms.answers import encode_answers
from onecurve.algorithms.pairs import evaluate_pairs, preference_loss
from onecurve.algorithms.supervised import ANSWERS, PAIRS
from onecurve.graders import checks
from onecurve.graders.judges import RewardModel
from onecurve.models import folders
from onecurve.models.dense import check_model
from rollout_server import RolloutEngine
from sync import RunError

CONFIG = DEFAULTS | dict(mode="rm")
ranks = test_trainer.ranks
scratch = test_trainer.scratch


@pytest.fixture(scope="module")
def judge(scratch, tmp_path_factory):
    """The folder of a reward model with a head of random numbers, as Hugging Face writes it."""
    folder = tmp_path_factory.mktemp("judge")
    shutil.copytree(scratch, folder, dirs_exist_ok=True)
    model = AutoModelForSequenceClassification.from_pretrained(scratch, num_labels=1)
    model.score.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def trainer(ranks, scratch, judge):
    """A trainer whose head is that of the judge: training begins with zeros."""
    trainer = make_trainer(ranks, scratch, mode="rm")
    trainer.model.score.weight.detach().copy_(load_file(judge / "model.safetensors")["score.weight"])
    return trainer


# ---- the loss


def test_the_loss_and_its_gradient_are_those_of_a_loop_at_any_distance(ranks):
    margins = [0.0, 0.5, -0.5, 3, -3, 20, -20, 200, -200]
    scores = torch.tensor([x for m in margins for x in (m + 1.5, 1.5)], requires_grad=True)
    losses, margin = preference_loss(scores)
    assert margin.tolist() == margins
    exact = [max(-m, 0) + math.log1p(math.exp(-abs(m))) for m in margins]  # -log sigmoid(m)
    assert losses.tolist() == approx(exact, rel=1e-6, abs=1e-7)
    losses.sum().backward()
    chosen = scores.grad[::2]
    rejected = scores.grad[1::2]
    slope = [-1 / (1 + math.exp(m)) for m in margins]
    assert chosen.tolist() == approx(slope, rel=1e-6, abs=1e-30)
    assert torch.equal(rejected, -chosen) and chosen[0] == -0.5


def test_scores_loss_and_gradients_are_those_of_plain_transformers(trainer, judge):
    """Against float64, through leaves, the sum and our operators."""
    samples = make_pairs(9)
    grads, metrics = trainer.gradients(samples, PAIRS)
    found = []

    def gradients(*args):
        found.append(trainer.gradients(*args))
        return found[0]

    evaluate_pairs(types.SimpleNamespace(gradients=gradients), PAIRS, 0, samples, None)
    assert found == [(None, metrics)]  # the same figures, and no gradient is asked for
    train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64)
    scores = torch.stack([plain(s.tokens[None]).logits[0, 0] for s in samples])
    margin = scores[::2] - scores[1::2]
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    loss.backward()
    assert metrics["loss"] == approx(loss.item(), abs=1e-5)
    assert abs(metrics["loss"] - math.log(2)) > 0.1
    assert metrics["margin"] == approx(margin.mean().item(), abs=1e-5)
    right = (margin > 0).double().mean().item()
    assert metrics["accuracy"] == right and 0 < right < 1
    for shard, grad in zip(trainer.shards, grads, strict=True):
        expected = plain.get_parameter(shard.name).grad
        largest = float(expected.abs().max())  # sums in float32 are off by parts of their largest summands
        assert largest > 1e-4, shard.name
        torch.testing.assert_close(grad.double(), expected, atol=max(1e-6, 1e-6 * largest), rtol=1e-3)


# ---- pairs


def test_a_pair_is_in_one_leaf_chosen_first_and_leaves_keep_their_bound(ranks, scratch):
    samples = make_pairs(40)
    trainer = make_trainer(ranks, scratch, mode="rm", leaf_tokens=70)
    with torch.no_grad():
        leaves = [*trainer.passes(samples, trainer.model, PAIRS)]
        apart = [*trainer.passes(samples, trainer.model, ANSWERS)]
    assert len(leaves) > 8
    assert sorted(i for chosen, _, _ in leaves for i in chosen) == [*range(80)]
    for chosen, leaf, _ in leaves:
        assert not any(a % 2 for a in chosen[::2])
        assert chosen == [i for a in chosen[::2] for i in (a, a + 1)]
        assert len(leaf.ids) <= 70 or len(chosen) <= 2
    assert any(i ^ 1 not in chosen for chosen, _, _ in apart for i in chosen)  # answers go anywhere


def test_the_gradient_of_pairs_sees_the_leaves_but_no_empty_lanes(trainer):
    def gradients(samples, lanes, leaf_tokens):
        trainer.c.lanes = lanes
        trainer.c.leaf_tokens = leaf_tokens
        return [g.clone() for g in trainer.gradients(samples, PAIRS)[0]]

    samples = make_pairs(6)
    pair = samples[2:4]
    one = gradients(pair, 1, 9999)
    assert all(equal(one, gradients(pair, 4, 9999)))
    assert max(g.abs().max() for g in one) > 1e-3
    few = gradients(samples, 4, 9999)
    many = gradients(samples, 4, 1)
    assert all(close(few, many)) and not all(equal(few, many))


def test_sums_are_paired_with_others_of_as_many_digits_in_every_run():
    sums = dict(dataset="arithmetic:0:50")
    rows, held_out = rewards.load_rows(CONFIG | sums)
    assert (rows, held_out) == rewards.load_rows(CONFIG | sums | dict(seed=2))
    assert rows[0].keys() == {"prompt", "chosen", "rejected"}
    for ours, others in zip((rows, held_out), rewards.load_rows(DEFAULTS | sums)):
        assert [(r["prompt"], r["chosen"]) for r in ours] == [(r["prompt"], r["answer"]) for r in others]
    sides = [zip(row["chosen"], row["rejected"], strict=True) for row in rows + held_out]
    changed = Counter(tuple(a != b for a, b in pair) for pair in sides)
    assert set(changed) == {(True,), (True, False), (False, True), (True, True)}
    assert min(changed[k] for k in changed if len(k) == 2) > 700


# ---- scores


TEXTS = [(f"{a}+{b}=", str(a * b)) for a in range(12) for b in range(9)]


def bits(scores):
    return torch.tensor(scores).view(torch.int32).tolist()


def test_scores_are_those_of_transformers_with_equal_bits_in_any_batch(judge, ranks):
    model = RewardModel(judge, DEFAULTS)
    alone = [model(*texts, "") for texts in TEXTS]
    order = random.Random(0).sample(range(len(TEXTS)), len(TEXTS))
    shuffled = model._scores([TEXTS[i] for i in order])
    assert bits(model._scores(TEXTS)) == bits(alone)
    assert bits(shuffled) == bits([alone[i] for i in order])
    assert len(set(alone)) > 100
    train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    padded = tokenizer([f"{x}{y}<eos>" for x, y in TEXTS], return_tensors="pt", padding=True)
    assert padded["attention_mask"].min() == 0
    with torch.no_grad():
        assert plain(**padded).logits[:, 0].tolist() == approx(alone, abs=1e-5)
    torchs_own = RewardModel(judge, DEFAULTS | dict(batch_invariant=False))
    assert bits(torchs_own._scores(TEXTS)) != bits([torchs_own(*texts, "") for texts in TEXTS])  # the control


def test_waiting_texts_are_scored_in_one_pass_equal_ones_once(judge, ranks):
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
    assert bits(found) == bits(alone) * 4
    assert sum(batches) == len(TEXTS) and max(batches) > 8
    model.known = dict.fromkeys(range(10_001))
    assert bits([model(*TEXTS[5], "")]) == bits(alone[5:6])
    assert len(model.known) == 1  # it forgets


def test_it_is_loaded_before_the_engine_starts(judge, tmp_path, monkeypatch):
    """It was loaded at the first score, when the engine had taken its share of the card and left no room for it."""
    model = RewardModel(judge, DEFAULTS)

    def start(*_):
        assert model.model is not None
        raise ValueError("it would start")

    monkeypatch.setattr("rollout_server.start_engine", start)
    with pytest.raises(RunError, match="did not start: it would start"):
        RolloutEngine(0, judge, model.hf, DEFAULTS, "cpu", torch.float32, tmp_path / "engine.log", models=[model])


def test_an_error_reaches_all_that_wait(judge, ranks):
    model = RewardModel(judge, DEFAULTS)
    model._scores = lambda texts: 1 / 0
    with ThreadPoolExecutor(64) as threads:
        calls = [threads.submit(model, *texts, "") for texts in TEXTS]
        assert all(isinstance(call.exception(timeout=30), ZeroDivisionError) for call in calls)


def test_a_model_whose_padding_is_its_eos_is_read_before_it(judge, tmp_path, ranks):
    shutil.copytree(judge, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(pad_token_id=1)))
    usual = RewardModel(judge, DEFAULTS)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([usual.tokenizer("1+2=3<eos>")["input_ids"]])
    ours = RewardModel(tmp_path, DEFAULTS)("1+2=", "3", "")
    assert plain(ids).logits.item() == approx(ours, abs=1e-5) != usual("1+2=", "3", "")
    hf = check_model(tmp_path, DEFAULTS, "reward")
    assert hf.pad_token_id == hf.eos_token_id == 1


# ---- what is refused


def test_what_is_no_reward_model_of_the_policys_is_refused_at_the_start(scratch, judge, tmp_path, refusal):
    def why(spec, **change):
        return refusal(rewards.load_reward, spec, DEFAULTS | change)

    shutil.copytree(judge, tmp_path / "two")
    config = json.loads((judge / "config.json").read_text())
    config |= dict(id2label={"0": "bad", "1": "good"}, label2id=dict(bad=0, good=1))
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    assert "no such folder': neither a model folder nor" in why("model:no such folder")
    assert f"reward='{scratch}': a language model; a reward model is wanted" in why(f"numeric + 0.5*model:{scratch}")
    assert "two': it gives 2 numbers" in why(f"model:{tmp_path}/two")
    assert "the model has 4096 positions" in why(f"model:{judge}", max_new_tokens=5000)
    for change in (dict(), dict(advantage="distill", reference=str(judge))):
        assert "a reward model, which writes nothing" in refusal(check_model, judge, DEFAULTS | change)
    loaded = {"": rewards.load_reward(f"model:{judge} + 0*numeric", DEFAULTS)}
    tokenizer = AutoTokenizer.from_pretrained(scratch)
    checks.check_vocabulary(loaded, tokenizer)
    tokenizer.add_tokens(["<tool>"])
    line = refusal(checks.check_vocabulary, loaded, tokenizer)
    assert f"reward='model:{judge}': of another vocabulary than the policy" in line


def test_a_folder_without_a_head_is_refused_at_the_start(judge, tmp_path, refusal):
    shutil.copytree(judge, tmp_path, dirs_exist_ok=True)
    weights = load_file(judge / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    line = refusal(RewardModel, tmp_path, DEFAULTS)
    assert f"reward='{tmp_path}': no score.weight in its safetensors files" in line


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
def test_pairs_that_are_none_are_refused(scratch, tmp_path, refusal, row, change, message):
    config = CONFIG | dict(dataset=str(tmp_path / "pairs.jsonl"), eval_size=0) | change
    content = "" if row is None else json.dumps(dict(prompt="2+2=", chosen="4", rejected="5") | row)
    (tmp_path / "pairs.jsonl").write_text(content)
    tokenizer, stop = folders.load_tokenizer(scratch)

    def read():
        encode_answers(rewards.load_rows(config)[0], tokenizer, stop, config)

    assert message in refusal(read)


# ---- runs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Flags of a run on pairs of which the chosen one begins as the prompt does."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = []
    for _ in range(700):
        a, b = rng.sample("12345", 2)
        right, good, bad = ("".join(rng.choices("0123456789", k=rng.randrange(1, 4))) for _ in range(3))
        rows.append(dict(question=f"{a}+{right}=", good=a + good, bad=b + bad))
    write_rows(path, rows)
    return f"""--dataset={path} --prompt_column=question --chosen_column=good --rejected_column=bad --mode=rm
        --eval_size=100 --max_steps=80 --learning_rate=2e-3 --checkpoint_every=10""".split()


@shared
def trained(folder, pairs):
    return finish(folder, *pairs)


def test_a_run_learns_what_is_preferred_and_says_so_of_held_out_pairs(trained):
    folder, output = trained
    before, after = lines(folder, "metrics.jsonl", "eval")
    assert (before["step"], after["step"]) == (0, 80)
    assert before["eval_loss"] == approx(math.log(2))
    assert before["eval_margin"] == before["eval_accuracy"] == 0
    assert after["eval_accuracy"] > 0.85 and after["eval_margin"] > 1, after
    right = [m["accuracy"] for m in lines(folder, "metrics.jsonl", "rm")]
    assert len(right) == 80 and sum(right[-10:]) > 8 > sum(right[:10])
    line = f"held out after 80 steps: eval_accuracy {after['eval_accuracy']:.4f} +- "
    assert line in output and "(100 pairs, loss " in output and "SGLang" not in output


def test_one_and_two_trainers_a_kill_and_a_resume_have_one_ledger(trained, pairs, run):
    flags = [*pairs, "--threads=1", "--max_steps=20"]
    status, output = launch_warm(run, *flags, ranks=2, broken=killed_in_step_13)
    assert status == -signal.SIGKILL, output[-4000:]
    output = finish(run, *flags, "--init_from=resume", ranks=2)
    assert "resuming at step 10" in output
    ours = lines(run, "ledger.jsonl")
    assert ours == lines(trained[0], "ledger.jsonl")[:20] and len(ours) == 20


def test_dpo_learns_from_the_pairs_with_one_digest_also_resumed(trained, pairs, tmp_path):
    flags = [*pairs, "--mode=dpo", "--kl_coef=0.1", f"--init_from={trained[0]}/model", "--max_steps=20"]
    one = finish(tmp_path / "one", *flags)
    finish(tmp_path / "two", *flags, "--max_steps=10", ranks=2)
    resumed = finish(tmp_path / "two", *flags, "--init_from=resume")
    assert digest(one) == digest(resumed)
    before, after = lines(tmp_path / "one", "metrics.jsonl", "eval")
    assert before["eval_loss"] == approx(math.log(2)) and before["eval_margin"] == 0.0
    assert after["eval_accuracy"] > 0.85 and after["eval_margin"] > 0.2, after
    steps = lines(tmp_path / "one", "metrics.jsonl", "dpo")
    assert len(steps) == 20 and steps[-1]["loss"] < 0.6 and "SGLang" not in one


def test_a_checkpoint_is_a_folder_that_transformers_scores_with_alike(trained, ranks):
    folder = trained[0] / "ckpt" / "step_000080"
    model = RewardModel(folder, DEFAULTS)
    texts = [("3+17=", "312"), ("3+17=", "512"), ("4+1=", "4")]
    ours = [model(*text, "") for text in texts]
    train.kernels.disable_batch_invariant()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    assert type(plain).__name__ == "Qwen3ForSequenceClassification" and plain.config.num_labels == 1
    padded = model.tokenizer([f"{x}{y}<eos>" for x, y in texts], return_tensors="pt", padding=True)
    assert plain(**padded).logits[:, 0].tolist() == approx(ours, abs=1e-5)
    assert ours[0] > ours[1] + 1


def test_runs_rewarded_by_a_model_have_one_ledger_and_so_has_their_replay(trained, tmp_path):
    judge = f"model:{trained[0]}/ckpt/step_000080"
    flags = f"""--max_steps=3 --warmup_sft_steps=0 --checkpoint_every=0 --pass_reward=0 --advantage=gae --kl_coef=0.05
        --kl_in_reward --init_from={trained[0]}/model""".split()
    flags.append(f"--reward={judge} + 0*numeric")
    others = "--rollout_ranks=2", "--engine_args=disable_radix_cache=True"
    finish(tmp_path / "a", *flags)
    finish(tmp_path / "b", *flags, *others, ranks=4)
    finish(tmp_path / "c", *flags, *replay_of(tmp_path / "a"))
    one, *more = ((tmp_path / name / "ledger.jsonl").read_bytes() for name in "abc")
    assert more == [one] * 2
    steps = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert all(m["reward_std"] > 0.1 for m in steps)
    assert all(m[f"reward_{judge}"] == approx(m["reward_mean"]) for m in steps)
    assert all(0 <= m["reward_numeric"] <= 1 for m in steps)
