"""
tools/plot.py: what it draws and says of real runs, and that no text of theirs is more than text to a browser.

    pytest tests/test_plot.py
    apt-get install chromium     # without it the last tests are skipped
"""

import http.server
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser

import numpy
import pytest
import torch
from conftest import error_line, group_tensors, lines, read_groups
from safetensors.torch import save_file

import sync
from train_grpo import samples_of, with_advantages

pytest.importorskip("matplotlib", reason="no matplotlib: uv sync --group plot")
import plot  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no browser: apt-get install chromium")


class Page(HTMLParser):
    """A page's tags, the text of its samples by class, and all of its text."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = ""
        self.attributes = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def draw(tmp_path, capsys):
    """(what tools/plot.py printed, the text of the page, the folder it wrote to)."""

    def run(*args):
        plot.main([*map(str, args), f"--out={tmp_path / 'out'}"])
        return capsys.readouterr().out, (tmp_path / "out" / "plot.html").read_text(), tmp_path / "out"

    return run


def make_tokenizer(folder, words):
    """A model folder's tokenizer with these tokens, in this order."""
    from tokenizers import Tokenizer, models
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(words)}
    vocabulary = Tokenizer(models.WordLevel(ids, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token=words[0]).save_pretrained(folder)
    GenerationConfig(eos_token_id=0).save_pretrained(folder)


def make_run(folder, texts, steps=3, change=None):
    """A run folder whose samples say these texts, a token each; in step `change` its rewards have another hash."""
    (folder / "model").mkdir(parents=True)
    make_tokenizer(folder / "model", ["<eos>", *texts])
    (folder / "config.py").write_text(f"advantage = 'grpo'  # command line\nseed = {change or 1}\nout_dir = 'a # b'\n")
    ledger = sync.Ledger(folder / "ledger.jsonl")
    for step in range(steps):
        queue = folder / "queue" / f"rl_{step:06d}"
        queue.mkdir(parents=True)
        tokens = torch.arange(1, len(texts) + 1).repeat(2)
        tensors = group_tensors(
            [len(texts)] * 2,
            tokens=tokens,
            logprobs=torch.linspace(0, -9, len(tokens)),
            rewards=torch.tensor([1.0, 0.0]),
        )
        prompt = 0 if step else "</small><meta http-equiv=refresh content=0>"
        sync.write_group(sync.group_path(queue, 0), tensors, dict(prompt=prompt, answer=texts[0], finished=True))
        ledger.append(phase="rl", step=step, tokens="0", rewards="1" if step == change else "0")
        line = dict(
            phase="rl",
            step=step,
            reward_mean=step / 4,
            logprob_mismatch_tokens=0,
            wait_seconds=0.5,
            train_seconds=0.25,
            sync_seconds=0.125,
            step_seconds=1.0,
        )
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    return folder


# ---- real runs


def test_equal_runs_are_called_equal_and_drawn_dashed_on_solid(draw, two_ranks, one_process):
    digest = lines(two_ranks[0], "ledger.jsonl")[-1]["chain"]
    output, page, folder = draw(two_ranks[0], one_process[0])
    words = f"one_process and two_ranks are equal: 60 supervised and 24 RL steps, digest {digest}"
    assert words in output and words in page and "first difference" not in page
    assert "Samples of two_ranks and one_process" in page and page.count("<h2>") == 1
    runs = [plot.read_run(run[0], run[0].name) for run in (two_ranks, one_process)]
    below, above = plot.draw(runs, {})["reward"].axes[0].lines
    assert (below.get_ydata() == above.get_ydata()).all() and len(above.get_ydata()) == 24
    assert below.get_linestyle() == "-" != above.get_linestyle()
    assert below.get_linewidth() > above.get_linewidth()
    names = "accuracy entropy grad_norm length loss mismatch reward seconds_1 seconds_2".split()
    assert sorted(path.stem for path in folder.glob("*.png")) == names


def test_where_two_runs_part_is_marked_and_named(draw, two_ranks, lagged):
    output, page, _ = draw(two_ranks[0], lagged[0], "--steps=5")
    assert "lagged differs from two_ranks first in rl step 0: prompts, weight_version, tokens" in output
    # no mark where seconds are drawn, nor in the supervised steps, which lagged has not
    assert "lag 2 instead of 0" in page and page.count("first difference") == page.count("<svg") - 3
    assert "KL, nats per token" in page and "Staleness" in page and page.count("Step 5</h3>") == page.count("<h2>") == 2


def test_curves_are_the_numbers_of_the_metrics(two_ranks):
    run = plot.read_run(two_ranks[0], "a")
    figures = plot.draw([run], {})
    steps = lines(two_ranks[0], "metrics.jsonl", "rl")
    axes = {name: figure.axes[0] for name, figure in figures.items()}
    for panel, key in (("reward", "reward_mean"), ("grad_norm", "grad_norm"), ("entropy", "entropy")):
        (line,) = axes[panel].lines
        assert line.get_xydata().tolist() == [[x["step"], x[key]] for x in steps]
    areas = axes["seconds_1"].collections
    tops = [max(y for _, y in area.get_paths()[0].vertices) for area in areas]
    assert tops == sorted(tops)
    assert tops[-1] == pytest.approx(max(x["step_seconds"] for x in steps))
    figures["mismatch"].canvas.draw()
    assert "0 in every step" in [text.get_text() for text in axes["mismatch"].texts]


def test_a_dialled_run_shows_mean_distances_by_position_and_entropy(tmp_path):
    folder = make_run(tmp_path / "a", ["1"])
    for step in range(2):  # 20 tokens at the positions 0 to 3, as far off as their entropy says
        entropy = torch.arange(20).flip(0) / 20 + step
        table = dict(
            entropy=entropy,
            position=torch.arange(20) % 4,
            logprobs=-entropy,
            rollout_logprobs=torch.zeros(20),
        )
        save_file(table, folder / "queue" / f"rl_{step:06d}" / "trainer.safetensors")
    figures = plot.draw([plot.read_run(folder, "a")], {})
    tenths = [(4 * i + 1.5) / 20 for i in range(10)]
    means = [sum(19 - i for i in range(k, 20, 4)) / 100 + 0.5 for k in range(4)]
    for name, points in (("entropy", [tenths, tenths]), ("position", [range(4), means])):
        line = figures[f"distance_{name}"].axes[0].lines[0]
        assert line.get_xydata() == pytest.approx(numpy.array(points).T)


def test_the_advantages_beside_the_samples_are_those_that_were_trained_on(draw, two_ranks):
    groups = read_groups(two_ranks[0], "rl_000023")
    config = plot.read_run(two_ranks[0], "a").config
    rewards = torch.stack([t["rewards"] for t, _ in groups])
    samples = with_advantages(samples_of(groups, 23), rewards, type("Config", (), config))
    _, page, _ = draw(two_ranks[0], "--steps=23", "--prompts=8")
    shown = re.findall(r"sample \d: reward ([\d.]+), advantage ([+-][\d.]+)", page)
    assert shown == [(f"{r:g}", f"{float(s.advantages[0]):+.3f}") for r, s in zip(rewards.flatten(), samples)]
    assert len({advantage for _, advantage in shown}) > 2


def test_an_agents_episode_is_shown_turn_by_turn_with_what_it_was_told(draw, agents):
    _, page, _ = draw(agents[0], "--steps=0", "--prompts=8")
    groups = read_groups(agents[0], "rl_000000")
    turns = sum(int(t["turns"].sum()) for t, _ in groups)
    assert len(re.findall(r"<small>turn \d+</small>", page)) == turns > 64 and "<small>told</small> <i>" in page
    sampled = 0
    told = 0
    for t, _ in groups:
        sampled += int(t["loss_mask"].sum())
        told += len(t["prompt_tokens"]) + int((~t["loss_mask"]).sum())
    samples = page[page.index("<h2>") :]
    assert samples.count("<b class=") == sampled and samples.count("<i>") == told


# ---- runs made by hand


def test_the_same_runs_make_the_same_page_to_the_byte(draw, tmp_path):
    run = make_run(tmp_path / "run", ["a"])
    assert draw(run)[1] == draw(run)[1]


def test_a_step_that_is_different_is_named_with_its_fields_and_settings(draw, tmp_path):
    run = make_run(tmp_path / "a", ["a"])
    other = make_run(tmp_path / "b", ["a"], change=2)
    assert "b differs from a first in rl step 2: rewards (seed 2 instead of 1)" in draw(run, other)[0]
    shorter = make_run(tmp_path / "c", ["a"], steps=2)
    assert "c and a are equal as far as they go: 2 RL steps, and 3 RL steps" in draw(run, shorter)[0]
    for folder in (run, other):  # of mode='eval' the only ledger is that of evaluations
        ledger = [x | dict(phase="eval") for x in lines(folder, "ledger.jsonl")]
        (folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in ledger))
        (folder / "ledger.jsonl").write_text("")
    assert "b differs from a first in eval step 2: rewards" in draw(run, other)[0]


def test_two_runs_of_one_name_are_told_apart_by_their_paths(draw, tmp_path):
    one, other = (make_run(tmp_path / x / "run", ["a"], change=y) for x, y in (("a", 1), ("b", 2)))
    assert f"{other} differs from {one} first in rl step 1: rewards" in draw(one, other)[0]


def test_advantages_that_a_groups_rewards_do_not_give_are_not_shown(draw, tmp_path):
    run = make_run(tmp_path / "run", ["a"])
    (run / "config.py").write_text("advantage = 'gae'\n")
    page = draw(run)[1]
    assert "sample 0: reward 1<" in page and "advantage" not in page


def test_a_page_does_without_a_tokenizer_and_says_if_rollouts_are_gone(draw, tmp_path):
    run = make_run(tmp_path / "run", ["a"])
    shutil.rmtree(run / "model")
    said, page, _ = draw(run, "--steps=7")
    assert "step 7: no rollout files" in said and "Its rollout files are not kept" in page and "‹1›" in draw(run)[1]


def test_samples_come_from_the_runs_own_folder_whatever_its_config_names(draw, tmp_path):
    run = make_run(tmp_path / "run", ["mine"])
    other = make_run(tmp_path / "other", ["secret"])
    (run / "config.py").write_text(f"advantage = 'grpo'\nqueue_dir = {str(other / 'queue')!r}\n")
    shutil.rmtree(run / "queue/rl_000001")
    assert "mine" in draw(run)[1] and "Its rollout files are not kept" in draw(run, "--steps=1")[1]


def test_a_run_that_is_still_going_may_have_written_half_a_line(draw, tmp_path):
    run = make_run(tmp_path / "run", ["a"])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rl", "ste')
    assert "3 RL steps" in draw(run)[0]


@pytest.mark.parametrize("line, spoil", {
    "no such run": lambda run: shutil.rmtree(run),
    "no ledger.jsonl in it: not the folder of a run": lambda run: (run / "ledger.jsonl").unlink(),
    "not lines of JSON": ("metrics.jsonl", "a\n"),
    "a line that has no phase and step": ("metrics.jsonl", "[]\n"),
    "a line that has no phase": ("metrics.jsonl", '{"phase": "rl", "step": "x"}\n'),
    "sync_seconds: no number": ("metrics.jsonl", '{"phase": "rl", "step": 0}\n'),
    "not only lines 'key = literal'": ("config.py", "seed = print(1)"),
    "not as a run writes its files: invalid lit": lambda run: (run / "queue/rl_000000").rename(run / "queue/rl_x"),
    "not as a run writes its files: expected str": ("config.py", "init_from = 5\n"),
    "writes its files: 'chain'": ("ledger.jsonl", '{"phase": "rl", "step": 0}\n'),
    "rl_000009: a symbolic link": lambda run: (run / "queue/rl_000009").symlink_to(run / "queue/rl_000000"),
    "torn or not a rollout file": ("queue/rl_000000/group_0000.safetensors", "a"),
}.items())  # fmt: skip
def test_what_is_no_run_ends_in_one_line(tmp_path, refusal, spoil, line):
    run = make_run(tmp_path / "run", ["a"])
    if callable(spoil):
        spoil(run)
    else:
        file, text = spoil
        (run / file).write_text(text)
    assert line in refusal(plot.main, [str(run), f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_line_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    command = [sys.executable, plot.__file__, tmp_path]
    end = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert end.returncode == 2 and error_line(end.stderr).endswith("matplotlib is not installed; uv sync --group plot")


# ---- hostile text, in a real browser


@pytest.fixture
def visited():
    """(address, [paths that were asked for]) of a server here, which nothing may ask anything."""
    paths = []

    class Notes(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()


def hostile(address):
    return [
        f"<script>console.log('ran'); document.title = 'owned'; fetch('{address}/script')</script>",
        f"<img src={address}/img onerror=\"console.log('ran')\">",
        f'"><iframe src="{address}/frame"></iframe>',
        f"</pre></div></body><style>body {{ background: url({address}/css) }}</style>",
        "&lt;b&gt;",
        "\n",
        "\u202egnp.a",
        "\0",
        "$x^2$",
        "]]>",
        "<!--",
        f"{{STYLE}}<link rel=stylesheet href={address}/link>",
    ]


@pytest.fixture
def drawn_hostile(draw, tmp_path, visited):
    """(the hostile texts, what `draw` gives for a run of them beside another)."""
    texts = hostile(visited[0])
    return texts, draw(make_run(tmp_path / '_<b>&"$x$', texts), make_run(tmp_path / "other", ["b"], change=1))


def browse(page, *flags):
    """(what a browser printed, its messages) of a page that it opened: a file, or an address."""
    address = page if str(page).startswith("http") else f"file://{page}"
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    command = [BROWSER, *quiet, "--enable-logging=stderr", "--hide-scrollbars", *flags, address]
    end = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return end.stdout, end.stderr


def test_hostile_text_is_text(drawn_hostile):
    texts, (_, source, _) = drawn_hostile
    page = Page(source)
    plain = "html head meta title style body h1 h2 h3 p div pre small b i code span".split()
    assert {*page.tags} <= {*plain, *"svg g path text use defs rect clippath".split()}
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert value.startswith("#") or not name.endswith(("src", "href"))
    for text in texts[:5]:
        assert page.text.count(text) >= 2 * 3
    assert "\\u202egnp.a" in page.text and "\u202e" not in source
    assert "\\u0000" in page.text and "\0" not in source


@needs_browser
def test_a_browser_shows_all_of_it_runs_nothing_and_fetches_nothing(drawn_hostile, tmp_path, visited):
    _, paths = visited
    texts, (_, source, folder) = drawn_hostile
    dom, messages = browse(folder / "plot.html", "--dump-dom")
    page = Page(dom)
    assert '_<b>&"$x$, other' in page.text and "owned" not in re.search("<title>(.*?)</title>", dom)[1]
    assert "<script" not in dom and page.tags.count("svg") == source.count("<svg") == 4
    assert all(page.text.count(text) >= 6 for text in texts[:5])
    assert "Samples of other" in page.text
    assert "CONSOLE" not in messages and paths == []
    # The same instruments do see a page that lets text through.
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><title>a</title><p>{texts[0]}{texts[1]}")
    dom, messages = browse(tmp_path / "bad.html", "--dump-dom")
    assert "<title>owned</title>" in dom and "CONSOLE" in messages and "/img" in paths


@needs_browser
def test_a_browser_draws_it_in_a_narrow_window_too(draw, tmp_path):
    image = pytest.importorskip("PIL.Image")
    runs = [make_run(tmp_path / name, ["a " * 200], change=i) for i, name in enumerate("abc", 1)]
    browse(draw(*runs)[2] / "plot.html", f"--screenshot={tmp_path / 'shot.png'}", "--window-size=500,1600")
    picture = numpy.array(image.open(tmp_path / "shot.png").convert("RGB"))
    assert picture.shape == (1600, 500, 3)
    assert (picture[:, -8:] == 255).all()  # nothing reaches the right edge: long texts are broken
    for color in plot.COLORS[1:3]:
        assert (picture == [*bytes.fromhex(color[1:])]).all(2).any()


# ---- a run that goes on


@pytest.fixture
def live(tmp_path):
    """(the run's folder, the address) of a page that is served while a run goes on; its folder is empty yet."""
    folder = tmp_path / "run"
    command = [sys.executable, plot.__file__, folder, "--live", "--port=0", "--every=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield folder, process.stdout.readline().split()[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def get(address, host=None, path=""):
    """(status, text) of what the server says."""
    request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_a_long_run_some_points_are_drawn_and_the_last_one():
    lines = [*range(10_001)]
    thinned = plot.thinned(lines)
    assert len(thinned) <= 2000 and thinned[-1] == 10_000
    assert plot.thinned(lines[:2000]) == lines[:2000]


def test_a_page_of_a_run_that_goes_on_is_new_each_time_and_reads_only(live, tmp_path):
    folder, address = live
    assert "It has not begun" in get(address)[1] and not folder.exists()
    make_run(folder, ["a"])
    before = contents(folder)
    status, source = get(address)
    assert status == 200 and source.count("<svg") == 3
    assert "3 RL steps" in source and "sample 0: reward 1" in source
    assert 'http-equiv="refresh" content="1"' in source and "script" not in source
    assert contents(folder) == before
    assert get(address, host="evil.example")[0] == 403
    assert get(address, path="config.py")[0] == 404
    port = int(address.split(":")[2].rstrip("/"))
    with socket.create_connection(("127.0.0.1", port)):  # one that asks for nothing stops no other
        began = time.monotonic()
        assert get(address)[0] == 200 and time.monotonic() - began < 4
    for line in (
        '{"phase": "rl", "step": "0"}',
        "[" * 10**5,
        "1" * 5000,
        '{"phase": "rl", "step": 3, "a": 1%s}' % ("0" * 400),
    ):
        with open(folder / "metrics.jsonl", "a") as file:  # a server that could not read it ended
            file.write(f"{line}\n")
        assert "Not now: its files cannot be read" in get(address)[1]
    shutil.rmtree(folder)
    make_run(folder, ["a"], steps=5)
    assert "5 RL steps" in get(address)[1]
    if not BROWSER:
        pytest.skip("no browser: apt-get install chromium")
    dom, messages = browse(address, "--dump-dom")
    page = Page(dom)
    assert "5 RL steps" in page.text and page.tags.count("svg") == 3
    assert "CONSOLE" not in messages
