"""
The config block of a script is its schema; config files and the command line override it.

    learning_rate = 1e-6  # peak, reached after the warm-up
    config = configure(globals())  # directly under the block
    $ torchrun --nproc_per_node=8 train_grpo.py config/tiny.py --learning_rate=2e-6 --strict

The idea is nanoGPT's. What differs: a name that is not in the block is an error, in a file too; a value has the type of
its default; defaults < files in their order < flags, in whatever order they are typed; and what `config_source` writes
is a config file itself. A mistake ends in one line and status 2, never in a traceback. `--help` shows the comments of a
block that stands at the left margin.

All of it serves any script; only the last section knows the keys of train_grpo.py.
"""

import json
import os
import re
import signal
import sys
import time
import types
from ast import literal_eval, parse
from difflib import get_close_matches
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import NamedTuple

WANTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
ORIGINS = {}  # key -> the config file or "command line" that last set it, filled by configure
NO_LITERAL = ValueError, TypeError, SyntaxError, OverflowError, MemoryError, RecursionError  # literal_eval raises them


def close_bars():
    """Closes progress bars, which leave the cursor at their end: so an error gets a line of its own."""
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()


def on_cpu(config):
    """Whether the run will be on a CPU; before torch, which knows, is imported."""
    return config["device"] == "cpu" or not (config["device"] or Path("/proc/driver/nvidia").exists())


def printable(text):
    """`text` as one line that a terminal shows and does not obey: what others wrote may have escape sequences in it."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.splitlines()))


def error_line(message):
    """The line in which an error ends this process. Under torchrun it is told, too, so that its last line is this."""
    line = f"error: {printable(message)}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = dict(py_callstack=line, timestamp=str(int(time.time())))
        Path(path).write_text(json.dumps(dict(message=dict(message=line, extraInfo=details))))
    return line


def fail(message):
    """Ends this process with one line on stderr and status 2, whatever its rank."""
    close_bars()
    print(error_line(message), file=sys.stderr)
    sys.exit(2)


def require(condition, message):
    """Ends the run with one line unless `condition`, which is best the same on every rank."""
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


def configure(namespace, argv=None):
    """
    Overrides the config block in `namespace` (a script's globals()) from `argv`, in place; returns {key: value} in the
    block's order. Call it before the script binds any other name that `block` would take for a key. In a config file a
    name that is not a key starts with an underscore.
    """
    argv = sys.argv[1:] if argv is None else argv
    script = Path(namespace.get("__file__", ""))
    defaults = block(namespace)
    if "--help" in argv or "-h" in argv:
        if os.environ.get("RANK", "0") == "0":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
            print(_help(defaults, script), flush=True)
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
            require(key in defaults, f"{where}{key}: no such key{near}  (--help lists all keys)")
            kind = type(defaults[key])
            try:
                config[key] = _typed(value, kind, is_text=is_flag and value is not True)
            except NO_LITERAL:
                given = arg if is_flag else f"{where}{key}={value!r:.60}"
                require(False, f"{given}: wants {WANTED[kind]}, as in {'--' * is_flag}{key}={defaults[key]!r}")
            ORIGINS[key] = "command line" if is_flag else arg
    namespace.update(config)
    return config


def resume_config(config, path, free):
    """
    (the config saved in `path`, the config to resume with): the saved one with what the command line and its files set
    for the keys `free`. Ends the run with one line that names the other keys for which they set new values.
    """
    saved = saved_config(path)
    unknown = [key for key in config if key not in saved]
    require(not unknown, f"{path}: has no {', '.join(unknown)}; it was saved by another version of this program")
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
        saved = {line.targets[0].id: literal_eval(line.value) for line in parse(path.read_bytes()).body}
        strange = [key for key, x in saved.items() if type(x) not in WANTED or "\0" in str(x)]
        config_source(saved)  # raises for numbers of more digits than Python prints
        if strange:
            raise ValueError(f"{strange}: wants {', '.join(WANTED.values())} without NUL")
        return saved
    except (OSError, AttributeError, *NO_LITERAL) as error:
        require(False, f"{path}: not only lines 'key = literal', as a run saves them: {error}")


def config_source(config, origins=ORIGINS):
    """`config` as the source of a config file that reruns the run; a comment behind each override says its origin."""
    comments = {key: f"  # {origin}" for key, origin in origins.items()}
    return "".join(f"{key} = {value!r}{comments.get(key, '')}\n" for key, value in config.items())


def _typed(value, kind, is_text):
    """`value` as a `kind`, or an exception. The text of a flag is read as a Python literal unless a str is wanted."""
    if is_text and kind is not str:
        value = literal_eval(value.title() if kind is bool else value)
    typed = kind(value)  # 1 will do for a float, 1e3 for an int; True is no number, and 1 is not True
    same = typed == value and isinstance(value, bool) == (kind is bool)
    if not same or literal_eval(repr(typed)) != typed:  # inf and nan have no literal to be saved as
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
    except Exception as error:  # the file's code may raise anything
        lines = [getattr(error, "lineno", "?")]  # of a syntax error, which has no frame in the file
        lines += [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        require(False, f"{name}:{lines[-1]}: {type(error).__name__}: {getattr(error, 'msg', error)}")
    # a value with a __name__ is a module, function or class: an import or helper, and an error only under a key's name
    return {key: x for key, x in scope.items() if key in defaults or not (key[0] == "_" or hasattr(x, "__name__"))}


def _help(defaults, script):
    """Every key with its default, its comment in the script and the comment lines above it."""
    source = script.read_text(encoding="utf-8") if script.is_file() else ""
    found = re.findall(r"((?:^#.*\n)*)^(\w+) = .*?(?:  # (.*))?$", source, re.MULTILINE)
    notes = {key: (above, comment) for above, key, comment in found}
    lines = [f"usage: {Path(sys.argv[0]).name} [config/file.py ...] [--key=value ...]"]
    for key, default in defaults.items():
        above, comment = notes.get(key, ("", ""))
        lines += ["", above.strip()] * bool(above)
        lines.append(f"  {f'--{key}={default!r}':<36}  {comment}".rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------
# the keys of train_grpo.py: what may change on the way, and which values make no sense together

# keys that say where and how fast, not what is computed: they may differ between two runs with one digest
FREE_KEYS = """
    out_dir mode queue_dir max_steps device threads rollout_ranks colocate eval_every gradient_checkpointing
    rollout_tp engine_memory engine_args engine_timeout strict
    weight_sync checkpoint_every keep_checkpoints keep_rollouts sample_every eval_samples pass_reward
    judge judge_tries watch""".split()


class Mode(NamedTuple):
    """What a run of this mode does; nothing but this table knows the modes' names."""

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
    "mode": " ".join(MODES),
    "weight_sync": "broadcast ipc",
    "engine_bits": "fp32 bf16 fp16 fp8 int8 bf16:act fp16:act fp8:act int8:act",
    "credit": "sample turn",
    "sandbox": "bwrap none",
    "watch": "stop",
    "advantage": "grpo dr_grpo rloo reinforce++ reinforce++_baseline gae distill",
    "loss": "ppo gspo cispo pg",
    "loss_aggregation": "token sequence constant",
    "importance": "full truncate mask",
    "kl_estimator": "k1 k2 k3",
}
OWN = "advantage", "loss"  # keys whose value may be a function in a file, such as 'mine.py:f'
POSITIVE = """
    prompts_per_step group_size max_new_tokens max_prompt_tokens temperature eval_samples engine_timeout
    keep_checkpoints updates_per_batch leaf_tokens lanes rollout_tp rollout_ranks tp_split max_turns agent_timeout
    judge_tries sandbox_seconds lora_alpha sft_batch engine_memory""".split()
NOT_NEGATIVE = """
    curriculum lag segment_tokens groups_in_flight lora_rank eval_temperature top_k min_p max_steps threads
    eval_size eval_every checkpoint_every keep_rollouts sample_every dynamic_sampling warmup_sft_steps sft_learning_rate
    learning_rate warmup_steps lr_decay_steps min_lr beta1 beta2 weight_decay grad_clip gamma gae_lambda value_coef
    value_clip clip_low clip_high importance_floor importance_cap router_aux_loss_coef kl_coef""".split()
AT_MOST_1 = "engine_memory gamma gae_lambda".split()
# {a condition (see `holds`): the keys that have an effect only then}
HAVE_EFFECT = {
    "advantage=gae": "gae_lambda value_coef value_clip",
    "advantage=gae or --credit=turn": "gamma",
    "kl_coef or --advantage=distill": "reference",
    "mode=replay": "queue_dir",
    "batch_invariant=True": "tp_split",
    "mode=rm or dpo": "chosen_column rejected_column",
    "segment_tokens": "groups_in_flight",
    "mode=grpo or replay": "engine_bits",
    "kl_coef": "kl_in_reward",
    "lora_rank": "lora_alpha lora_targets",
    "agent": "credit",
    "agent or --chat_template": "chat_template_args",
    "chat_template": "system_prompt",
    "advantage=grpo, dr_grpo, rloo or gae": "credit",
}
EXCLUDES = {  # {a condition: the keys that must then be left alone}
    "agent": "chat_template segment_tokens",
    "segment_tokens": "curriculum dynamic_sampling",
    "credit=turn": "kl_in_reward overlong_cache",
    "advantage=distill": "kl_coef",
    "advantage=reinforce++, gae or distill": "dynamic_sampling",
    "loss=pg": "updates_per_batch",
    "mode=rm or dpo": "agent",
    "mode=rm": "lora_rank",
    "mode=sft, rm, dpo or eval": "watch",
}
SUMS = r"arithmetic(?::(\d+):(\d+))?"  # a `dataset` that is made here
SEEDS = {"data", "noise", "init", "eval"}
SCRATCH = (
    "num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, "
    "intermediate_size=384, num_experts=0, num_experts_per_tok=2"
)
SOURCE = """
    weight dataset dataset_config split eval_split eval_size
    prompt_column answer_column sft_column prompt_template reward""".split()
ARGUMENTS = {  # keys whose value is the text of named arguments
    "chat_template_args": "arguments of the chat template, such as 'enable_thinking=False'",
    "engine_args": "arguments of SGLang's ServerArgs, such as 'max_running_requests=64'",
    "scratch_args": f"whole numbers, of a scratch model that has else {SCRATCH}",
    "seeds": "whole numbers for some of data, noise, init, eval, such as 'data=2, eval=3'",
    "sources": "names with a dictionary each, of " + ", ".join(SOURCE),
}


def named_arguments(text):
    """{name: value} of a text such as 'enable_thinking=False, effort=2'. Raises one of NO_LITERAL."""
    call = parse(f"dict({text})", mode="eval").body
    if call.args:
        raise ValueError("no name=value")
    return {keyword.arg: literal_eval(keyword.value) for keyword in call.keywords}


def scratch_sizes(config):
    """{name: size} of a scratch model; of two sizes of one name the last."""
    return named_arguments(f"{SCRATCH}, {config['scratch_args']}")


def seed_of(config, source):
    """The seed of a source of chance: its own, if `seeds` has one, or the run's."""
    return named_arguments(config["seeds"]).get(source, config["seed"])


def sources_of(config):
    """{name: the config by which a source's rows are read and scored, and its weight}; an only one has the name ''."""
    sources = named_arguments(config["sources"]) or {"": {}}
    return {name: config | {"weight": 1} | own for name, own in sources.items()}


def noise_seed(config, stream="rl"):
    """The seed of the noise in the samples of a stream: held-out ones have their own."""
    return seed_of(config, "eval" if stream == "eval" else "noise")


def resolve(namespace, defaults):
    """
    Reads the command line of train_grpo.py, whose globals() are `namespace`, into its block and checks it; imports
    nothing that takes time. Returns (the config; on a resume the saved config of the run in out_dir, else {}; whether
    torchrun has restarted the run, and not the user).
    """
    config = configure(namespace)
    saved = {}
    path = Path(config["out_dir"], "config.py")
    by_user = config["init_from"] == "resume"
    restarted = not by_user and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and path.exists()
    if by_user or restarted:
        require(path.is_file(), f"init_from='resume': out_dir={config['out_dir']!r} holds no run")
        if by_user:
            del ORIGINS["init_from"]  # it is this command's; the run has its own
        saved, config = resume_config(config, path, FREE_KEYS)
        namespace.update(config)
        before = MODES[saved["mode"]]
        why = f"the run has {saved['mode']!r}, and a reward model is no policy; start another run"
        require(MODES.get(config["mode"], before).scores == before.scores, f"mode={config['mode']!r}: {why}")
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


def holds(condition, values):
    """Whether one of a condition's parts does: 'mode=rm or dpo' (one of these), 'agent or --chat_template' (not 0)."""
    parts = (part.partition("=") for part in condition.split(" or --"))
    return any(str(values[key]) in re.split(", | or ", known) if known else values[key] for key, _, known in parts)


def key_rules(c, world, defaults):
    """Each key by itself, and what a run's ranks can do."""
    values = vars(c)
    for key, known in CHOICES.items():
        fits = values[key] in [defaults[key], *known.split()] or key in OWN and ".py:" in values[key]
        yield key, fits, f"use {known.replace(' ', ', ')}" + ", or 'mine.py:f'" * (key in OWN)
    for key in POSITIVE:
        yield key, values[key] > 0, "must be more than 0"
    for key in NOT_NEGATIVE:
        yield key, values[key] >= 0, "use 0 or more"
    for key in AT_MOST_1:
        yield key, values[key] <= 1, "use 1 or less"
    for key in ("beta1", "beta2"):
        yield key, values[key] < 1, "the part of a mean that each step keeps; use less than 1"
    for key in ("lanes", "tp_split"):
        yield key, values[key].bit_count() == 1, "not a power of two; use 1, 2, 4, .."
    for conditions, what, may in ((HAVE_EFFECT, "is for", True), (EXCLUDES, "is not for", False)):
        for condition, keys in conditions.items():
            fits = holds(condition, values) == may
            for key in keys.split():
                yield key, fits or values[key] == defaults[key], f"{what} --{condition}; use {defaults[key]!r}"
    for key, what in ARGUMENTS.items():
        try:
            given = named_arguments(values[key])
            names = {"seeds": SEEDS, "scratch_args": named_arguments(SCRATCH).keys()}.get(key)
            fits = names is None or given.keys() <= names and all(type(x) is int for x in given.values())
            yield key, fits, f"use {what}"
        except NO_LITERAL as e:
            yield key, False, f"{getattr(e, 'msg', e)}; use {what}"
    trainers, engines = roles(values, world)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # an engine's ranks are of one node, and train nothing
    fill = trainers + engines * c.rollout_tp == world and (here == world or here % c.rollout_tp == 0)
    why = f"{world} ranks, of which {trainers} train, do not make engines of {c.rollout_tp}; use others, or 1"
    yield "rollout_tp", c.rollout_tp == 1 or fill, why
    machine = os.uname().machine
    why = f"SGLang's engine has run on x86_64 only, and this is {machine}; use a mode without an engine, such as sft"
    yield "device", machine == "x86_64" or not (engines and on_cpu(values)), why
    why = f"of {world} ranks at least one must roll out and one train; or use --colocate"
    yield "rollout_ranks", (trainers > 0, engines > 0) == MODES[c.mode][:2], why
    why = f"does not divide tp_split={c.tp_split}, the parts of a sum; use a tp_split of which it is a divisor"
    yield "rollout_tp", c.tp_split % c.rollout_tp == 0, why
    why = f"{trainers} trainer ranks cannot share them; use 1, 2, 4, .. ranks, at most as many as lanes"
    yield "lanes", not trainers or c.lanes % trainers == 0, why
    why = "engine and trainer must be one process; use --colocate or another transport"
    yield "weight_sync", c.weight_sync != "ipc" or trainers == engines == world, why


def data_rules(c, world, defaults):
    """Sources, and the quotas by which a step's prompts are shared out among them."""
    given = named_arguments(c.sources)
    for name, own in given.items():
        yield "sources", isinstance(own, dict) and own.keys() <= {*SOURCE}, f"{name}: use {ARGUMENTS['sources']}"
        for key, x in own.items():
            kind = type(defaults.get(key, 0))
            yield "sources", type(x) is kind, f"{name}: {key}={x!r}: wants {WANTED[kind]}"
            yield "sources", key not in NOT_NEGATIVE or x >= 0, f"{name}: {key}={x!r}: use 0 or more"
    weights = [own["weight"] for own in sources_of(vars(c)).values()]
    yield "sources", min(weights) >= 0, "a weight is 0, for held-out prompts only, or more"
    total = sum(weights)
    steps = MODES[c.mode].steps
    yield "sources", total > 0 or not steps, "all weights are 0; use more for what is trained on"
    why = f"the weights of sources add up to {total}; use a multiple, so that each has its share of a step"
    yield "prompts_per_step", steps != "rl" or c.prompts_per_step % total == 0, why
    supervised = steps == "supervised" or c.warmup_sft_steps > 0
    yield "sft_batch", not (supervised and total) or c.sft_batch % total == 0, why


def algorithm_rules(c, world, defaults):
    """Keys of one algorithm that make no sense together."""
    yield "kl_coef", c.kl_coef > 0 or c.mode != "dpo", "is DPO's beta; use more than 0, such as 0.1"
    why = f"the baseline of advantage={c.advantage!r} is the mean of the group; use at least 2"
    yield "group_size", c.group_size > 1 or c.advantage in ("reinforce++", "gae", "distill"), why
    yield "advantage", c.reference or c.advantage != "distill", "needs a teacher; --reference=model folder"
    refers = not c.kl_coef or c.reference or c.init_from != "scratch"
    yield "kl_coef", refers, "needs a reference, as a scratch model is random; --reference=model folder"
    per_sequence = c.loss != "gspo" or c.loss_aggregation == "sequence"
    yield "loss", per_sequence, "its ratio is a sequence's, not a token's; --loss_aggregation=sequence"
    why = f"the weight of equal log-probs, 1, must lie between it and importance_cap={c.importance_cap}"
    yield "importance_floor", c.importance_floor < 1 < c.importance_cap, why
    yield "overlong_cache", 0 <= c.overlong_cache < c.max_new_tokens, f"not within max_new_tokens={c.max_new_tokens}"
    yield "dual_clip", not c.dual_clip or c.dual_clip > 1, "a bound of the ratio; use more than 1, or 0"
    yield "top_p", 0 < c.top_p <= 1, "a probability; use more than 0, or 1: all tokens"
    yield "top_k", c.top_k != 1, "samples of a group must differ; use 2 or more, or 0: all tokens"
    yield "min_p", c.min_p < 1, "a part of the largest probability; use less than 1, or 0: all tokens"


def feature_rules(c, world, defaults):
    """Modes, partial rollouts, LoRA and agents."""
    mode = MODES[c.mode]
    yield "eval_size", c.eval_size > 0 or mode.steps, f"mode={c.mode!r} is of held-out prompts; use more than 0"
    replays = c.mode != "replay" or Path(c.queue_dir, "rl_000000").is_dir()
    yield "queue_dir", replays, "mode='replay' needs the queue of a run, such as 'out/tiny/queue'"
    fits = c.segment_tokens <= c.max_new_tokens
    yield "segment_tokens", fits, f"not within max_new_tokens={c.max_new_tokens}; use less, or 0: whole samples"
    why = f"a step trains on prompts_per_step={c.prompts_per_step} groups out of these; use {2 * c.prompts_per_step}"
    yield "groups_in_flight", not c.segment_tokens or c.groups_in_flight >= c.prompts_per_step, why
    *sizes, experts, active = scratch_sizes(vars(c)).values()
    fits = 0 < min(*sizes, active) and active <= (experts or active)
    yield "scratch_args", fits, f"sizes must be more than 0, and a token's experts no more than num_experts={experts}"
    why = "adapters are trained here; to use them first make one model of both (tools/merge.py)"
    for key in ("lora_rank", "lora"):
        yield key, not vars(c)[key] or mode.trains, f"mode={c.mode!r}: {why}"
    yield "lora", not c.lora or c.lora_rank, "adapters to train on; use --lora_rank, with their rank, too"
    tokens = c.max_prompt_tokens + c.max_new_tokens + 1
    cache = named_arguments(c.engine_args).get("max_total_tokens", tokens)
    yield "engine_args", cache >= tokens, f"one sample may take max_total_tokens={tokens}; use more"


def check_config(config, world, defaults):
    """
    Refuses values that make no sense together, before anything is started. world: number of ranks. The rules yield
    (key, whether its value fits, what is wrong with it and the cure), and the first that does not fit is told.
    """
    c = types.SimpleNamespace(**config)
    for rules in (key_rules, data_rules, algorithm_rules, feature_rules):
        for key, fits, why in rules(c, world, defaults):
            require(fits, f"{key}={config[key]!r}: {why}")
