"""
What SGLang's scheduler does for agents and for clients of a served model, and not for samples of one turn: turns that
end at strings, drawing by grammars, the likeliest tokens. It runs in the scheduler's process (rollout_server.py).
"""

import functools

import torch


class Ranked:
    """Log-probs whose topk has the smaller id first among equals, however many others of the batch want."""

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def topk(self, k, dim):
        ranked = torch.sort(self.logprobs, dim=dim, descending=True, stable=True)
        return torch.return_types.topk([x[:, :k] for x in ranked])


def ranked_logprobs(own):
    return lambda logprobs, *args, **kwargs: own(Ranked(logprobs), *args, **kwargs)


def process_grammar(self, by_sglang, req):
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
    return by_sglang(self, req)


def install_tokenizer(folder):
    """Gives the scheduler a tokenizer, so that turns end at strings, and what clients ask for beside tokens."""
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.layers import logprob_processor
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    def init_tokenizer(self, own=Scheduler.init_tokenizer):
        own(self)
        self.tokenizer = get_tokenizer(folder)

    # SGLang's own switch would have it send texts, to a process that we do not start.
    Scheduler.init_tokenizer = init_tokenizer
    own = GrammarManager.process_req_with_grammar
    GrammarManager.process_req_with_grammar = functools.partialmethod(process_grammar, own)
    for name in ("get_top_logprobs_raw", "get_top_logprobs_chunk"):
        setattr(logprob_processor, name, ranked_logprobs(getattr(logprob_processor, name)))
