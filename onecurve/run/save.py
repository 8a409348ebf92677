"""A trainer's checkpoint: what is in it, how it is written and read."""

import shutil
from itertools import chain

import sync
from configurator import require
from onecurve.models import folders
from onecurve.run.checkpoint import checkpoints, delete_checkpoints, seal_checkpoint, write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments


def optimizer_state(trainer, versions):
    """The shards that a checkpoint has beside the model: AdamW's moments, these versions, the critic's head."""
    state = [
        s._replace(name=f"{k}.{s.name}", data=trainer.optimizer.state[w][k])
        for s, w in zip(trainer.shards, trainer.weights)
        for k in MOMENTS
    ]
    for version, kept in versions.items():
        state += [s._replace(name=f"version {version}.{s.name}", data=s.data.to(trainer.device)) for s in kept]
    return state + [s for s in trainer.shards if s.name == "value_head"]


def load_optimizer(trainer, checkpoint):
    """Fills the optimizer's state, the older versions and the critic's head from a checkpoint's folder."""
    folders.load_weights(optimizer_state(trainer, trainer.past.versions), checkpoint / "optimizer", tied=False)


def save_trainer(trainer, ckpt, tokenizer, stop_tokens, record, step, flight):
    """
    Writes ckpt/step_000100, for step = 100, from which any number of ranks can resume at that step. flight: the groups
    in flight. record: the first rank's Record; None on others. Collective over the trainers.
    """
    found = {*chain(*(trainer.optimizer.state[w] for w in trainer.weights))} - {"step"}
    cure = "name in MOMENTS what the optimizer keeps of a weight, or a resume begins without it"
    require(found == {*MOMENTS}, f"MOMENTS={MOMENTS}: the optimizer has {', '.join(sorted(found))}; {cure}")
    # A name that no reader looks for until all is on the disk: a kill leaves no half of a checkpoint.
    finished = ckpt / f"step_{step:06d}"
    unfinished = ckpt / f".step_{step:06d}"
    earlier = dict(trainer.past.versions)
    earlier.pop(step, None)  # it is the model itself
    if record:
        shutil.rmtree(unfinished, ignore_errors=True)
        for name in ("optimizer", "flight"):
            (unfinished / name).mkdir(parents=True)
        folders.save_tokenizer(unfinished, tokenizer, stop_tokens)
    sync.meet(trainer.control)  # the folders are there
    trainer.parts.save(unfinished)
    write_tensors(unfinished / "optimizer", "optimizer", optimizer_state(trainer, earlier), trainer.mesh)
    sync.meet(trainer.control)  # and the files
    if record:
        for i, group in enumerate(flight.groups):
            sync.write_group(sync.group_path(unfinished / "flight", i), *group)
        seal_checkpoint(
            unfinished,
            finished,
            step=step,
            optimizer_steps=int(trainer.optimizer.state[trainer.weights[0]]["step"]),
            earlier=[*earlier],
            begun=flight.begun,
            seen=[(*place, right) for place, right in flight.seen.items()],
            **record.state(),
        )
        delete_checkpoints(ckpt, checkpoints(ckpt)[: -trainer.c.keep_checkpoints])
