"""
The config block, files and flags: what wins, what is refused, and what the user then reads.

    pytest tests/test_configurator.py
"""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from conftest import ROOT, flipped

import configurator
from configurator import check_config, config_source, configure, fail, require
from onecurve.run import start, versions
from sync import run_id
from train_grpo import DEFAULTS

SCRIPT = ROOT / "train_grpo.py"
HEAD = """
from configurator import configure

def scaled(
    x,
):
    steps = 3  # not the key's comment
    return steps * x

"""
BLOCK = """# ----- optimizer
learning_rate = 1e-6  # peak, in 1/step # and a second sharp
steps = 100
strict = True  # stop at the first difference

# where things go
out_dir = "out/#1"  # holds the checkpoints
_private = 1
CONSTANT = 2
"""
FUNCTION = """
def doubled(x):
    steps = 3  # nor is this
    return steps * 2

"""
MAIN = """config = configure(globals())
steps_after = 7  # no key: bound after the block
"""


def started(script, *argv, **options):
    """A script with these arguments, as a finished process."""
    return subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture(autouse=True)
def pipes():
    """A process that prints --help ends when nobody reads it. The tests' own goes on, and would be ended by a pipe."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.fixture
def block():
    """The globals() of a script right under its config block."""
    private = {"_private": 1, "CONSTANT": 2, "scaled": len, "os": os, "Path": Path, "nothing": None, "a_list": [1]}
    return private | {"learning_rate": 1e-6, "steps": 100, "strict": True, "out_dir": "out"}


@pytest.fixture
def refuse(block, refusal):
    """Configures `block` with bad arguments; returns the one line it prints, without 'error: '."""

    def run(*argv):
        before = dict(block)
        line = refusal(configure, block, list(argv))
        assert block == before, "a refused config must leave the block alone"
        return line.removeprefix("error: ")

    return run


@pytest.fixture
def write(tmp_path):
    def run(source, name="tiny.py"):
        (tmp_path / name).write_text(source, encoding="utf-8")
        return str(tmp_path / name)

    return run


# ------------------------------------------------------------------------------------------------------------------
# what is a key, and who wins


def test_the_later_of_two_files_wins_and_the_later_of_two_flags(block, write):
    a, b = write("steps = 1\nout_dir = 'a'\n", "a.py"), write("steps = 2\n", "b.py")
    config = configure(dict(block), [a, b])
    assert (config["steps"], config["out_dir"]) == (2, "a")
    assert configure(dict(block), [b, a])["steps"] == 1
    assert configure(dict(block), ["--steps=3", "--steps=4"])["steps"] == 4


def test_a_file_may_import_and_compute_with_helpers(block, write):
    source = "import math\nfrom math import sqrt\nfrom pathlib import Path\n_n = 4\ndef half(x): return x // 2\n"
    config = configure(block, [write(source + "steps = half(int(sqrt(_n * 4)) * 2)\n")])
    assert config["steps"] == 4 and set(config) == {"learning_rate", "steps", "strict", "out_dir"}


def test_a_file_is_sought_in_the_working_folder_then_beside_the_script(block, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "x.py").write_text("steps = 1\n")
    block["__file__"] = str(tmp_path / "project" / "script.py")
    monkeypatch.chdir(tmp_path / "here")
    assert configure(dict(block), ["x.py"])["steps"] == 1
    (tmp_path / "here" / "x.py").write_text("steps = 2\n")
    assert configure(dict(block), ["x.py"])["steps"] == 2


# ------------------------------------------------------------------------------------------------------------------
# types


@pytest.mark.parametrize(
    "flag, value",
    {
        "--learning_rate=2e-6": 2e-6,
        "--learning_rate=3": 3.0,
        "--learning_rate=-.5": -0.5,
        "--steps=1e3": 1000,
        "--steps=1_000": 1000,
        "--steps=-1": -1,
        "--steps=9223372036854775807": 9223372036854775807,  # by way of a float it would be one more
        "--strict=false": False,
        "--strict=False": False,
        "--strict=true": True,
        "--strict": True,
        "--out_dir=": "",
        "--out_dir=a=b --c": "a=b --c",
        "--out_dir=1": "1",
        "--out_dir='x'": "'x'",
    }.items(),
)
def test_a_flag_takes_the_type_of_its_default(block, flag, value):
    block["strict"] = value is False  # another than the flag's
    found = configure(block, [flag])[re.match(r"--(\w+)", flag)[1]]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "flag, wants",
    {
        "--learning_rate=abc": "a finite number, as in --learning_rate=1e-06",
        "--learning_rate=true": "a finite number",
        "--learning_rate=1e999": "a finite number",
        "--learning_rate=nan": "a finite number",
        "--learning_rate=__import__('os')": "a finite number",
        "--learning_rate=" + "9" * 400: "a finite number",
        "--steps=1.5": "a whole number, as in --steps=100",
        "--steps=1e999": "a whole number",
        "--steps=true": "a whole number",
        "--steps=" + "9" * 5000: "a whole number",
        "--steps=" + "(" * 5000: "a whole number",
        "--strict=1": "true or false, as in --strict=True",
        "--strict=": "true or false",
        "--steps": "a whole number, as in --steps=100",
        "--out_dir": "a string in UTF-8 without NUL, as in --out_dir='out'",
    }.items(),
)
def test_a_flag_of_another_type_is_refused_with_an_example(refuse, flag, wants):
    line = refuse(flag)
    assert line.startswith(f"{flag}: wants {wants}")


@pytest.mark.parametrize(
    "source, changed",
    {
        "learning_rate = 1": dict(learning_rate=1.0),
        "steps = 1e3": dict(steps=1000),
        "strict = False": dict(strict=False),
        "import enum\nclass _E(enum.IntEnum): A = 5\nsteps = _E.A": dict(steps=5),
    }.items(),
)
def test_a_value_in_a_file_takes_the_type_of_its_default(block, write, source, changed):
    before = configure(block, [])
    config = configure(block, [write(source)])
    assert config == before | changed
    assert [*map(type, config.values())] == [*map(type, before.values())]


@pytest.mark.parametrize(
    "source, complaint",
    {
        "learning_rate = 'abc'": "learning_rate='abc': wants a finite number, as in learning_rate=1e-06",
        "learning_rate = '1e-6'": "learning_rate='1e-6': wants a finite number",
        "learning_rate = float('inf')": "learning_rate=inf: wants a finite number",
        "learning_rate = float('nan')": "learning_rate=nan: wants a finite number",
        "learning_rate = float": "learning_rate=<class 'float'>: wants a finite number",
        "steps = 1.5": "steps=1.5: wants a whole number",
        "steps = True": "steps=True: wants a whole number",
        "strict = 1": "strict=1: wants true or false",
        "strict = 'false'": "strict='false': wants true or false",
        "out_dir = 1": "out_dir=1: wants a string",
        "import pathlib\nout_dir = pathlib": "out_dir=<module",
        r"out_dir = 'a\udcff'": r"out_dir='a\udcff': wants a string in UTF-8",
    }.items(),
)
def test_a_value_of_another_type_in_a_file_is_refused(refuse, write, source, complaint):
    file = write(source)
    line = refuse(file)
    assert line.startswith(f"{file}: {complaint}") and len(line) < len(file) + 200


# ------------------------------------------------------------------------------------------------------------------
# mistakes


def test_a_key_that_is_none_is_refused_with_a_suggestion_if_there_is_one(refuse, write):
    """nanoGPT runs the file in its globals, where `learing_rate = 1` makes a new name and trains with the old value."""
    near = "no such key; did you mean learning_rate?  (--help=all lists all keys)"
    assert refuse("--learing_rate=1") == refuse("--learing_rate") == f"--learing_rate: {near}"
    assert refuse("--learning-rate=1").endswith(near)
    file = write("learing_rate = 1\n")
    assert refuse(file) == f"{file}: learing_rate: {near}"
    assert refuse("--zzz=1") == "--zzz: no such key  (--help=all lists all keys)"
    assert ": pi: no such key" in refuse(write("from math import pi\n"))
    for key in ("", "_private", "CONSTANT", "os", "Path", "scaled", "nothing", "a_list", "__file__"):
        assert refuse(f"--{key}=1").startswith(f"--{key}: no such key")


def test_what_is_neither_a_file_nor_a_flag_is_refused_and_the_equals_sign_shown(refuse):
    for arg in ("7", "steps=7", "-steps=7", "config.json", ""):
        line = f"{arg}: not a config file (.py); a flag is joined to its value: --key=value"
        assert refuse("--strict", arg) == line


def test_a_missing_file_and_one_that_is_no_text_are_refused_in_one_line(refuse, tmp_path):
    (bad := tmp_path / "bad.py").write_bytes(b"steps = 1\0\xff\n")
    assert refuse(str(bad)).startswith(f"{bad}:")
    assert refuse("config/no.py").startswith(f"config/no.py: no such config file, in {Path.cwd()}")
    (tmp_path / "folder.py").mkdir()
    assert "no such config file" in refuse(str(tmp_path / "folder.py"))


@pytest.mark.parametrize(
    "source, complaint",
    {
        "steps = 1\nsteps = = 2\n": "2: SyntaxError: invalid syntax",
        "steps = 1\n\nsteps = 1 / 0\n": "3: ZeroDivisionError: division by zero",
        "def _f():\n    return unknown\nsteps = _f()\n": "2: NameError: name 'unknown' is not defined",
        "import no_such_module_at_all\n": "1: ModuleNotFoundError: No module named 'no_such_module_at_all'",
        "import json\nsteps = json.loads('')\n": "2: JSONDecodeError: Expecting value",
        "raise ValueError('two\\nlines')\n": "1: ValueError: two lines",
        "exec('1 +')\n": "1: SyntaxError: invalid syntax",
        "import sys\nsys.exit(0)\n": "2: SystemExit: 0",
    }.items(),
)
def test_an_error_inside_a_file_names_the_file_and_the_line(refuse, write, source, complaint):
    file = write(source)
    assert refuse(file).startswith(f"{file}:{complaint}")


# ------------------------------------------------------------------------------------------------------------------
# what is printed


def test_the_source_names_the_origin_of_each_override(block, write):
    file = write("steps = 5\nout_dir = 'from file'\n")
    assert config_source(configure(block, ["--steps=7", file])).splitlines() == [
        "learning_rate = 1e-06",
        "steps = 7  # command line",
        "strict = True",
        f"out_dir = 'from file'  # {file}",
    ]


def test_origins_do_not_outlive_their_configure(block):
    configure(dict(block), ["--steps=7"])
    assert "#" not in config_source(configure(dict(block), []))
    assert config_source({"a": 1}, {"a": "elsewhere"}) == "a = 1  # elsewhere\n"


def test_the_saved_source_reruns_to_the_same_config(block, write):
    odd = 'it\'s "odd" # \\ \n\t {x} \u00e9'
    flags = ["--learning_rate=0.1234567890123456789", "--steps=1e20", "--strict=false"]
    config = configure(dict(block), [*flags, f"--out_dir={odd}"])
    rerun = configure(dict(block), [write(config_source(config), "config.py")])
    assert rerun == config and list(rerun) == list(config) and config["out_dir"] == odd
    assert [type(x) for x in rerun.values()] == [type(x) for x in config.values()]


def test_help_lists_headings_and_each_key_with_default_and_comment(write):
    script = write(HEAD + BLOCK + FUNCTION + MAIN, "script.py")
    result = started(script, "--help", "--nonsense", env=os.environ | {"PYTHONPATH": str(ROOT)})
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and result.stderr == ""
    assert lines == [
        "usage: script.py [config/file.py ...] [--key=value ...]",
        "",
        "# ----- optimizer",
        "--learning_rate=1e-06 peak, in 1/step # and a second sharp",
        "--steps=100",
        "--strict=True stop at the first difference",
        "",
        "# where things go",
        "--out_dir='out/#1' holds the checkpoints",
    ]


def test_help_works_without_a_source_file(block, capsys):
    with pytest.raises(SystemExit) as stop:
        configure(block, ["--help"])
    assert stop.value.code == 0 and "--out_dir=" in capsys.readouterr().out


# ---- features


FEATURES = configurator.load_features()


def trainer_help(of=""):
    """train_grpo.py with --help, or the help of something, as a finished process."""
    return started(SCRIPT, f"--help={of}" if of else "--help")


def keys_in(text):
    return re.findall(r"^  --(\w+)=", text, re.MULTILINE)


def test_help_has_the_keys_of_the_block_and_a_line_for_each_feature():
    done = trainer_help()
    block, _, features = done.stdout.partition("# features: ")
    assert done.returncode == 0 and keys_in(done.stdout) == keys_in(block)
    assert keys_in(block) == [key for key in DEFAULTS if key not in configurator.keys_of(FEATURES)]
    assert [line.split()[0] for line in features.splitlines()[1:]] == [*FEATURES]
    assert "  lora          Adapters are trained beside the model's weights, which are frozen.\n" in features


def test_help_of_a_feature_has_its_docstring_and_keys_and_all_has_all():
    lora = trainer_help("lora").stdout
    assert keys_in(lora) == ["lora_rank", "lora_alpha", "lora_targets", "lora"]
    assert "# Code: onecurve/models/adapters.py." in lora and "rows of A and columns of B; 0: no LoRA" in lora
    everything = trainer_help("all").stdout
    assert keys_in(everything) == [*DEFAULTS] and lora in everything and everything.startswith("usage: ")


def test_help_of_an_unknown_feature_is_one_line_with_a_suggestion():
    for name, near in (("lorra", "; did you mean lora?"), ("zzz", "")):
        done = trainer_help(name)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == f"error: --help={name}: no such feature{near}  (--help lists the features)\n"


def test_no_key_is_declared_twice():
    declared = keys_in(trainer_help().stdout)
    for name, feature in FEATURES.items():
        own = re.findall(r"^([a-z]\w*) = ", Path(feature.__file__).read_text(), re.MULTILINE)
        assert own == [*configurator.block(vars(feature))], name
        declared += own
    assert len(declared) == len({*declared}) and declared == [*DEFAULTS]


def test_a_feature_says_what_it_is_and_where_its_code_is():
    for name, feature in FEATURES.items():
        empty, what, where, _ = feature.__doc__.split("\n")
        assert not empty and len(what) < 100 and where.startswith("Code: "), name
        for file in re.findall(r"\w+(?:/\w+)*(?:\.py|\.md|/(?=[. ,]))", where):
            assert (ROOT / file).exists(), f"{name}: {file}"


def test_the_keys_of_a_feature_come_behind_the_block_and_are_set_like_it(block):
    feature = types.ModuleType("deep")
    feature.depth = 2
    config = configure(block, ["--depth=3", "--steps=7"], {"deep": feature})
    assert list(config) == ["learning_rate", "steps", "strict", "out_dir", "depth"]
    assert config["depth"] == block["depth"] == 3 and feature.depth == 2


# ------------------------------------------------------------------------------------------------------------------
# ranks


def test_rank_0_speaks_first_and_others_only_if_they_outlive_a_wait(block, capsys, monkeypatch):
    """
    torchrun kills every rank as soon as one exits: without the wait, rank 1 could end the run before that line. If it
    is not killed, rank 0 has nothing to say, as its samples are others; then the line is this rank's.
    """
    slept = []
    monkeypatch.setattr(configurator.time, "sleep", lambda s: slept.append((s, *capsys.readouterr())))
    monkeypatch.setenv("RANK", "1")
    for argv in (["--stps=1"], ["no.py"], ["--steps=x"]):
        with pytest.raises(SystemExit) as stop:
            configure(dict(block), argv)
        assert stop.value.code == 2
        assert slept[-1] == (5, "", "") and capsys.readouterr().err.count("error: ") == 1
    with pytest.raises(SystemExit) as stop:
        configure(dict(block), ["--help"])
    assert stop.value.code == 0 and capsys.readouterr() == ("", "") and len(slept) == 3


def test_require_passes_what_holds_and_ends_rank_0_with_one_line(refusal, capsys, monkeypatch):
    monkeypatch.setattr(configurator.time, "sleep", lambda seconds: pytest.fail("rank 0 has nobody to wait for"))
    monkeypatch.setenv("RANK", "0")
    require(True, "never seen")
    assert capsys.readouterr() == ("", "")
    assert refusal(require, 0, "group_size=1: use 2") == "error: group_size=1: use 2"


def test_fail_speaks_from_any_rank_on_a_line_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        fail("a file: the header\nis broken")
    assert capsys.readouterr().err == "\nerror: a file: the header is broken\n"  # maybe behind the first rank's bar


# ---- resume


def test_a_resume_takes_the_saved_config_and_the_commands_free_keys(tmp_path, refusal):
    saved = tmp_path / "config.py"
    saved.write_text("# a comment\nsteps = 5  # command line\nrate = 0.5\nname = 'run'\n")
    block = dict(steps=1, rate=0.1, name="x")

    def resume(*argv, free=("steps",)):
        return configurator.resume_config(configure(dict(block), list(argv)), saved, lambda _: free)[1]

    assert resume() == dict(steps=5, rate=0.5, name="run")
    saved.write_text("rate = 0.5\nname = 'run'\nsteps = 5\n")  # the run's order stays: its id is made in that order
    assert list(resume("--steps=9")) == ["rate", "name", "steps"]
    assert resume("--steps=9", "--rate=0.5") == dict(steps=9, rate=0.5, name="run")
    line = "rate=0.2 (the run has 0.5), name='y' (the run has 'run'): cannot change"
    assert line in refusal(resume, "--rate=0.2", "--name=y")
    line = "steps=9 (the run has 5): cannot change on resume; what can: name, rate"
    assert line in refusal(resume, "--steps=9", free=["rate", "name"])
    saved.write_text("steps = 5\n")
    assert "has no rate, name of the type that is wanted; it was saved by another version" in refusal(resume)
    saved.write_text("steps = '5'\nrate = 0.5\nname = 'run'\n")
    assert "has no steps of the type" in refusal(resume)


def test_a_curriculum_has_pass_reward_in_the_run():
    changed = [run_id(DEFAULTS | dict(curriculum=n, pass_reward=0.5)) for n in (0, 4)]
    assert [a != run_id(DEFAULTS | dict(curriculum=n)) for n, a in zip((0, 4), changed)] == [False, True]


@pytest.mark.parametrize("mode,line", [("server", "use grpo"), ("eval", "the run has 'grpo'; use another out_dir")])
def test_a_mode_that_the_run_cannot_have_is_refused_on_resume(tmp_path, refusal, monkeypatch, mode, line):
    (tmp_path / "config.py").write_text(config_source(DEFAULTS, {}))
    flags = [f"--out_dir={tmp_path}", "--init_from=resume", f"--mode={mode}"]
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *flags])
    assert refusal(configurator.resolve, "train_grpo.py", DEFAULTS).startswith(f"error: mode={mode!r}: {line}")
    (tmp_path / "config.py").write_text(config_source(DEFAULTS | dict(mode="server"), {}))
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *flags[:2]])
    assert refusal(configurator.resolve, "train_grpo.py", DEFAULTS).startswith("error: mode='server': use grpo")


def test_a_damaged_saved_config_ends_in_one_line_or_is_still_a_config(tmp_path):
    saved = tmp_path / "config.py"
    block = dict(steps=1, rate=0.1, name="x")
    data = config_source(dict(steps=5, rate=0.5, name="run")).encode()
    refused = 0
    for i in range(len(data)):
        for content in (data[:i], flipped(data, i)):
            saved.write_bytes(content)
            try:
                config = configurator.resume_config(configure(dict(block), []), saved, lambda _: ())[1]
            except SystemExit as ended:
                assert ended.code == 2
                refused += 1
            else:
                assert config.keys() == block.keys()
    assert refused > len(data)


# ------------------------------------------------------------------------------------------------------------------
# the keys of train_grpo.py: values that make no sense together

BAD = {  # on so many ranks: {flags: the beginning of the line}
    1: {
        "--group_size=1": "group_size=1",
        f"--seed={2**64}": f"seed={2**64}: beyond torch's 64 bits",
        f"--seeds=init={2**64}": f"seeds='init={2**64}': beyond torch's 64 bits",
        "--seeds=data=1,data=2": "seeds='data=1,data=2': a name twice; use whole numbers",
        "--lanes=6": "lanes=6: not a power of two",
        "--lanes=1024": "lanes=1024: use 512 or less",
        "--threads=100000": "threads=100000: use 512 or less",
        "--tp_split=6": "tp_split=6: not a power of two",
        "--sources=a=3": "sources='a=3': a: use names with a dictionary each, of weight, dataset",
        "--sources=a={'learning_rate':1}": "sources=\"a={'learning_rate':1}\": a: use names with a dictionary",
        "--sources=a={'eval_size':'3'}": "sources=\"a={'eval_size':'3'}\": a: eval_size='3': wants a whole number",
        "--sources=a={'eval_size':-5}": "sources=\"a={'eval_size':-5}\": a: eval_size=-5: use 0 or more",
        "--sources=a={'weight':0}": "sources=\"a={'weight':0}\": all weights are 0",
        "--sources=a={'weight':-1}": "sources=\"a={'weight':-1}\": a weight is 0, for held-out prompts only",
        "--sources=a={'weight':2},b={}": "prompts_per_step=8: the weights of sources add up to 3; use a",
        f"--curriculum={10**17}": f"curriculum={10**17}: use 1000000 or less",
        "--curriculum=2 --segment_tokens=1 --groups_in_flight=8": "curriculum=2: is not for --segment_tokens; use 0",
        "--tp_split=2 --batch_invariant=False": "tp_split=2: is for --batch_invariant=True",
        "--rollout_tp=0": "rollout_tp=0: must be more than 0",
        "--rollout_tp=2 --tp_split=2": "rollout_tp=2: 1 ranks, of which 1 train",
        "--leaf_tokens=0": "leaf_tokens=0: must be more than 0",
        "--temperature=0.0": "temperature=0.0",
        "--temperature=1e-9": "temperature=1e-09: SGLang takes so little for 0; use at least 0.001",
        "--eval_temperature=1e-9": "eval_temperature=1e-09: SGLang takes so little",
        "--out_dir=": "out_dir='': name a folder",
        "--init_from=": "init_from='': name a model",
        "--dataset=": "dataset='': name a data set",
        "--device=tpu": "device='tpu'",
        "--dtype=float16": "dtype='float16'",
        "--device=cpu --dtype=bfloat16": "dtype='bfloat16': is for cards, and this run is on a CPU; use float32",
        "--device=cuda --dtype=float32 --batch_invariant=False": "dtype='float32': on a card it needs",
        "--max_new_tokens=0": "max_new_tokens=0",
        "--engine_args=max_total_tokens=519": "engine_args='max_total_tokens=519': one sample may take",
        "--engine_args=max_total_tokens=None": "engine_args='max_total_tokens=None': one sample may take",
        "--weight_sync=pigeon": "weight_sync='pigeon'",
        "--mode=replay --queue_dir=no/queue": "queue_dir='no/queue': mode='replay' needs",
        "--queue_dir=out/x": "queue_dir='out/x': is for --mode=replay",
        "--mode=server": "mode='server': use grpo, replay, sft",
        "--chosen_column=best": "chosen_column='best': is for --mode=rm",
        "--mode=dpo --init_from=x": "kl_coef=0.0: is DPO's beta; use more than 0",
        "--mode=rm --agent=examples/guess.py:solve": "agent='examples/guess.py:solve': is not for --mode=rm or dpo",
        "--watch=rewind": "watch='rewind': use stop",
        "--scratch_args=hidden=64": "scratch_args='hidden=64': use whole numbers, of a scratch model that has else",
        "--scratch_args=hidden_size=x": "scratch_args='hidden_size=x': x is no literal; use whole numbers",
        "--scratch_args=hidden_size=6.4": "scratch_args='hidden_size=6.4': use whole numbers",
        "--scratch_args=hidden_size=0": "scratch_args='hidden_size=0': sizes must be more than 0",
        "--scratch_args=num_experts=1": "scratch_args='num_experts=1': sizes must be more than 0, and a token's",
        "--lora_alpha=16.0": "lora_alpha=16.0: is for --lora_rank; use 32.0",
        "--lora=out/x": "lora='out/x': adapters to train on; use --lora_rank, with their rank, too",
        "--lora=out/x --mode=eval": "lora='out/x': mode='eval': adapters are trained here; to use them first make",
        "--lora_rank=8 --lora_alpha=0.0": "lora_alpha=0.0: must be more than 0",
        "--lora_rank=8 --mode=eval": "lora_rank=8: mode='eval': adapters are trained here; to use them first make",
        "--lora_rank=8 --mode=rm": "lora_rank=8: is not for --mode=rm; use 0",
        "--router_aux_loss_coef=0.1 --mode=rm": "router_aux_loss_coef=0.1: is not for --mode=rm or dpo; use 0.0",
        "--watch=stop --mode=sft": "watch='stop': is not for --mode=sft, rm, dpo or eval; use ''",
        "--group_size=1 --prompts_per_step=1 --advantage=reinforce++": "group_size=1: the baseline of advantage=",
        "--loss=gspo": "loss='gspo': its ratio is a sequence's, not a token's; --loss_aggregation",
        "--loss=pg --updates_per_batch=2": "updates_per_batch=2: is not for --loss=pg; use 1",
        "--updates_per_batch=0": "updates_per_batch=0: must be more than 0",
        "--advantage=ppo": "advantage='ppo': use grpo, dr_grpo",
        "--advantage=distill": "advantage='distill': needs a teacher",
        "--advantage=distill --kl_coef=0.1 --reference=x": "kl_coef=0.1: is not for --advantage=distill; use 0.0",
        "--advantage=gae --dynamic_sampling=2": "dynamic_sampling=2: is not for --advantage=reinforce++",
        "--value_clip=0.0": "value_clip=0.0: is for --advantage=gae",
        "--credit=turn": "credit='turn': is for --agent; use 'sample'",
        "--credit=turn --agent=examples/guess.py:solve --advantage=reinforce++": "credit='turn': is for --adv",
        "--kl_in_reward=True": "kl_in_reward=True: is for --kl_coef",
        "--importance=mask --importance_floor=1.5": "importance_floor=1.5: the weight of equal log-probs",
        "--overlong_cache=256": "overlong_cache=256: not within max_new_tokens=256",
        "--eval_samples=0": "eval_samples=0",
        "--dual_clip=0.5": "dual_clip=0.5",
        "--kl_coef=0.1": "kl_coef=0.1: needs a reference, as a scratch model is random",
        "--reference=x": "reference='x': is for --kl_coef or --advantage=distill; use ''",
        "--keep_checkpoints=0": "keep_checkpoints=0",
        "--sft_batch=0": "sft_batch=0: must be more than 0",
        "--warmup_steps=10 --lr_decay_steps=5": "lr_decay_steps=5: the cosine begins after warmup_steps=10",
        "--beta2=1.0": "beta2=1.0: the part of a mean that each step keeps; use less than 1",
        "--engine_memory=5.0": "engine_memory=5.0: use 1 or less",
        "--advantage=gae --gamma=1.5": "gamma=1.5: use 1 or less",
    },
    2: {
        "--rollout_ranks=2": "rollout_ranks=2: of 2 ranks",
        "--rollout_tp=2 --tp_split=2 --colocate=True --rollout_ranks=2": "rollout_tp=2: 2 ranks, of which 2 train",
        "--rollout_ranks=0": "rollout_ranks=0: must be more than 0",
        "--weight_sync=ipc": "weight_sync='ipc': engine and trainer must be one process",
        "--segment_tokens=257 --groups_in_flight=16": "segment_tokens=257: not within max_new_tokens=256",
        "--segment_tokens=32": "groups_in_flight=0: a step trains on prompts_per_step=8 groups out of these; use 16",
        "--groups_in_flight=16": "groups_in_flight=16: is for --segment_tokens",
        "--segment_tokens=32 --groups_in_flight=16 --dynamic_sampling=1": "dynamic_sampling=1: is not for",
    },
    3: {
        "--rollout_tp=2 --rollout_ranks=2": "rollout_tp=2: does not divide tp_split=1",
        "--rollout_tp=2 --tp_split=2": "rollout_tp=2: 3 ranks, of which 2 train, do not make engines of 2",
        "--rollout_tp=2 --tp_split=2 --mode=eval": "rollout_tp=2: 3 ranks, of which 0 train",
    },
    4: {
        "--rollout_tp=2 --tp_split=2 --rollout_ranks=3": "rollout_tp=2: 4 ranks, of which 1 train",
        "": "lanes=8: 3 trainer ranks cannot share",
    },
}
CASES = [(ranks, flags) for ranks, cases in BAD.items() for flags in cases]


@pytest.mark.parametrize("ranks,flags", CASES)
def test_values_that_make_no_sense_are_refused_in_one_line(ranks, flags, refusal):
    config = configure(dict(DEFAULTS), flags.split())
    assert refusal(check_config, config, ranks, DEFAULTS).startswith(f"error: {BAD[ranks][flags]}")


@pytest.mark.parametrize("change", [dict(advantage="mine.py:f"), dict(advantage="reinforce++"), dict(mode="sft")])
def test_a_group_of_one_is_enough_where_no_baseline_is_its_mean(change):
    check_config(DEFAULTS | dict(group_size=1) | change, 1, DEFAULTS)


def test_a_negative_number_is_refused_wherever_it_has_no_meaning(refusal):
    for key, default in DEFAULTS.items():
        if type(default) in (int, float):
            config = DEFAULTS | {key: type(default)(-1)}
            if key in ("seed", "entropy_coef", "pass_reward"):
                check_config(config, 1, DEFAULTS)
            else:
                assert refusal(check_config, config, 1, DEFAULTS).startswith(f"error: {key}=-1")


def test_another_kind_of_cpu_is_refused_only_where_an_engine_runs(refusal, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="riscv64"))
    config = DEFAULTS | dict(device="cpu")
    check_config(config | dict(mode="sft"), 1, DEFAULTS)
    check_config(config | dict(device="cuda"), 1, DEFAULTS)
    line = refusal(check_config, config, 1, DEFAULTS)
    assert line.startswith("error: device='cpu': SGLang has engines for x86_64 and aarch64")


@pytest.mark.parametrize("name", ["torch", "sglang", "transformers", "triton", "numba"])
def test_another_version_than_the_pinned_one_is_named_with_the_cure(name, refusal, monkeypatch):
    versions.check_versions()  # those that are here are the pinned ones
    right = versions.library_versions()
    monkeypatch.setattr(versions, "library_versions", lambda: right | {name: "9.9.9"})
    line = refusal(versions.check_versions)
    assert line.startswith(f"error: {name} 9.9.9: the hooks into it are written for {name} {right[name]}; ")
    assert "uv sync" in line and "pyproject.toml" in line


def test_outside_of_the_environment_the_line_says_how_to_start(refusal, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: importlib.metadata.version(f"no_{name}"))
    line = refusal(versions.check_versions)
    assert line.startswith("error: no_torch: not installed for ")
    assert line.endswith("; start with uv run, as in: uv run train_grpo.py")


WITHOUT_LIBRARIES = [
    ("--help", 0),
    ("--help=all", 0),
    ("--learing_rate=1", 2),
    ("--group_size=1", 2),
    ("--watch=rewind", 2),  # a rule of the last feature: those of all features before it have been tried
]


@pytest.mark.parametrize("argument,status", WITHOUT_LIBRARIES)
def test_help_and_mistyped_keys_do_not_wait_for_the_libraries(argument, status):
    """None of them is imported; a time limit would show that on an idle machine only."""
    code = f"""if True:
        import runpy, sys
        sys.argv = [{str(SCRIPT)!r}, {argument!r}]
        try:
            runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
        except SystemExit as ended:
            print(ended.code, sorted({{"torch", "transformers", "sglang", "numpy", "tqdm"}} & set(sys.modules)))"""
    done = started("-c", code, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == f"{status} []", done.stdout + done.stderr


def test_a_start_that_imports_for_long_says_what_it_waits_for(monkeypatch, capsys):
    class AtOnce(threading.Timer):
        def start(self):
            self.function(*self.args, **self.kwargs)

    monkeypatch.setattr(start.threading, "Timer", AtOnce)
    for aloud in (False, True):
        with start.lean_imports(aloud):
            pass
        assert capsys.readouterr().out.startswith("waiting for the imports of torch") == aloud
