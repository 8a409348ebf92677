"""
What README.md, .github/CONTRIBUTING.md and the pages of docs/, learn/ and experiments/ say of lines,
commands, keys, files, sizes and metrics is true.

    pytest tests/test_readme.py
    python tests/test_readme.py    # sets the numbers of lines and the sizes of files; prints the sizes
"""

import ast
import io
import itertools
import json
import re
import shlex
import sys
import tokenize
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402
from configurator import configure, load_features  # noqa: E402

README, RUN = ROOT / "README.md", ROOT / "docs" / "run.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
TEACHING = [page for folder in ("learn", "experiments") for page in sorted((ROOT / folder).rglob("*.md"))]
PAGES = [README, *DOCS, ROOT / ".github" / "CONTRIBUTING.md", *TEACHING]
FLAGS = re.findall(r"--(\w+)", "".join(path.read_text() for path in (ROOT / "tools").glob("*.py")))  # the tools' own
KEYS = {*train_grpo.DEFAULTS, *FLAGS, "help", "tool_choice"}  # the last is a field of OpenAI's requests
LINE = re.compile(r"\[`([\w.]+|[\w ]+)`\]\(([\w./]+\.py)#L(\d+)\)")  # [`Trainer.update`](train_grpo.py#L907)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
KEY = re.compile(r"`(?:--)?([a-z]\w*)=")  # `lag=1`, `--lag=1`
FOLDERS = "config|docs|examples|experiments|learn|onecurve|tests|tools"
FILE = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[\w/]*\.\w+")
SIZE = re.compile(r"^(\| `([\w./]+)` \| )([\d,]+) \| ([\d,]+)(?= \|)", re.MULTILINE)  # | `sync.py` | lines | tokens |
UNCOUNTED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def line_of(name, path):
    """
    The number of the line in which a file defines the name: a function, a class, a constant, `Class.method`, or a
    section: `the loop` is the comment "# ---- the loop ..". None if it does not.
    """
    lines = [*enumerate(path.read_text().splitlines(), 1)]
    owner, _, name = name.rpartition(".")
    definition = re.compile(rf"(async )?(def|class) {name}\b|{name} = | *# ---- {name}\b")
    if owner:
        after = lines[line_of(owner, path) :] if line_of(owner, path) else []
        lines = itertools.takewhile(lambda line: not re.match(r"\w", line[1]), after)  # the class's own
        definition = re.compile(rf"    (async )?def {name}\b")
    return next((number for number, text in lines if definition.match(text)), None)


def size_of(path):
    """(lines of code, tokens) of a Python file, or of all in a folder, without comments and docstrings."""
    lines = tokens = 0
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        source, documented = file.read_text(), set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                documented |= set(range(node.lineno, node.end_lineno + 1))
        every = tokenize.generate_tokens(io.StringIO(source).readline)
        counted = [t for t in every if t.type not in UNCOUNTED and t.start[0] not in documented]
        lines += len({number for t in counted for number in range(t.start[0], t.end[0] + 1)})
        tokens += len(counted)
    return lines, tokens


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text):
    """The command lines of a page that start train_grpo.py."""
    lines = (line.partition("  #")[0] for line in text.replace("\\\n", " ").splitlines())
    return [line.strip() for line in lines if line.startswith("    uv run ") and " train_grpo.py" in line]


def mistakes(text, folder, capsys):
    """Yields a line for each mistake in the text of a page that lies in the folder."""
    for name, file, line in LINE.findall(text):
        found = line_of(name, folder / file) if (folder / file).exists() else None
        if found is None:
            yield f"`{name}`: {file} does not define it; which function does this now?"
        elif found != int(line):
            yield f"`{name}`: line {found} of {file}, not {line}; python tests/test_readme.py sets it"
    for file, anchor in LINK.findall(text):
        page = folder / file
        if not page.exists():
            yield f"{file}: no such file"
        elif anchor and not file.endswith(".py") and anchor not in anchors(page.read_text() if file else text):
            yield f"{file}#{anchor}: no such heading"
    for command in commands(text):
        words = shlex.split(command)
        flags = [flag for flag in words[words.index("train_grpo.py") + 1 :] if flag != "--help"]
        try:
            configure(train_grpo.DEFAULTS | {"__file__": str(ROOT / "train_grpo.py")}, flags)
        except SystemExit:
            yield f"{command}: {capsys.readouterr().err.strip()}"
    for key in sorted(set(KEY.findall(text)) - KEYS):
        yield f"`{key}=`: no such key"
    for name in set(re.findall(r"--help=(\w+)", text)) - {"all", *load_features()}:
        yield f"`--help={name}`: no such feature"
    for file in sorted(set(FILE.findall(text))):
        if not (ROOT / file).exists():
            yield f"{file}: no such file"
    for _, name, *said in SIZE.findall(text):
        for number, unit, now in zip(said, ("lines", "tokens"), size_of(ROOT / name)):
            if not 0.9 < int(number.replace(",", "")) / now < 1.1:
                yield f"{name}: {now:,} {unit}, not {number}; python tests/test_readme.py sets it"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_commands_keys_files_and_sizes_are_as_a_page_says(page, capsys):
    assert not [*mistakes(page.read_text(), page.parent, capsys)]


@pytest.mark.parametrize(
    "text",
    [
        "[`gae`](train_grpo.py#L1)",
        "[`WeightSync.step`](sync.py#L936)",  # a method of another class
        "[`gae`](train.py#L1)",
        "[a page](docs/none.md)",
        "[a section](README.md#none)",
        "    uv run train_grpo.py config/tiny.py --sed=1",
        "    uv run train_grpo.py config/none.py",
        "set `sed=1`",
        "see `--help=lorra`",
        "`tools/none.py`",
        "| `sync.py` | 1 | 1 | what it does |",
    ],
)
def test_a_mistake_of_each_kind_is_found(text, capsys):
    assert [*mistakes(text, ROOT, capsys)]


def test_the_pages_have_what_is_checked():
    text = "".join(page.read_text() for page in (README, *DOCS))
    assert len(LINE.findall(text)) > 20 and len(commands(text)) > 20 and len(KEY.findall(text)) > 30
    assert len(SIZE.findall(README.read_text())) > 5
    assert {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= set(FILE.findall(text))


def test_every_page_of_docs_is_linked_from_the_readme():
    linked = {file for file, _ in LINK.findall(README.read_text())}
    assert {f"docs/{page.name}" for page in DOCS} <= linked


def test_the_first_command_needs_no_compiler():
    compiled_here = {d.name for d in distributions() if re.search("Tag: .*-linux_", d.read_text("WHEEL") or "")}
    assert compiled_here <= {"pycosat"}  # which reasoning-gym wants
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {"include-group": "gym"} not in groups["dev"]


def test_the_glossary_has_every_metric_of_a_run(two_ranks, lagged, agents):
    table = RUN.read_text().partition("## What metrics.jsonl says")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    for run, _ in (two_ranks, lagged, agents):
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            for metric in line.keys() - {"phase", "step"}:
                general = re.sub(r"pass@\d+", "pass@k", re.sub("^reward_(?!mean|std).*", "reward_<term>", metric))
                general = re.sub("^(low|high)/", "", general)  # sources of `lagged`
                assert general in named, f"{metric}: {RUN.name} does not say what it is"


def refresh(page):
    """Sets the numbers of lines and the sizes of files on a page."""

    def line(link):
        name, file, old = link.groups()
        return f"[`{name}`]({file}#L{line_of(name, page.parent / file) or old})"

    def size(row):
        lines, tokens = size_of(ROOT / row[2])
        return f"{row[1]}{round(lines, -1):,} | {round(tokens, -2):,}"

    page.write_text(SIZE.sub(size, LINE.sub(line, page.read_text())))


if __name__ == "__main__":
    for page in PAGES:
        refresh(page)
    for file in sorted(ROOT.glob("*.py")):
        print("{:6,} lines {:7,} tokens".format(*size_of(file)), file.name)
