"""
Wrong lines in what only CUDA executes, each of which the pretended runs must catch:

    python tests/pretend_mutants.py [NAME ..]       # some two minutes each: not part of the tests

A mutant is a copy of the project in which one text is another, and the test of test_pretend_cuda.py that has to fail.
In the first copy nothing is changed, and no test may fail.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEARNS, PLACES, WAITS = "test_it_learns_and", "test_no_function", "test_the_host_waits"
ORDER, HOLDS, GROUPS, THREADS = "test_streams_wait", "test_a_trainer_holds", "test_every_group", "test_collectives"

MUTANTS = dict(
    nothing_changed=("sync.py", "", "", "test_"),
    engine_never_leaves=(
        "sync.py",
        "        if self.groups:\n            self._at_both_ends(",
        "        if self.groups:\n            (lambda leave, _: leave())(",
        f"{GROUPS} and overlapped",
    ),
    thread_gathers=(
        "sync.py",
        "            piece = torch.cat([s.data",
        """            shards = [*shards]
            [whole(s, self.ranks.mesh) for s in shards]
            piece = torch.cat([s.data""",
        THREADS,
    ),
    sends_on_without_waiting=(
        "sync.py",
        "            torch.cuda.current_stream().synchronize()",
        "            pass",
        f"{ORDER} and overlapped",
    ),
    sent_before_it_is_copied=(
        "sync.py",
        '            if shards and self.device == "cuda":\n                torch.cuda.current_stream().synchronize()',
        "",
        "test_L17",
    ),
    lends_what_is_in_use=(
        "onecurve/sglang/patches.py",
        "    torch.cuda.synchronize()  # kernels after",
        "    pass  #",
        f"{ORDER} and alone",
    ),
    delivery_kept=("sync.py", "                    del delivery", "                    pass", HOLDS),
    older_versions_on_the_card=(
        "onecurve/run/past.py",
        's.data.to("cpu", non_blocking=True)',
        "s.data",
        HOLDS,
    ),
    older_weights_sent=(
        "train_grpo.py",
        "self.past.versions[version]",
        "self.past.versions[max(0, version - 1)]",
        f"{LEARNS} and overlapped",
    ),
    computed_in_float32=(
        "onecurve/models/dense.py",
        "param_dtype=None if lora else computed_in",
        "param_dtype=None",
        f"{LEARNS} and overlapped",
    ),
    model_not_filled=("train_grpo.py", "        self.parts.fill_model()", "", f"{LEARNS} and alone"),
    hash_factors_on_the_host=("sync.py", "len(t), t.device)", 'len(t), "cpu")', f"{PLACES} and alone"),
    host_waits_in_the_graph=(
        "onecurve/models/dense.py",
        "q_lens = torch.ones_like(batch.seq_lens)",
        "q_lens = int(batch.seq_lens.max()) * 0 + torch.ones_like(batch.seq_lens)",
        f"{LEARNS} and alone",
    ),
    plan_made_outside_of_the_graph=(
        "onecurve/models/dense.py",
        "def init_forward_metadata_in_graph(self, batch):",
        """def init_forward_metadata_in_graph(self, batch):
            if not torch.cuda.is_current_stream_capturing():
                self.plan_batch(batch)

        def plan_batch(self, batch):""",
        f"{LEARNS} and alone",
    ),
    host_counts_an_experts_tiles=(
        "kernels.py",
        'tiles = pairs // config["BLOCK_N"] + min(pairs, E)',
        'tiles = int((starts.diff()[:E] / config["BLOCK_N"]).ceil().sum())',
        f"{LEARNS} and mixture",
    ),
    leaf_waits_for_its_copies=(
        "train_grpo.py",
        "x.to(device, non_blocking=True)",
        "x.to(device)",
        f"{WAITS} and alone",
    ),
    leaf_waits_for_its_comparison=(
        "train_grpo.py",
        "                self.compare(leaf,",
        "                self.mismatches()\n                self.compare(leaf,",
        f"{WAITS} and alone",
    ),
    capability_not_compared=("onecurve/run/setup.py", ", device=one_device(self.device)", "", "test_a_resume_on"),
)


def main():
    missed = []
    for name in sys.argv[1:] or MUTANTS:
        file, text, other, test = MUTANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            ignored = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
            shutil.copytree(ROOT, copy, ignore=ignored)
            source = (copy / file).read_text()
            assert text in source, f"{name}: {file} has changed"
            (copy / file).write_text(source.replace(text, other))
            command = [sys.executable, "-m", "pytest", "-n0", "-x", "-k", test, "tests/test_pretend_cuda.py"]
            status = subprocess.run(command, cwd=copy, capture_output=True, text=True).returncode
        right = status == (text != other)
        print(f"{name}: {'as it must be' if right else 'WRONG'}, pytest ended with {status}", flush=True)
        missed += [name] * (not right)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
