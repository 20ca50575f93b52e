"""End a request whose grammar allows no token with status 400, and keep the server running.

`root ::= root "a"` compiles and allows no token, at the beginning of an answer or, in a later rule,
in its middle. Upstream (sglang/srt/constrained) then masks every token. Greedy decoding takes token
0, which the grammar refuses, and the request gets a 500. Sampling finds a row without probability
and raises in the scheduler, which ends the server. Here such a row stays unmasked: the grammar
refuses any sampled token, and the answer names the reason. A grammar that is complete before
`min_new_tokens` allows no token either (backends/cpu/accept.py).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream
from sglang_dspark.step.penalties import stop_ids

SEAMS = Seams(issue="none found (2026-11-27)")
_ALL = -1  # of xgrammar's mask of 32 tokens: every bit


@SEAMS.before(
    "grammar-mask",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
    signature="(self, logits, vocab_mask)",
    why="a row without probability raises in the sampler, which ends the server",
    drop_when="upstream's samplers survive a row in which the grammar masks every token",
)
def open_dead_ends(grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Allow all tokens where a grammar allows none (BEFORE hook of xgrammar's `apply_vocab_mask`).

    logits: [rows, V]; vocab_mask: [rows, ceil(V / 32)] int32, a bit a token, changed in place. It
    is read on its device without a synchronisation. Drafts are looked up in the unchanged mask.
    """
    vocab_mask.masked_fill_(~(vocab_mask != 0).any(dim=-1, keepdim=True), _ALL)


@SEAMS.subclass(
    "grammar-status",
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor",
    why="upstream answers a grammar that allows no token with 500, as a fault of its own",
    drop_when="upstream answers a grammar without a next token with status 400",
)
class ResultProcessor(Upstream):
    """Upstream's processor of results, which answers a dead end with status 400."""

    def _apply_prefill_grammar(
        self, *, req: Any, next_token_id: int, already_advanced: bool = False
    ) -> Any:
        result = super()._apply_prefill_grammar(
            req=req, next_token_id=next_token_id, already_advanced=already_advanced
        )
        blame(req)
        return result

    def _accept_grammar_tokens(self, req: Any, tokens: Any) -> Any:
        result = super()._accept_grammar_tokens(req, tokens)
        blame(req)
        return result


def blame(req: Any) -> None:
    """Set status 400 for a request that its grammar has just ended.

    Stop tokens are forbidden until `min_new_tokens`. Another token that the grammar allows means
    that the refusal was the server's fault.
    """
    if not isinstance(req.to_finish, upstream.FINISH_ABORT):
        return
    too_early = len(req.output_ids) < req.sampling_params.min_new_tokens
    allowed = _allowed(req.grammar, req.vocab_size)
    if allowed is None or not allowed <= set(stop_ids(req) if too_early else ()):
        return
    if allowed:
        message = "the request's grammar is at its end before min_new_tokens; lower it"
    else:
        message = (
            "the request's grammar came to a place where it allows no token; fix its ebnf, regex, "
            "json_schema, response_format or structural_tag"
        )
    req.to_finish = upstream.FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequest")


def _allowed(grammar: Any, vocab: int) -> set[int] | None:
    """Return the tokens that a grammar allows now; None if they are unknown.

    They are unknown after the grammar's end; such a request ended for another reason.
    """
    if grammar.is_terminated():
        return None
    mask = grammar.allocate_vocab_mask(vocab, 1, "cpu")
    if mask.dtype != torch.int32:  # another backend's mask, without a bit a token
        return None
    grammar.fill_vocab_mask(mask, 0)
    bits = mask.view(-1, 1) >> torch.arange(32, dtype=torch.int32)  # [ceil(V / 32), 32]
    return set((bits & 1).view(-1)[:vocab].nonzero()[:, 0].tolist())
