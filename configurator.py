"""
The config block of a script is its schema; config files and the command line override it.

    learning_rate = 1e-6  # peak, reached after the warm-up
    config = configure(globals())  # directly under the block
    $ torchrun --nproc_per_node=8 train_grpo.py config/tiny.py --learning_rate=2e-6 --strict

The idea is nanoGPT's. What differs: a name that is not in the block is an error, in a file too; a value has the type of
its default; defaults < files in their order < flags, in whatever order they are typed; and `config_source` writes a
config file itself. A mistake ends in one line and status 2, never in a traceback. `--help` shows the comments of a
block that stands at the left margin.

Each feature has a file in onecurve/keys/ with a block of its keys and its `rules`. A script that gives these files to
`configure` has their keys, too. The last section is train_grpo.py's: it calls `resolve`, which calls `configure`.
"""

import json
import os
import re
import signal
import sys
import time
import types
from ast import literal_eval, parse, unparse
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import NamedTuple

WANTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string in UTF-8 without NUL"}
ORIGINS = {}  # key -> the config file or "command line" that last set it, filled by configure
NO_LITERAL = ValueError, TypeError, SyntaxError, OverflowError, MemoryError, RecursionError  # literal_eval raises them


def close_bars():
    """Closes progress bars, which leave the cursor at their end: so an error gets a line of its own."""
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()
    if os.environ.get("RANK", "0") != "0":
        print(file=sys.stderr)  # the bar is the first rank's


def on_cpu(config):
    """Whether the run will use a CPU, found without torch, which is imported later."""
    drivers = "/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"  # dxg: of WSL2
    return config["device"] == "cpu" or not (config["device"] or any(map(os.path.exists, drivers)))


def printable(text):
    """`text` as one line that is safe to print: text of others may contain escape sequences for the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.splitlines()))


def error_line(message):
    """The line in which an error ends this process. torchrun, if there is one, gets it as its own last line, too."""
    line = f"error: {printable(message)}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = dict(py_callstack=line, timestamp=str(int(time.time())))
        Path(path).write_text(json.dumps(dict(message=dict(message=line, extraInfo=details))))
    return line


def last_word(line, stderr=2):
    """Writes the line in which this process ends, behind a progress bar; it ends, too, where nobody reads any more."""
    with suppress(OSError):
        os.write(stderr, f"\n{line}\n".encode())


def fail(message):
    """Ends this process with one line on stderr and status 2, whatever its rank."""
    close_bars()
    print(error_line(message), file=sys.stderr)
    sys.exit(2)


def require(condition, message):
    """Ends the run with one line unless `condition`, which should be the same on every rank."""
    if not condition:
        if os.environ.get("RANK", "0") != "0":
            # torchrun kills all ranks as soon as one has exited. Rank 0 prints the line, and may come here seconds
            # later (it is still importing torch): so the others wait, and are killed meanwhile, unless rank 0 is well.
            time.sleep(5)
        fail(message)


def suggestion(name, names):
    """The end of a sentence that refuses `name`: the nearest of `names`, if one is near."""
    return "".join(f"; did you mean {near}?" for near in get_close_matches(name, names, n=1))


def block(namespace):
    """{key: default} of the config block in `namespace`: the lower-case names of int, float, bool or str."""
    return {key: x for key, x in namespace.items() if key.islower() and key[0] != "_" and type(x) in WANTED}


def load_features():
    """{name: module} of the files in onecurve/keys/, by name. They import nothing that takes time."""
    files = sorted(Path(__file__).parent.glob("onecurve/keys/*.py"))
    return {file.stem: import_module(f"onecurve.keys.{file.stem}") for file in files}


def keys_of(features):
    """{key: default} of all features, one after the other."""
    return {key: x for feature in features.values() for key, x in block(vars(feature)).items()}


def configure(namespace, argv=None, features={}):
    """
    Overrides the config block in `namespace` (a script's globals()) from `argv`, in place; returns {key: value} in the
    block's order, then the keys of `features`, {name: module}. Call it before the script binds any other name that
    `block` would take for a key. In a config file a name that is not a key starts with an underscore.
    """
    argv = sys.argv[1:] if argv is None else argv
    script = Path(namespace.get("__file__", ""))
    defaults = block(namespace) | keys_of(features)
    for arg in argv:
        if re.match("(-h|--help)($|=)", arg):
            text = _help(arg.partition("=")[2], defaults, script, features)
            if os.environ.get("RANK", "0") == "0":
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
                print(text, flush=True)
            sys.exit(0)

    config = dict(defaults)
    ORIGINS.clear()
    for arg in sorted(argv, key=lambda arg: arg.startswith("--")):  # a stable sort: files, then flags, in their order
        is_flag = arg.startswith("--")
        flag, equals, text = arg[2:].partition("=")
        assigned = {flag: text if equals else True} if is_flag else _run_file(arg, script.parent, defaults)
        for key, value in assigned.items():
            where = "--" if is_flag else f"{arg}: "
            near = suggestion(key, defaults)
            require(key in defaults, f"{where}{key}: no such key{near}  (--help=all lists all keys)")
            kind = type(defaults[key])
            try:
                config[key] = _typed(value, kind, is_text=is_flag and value is not True)
            except NO_LITERAL:
                given = arg if is_flag else f"{where}{key}={value!r:.60}"
                require(False, f"{given}: wants {WANTED[kind]}, as in {'--' * is_flag}{key}={defaults[key]!r}")
            ORIGINS[key] = "command line" if is_flag else arg
    namespace.update(config)
    return config


def resume_config(config, path, free_keys):
    """
    (the config saved in `path`, the config to resume with): the saved one with what the command line and its files set
    for its `free_keys`. Ends the run with one line that names the other keys for which they set new values.
    """
    saved = saved_config(path)
    unknown = [key for key, x in config.items() if type(saved.get(key)) is not type(x)]
    why = "it was saved by another version of this program, or edited"
    require(not unknown, f"{path}: has no {', '.join(unknown)} of the type that is wanted; {why}")
    free = free_keys(saved)
    changed = ", ".join(
        f"{key}={config[key]!r} (the run has {saved[key]!r})"
        for key in ORIGINS
        if key not in free and config[key] != saved[key]
    )
    require(not changed, f"{changed}: cannot change on resume; what can: {', '.join(sorted(free))}")
    return saved, saved | {key: config[key] for key in ORIGINS if key in free}


def saved_config(path):
    """{key: value} of a file that `config_source` wrote: it is read and not executed, as it may be a stranger's."""
    try:
        saved = {line.targets[0].id: _literal(line.value) for line in parse(path.read_bytes()).body}
        strange = [key for key, x in saved.items() if type(x) not in WANTED or "\0" in str(x)]
        config_source(saved)  # raises for numbers of more digits than Python prints
        if strange:
            raise ValueError(f"{strange}: wants {', '.join(WANTED.values())}")
        return saved
    except (OSError, AttributeError, *NO_LITERAL) as error:
        require(False, f"{path}: not only lines 'key = literal', as a run saves them: {error}")


def config_source(config, origins=ORIGINS):
    """`config` as the source of a config file that reruns the run; a comment behind each override says its origin."""
    comments = {key: f"  # {origin}" for key, origin in origins.items()}
    return "".join(f"{key} = {value!r}{comments.get(key, '')}\n" for key, value in config.items())


def _literal(node):
    """The value of a node of ast's; its own error of what is no literal would show the node as an object."""
    try:
        return literal_eval(node)
    except ValueError:
        raise ValueError(f"{unparse(node):.60} is no literal")


def _typed(value, kind, is_text):
    """`value` as a `kind`, or an exception. The text of a flag is read as a Python literal unless a str is wanted."""
    if is_text and kind is not str:
        value = literal_eval(value.title() if kind is bool else value)
    typed = kind(value)  # 1 will do for a float, 1e3 for an int; True is no number, and 1 is not True
    same = typed == value and isinstance(value, bool) == (kind is bool)
    if not same or literal_eval(repr(typed)) != typed:  # inf and nan have no literal to be saved as
        raise ValueError
    if kind is str and b"\0" in typed.encode():  # which raises for what is not UTF-8
        raise ValueError
    return typed


def _run_file(name, folder, defaults):
    """{key: value} that a config file assigns; it is looked for in the working directory, then beside the script."""
    require(name.endswith(".py"), f"{name}: not a config file (.py); a flag is joined to its value: --key=value")
    path = next((path for path in (Path(name), folder / name) if path.is_file()), None)
    folders = " or in ".join(dict.fromkeys([str(Path.cwd()), str(folder.resolve())]))
    require(path, f"{name}: no such config file, in {folders}")
    try:
        scope = run_path(str(path))
    except (Exception, SystemExit) as error:  # the file's code may raise anything
        lines = [getattr(error, "lineno", "?")]  # of a syntax error, which has no frame in the file
        lines += [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        require(False, f"{name}:{lines[-1]}: {type(error).__name__}: {getattr(error, 'msg', error)}")
    # a value with a __name__ is a module, function or class: an import or helper, and an error only under a key's name
    return {key: x for key, x in scope.items() if key in defaults or not (key[0] == "_" or hasattr(x, "__name__"))}


def _help(what, defaults, script, features):
    """The text of --help (`what` is ''), of --help=all, or of --help= and a feature's name."""
    known = "all", *features
    near = suggestion(what, known)
    require(what in ("", *known), f"--help={what}: no such feature{near}  (--help lists the features)")
    if what in features:
        return "\n".join(_about(what, features[what]))
    own = {key: x for key, x in defaults.items() if key not in keys_of(features)}
    lines = [f"usage: {Path(sys.argv[0]).name} [config/file.py ...] [--key=value ...]", *_described(own, script)]
    if what == "all":
        for name, feature in features.items():
            lines += ["", *_about(name, feature)]
    elif features:
        lines += ["", "# features: --help=lora lists the keys of one, --help=all those of all"]
        lines += [f"  {name:<12}  {feature.__doc__.splitlines()[1]}" for name, feature in features.items()]
    return "\n".join(lines)


def _about(name, feature):
    """Lines about a feature: its docstring and its keys."""
    docstring = [f"# {line}" for line in feature.__doc__.strip().splitlines()]
    return [f"# {name}", *docstring, *_described(block(vars(feature)), Path(feature.__file__))]


def _described(keys, file):
    """A line for each key: its default, its comment in the file; before it the comment lines above it."""
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.findall(r"((?:^#.*\n)*)^(\w+) = .*?(?:  # (.*))?$", source, re.MULTILINE)
    notes = {key: (above, comment) for above, key, comment in found}
    for key, default in keys.items():
        above, comment = notes.get(key, ("", ""))
        if above:
            yield from ("", above.strip())
        yield f"  {f'--{key}={default!r}':<36}  {comment}".rstrip()


# ------------------------------------------------------------------------------------------------------------------
# the keys of train_grpo.py: which may change on a resume, and which values make no sense together

# keys that say where and how fast, not what is computed: they may differ between two runs with one digest
FREE_KEYS = """
    out_dir mode queue_dir max_steps device dtype threads rollout_ranks colocate eval_every gradient_checkpointing
    rollout_tp engine_memory engine_args engine_timeout strict
    weight_sync checkpoint_every keep_checkpoints keep_rollouts sample_every eval_samples pass_reward
    judge judge_tries watch""".split()


def free_keys(config):
    """Of FREE_KEYS those that are free in this run: a curriculum draws prompts by which samples are right."""
    return {*FREE_KEYS} - ({"pass_reward"} if config.get("curriculum") else set())


class Mode(NamedTuple):
    """The tasks of a run of this mode; nothing but this table knows the modes' names."""

    trains: bool = True
    samples: bool = True  # with engines; a mode that trains and samples sends them its weights
    steps: str = "rl"  # or 'supervised', or '' for none
    pairs: bool = False  # learns which of two texts is preferred ..
    scores: bool = False  # .. as a reward model, not as a policy


SUPERVISED = Mode(samples=False, steps="supervised")
MODES = {
    "grpo": Mode(),
    "replay": Mode(samples=False),
    "sft": SUPERVISED,
    "rm": SUPERVISED._replace(pairs=True, scores=True),
    "dpo": SUPERVISED._replace(pairs=True),
    "rollout": Mode(trains=False),
    "eval": Mode(trains=False, steps=""),
}
CHOICES = {  # beside the default, which may be ''
    "device": "cpu cuda",
    "dtype": "bfloat16 float32",
    "mode": " ".join(MODES),
    "advantage": "grpo dr_grpo rloo reinforce++ reinforce++_baseline gae distill",
    "loss": "ppo gspo cispo pg",
    "loss_aggregation": "token sequence constant",
}
POSITIVE = """
    prompts_per_step group_size max_new_tokens max_prompt_tokens temperature eval_samples
    keep_checkpoints updates_per_batch leaf_tokens lanes rollout_tp rollout_ranks"""
NOT_NEGATIVE = """
    max_steps threads eval_size eval_every eval_temperature checkpoint_every keep_rollouts sample_every
    learning_rate warmup_steps lr_decay_steps min_lr beta1 beta2 weight_decay grad_clip clip_low clip_high"""
GROUP_BASELINES = "grpo dr_grpo rloo reinforce++_baseline".split()  # advantages within a group
OWN = "advantage", "loss"  # keys whose value may be a function in a file, such as 'mine.py:f'


def named_arguments(text):
    """{name: value} of a text such as 'enable_thinking=False, effort=2'. Raises one of NO_LITERAL."""
    call = parse(f"dict({text})", mode="eval").body
    if call.args:
        raise ValueError("no name=value")
    if len(call.keywords) > len({keyword.arg for keyword in call.keywords}):
        raise ValueError("a name twice")
    return {keyword.arg: _literal(keyword.value) for keyword in call.keywords}


def resolve(script, defaults):
    """
    Reads the command line of train_grpo.py, whose path is `script`, and checks it; imports nothing that takes time.
    Returns (the config; on a resume the saved config of the run in out_dir, else {}; whether torchrun has restarted the
    run, and not the user). defaults: all keys, the block's and the features'.
    """
    config = configure(defaults | {"__file__": script}, features=load_features())
    saved = {}
    path = Path(config["out_dir"], "config.py")
    by_user = config["init_from"] == "resume"
    restarted = not by_user and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and path.exists()
    if by_user or restarted:
        require(path.is_file(), f"init_from='resume': out_dir={config['out_dir']!r} holds no run")
        if by_user:
            del ORIGINS["init_from"]  # it is this command's; the run has its own
        saved, config = resume_config(config, path, free_keys)
        before = MODES.get(saved["mode"], Mode())
        now = MODES.get(config["mode"], before)
        why = f"mode={config['mode']!r}: the run has {saved['mode']!r}"
        fits = now.scores == before.scores and now.trains >= before.trains  # a reward model is no policy
        require(fits, f"{why}; use another out_dir, and --init_from=checkpoint for its model")
    check_config(config, int(os.environ.get("WORLD_SIZE", 1)), defaults)
    return config, saved, restarted


def roles(config, world):
    """(trainers, engines) of `world` ranks. Engines have the last ranks, rollout_tp each; a rank may be both."""
    mode = MODES[config["mode"]]
    if not mode.samples:
        return world, 0
    if not mode.trains:
        return 0, max(1, world // config["rollout_tp"])
    if world == 1 or config["colocate"]:
        return world, world
    last = config["rollout_ranks"]
    return world - last, last // config["rollout_tp"]


# A rule yields a key, whether its value fits, and else what is wrong and the cure. `c` is the config as a
# namespace that has `world`, the number of ranks, and `defaults`, too. Several keys are words of one string.


def positive(c, keys):
    for key in keys.split():
        yield key, vars(c)[key] > 0, "must be more than 0"


def not_negative(c, keys):
    for key in keys.split():
        yield key, vars(c)[key] >= 0, "use 0 or more"


def at_most(c, most, keys):
    for key in keys.split():
        yield key, vars(c)[key] <= most, f"use {most} or less"


def power_of_2(c, key):
    yield key, vars(c)[key].bit_count() == 1, "not a power of two; use 1, 2, 4, .."


def choice(c, key, known):
    """One of the words `known`, or the default."""
    value = vars(c)[key]
    fits = value in (c.defaults[key], *known.split()) or key in OWN and ".py:" in value
    yield key, fits, f"use {known.replace(' ', ', ')}" + ", or 'mine.py:f'" * (key in OWN)


def untouched(c, keys, why):
    """The keys must have their defaults, as they have no effect here. why: such as 'is for --lora_rank'."""
    for key in keys.split():
        yield key, vars(c)[key] == c.defaults[key], f"{why}; use {c.defaults[key]!r}"


def arguments(c, key, what, numbers=None):
    """The text of named arguments. numbers: the names that they may have, whose values are whole numbers."""
    try:
        given = named_arguments(vars(c)[key])
    except NO_LITERAL as e:
        yield key, False, f"{getattr(e, 'msg', e)}; use {what}"
    else:
        fits = numbers is None or given.keys() <= {*numbers} and all(type(x) is int for x in given.values())
        yield key, fits, f"use {what}"


def block_rules(c):
    """The rules of the block: for each key by itself, and for values that make no sense together."""
    for key, known in CHOICES.items():
        yield from choice(c, key, known)
    yield from positive(c, POSITIVE)
    yield from not_negative(c, NOT_NEGATIVE)
    # an empty variable of a shell, whose run would fill the folder it is in, or take that for its model
    for key, what in dict(out_dir="a folder", init_from="a model", dataset="a data set").items():
        yield key, vars(c)[key], f"name {what}"
    for key in ("temperature", "eval_temperature"):
        yield key, not 0 < vars(c)[key] < 1e-3, "SGLang takes so little for 0; use at least 0.001"
    yield from at_most(c, 512, "threads lanes")  # a slip: the run would stand still, without a word
    for key in ("beta1", "beta2"):
        yield key, vars(c)[key] < 1, "the part of a mean that each step keeps; use less than 1"
    why = f"mode={c.mode!r} is of held-out prompts; use more than 0"
    yield "eval_size", c.eval_size > 0 or MODES[c.mode].steps, why
    why = f"the baseline of advantage={c.advantage!r} is the mean of the group; use at least 2"
    yield "group_size", c.group_size > 1 or c.advantage not in GROUP_BASELINES or MODES[c.mode].steps != "rl", why
    why = f"the baseline of advantage={c.advantage!r} is the mean of the batch; use at least 2 samples"
    alone = c.group_size * c.prompts_per_step == 1 and MODES[c.mode].steps == "rl"
    yield "group_size", not (alone and c.advantage == "reinforce++"), why
    per_sequence = c.loss != "gspo" or c.loss_aggregation == "sequence"
    yield "loss", per_sequence, "its ratio is a sequence's, not a token's; --loss_aggregation=sequence"
    why = f"the cosine begins after warmup_steps={c.warmup_steps}; use more, or 0: constant"
    yield "lr_decay_steps", not 0 < c.lr_decay_steps <= c.warmup_steps, why
    if c.loss == "pg":
        yield from untouched(c, "updates_per_batch", "is not for --loss=pg")


def rank_rules(c):
    """The rules of the ranks, whoever trains and samples."""
    world = c.world
    trainers, engines = roles(vars(c), world)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # an engine's ranks are of one node, and train nothing
    fill = trainers + engines * c.rollout_tp == world and (here == world or here % c.rollout_tp == 0)
    why = f"{world} ranks, of which {trainers} train, do not make engines of {c.rollout_tp}; use others, or 1"
    yield "rollout_tp", c.rollout_tp == 1 or fill, why
    why = f"of {world} ranks at least one must roll out and one train; or use --colocate"
    yield "rollout_ranks", (trainers > 0, engines > 0) == MODES[c.mode][:2], why
    yield from power_of_2(c, "lanes")
    why = f"{trainers} trainer ranks cannot share them; use 1, 2, 4, .. ranks, at most as many as lanes"
    yield "lanes", not trainers or c.lanes % trainers == 0, why


def check_config(config, world, defaults):
    """
    Refuses values that make no sense together, before anything is started, in a line about the first of them. world:
    number of ranks.
    """
    c = types.SimpleNamespace(**config, world=world, defaults=defaults)
    features = load_features().values()
    for rules in (block_rules, rank_rules, *(feature.rules for feature in features)):
        for key, fits, why in rules(c):
            require(fits, f"{key}={config[key]!r}: {why}")
