"""
What README and RESULTS say of files, keys and metrics is true.

    pytest tests/test_readme.py
    python tests/test_readme.py    # sets the numbers of lines
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402
from configurator import block, configure  # noqa: E402

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\[`(\w+)`\]\(([\w./]+\.py)#L(\d+)\)")
COMMANDS = [
    line.partition("  #")[0]
    for line in README.replace("\\\n", " ").splitlines()
    if line.startswith("    uv run ") and " train_grpo.py" in line
]


def line_of(name, file):
    """The number of the line in which a file defines the name."""
    lines = enumerate((ROOT / file).read_text().splitlines(), 1)
    return next(i for i, text in lines if re.match(rf"(async )?(def|class) {name}\b|{name} = ", text))


@pytest.mark.parametrize("name,file,line", LINK.findall(README))
def test_a_link_leads_to_the_line_that_it_names(name, file, line):
    assert int(line) == line_of(name, file), "python tests/test_readme.py sets it"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_files_and_keys_that_are_there(command):
    words = shlex.split(command)
    flags = words[words.index("train_grpo.py") + 1 :]
    namespace = block(vars(train_grpo)) | {"__file__": str(ROOT / "train_grpo.py")}
    assert configure(namespace, [flag for flag in flags if flag != "--help"])


def test_there_are_links_and_commands():
    assert len(LINK.findall(README)) > 6 and len(COMMANDS) > 20


def test_the_files_that_it_names_are_there_and_no_other_tool_is():
    named = {name for name in re.findall(r"`((?:tools|agents|config|lessons|tests)/[\w.]+)`", README)}
    assert all((ROOT / name).exists() for name in named), named
    assert {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= named


def test_the_glossary_has_every_metric_of_a_run(two_ranks, lagged, agents):
    table = README.partition("## What metrics.jsonl says")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    for run, _ in (two_ranks, lagged, agents):
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            for metric in line.keys() - {"phase", "step"}:
                general = re.sub(r"pass@\d+", "pass@k", re.sub("^reward_(?!mean|std).*", "reward_<term>", metric))
                assert general in named, f"{metric}: README does not say what it is"


if __name__ == "__main__":
    text = LINK.sub(lambda link: f"[`{link[1]}`]({link[2]}#L{line_of(link[1], link[2])})", README)
    (ROOT / "README.md").write_text(text)
