"""Keeps a grammar that allows no token from ending the server.

The hooks: `sglang_dspark/serving/grammar_ends.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import grammar_ends

_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_NO_500 = "upstream tells a grammar that allows no token with 500, as a fault of its own"

SEAMS = (
    Seam(
        name="grammar-mask",
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        kind="before",
        hook=grammar_ends.open_dead_ends,
        signature="(self, logits, vocab_mask)",
        why="a row without probability raises in the sampler, which ends the server",
    ),
    Seam(
        name="grammar-prefill",
        target=f"{_PROCESSOR}._apply_prefill_grammar",
        kind="after",
        hook=grammar_ends.blame,
        signature="(self, *, req, next_token_id, already_advanced=False)",
        why=_NO_500,
    ),
    Seam(
        name="grammar-decode",
        target=f"{_PROCESSOR}._accept_grammar_tokens",
        kind="after",
        hook=grammar_ends.blame,
        signature="(self, req, tokens)",
        why=_NO_500,
    ),
)
