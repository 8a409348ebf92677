"""
A model as a folder in Hugging Face's format, from which every weight starts its way: made from scratch, fetched, read.
"""

import sys
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

import kernels
from configurator import require
from onecurve.keys.scratch import scratch_sizes
from onecurve.keys.seeds import seed_of
from onecurve.models.moe import KIND, per_expert
from onecurve.run.checkpoint import write_tensors
from onecurve.run.machine import machine_memory
from onecurve.run.start import lean_imports
from sync import reason, shards

HEADS = ("value_head", "score.weight")  # the critic's and the reward model's; a language model has neither
LEAST_LAYER = 2**18  # weights for which a layer counts, however small it is: it has objects, too

# A scratch model's dialogues, as short as can be; a call of a tool is [add(a=1, b=2)], SGLang's format 'pythonic'.
CHAT_TEMPLATE = """
{%- if tools %}<system>{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | join(',') }})
{%- endfor %}<eos>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})
{{- ', ' if not loop.last }}{% endfor %}]{% endif %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def make_scratch_model(folder, config):
    """
    A small Qwen3 or Qwen3-MoE with random weights and a character tokenizer, as an ordinary Hugging Face folder. Ends
    the run with one line, before anything is made, if this machine has no memory for it.
    """
    sizes = scratch_sizes(config)
    experts = sizes.pop("num_experts")
    active = sizes.pop("num_experts_per_tok")
    layers, H, heads, kv_heads, head_dim, F = sizes.values()
    layer = H * (2 * head_dim * (heads + kv_heads) + 3 * F * max(1, experts))
    has = machine_memory()
    # in float32; for a matrix of random numbers twelve of 8 bytes, which is at most 24 layers
    fits = 4 * (layers + 24) * max(layer, LEAST_LAYER) <= has
    why = f"its weights do not fit into this machine's {has / 1e9:.1f} GB; use smaller sizes"
    require(fits, f"scratch_args={config['scratch_args']!r}: {why}")
    with lean_imports():
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
        from transformers.utils import logging

    logging.disable_progress_bar()
    roles = "<system> <user> <assistant> <tool>".split() if config["agent"] else []
    characters = ["<pad>", "<eos>", "\n", *map(chr, range(32, 127)), *roles]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    # pad and eos are two tokens: where they are one, masking the padding masks the end of every answer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE if roles else None,
    )  # fmt: skip
    write_tokenizer(folder, tokenizer)
    if experts:
        sizes |= dict(num_experts=experts, num_experts_per_tok=active, norm_topk_prob=True, moe_intermediate_size=F)
    hf = AutoConfig.for_model(
        KIND if experts else "qwen3", vocab_size=len(characters), max_position_embeddings=4096,
        tie_word_embeddings=not experts, eos_token_id=1, pad_token_id=0, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(hf)
    # torch's normal numbers depend on the width of the CPU's vectors. A sum of twelve uniform numbers in -1/2 .. 1/2
    # has their mean 0 and variance 1, and here it is a sum of whole numbers, which is exact.
    generator = torch.Generator().manual_seed(seed_of(config, "init"))
    for p in model.parameters():
        if p.dim() > 1:
            whole = torch.randint(-(2**24), 2**24, (12, *p.shape), generator=generator).sum(0)
            p.data.copy_(whole * (hf.initializer_range / 2**25))
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(folder.stat().st_mode & 0o666)  # as in checkpoint.write_file


def fetch_model(name, key="init_from"):
    """
    The local folder of a model folder, a GGUF file or a hub name. key: the config's key that has the name, for the
    error line.
    """
    name = str(name)
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".gguf"):
        from onecurve.models import gguf

        return gguf.fetch(name, key)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_file()
    cure = "make it first, or use another model's folder or a hub name"
    require(not is_path, f"{key}={name!r}: no such folder; {cure}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns="*.json *.safetensors *.txt *.model *.jinja".split()))
    except Exception as e:
        require(False, f"{key}={name!r}: neither a model folder nor a model that the hub gives: {reason(e)}")


def weight_files(folder, key="init_from"):
    """{parameter: the open safetensors file that has it} of a model folder. key: as in `fetch_model`."""
    files = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as e:
            require(False, f"{key}={str(folder)!r}: {path.name}: {e}")
        files |= dict.fromkeys(file.keys(), file)
    return files


def load_weights(shards, folder, tied, key="init_from"):
    """Each rank reads its own rows of each parameter from the folder's files. key: as in `fetch_model`."""
    files = weight_files(folder, key)
    for s in chain.from_iterable(map(per_expert, shards)):
        name = "model.embed_tokens.weight" if tied and s.name == "lm_head.weight" else s.name
        require(name in files, f"{key}={str(folder)!r}: no {name} in its safetensors files; use a complete folder")
        rows = files[name].get_slice(name)
        shape = tuple(rows.get_shape())
        require(shape == s.shape, f"{key}={str(folder)!r}: {name} is {shape}, config.json says {s.shape}")
        s.data.copy_(rows[s.first : s.first + len(s.data)])


def large(folder):
    """Whether memory may be too small for a model folder's weights: to count exactly takes a second."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) > 2**28


def write_tokenizer(folder, tokenizer):
    """Writes a tokenizer's files; its class by the name that transformers 4 knows as well."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


def load_tokenizer(folder):
    """(the tokenizer, its model's stop tokens) of a model folder."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not tokenizer("1")["input_ids"]:  # without files, transformers makes up an empty one for some kinds of model
            raise ValueError("it has no tokens")
    except Exception as e:
        require(False, f"init_from={str(folder)!r}: no usable tokenizer: {reason(e)}; use a complete folder")

    def end_in(config):
        try:
            return config.from_pretrained(folder).eos_token_id
        except (OSError, AttributeError):  # no such file, or a config without the field
            return None

    stop = end_in(GenerationConfig)
    if stop is None:
        stop = tokenizer.eos_token_id
    if stop is None:
        stop = end_in(AutoConfig)
    where = "generation_config.json, tokenizer and config.json"
    require(stop is not None, f"init_from={str(folder)!r}: {where} have no EOS token; write its eos_token_id into one")
    return tokenizer, stop if isinstance(stop, list) else [stop]


def say_ends(tokenizer, stop_tokens, templated, system_prompt=""):
    """
    Prints at which tokens samples end and, where a chat template makes the prompts, its surprises: its own system
    prompt, a turn that ends with a token at which no sample does.
    """
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in stop_tokens)
    print(f"samples end at {ends}", flush=True)
    if not templated or not tokenizer.chat_template:
        return

    def written(*contents):
        """A dialogue, from its system prompt or from its question on."""
        roles = ("system", "user", "assistant")[-len(contents) :]
        messages = [dict(role=role, content=text) for role, text in zip(roles, contents)]
        return tokenizer.apply_chat_template(messages, tokenize=False)

    try:
        alone = written("QUESTION", "REPLY").partition("QUESTION")[0]
        before, _, after = written("SYSTEM", "QUESTION", "REPLY").partition("QUESTION")[0].partition("SYSTEM")
        behind = written("QUESTION", "REPLY").rpartition("REPLY")[2]
    except Exception:  # a template may refuse such a dialogue
        return
    own = alone[len(before) : len(alone) - len(after)]
    if after and own and alone == before + own + after and not system_prompt:
        print(f"the chat template adds a system prompt, {own!r}; another: --system_prompt='..'", flush=True)
    added = tokenizer.added_tokens_decoder
    special = [i for i in tokenizer(behind, add_special_tokens=False)["input_ids"] if i in added]
    if special and special[0] not in stop_tokens:
        end = tokenizer.convert_ids_to_tokens(special[0])
        cure = f"write its id, {special[0]}, to eos_token_id in generation_config.json"
        print(f"warning: the chat template ends a turn with {end!r}, at which no sample ends; {cure}", file=sys.stderr)


def save_tokenizer(folder, tokenizer, stop_tokens):
    from transformers import GenerationConfig

    write_tokenizer(folder, tokenizer)
    stop = stop_tokens if len(stop_tokens) > 1 else stop_tokens[0]
    GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


class FullWeights:
    """
    The parameters that a Trainer trains: all of the model's, or in adapters.Adapters some beside frozen ones.

    trained, frozen: shards that are and are not trained, the first in float32. rounded: the model's own tensors of
    them, where it computes in bfloat16 and FSDP2 does not round. policy: those that model folders and versions hold.
    sent: those whose names and shapes the engines know. dtype: of versions.
    """

    def __init__(self, model, c, mesh, device):
        self.model = model
        self.c = c
        self.mesh = mesh
        every = [*zip(shards(model, mesh), model.parameters())]
        learned = [s for s, p in every if p.requires_grad]
        self.trained = [s._replace(data=s.data.float()) for s in learned]  # float32 stays where it is
        self.rounded = [s.data for s in learned if s.data.dtype != torch.float32]
        self.frozen = [s for s, p in every if not p.requires_grad]
        self.policy = [s for s in self.trained if s.name != "value_head"]
        self.sent = self.frozen or self.policy
        self.dtype = torch.float32 if self.frozen else kernels.compute_dtype(device)

    def fill_model(self):
        """Rounds what is trained into the model, where that is not the same memory."""
        if self.rounded:
            torch._foreach_copy_(self.rounded, [s.data for s in self.trained])

    def load(self, folder, checkpoint=None):
        """Reads a model's folder; checkpoint: it is the one from which a run resumes, and has all heads."""
        known = [s for s in self.sent if checkpoint or s.name not in HEADS]
        load_weights(known, folder, self.model.config.tie_word_embeddings)

    def anchor(self):
        """The shards with which the model itself is the reference of the KL; None: that is another model."""

    def published(self, policy):
        """The engines' form of these shards of the policy. Collective over the trainers, and so is `save`."""
        return policy

    def save(self, folder):
        """Writes a checkpoint's part in Hugging Face's format."""
        if self.mesh.get_local_rank() == 0:
            self.model.config.save_pretrained(folder)
        write_tensors(folder, "model", self.policy, self.mesh)
