"""
All laws, proven with whole runs of the real engine: what was varied, whether all bits are equal, and whether the
negative control, a run with one thing wrong, was caught. tests/test_laws.py, and for L14 tests/test_instruments.py,
make the runs and compare them; this runs their laws with more kills and prints the results as a table.

    python tools/prove.py                  # all laws: some 10 minutes on two CPU cores
    python tools/prove.py L3 L6 --kills=20 -n 1

Flags that it does not know are pytest's. Exit status 0: all laws hold and all controls were caught.
"""

import argparse
import os
import re
import sys
import time

import pytest
import torch
from runs import ROOT

from onecurve.run.versions import commit


class Table:
    """A plugin of pytest: gathers from the tests of each law what they vary, whether it holds, and their controls."""

    def __init__(self):
        self.laws = {}  # {law: {"law" or "control": whether all of its tests passed, or what they say of themselves}}

    def pytest_runtest_logreport(self, report):
        law, control = re.search(r"::test_(L\d+)_(control)?", report.nodeid).groups()
        found = self.laws.setdefault(law, dict(varied=[], steps=[], held=[], control=[], caught=[]))
        if report.failed or report.passed and report.when == "call":
            found["caught" if control else "held"].append(report.passed)
        for key, x in report.user_properties if report.when == "call" else ():
            found[key].append(x)

    def print(self):
        def verdict(passed):
            return "yes" if passed and all(passed) else "NO" if passed else "not run"

        rows = [("law", "varied", "steps", "bits equal", "negative control", "caught")]
        for law, found in sorted(self.laws.items(), key=lambda pair: int(pair[0][1:])):
            steps = str(min(found["steps"], default=""))
            row = law, "; ".join(found["varied"]), steps, verdict(found["held"])
            rows.append((*row, "; ".join(found["control"]), verdict(found["caught"])))
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
            print("| " + " | ".join(x.ljust(width) for x, width in zip(row, widths)) + " |")


def main():
    tests = [ROOT / "tests" / f"test_{file}.py" for file in ("laws", "instruments")]
    named = re.findall(r"def test_(L\d+)_", "".join(file.read_text() for file in tests))
    known = sorted({*named}, key=lambda law: int(law[1:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("laws", nargs="*", choices=[[], *known], default=[], metavar="L1 .. L16")
    parser.add_argument("--kills", type=int, default=6, help="SIGKILLs of L6; of L9 and L11 a third of them each")
    args, more = parser.parse_known_args()
    table, started = Table(), time.monotonic()
    chosen = " or ".join(f"test_{law}_" for law in args.laws or known)
    status = pytest.main([*map(str, tests), "-k", chosen, f"--kills={args.kills}", "-vv", *more], plugins=[table])
    table.print()
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {time.monotonic() - started:.0f} s"
    print(f"{machine}, {time.strftime('%Y-%m-%d')}, commit {commit()}")
    sys.exit(status)


if __name__ == "__main__":
    main()
