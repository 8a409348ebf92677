"""
Mixtures of experts in Hugging Face's classes and folders. The operator is test_kernels.py's, whole runs are law L15's.

    pytest tests/test_moe.py
"""

import itertools
import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from verify import whole_experts

import sync
import train_grpo as train
from onecurve.models import folders, moe
from onecurve.models.dense import build_model, check_model
from onecurve.run.checkpoint import write_tensors

SIZES = dict(
    scratch_args="num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_experts=6, num_experts_per_tok=2"
)
CONFIG = train.DEFAULTS | SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    folders.make_scratch_model(folder, CONFIG)
    return folder


def built(folder, mesh, lora=None):
    model = build_model(check_model(folder, CONFIG), mesh, "cpu", True, lora=lora)
    shards = sync.shards(model, mesh)
    folders.load_weights([s for s in shards if "lora" not in s.name], folder, False)
    return model, shards


def test_a_folder_holds_each_expert_and_transformers_computes_the_same(folder, mesh, tmp_path):
    from transformers import AutoModelForCausalLM

    model, shards = built(folder, mesh)
    model.config.save_pretrained(tmp_path)
    write_tensors(tmp_path, "model", shards, mesh)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in names and len(names) == 3 + 2 * (9 + 3 * 6)
    options = dict(dtype=torch.float64, experts_implementation="eager")
    theirs, again = (AutoModelForCausalLM.from_pretrained(x, **options) for x in (folder, tmp_path))
    for (name, a), b in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    whole = whole_experts({name: folders.weight_files(folder)[name].get_tensor(name) for name in names})
    assert len(whole) == len(shards) and all(torch.equal(whole[s.name], s.data) for s in shards)
    tokens = torch.randint(97, (3, 9))
    no_logprobs = torch.zeros(8)
    samples = [train.make_sample(x[:1], x[1:], torch.ones(8).bool(), no_logprobs) for x in tokens]
    right = torch.log_softmax(theirs(tokens).logits, -1)[:, :-1].gather(2, tokens[:, 1:, None])
    assert (model.token_logprobs(train.pack(samples, "cpu"))[0] - right.flatten()).abs().max() < 1e-6


def test_routers_give_transformers_balance_loss_and_count_their_choices(folder, mesh):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, _ = built(folder, mesh)
    c = types.SimpleNamespace(**CONFIG | dict(router_aux_loss_coef=0.5))
    (routers,) = moe.routers_of(types.SimpleNamespace(model=model, c=c, process_group=mesh.get_group()))
    sample = train.make_sample(*torch.randint(97, (2, 20)), torch.arange(20) > 3, torch.zeros(20))
    leaf = train.pack([sample], "cpu")
    routers.before([sample] * 4, "rl", check=False)
    model.token_logprobs(leaf)
    z = tuple(block.routed[0].detach().clone().requires_grad_() for block in routers.blocks)
    for block, mine in zip(routers.blocks, z):
        block.routed[0] = mine
    figures = {}
    routers.note(0.0, [], leaf, None, figures)
    loss = routers.note(0.0, [0], leaf, None, figures)
    copies = [x.detach().double().requires_grad_() for x in z]
    theirs = 0.5 * 0.25 * load_balancing_loss_func(tuple(copies), 6, 2)
    assert abs(loss - theirs) < 1e-6 and theirs > 0.25
    loss.backward()
    theirs.backward()
    for mine, right in zip(z, copies):
        assert (mine.grad - right.grad).abs().max() < 1e-7 < right.grad.abs().max()
    p = torch.stack(copies).softmax(-1)
    right = torch.distributions.Categorical(p).entropy().mean(0)[leaf.predictors]
    assert (figures["router_entropy"] - right).abs().max() < 1e-6 and right.std() > 0
    chosen = torch.stack(copies).topk(2).indices
    loads = torch.stack([(chosen == e).sum((1, 2)) for e in range(6)], 1)
    assert torch.equal(routers.counts, loads)
    assert routers.metrics({})["expert_load_max"] == float(loads.max()) / (40 * 2 / 6)
    assert "choice_changed" not in figures
    other = routers.choices()
    other[1, leaf.predictors[3]] = other[1, leaf.predictors[3]].add(1).remainder(6).sort().values
    routers.dialled = [other]
    routers.note(0.0, [], leaf, None, figures)
    assert figures["choice_changed"].nonzero().tolist() == [[3]]


def test_ranks_read_and_write_their_own_experts_be_they_none_or_many(folder):
    """Seven ranks of six experts, as FSDP2 cuts them."""
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (6, 64, 64)
    data = torch.zeros(shape)
    for ranks in (1, 4, 7):
        data.zero_()
        parts = [sync.Shard(name, shape, -(-6 // ranks) * r, x) for r, x in enumerate(data.chunk(ranks))]
        folders.load_weights([*parts, sync.Shard(name, shape, 6, data[:0])], folder, False)
        names = [[s.name for s in moe.per_expert(part)] for part in parts]
        assert sum(map(len, names)) == 12 and len(set(itertools.chain(*names))) == 12
        for e, half in itertools.product(range(6), (0, 1)):
            file = folders.weight_files(folder)[f"model.layers.0.mlp.experts.{e}.{('gate', 'up')[half]}_proj.weight"]
            right = file.get_tensor(f"model.layers.0.mlp.experts.{e}.{('gate', 'up')[half]}_proj.weight")
            assert torch.equal(data[e].chunk(2)[half], right) and right.any()


def test_adapters_are_of_attention_alone(folder, mesh, refusal):
    lora = CONFIG | dict(lora_rank=4)
    model, shards = built(folder, mesh, lora)
    adapted = {s.name.split(".")[-3] for s in shards if "lora_A" in s.name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    line = refusal(built, folder, mesh, lora | dict(lora_targets="q_proj,gate_proj"))
    assert "lora_targets: no layer has 'gate_proj' to adapt" in line


WRONG = {
    "mlp_only_layers=[0]": dict(mlp_only_layers=[0]),
    "decoder_sparse_step=2": dict(decoder_sparse_step=2),
    "norm_topk_prob=False": dict(norm_topk_prob=False),
    "tie_word_embeddings=True": dict(tie_word_embeddings=True),
    "7 experts per token of 6": dict(num_experts_per_tok=7),
    "a glm4_moe model; known are": dict(model_type="glm4_moe"),
    "a qwen2_moe model; known are": dict(model_type="qwen2_moe"),
    "a deepseek_v3 model; known are": dict(model_type="deepseek_v3"),
    "rollout_tp=4: does not divide the 6 experts": {},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_not_computed_is_refused_in_a_line(folder, tmp_path, message, refusal):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    hf = json.loads((tmp_path / "config.json").read_text()) | WRONG[message]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    changed = {} if WRONG[message] else dict(rollout_tp=4)
    assert message in refusal(check_model, tmp_path, CONFIG | changed)


def test_a_balance_loss_without_our_routers_is_refused_in_a_line(folder, refusal):
    unrouted = CONFIG | dict(router_aux_loss_coef=0.01, batch_invariant=False)
    assert "router_aux_loss_coef=0.01: init_from=" in refusal(check_model, folder, unrouted)


def test_a_folder_of_whole_parameters_is_refused_in_a_line(folder, mesh, tmp_path, refusal):
    """SGLang drops the names of such a folder in silence."""
    model, _ = built(folder, mesh)
    shutil.copy(folder / "config.json", tmp_path)
    save_file({s.name: s.data for s in sync.shards(model, mesh)}, tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    assert "no model.layers.0.mlp.experts.0.gate_proj.weight in its safetensors" in refusal(built, tmp_path, mesh)
