"""
Executes learn/notebook.ipynb from top to bottom and says what it must have said: some five minutes on two cores.

    uv run --with nbclient --with ipykernel tests/notebook.py [folder]    # the folder of a checkout; this one
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = (
    "digest a0dc9343", "the same", "identical: 24 steps", "divides by G - 1", "the project's own"
)  # fmt: skip


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT)
    notebook = nbformat.read(ROOT / "learn" / "notebook.ipynb", 4)
    began = time.monotonic()
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": folder / "learn"}}).execute()
    said = "".join(map(text_of, notebook.cells))
    print(said)
    missing = [words for words in EXPECTED if words not in said]
    pictures = sum(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())
    )
    print(f"{time.monotonic() - began:.0f} s, {pictures} pictures; not said: {missing or 'nothing'}")
    return bool(missing) or not pictures


if __name__ == "__main__":
    sys.exit(main())
