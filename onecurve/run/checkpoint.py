"""
Checkpoints: folders that appear whole or not at all, for any number of trainers. ckpt/step_000100/ is a Hugging Face
model folder; optimizer/ and checkpoint.json in it are ours.
"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

from safetensors import SafetensorError
from safetensors.torch import save_file

from onecurve.models.moe import per_expert
from sync import RunError, buckets, check_fields, checksum, fsync, read_group, whole, write_atomic

HEALTHY = 20  # a checkpoint this many steps before a watch speaks counts as healthy: two of its means are over by then


def write_file(path, tensors, **metadata):
    """Writes a safetensors file."""
    try:
        save_file(tensors, path, {"format": "pt"} | metadata)
    except SafetensorError as e:  # a full disk
        raise RunError(f"{path}: {e}; the checkpoints before it are whole: --init_from=resume")
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner may read


def write_tensors(folder, prefix, shards, mesh):
    """
    Writes whole tensors, of which each rank has rows, into `folder` as <prefix>-00001-of-00003.safetensors and so on,
    with Hugging Face's index. The trainers take turns with the files. Collective over the trainers.
    """
    plan = buckets(shards, shards[0].data.dtype, 4 << 30)
    where = {}  # {name: file}
    for i, bucket in enumerate(plan):
        path = folder / f"{prefix}-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        mine = i % mesh.size() == mesh.get_local_rank()
        content = {}
        for s in bucket:
            for part in per_expert(s._replace(first=0, data=whole(s, mesh))):
                where[part.name] = path.name
                if mine:
                    content[part.name] = part.data.to("cpu", copy=True)
        if mine:
            write_file(path, content)
    if mesh.get_local_rank() == 0:
        index = {"metadata": {}, "weight_map": where}
        (folder / f"{prefix}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _file_hash(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def seal_checkpoint(partial, final, **record):
    """
    Makes the folder `partial` the checkpoint `final`: checkpoint.json in it holds `record` and a SHA-256 of every file,
    and all is on the disk before the name appears.
    """
    paths = sorted(p for p in partial.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        list(pool.map(fsync, paths))
        record["files"] = dict(zip((str(p.relative_to(partial)) for p in paths), pool.map(_file_hash, paths)))
    record["sha256"] = checksum(record)
    write_atomic(partial / "checkpoint.json", json.dumps(record, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    fsync(final.parent)


def read_checkpoint(folder, rank, ranks, **expected):
    """
    The record of a checkpoint. Each of `ranks` checks its share of the files. Raises RunError for a damaged file, and
    where the record differs from `expected`.
    """
    path = folder / "checkpoint.json"
    try:
        record = json.loads(path.read_text())
        if record.pop("sha256") != checksum(record):
            raise ValueError
        check_fields(path, record, expected)
        there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        for name, digest in [*record["files"].items()][rank::ranks]:
            path = folder / name
            if name not in there:  # or a path that leads elsewhere, to what has no end
                raise ValueError
            if _file_hash(path) != digest:
                raise ValueError
    except (OSError, ValueError, KeyError, AttributeError):
        raise RunError(f"{path}: missing or damaged; delete {folder} to go on from the checkpoint before it")
    return record


def checkpoints(folder):
    """Sealed checkpoints, the latest last."""
    return sorted(folder.glob("step_*"))


def healthy_checkpoint(folder, done):
    """The last checkpoint that counts as healthy if the watch's alarm comes after `done` steps; None: none does."""
    before = (path for path in checkpoints(folder / "ckpt") if int(path.name[5:]) <= done - HEALTHY)
    return max(before, default=None)


def delete_checkpoints(folder, unwanted):
    """Deletes these folders; each gets another name first, so that half of one never looks like a checkpoint."""
    for path in unwanted:
        path.rename(folder / f".{path.name}")
    for unfinished in folder.glob(".step_*"):
        shutil.rmtree(unfinished)


def clean_queue(queue, first_step):
    """
    After a crash: deletes half-written files, and torn ones of steps still to be done. Whole files stay: they would be
    made the same again. Returns the number of files deleted as torn.
    """
    for leftover in queue.glob("*/.group_*"):
        leftover.unlink()
    torn = 0
    for path in queue.glob("*/group_*.safetensors"):
        if int(path.parent.name.rpartition("_")[2]) >= first_step:
            try:
                read_group(path)
            except RunError:
                path.unlink()
                torn += 1
    return torn
