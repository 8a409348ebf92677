"""The frozen reference of a KL term (--kl_coef), and the teacher of --advantage=distill: forward passes only."""

import sync
from configurator import require
from onecurve.models import folders
from onecurve.models.dense import build_model, check_model


class Reference:
    """A trainer's reference. With LoRA it is the trainer's own model with other adapters, else a whole model."""

    def __init__(self, trainer, hf):
        self.trainer = trainer
        self.adapters = trainer.parts.anchor() or ()
        self.model = trainer.model if self.adapters else self.whole_model(hf)

    def whole_model(self, hf):
        c = self.trainer.c
        mesh = self.trainer.mesh
        name = c.reference or c.init_from
        folder = folders.fetch_model(name, "reference")
        other = check_model(folder, vars(c), "reference")
        require(other.vocab_size == hf.vocab_size, f"reference={name!r}: needs the vocabulary of init_from's model")
        model = build_model(other, mesh, self.trainer.device, c.batch_invariant, tp_split=c.tp_split)
        folders.load_weights(sync.shards(model, mesh), folder, other.tie_word_embeddings)
        return model

    def fill(self, samples):
        """The samples with the reference's log-probs. Collective over the trainers."""
        outputs = self.trainer.outputs(samples, self.model, self.adapters)
        return [s._replace(reference=logprobs) for s, (logprobs, *_) in zip(samples, outputs)]
