"""Test grammars that allow no token: no row without probability; a 400 says what to fix."""

from __future__ import annotations

import copy
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.patches import registry
from sglang_dspark.patches.upstream_fixes.grammar_errors import (
    ResultProcessor,
    open_dead_ends,
)

WORDS = ["<s>", "</s>", "a", "b", "c"]
DEAD, LATER, FINE = 'root ::= root "a"', 'root ::= "a" x\nx ::= x "b"', 'root ::= "a" "b"'


def grammar(ebnf: str) -> XGrammarGrammar:
    info = xgrammar.TokenizerInfo(WORDS, stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(ebnf)
    matcher = xgrammar.GrammarMatcher(compiled)
    return XGrammarGrammar(matcher, len(WORDS), compiled, None, ebnf)


def test_only_a_row_without_tokens_is_left_unmasked() -> None:
    masks = [grammar(each) for each in (DEAD, FINE)]
    mask = masks[0].allocate_vocab_mask(len(WORDS), 2, "cpu")
    for row, each in enumerate(masks):
        each.fill_vocab_mask(mask, row)
    assert not mask[0].any()
    allowed = mask[1].clone()
    open_dead_ends(masks[0], None, mask)
    assert (mask[0] == -1).all()
    assert torch.equal(mask[1], allowed)


def request_of(ebnf: str, *taken: int, least: int = 0, reason: object = None) -> Any:
    """Make a request with the fields that are read; `taken` are its output tokens."""
    found = grammar(ebnf)
    for token in taken:
        found.accept_token(token)
    return SimpleNamespace(
        grammar=found,
        vocab_size=len(WORDS),
        output_ids=list(taken),
        sampling_params=SimpleNamespace(min_new_tokens=least, stop_token_ids=None),
        eos_token_ids=[1],
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1),
        to_finish=reason,
    )


def told(request: Any) -> Any:
    theirs = SimpleNamespace(
        _accept_grammar_tokens=lambda self, req, tokens: tokens,
        _apply_prefill_grammar=lambda self, *, req, next_token_id, already_advanced: None,
    )
    processor = registry.derive(type("Theirs", (), vars(theirs)), ResultProcessor)()
    prefilled = copy.copy(request)
    processor._apply_prefill_grammar(req=prefilled, next_token_id=3)  # type: ignore[attr-defined]
    assert processor._accept_grammar_tokens(request, [3]) == [3]  # type: ignore[attr-defined]
    reasons = (prefilled.to_finish, request.to_finish)
    assert len({each and each.message for each in reasons}) == 1
    return request.to_finish


ABORT = FINISH_ABORT("Grammar accept_token failed", HTTPStatus.INTERNAL_SERVER_ERROR, "x")


@pytest.mark.parametrize(
    ("ebnf", "taken", "dead"),
    [
        (DEAD, [], True),
        (LATER, [], False),
        (LATER, [2], True),
        (FINE, [], False),
        (FINE, [2], False),
        (FINE, [2, 3], False),
        (FINE, [2, 3, 1], False),  # at its end: xgrammar raises when asked for a mask
    ],
)
def test_a_dead_end_is_the_requests_fault(ebnf: str, taken: list[int], dead: bool) -> None:
    reason = told(request_of(ebnf, *taken, reason=ABORT))
    if dead:
        assert reason.status_code == HTTPStatus.BAD_REQUEST
        assert "allows no token; fix" in reason.message
    else:  # a token that was let through and is not allowed: ours
        assert reason is ABORT
    assert told(request_of(ebnf, *taken)) is None


def test_a_request_that_is_ended_at_its_grammars_end_is_left_alone() -> None:
    """Its client left, or another of its prompts was refused, while the stop token was drawn."""
    assert told(request_of(FINE, 2, 3, 1, reason=ABORT)) is ABORT
    assert told(request_of(FINE, 2, 3, 1, least=9, reason=ABORT)) is ABORT


def test_a_grammar_that_ends_before_min_new_tokens() -> None:
    assert told(request_of(FINE, 2, 3, least=2, reason=ABORT)) is ABORT
    assert told(request_of(FINE, 2, least=3, reason=ABORT)) is ABORT
    reason = told(request_of(FINE, 2, 3, least=3, reason=ABORT))
    assert reason.status_code == HTTPStatus.BAD_REQUEST
    assert "before min_new_tokens" in reason.message
    assert "allows no token" in told(request_of(DEAD, least=3, reason=ABORT)).message
