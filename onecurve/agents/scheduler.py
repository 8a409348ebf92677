"""
SGLang's scheduler for agents and for clients of a served model: turns that end at strings, drawing by grammars, the
likeliest tokens. Samples of one turn do without. `PATCHES` is a table like onecurve/sglang/patches.py's.
"""

import torch

from onecurve.sglang.patches import Around


class Ranked:
    """Log-probs whose topk has the smaller id first among equals, however many others of the batch want."""

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def topk(self, k, dim):
        ranked = torch.sort(self.logprobs, dim=dim, descending=True, stable=True)
        return torch.return_types.topk([x[:, :k] for x in ranked])


def ranked_logprobs(own, logprobs, *args, **kwargs):
    return own(Ranked(logprobs), *args, **kwargs)


def process_grammar(own, self, req):
    """SGLang's, for a request that may want a grammar; with the first one the means for them are loaded."""
    if req.sampling_params.json_schema and self.grammar_backend is None:
        import xgrammar
        from sglang.srt.constrained import base_grammar_backend, xgrammar_backend

        if self.scheduler.device == "cpu":  # SGLang allocates pinned memory for masks, and refuses to apply them
            xgrammar_backend._allocate_token_bitmask = lambda V, B: xgrammar.allocate_token_bitmask(B, V)
            apply = lambda _, logits, vocab_mask: xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)  # noqa: E731
            xgrammar_backend.XGrammarGrammar.apply_vocab_mask = apply
        hf = self.scheduler.model_config
        self.grammar_backend = base_grammar_backend.create_grammar_backend(
            self.server_args, self.scheduler.tokenizer, hf.vocab_size, hf.hf_eos_token_id
        )
    return own(self, req)


def init_tokenizer(own, self):
    """SGLang's own switch would have it send texts, to a process that we do not start."""
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    own(self)
    self.tokenizer = get_tokenizer(self.server_args.model_path)


def flush_cache(own, self, *args, **kwargs):
    done = own(self, *args, **kwargs)
    self.tree_cache.disable_finished_insert = False  # a dialogue continues from the end of its last turn
    return done


PATCHES = [
    ("managers.scheduler:Scheduler.init_tokenizer", Around(init_tokenizer)),
    ("managers.scheduler:Scheduler.flush_cache", Around(flush_cache)),
    ("constrained.grammar_manager:GrammarManager.process_req_with_grammar", Around(process_grammar)),
    ("layers.logprob_processor:get_top_logprobs_raw", Around(ranked_logprobs)),
    ("layers.logprob_processor:get_top_logprobs_chunk", Around(ranked_logprobs)),
]
