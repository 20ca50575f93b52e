"""A grammar that allows no token ends its own request with status 400, and not the server.

`root ::= root "a"` compiles, and allows nothing: neither at the beginning of an answer nor, in a
rule further on, in its middle. Upstream (0.5.23, sglang/srt/constrained) masks every token then.
Greedy decoding takes token 0, which the grammar refuses, and the request gets a 500; sampling finds
a row without probability and raises in the scheduler, which ends the server for everyone. Here such
a row is left as it is: whatever is sampled, the grammar refuses, and the answer says why.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch

_ALL = -1  # of xgrammar's mask of 32 tokens: every bit


def open_dead_ends(grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """BEFORE hook of xgrammar's `apply_vocab_mask`: all tokens where there would be none.

    logits: [rows, V]; vocab_mask: [rows, ceil(V / 32)] int32, a bit a token, changed in place. It
    is read on its device: nothing waits. Drafts are looked up in it before, as it was.
    """
    vocab_mask.masked_fill_(~(vocab_mask != 0).any(dim=-1, keepdim=True), _ALL)


def blame(result: Any, processor: Any, *given: Any, **named: Any) -> Any:
    """AFTER hook of what advances a request's grammar: a dead end is the request's fault.

    The request comes first among `given`, or by name; `result` is upstream's own.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = named["req"] if "req" in named else given[0]
    if isinstance(req.to_finish, FINISH_ABORT) and is_dead_end(req.grammar, req.vocab_size):
        req.to_finish = FINISH_ABORT(
            "the request's grammar came to a place where it allows no token; mend its ebnf, regex, "
            "json_schema, response_format or structural_tag",
            HTTPStatus.BAD_REQUEST,
            "BadRequest",
        )
    return result


def is_dead_end(grammar: Any, vocab: int) -> bool:
    """Whether a grammar that has just refused a token would have refused any other."""
    mask = grammar.allocate_vocab_mask(vocab, 1, "cpu")
    if mask.dtype != torch.int32:  # of another backend, whose masks are no bits
        return False
    grammar.fill_vocab_mask(mask, 0)
    return not bool(mask.any())
