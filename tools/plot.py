"""
Pictures of runs, and their samples to read: one HTML file that needs nothing else, and a PNG of each panel.

    uv sync --group plot
    python tools/plot.py out/tiny                                 # writes out/tiny/plot/plot.html
    python tools/plot.py out/a out/b --out=out/ab --steps=3,40    # over each other; the samples of these steps
    python tools/plot.py out/tiny --live                          # the page of a run that goes on, for a browser here

A value at step s belongs to the weights after s updates, before step s updates them. Runs with equal ledgers are
labelled equal and drawn over each other, dashed; where a run differs from the first, a vertical line marks the step,
and the page names the fields of the ledger. A sample's tokens are shaded by their log-prob, with its reward and, if it
follows from the group's rewards alone, its advantage beside them. Exit status 2: not a run, or no matplotlib.
"""

import argparse
import html
import http.server
import itertools
import math
import re
import signal
import threading
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from runs import check_links, evaluations, lines, saved_config
from safetensors.torch import load_file

from configurator import fail, free_keys, require

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    fail("tools/plot.py: matplotlib is not installed; uv sync --group plot")

from diff import STAGES, first_difference  # noqa: E402

import sync  # noqa: E402
from onecurve.models.folders import load_tokenizer  # noqa: E402
from train_grpo import advantages_of  # noqa: E402

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: for all kinds of eyes
SUPERVISED = ("sft", "rm", "dpo")  # phases
# file, title with the unit, phases, {metric: its name in the panel}
PANELS = (
    ("reward", "Training reward, mean of the step", ("rl",), dict(reward_mean="")),
    ("accuracy", "Held-out accuracy, with 95 % interval", ("eval",), {"pass@1": "pass@1", "eval_accuracy": "pairs"}),
    ("loss", "Loss of supervised steps", SUPERVISED, dict(loss="")),
    ("entropy", "Entropy of the policy, nats per token", ("rl",), dict(entropy="")),
    ("length", "Response length, tokens", ("rl",), dict(response_length_mean="mean", response_length_max="longest")),
    ("grad_norm", "Gradient norm, before the clip", ("rl",), dict(grad_norm="")),
    ("kl", "KL, nats per token", ("rl",), dict(kl_reference="to reference", kl_behaviour="to behaviour")),
    ("staleness", "Staleness: age of the weights that sampled, steps", ("rl",), dict(staleness="")),
    ("mismatch", "Log-probs that differ, engine and trainer, tokens", ("rl",), dict(logprob_mismatch_tokens="")),
)
DISTANCES = {
    "entropy": "Mismatch of a token, nats, by entropy",
    "position": "Mismatch of a token, nats, by position",
}
PHASES = {"wait": ("sample, or wait", "#77AADD"), "train": ("train", "#EEDD88"), "sync": ("send weights", "#EE8866")}
BY_GROUP = ("grpo", "dr_grpo", "rloo")  # advantages that follow from a group's rewards alone
POINTS = 2000  # of a curve, at most about
MOST = 2**60  # of a whole number; a stranger's may have any number of digits
SHADES = 8  # of a token's log-prob, from 0 to -SHADES / 2
STRANGE = (LookupError, TypeError, ValueError)  # what files that no run wrote may lead to


class Run(NamedTuple):
    folder: Path
    name: str
    lines: list  # of metrics.jsonl
    ledger: list
    config: dict


# ---- reading


def read_run(folder, name):
    if not folder.is_dir():
        fail(f"{folder}: no such run")
    check_links(folder)
    config = saved_config(folder) if (folder / "config.py").is_file() else {}
    ledger = lines(folder, "ledger.jsonl") or evaluations(folder)  # of mode='eval' it is empty
    run = Run(folder, name, lines(folder), ledger, config)
    seconds = ["step_seconds", *(f"{part}_seconds" for part in PHASES)]
    for line in run.lines:
        needed = dict.fromkeys(seconds if line["phase"] == "rl" else ()) | line | {"phase": 0}
        right = {key for key, x in needed.items() if isinstance(x, float) or isinstance(x, int) and abs(x) < MOST}
        wrong = [key for key in needed if key not in right]
        require(not wrong, f"{folder}: metrics.jsonl, step {line['step']}: {', '.join(wrong)}: no number")
    return run


def steps_of(run):
    """A run's steps, in words."""
    phases = [line["phase"] for line in run.ledger]
    kinds = {"supervised": sum(map(phases.count, SUPERVISED)), "RL": phases.count("rl")}
    return " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n or kind == "RL") + " steps"


def digest_of(run):
    return run.ledger[-1]["chain"] if run.ledger else "none"


def compare(first, run):
    """(a line about what `run` has in common with the first, the first line of the ledger that differs or None)."""
    found = first_difference(first.ledger, run.ledger)
    if not found:
        if first.ledger == run.ledger:
            return f"{run.name} and {first.name} are equal: {steps_of(run)}, digest {digest_of(run)}", None
        steps = f"{steps_of(run)}, and {steps_of(first)}"
        return f"{run.name} and {first.name} are equal as far as they go: {steps}", None
    x, y, stage, _ = found
    fields = [stage for stage in STAGES if x.get(stage) != y.get(stage)] or [stage]
    both = first.config.keys() & run.config.keys() - free_keys(first.config)
    keys = [k for k in both if first.config[k] != run.config[k]]
    settings = ", ".join(f"{k} {run.config[k]!r} instead of {first.config[k]!r}" for k in sorted(keys))
    where = f"{run.name} differs from {first.name} first in {x['phase']} step {x['step']}: {', '.join(fields)}"
    return where + f" ({settings})" * bool(keys), x


# ---- panels


def style(axis, title):
    """The axis, in the manner of all panels."""
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#E5E5E5")
    return axis


def new_panel(title, runs):
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axis = style(figure.add_subplot(), title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if len(runs) > 1:
        handles = [matplotlib.lines.Line2D([], [], **line_style(runs, i)) for i in range(len(runs))]
        figure.legend(
            handles, [r.name for r in runs], loc="outside lower left", ncols=3, frameon=False, handlelength=2.6
        )
    return figure, axis


def line_style(runs, i):
    """Equal runs lie on each other: the first of them is a broad pale line, the others are dashed."""
    above = any(runs[i].ledger == earlier.ledger for earlier in runs[:i])
    below = any(runs[i].ledger == later.ledger for later in runs[i + 1 :]) and not above
    shape = dict(linewidth=5 if below else 1.5, alpha=0.45 if below else 1.0, linestyle=(0, (4, 4)) if above else "-")
    return dict(color=COLORS[i % len(COLORS)], **shape)


def thinned(lines):
    """The last of the lines and every n-th before it, POINTS at most."""
    return lines[:: -max(1, -(-len(lines) // POINTS))][::-1]


def draw_panel(runs, marks, title, phases, metrics):
    """The figure of some metrics of all runs over their steps; None if no run has one of them."""
    figure, axis = new_panel(title, runs)
    ends, largest = {}, 0.0  # of the first curve of each name
    for (i, run), (key, label) in itertools.product(enumerate(runs), metrics.items()):
        lines = thinned([x for x in run.lines if x["phase"] in phases and key in x])
        points = [(x["step"], x[key], x.get(f"{key}_ci95", 0.0)) for x in lines]
        if not points:
            continue
        steps, values, spread = zip(*points)
        ends.setdefault(label, values[-1])
        largest, style = max(largest, *map(abs, values)), line_style(runs, i)
        style["alpha"] *= 0.5 if [*ends].index(label) else 1.0
        axis.plot(steps, values, **style, marker="o" if len(points) < 12 else "", markersize=4)
        if any(spread) and style["linestyle"] == "-":
            band = [[min(1, max(0, v + sign * x)) for v, x in zip(values, spread)] for sign in (-1, 1)]
            axis.fill_between(steps, *band, color=style["color"], alpha=0.15, linewidth=0)
    if not ends:
        return None
    apart = 0.06 * (axis.get_ylim()[1] - axis.get_ylim()[0])
    at = -math.inf
    for label, end in sorted(ends.items(), key=lambda x: x[1]):
        at = max(end, at + apart)  # not over each other
        axis.annotate(label, (1.02, at), xycoords=axis.get_yaxis_transform(), va="center", annotation_clip=False)
    if largest == 0:
        axis.set_ylim(-0.05, 1)
        axis.text(0.5, 0.5, "0 in every step", transform=axis.transAxes, ha="center", color="#444444")
    for i, mark in marks.items():
        draw_mark(axis, mark, phases, COLORS[i % len(COLORS)])
    supervised = "sft" in phases or not any(x["phase"] == "rl" for run in runs for x in run.lines)
    axis.set_xlabel(f"{'supervised' if supervised else 'RL'} steps done")
    return figure


def draw_mark(axis, mark, phases, color):
    """Where a run parts from the first one, a supervised step being before all RL steps, in this panel's steps."""
    supervised = mark["phase"] != "rl"
    if supervised or "sft" not in phases:
        step = mark["step"] if supervised == ("sft" in phases) else 0
        axis.axvline(step, color=color, linestyle=":", zorder=0)
        where = dict(xycoords=axis.get_xaxis_transform(), xytext=(3, -2), textcoords="offset points")
        axis.annotate("first difference", (step, 1), **where, rotation=90, va="top", fontsize=7, color=color)


def draw_seconds(run, most):
    """Where the time of a run's steps went, stacked; `most`: the top of the axis."""
    lines = thinned([x for x in run.lines if x["phase"] == "rl"])
    figure, axis = new_panel(f"Seconds per step: {run.name}", [run])
    parts = {label: [x[f"{key}_seconds"] for x in lines] for key, (label, _) in PHASES.items()}
    parts["record, all else"] = [x["step_seconds"] - sum(y) for x, *y in zip(lines, *parts.values())]
    colors = [*(color for _, color in PHASES.values()), "#CCCCCC"]
    axis.stackplot([x["step"] for x in lines], parts.values(), labels=parts, colors=colors, step="mid")
    axis.set(ylim=(0, most), xlabel="RL steps done", axisbelow=True)
    if (longest := max(x["step_seconds"] for x in lines)) > most:
        note = f"cut off: the longest took {longest:.1f} s"
        paper = dict(facecolor="white", edgecolor="none", pad=1)
        axis.text(1, 1, note, transform=axis.transAxes, ha="right", va="top", fontsize=8, bbox=paper)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8, handlelength=1, columnspacing=1)
    return figure


def token_table(run):
    """{column: tensor} of the tokens of all steps as the trainer of a dialled run saw them; {} for another run."""
    tables = [load_file(path) for path in sorted(run.folder.glob("queue/rl_*/trainer.safetensors"))]
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]} if tables else {}


def draw_distances(runs, tables, column, unit):
    """
    How far the log-probs of engine and trainer are from each other, the mean by a column of the tokens: of each value,
    or of ten equal parts if it has more.
    """
    figure, axis = new_panel(DISTANCES[column], runs)
    for i, table in enumerate(tables):
        if table:
            by, order = table[column].double().sort(stable=True)
            distance = (table["logprobs"].double() - table["rollout_logprobs"].double()).abs()[order]
            sizes = by.unique(return_counts=True)[1]
            cuts = sizes.cumsum(0)[:-1] if len(sizes) <= 10 else 10
            parts = zip(by.tensor_split(cuts), distance.tensor_split(cuts))
            axis.plot(*zip(*[(x.mean(), y.mean()) for x, y in parts if len(x)]), **line_style(runs, i), marker="o")
    axis.set(xlabel=unit, ylim=(0, None))
    return figure


def draw(runs, marks):
    """{file: figure} of all panels for which there is something to show."""
    figures = {file: draw_panel(runs, marks, *panel) for file, *panel in PANELS}
    sources = dict.fromkeys(key for run in runs for x in run.lines for key in x if key.endswith("/pass@1"))
    names = {"pass@1": "all"} | {key: key.partition("/")[0] for key in sources}
    if sources:
        figures["accuracy"] = draw_panel(runs, marks, *PANELS[1][1:3], names)
    if any(tables := [token_table(run) for run in runs]):
        figures["distance_entropy"] = draw_distances(runs, tables, "entropy", "entropy of the policy there, nats")
        figures["distance_position"] = draw_distances(runs, tables, "position", "tokens of the response before it")
    seconds = sorted(x["step_seconds"] for run in runs for x in run.lines if x["phase"] == "rl")
    for i, run in enumerate(runs):
        if any(x["phase"] == "rl" for x in run.lines):  # cut: the slowest steps, as the first, would make others flat
            figures[f"seconds_{i + 1}"] = draw_seconds(run, 1.2 * seconds[int(0.97 * (len(seconds) - 1))])
    return {file: figure for file, figure in figures.items() if figure}


def svg(figure, title):
    file = StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())  # each panel has the same ones
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


# ---- samples


def visible(text):
    """A token's text for HTML; what has no picture, or changes the direction of writing, by its number."""
    shown = (c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)
    return html.escape("".join(shown)).replace("\n", "↵\n")


def find_decoder(run):
    """decode(token id) -> text of a run's tokens; their numbers if no folder here has its tokenizer."""
    places = [run.folder / "model", *sorted(run.folder.glob("ckpt/step_*")), Path(run.config.get("init_from", ""))]
    for place in places:
        if (place / "tokenizer_config.json").is_file():
            tokenizer = load_tokenizer(place)[0]
            return lambda token: tokenizer.decode([token])
    return lambda token: f"‹{token}›"


def span(token, logprob, sampled, decode):
    if not sampled:
        return f"<i>{visible(decode(token))}</i>"
    shade = min(SHADES - 1, int(-2 * logprob)) if math.isfinite(logprob) else SHADES - 1
    return f'<b class="p{shade}" title="token {token}, log-prob {logprob:.4g}">{visible(decode(token))}</b>'


def row_html(t, tokens, logprobs, mask, turn, decode):
    """A row's tokens; of an agent's dialogue a line for each turn, and for the other text between turns."""
    spans = [span(*token, decode) for token in zip(tokens.tolist(), logprobs.tolist(), mask.tolist())]
    if turn is None:
        return f"<pre>{''.join(spans)}</pre>"
    parts = itertools.groupby(zip(turn.tolist(), spans), lambda pair: pair[0])
    named = ((f"turn {k + 1}" if k >= 0 else "told", "".join(x for _, x in pairs)) for k, pairs in parts)
    return "".join(f"<pre><small>{name}</small> {text}</pre>" for name, text in named)


def advantages_of_group(t, meta, config):
    """Advantages (G,) of a group's samples, if they follow from its rewards alone; else None."""
    kind, other = config.get("advantage"), ("overlong_cache", "kl_in_reward")
    known = meta.get("finished", True) and kind in BY_GROUP and config.get("credit") != "turn"
    return advantages_of(t["rewards"][None], kind)[0] if known and not any(map(config.get, other)) else None


def group_html(t, meta, config, decode):
    """A group file: the prompt, and each sample with its figure."""
    sizes, rewards = t["lengths"].tolist(), t["rewards"]
    finished, advantages = meta.get("finished", True), advantages_of_group(t, meta, config)
    known = advantages is not None
    if not known:  # for the border only
        advantages = advantages_of(rewards[None], "dr_grpo")[0]
    columns = [t[key].split(sizes) for key in ("tokens", "logprobs", "loss_mask")]
    columns.append(t["turn"].split(sizes) if config.get("agent") else [None] * len(sizes))
    rows = []  # HTML
    for g, *row in zip(t["sample"].tolist(), *columns):
        sign = "more" if advantages[g] > 0 else "less" if advantages[g] < 0 else "same"
        figure = f"reward {rewards[g]:g}" if finished else "not finished"
        figure += f", advantage {advantages[g]:+.3f}" * known
        rows.append(f'<div class="sample {sign}"><small>sample {g}: {figure}</small>{row_html(t, *row, decode)}</div>')
    prompt = "".join(f"<i>{visible(decode(token))}</i>" for token in t["prompt_tokens"].tolist())
    answer = f" <small>answer {visible(repr(meta['answer']))}</small>" if "answer" in meta else ""
    head = f"<pre><small>prompt {visible(str(meta.get('prompt')))}</small> {prompt}{answer}</pre>"
    return f'{head}<div class="group">{"".join(rows)}</div>'


def samples_html(run, names, wanted, prompts):
    """The first `prompts` groups of the wanted steps of a run; without any: of the first, the middle and the last."""
    queue = run.folder / "queue"  # a stranger's config may name any folder as its queue_dir
    there = sorted(int(path.name[3:]) for path in queue.glob("rl_*") if any(path.glob("group_*")))
    steps, decode = wanted or sorted({there[i] for i in (0, len(there) // 2, -1)} if there else ()), find_decoder(run)
    parts = [f"<h2>Samples of {html.escape(' and '.join(names))}</h2>"]
    for step in steps:
        paths = sorted((queue / f"rl_{step:06d}").glob("group_*"))[:prompts]
        groups = (sync.read_group(path, 2**31) for path in paths)
        text = "".join(group_html(*group, run.config, decode) for group in groups)
        parts.append(f"<h3>Step {step}</h3>{text or '<p>Its rollout files are not kept.</p>'}")
    return "".join(parts) if steps else ""


# ---- the page

STYLE = """
:root { color-scheme: light } body { background: #fff; color: #111; font: 15px/1.45 system-ui, sans-serif;
margin: 0 auto; max-width: 1240px; padding: 12px } h1 { font-size: 22px } h2 { font-size: 18px; margin-top: 32px }
h3 { font-size: 15px; margin: 20px 0 6px } p { margin: 6px 0; overflow-wrap: anywhere } small { color: #555 }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px }
.panels svg { width: 100%; height: auto } svg text { font-family: system-ui, sans-serif !important }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0; font: 14px/1.6 ui-monospace, monospace }
.group { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(270px, 100%), 1fr)); gap: 8px;
margin: 4px 0 14px } .sample { border-left: 5px solid #999; padding: 1px 8px } .sample.more { border-color: #0072B2 }
.sample.less { border-color: #D55E00 } b { font-weight: normal; unicode-bidi: isolate } i { color: #666 }
"""
STYLE += "".join(
    f".p{i} {{ background: rgba(230, 159, 0, {0.05 + 0.85 * i / (SHADES - 1):.2f}) }} " for i in range(SHADES)
)
KEY = '<p>Tokens that were sampled, by log-prob: <code>{}</code>. <i>Grey: told</i>, not trained on. A border is \
<span style="color:#0072B2">blue</span> where the sample did better than its group, <span style="color:#D55E00">orange\
</span> where it did worse.</p>'
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser must run and fetch nothing


def page(runs, words, panels, samples, again=""):
    """again: a tag that makes a browser reload the page."""
    title = html.escape(", ".join(run.name for run in runs))
    shades = " ".join(f'<b class="p{i}">{-i / 2:g}</b>' for i in range(SHADES)) + " or less"
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">{again}
<style>{STYLE}</style></head><body><h1>{title}</h1>{"".join(f"<p>{html.escape(line)}</p>" for line in words)}
<div class="panels">{"".join(panels)}</div>{KEY.format(shades) if samples else ""}{samples}</body></html>"""


def numbers(text):
    return [*map(int, text.split(","))]


def read_all(folders):
    """The runs in these folders, each named by its last part, or by all of it if two have the same."""
    last = [folder.resolve().name for folder in folders]
    names = [name if last.count(name) == 1 else str(folder) for folder, name in zip(folders, last)]
    return [read_run(*run) for run in zip(folders, names)]


def compose(runs, steps, prompts):
    """(lines about the runs, {file: figure}, HTML of samples)."""
    compared = [compare(runs[0], run) for run in runs[1:]]
    words = [line for line, _ in compared] or [f"{steps_of(runs[0])}, digest {digest_of(runs[0])}"]
    kept = {path.name for run in runs for path in run.folder.glob("queue/rl_*")}
    words += [f"step {step}: no rollout files of it are kept" for step in steps if f"rl_{step:06d}" not in kept]
    marks = {i: mark for i, (_, mark) in enumerate(compared, 1) if mark}
    alike = {}  # of equal runs the samples are equal, too
    for run in runs:
        alike.setdefault(digest_of(run), []).append(run)
    shown = [samples_html(same[0], [r.name for r in same], steps, prompts) for same in alike.values()]
    return words, draw(runs, marks), "".join(shown)


def panels_of(figures):
    return [svg(figure, figure.axes[0].get_title(loc="left")) for figure in figures.values()]


def live_page(args):
    """The page as the runs are now, or a line for a run that has not begun."""
    again = f'<meta http-equiv="refresh" content="{args.every}">'
    if missing := [f for f in args.runs for file in ("metrics.jsonl", "ledger.jsonl") if not (f / file).is_file()]:
        waits = Run(missing[0], str(missing[0]), [], [], {})
        return page([waits], ["It has not begun: no metrics in it yet."], [], "", again)
    runs = [Run(folder, folder.name, [], [], {}) for folder in args.runs]
    try:
        runs = read_all(args.runs)
        words, figures, shown = compose(runs, args.steps, args.prompts)
    except (SystemExit, FileNotFoundError, *STRANGE) as e:  # a run may delete a rollout file while it is read
        why = "its files cannot be read; the terminal says why" if e.args == (2,) else sync.reason(e)
        return page(runs, [f"Not now: {why}"], [], "", again)
    return page(runs, words, panels_of(figures), shown, again)


class Live(http.server.BaseHTTPRequestHandler):
    """Answers a browser on this machine with the page. It only reads."""

    timeout = 5  # seconds for a request; a browser may connect and send nothing

    def do_GET(self):
        own = f"127.0.0.1:{self.server.server_port}"
        # A page of another site may have a name that leads here: its browser then names that site.
        if self.headers.get("Host") not in (own, own.replace("127.0.0.1", "localhost")):
            return self.send_error(403)
        if self.path != "/":
            return self.send_error(404)
        body = self.server.render().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def serve(args):
    """Serves the page until it is interrupted; drawn again only if a run has written something."""
    drawn = {}  # {what was there: the page}
    one_draws = threading.Lock()  # the others wait for its page

    def render():
        files = [folder / file for folder in args.runs for file in ("metrics.jsonl", "ledger.jsonl")]
        with one_draws:
            state = tuple(file.stat().st_size if file.is_file() else -1 for file in files)
            if state not in drawn:
                page_now = live_page(args)
                drawn.clear()
                drawn[state] = page_now
            return drawn[state]

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Live)
    except OSError as e:
        fail(f"--port={args.port}: {e.strerror}; another, or 0 for any")
    server.render = render
    print(
        f"http://127.0.0.1:{server.server_port}/ every {args.every} s; Ctrl-C ends it, the run does not notice",
        flush=True,
    )
    # No KeyboardInterrupt: raised while a figure's objects are deleted it would be lost.
    signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    print()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="folder to write to; else 'plot' in the first run's")
    parser.add_argument("--steps", default=[], type=numbers, help="whose samples are shown, such as 3,40")
    parser.add_argument("--prompts", type=int, default=2, help="whose samples are shown, of each of these steps")
    parser.add_argument("--live", action="store_true", help="write nothing; serve the page to browsers on this machine")
    parser.add_argument("--port", type=int, default=8765, help="with --live; 0: any free port")
    parser.add_argument("--every", type=int, default=10, help="with --live: seconds until a browser asks again")
    args = parser.parse_args(argv)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False, "font.size": 9})
    if args.live:
        return serve(args)
    runs, out = read_all(args.runs), args.out or args.runs[0] / "plot"
    try:
        words, figures, shown = compose(runs, args.steps, args.prompts)
    except sync.RunError as e:
        fail(str(e).removeprefix("error: "))
    except STRANGE as e:
        fail(f"{', '.join(map(str, args.runs))}: not as a run writes its files: {sync.reason(e)}")
    out.mkdir(parents=True, exist_ok=True)
    for file, figure in figures.items():
        figure.savefig(out / f"{file}.png", dpi=150)
    (out / "plot.html").write_text(page(runs, words, panels_of(figures), shown))
    print(*words, f"{out / 'plot.html'}, and {len(figures)} PNG files beside it", sep="\n")


if __name__ == "__main__":
    main()
