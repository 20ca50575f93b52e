"""A grammar that allows no token: no row without probability, and a 400 that says what to mend."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.serving.grammar_ends import blame, is_dead_end, open_dead_ends

WORDS = ["<s>", "</s>", "a", "b", "c"]
DEAD, LATER, FINE = 'root ::= root "a"', 'root ::= "a" x\nx ::= x "b"', 'root ::= "a" "b"'


def grammar(ebnf: str) -> XGrammarGrammar:
    info = xgrammar.TokenizerInfo(WORDS, stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(ebnf)
    matcher = xgrammar.GrammarMatcher(compiled)
    return XGrammarGrammar(matcher, len(WORDS), compiled, None, ebnf)


@pytest.mark.parametrize(
    ("ebnf", "taken", "dead"),
    [
        (DEAD, [], True),
        (LATER, [], False),
        (LATER, [2], True),
        (FINE, [], False),
        (FINE, [2], False),
    ],
)
def test_a_dead_end_is_known(ebnf: str, taken: list[int], dead: bool) -> None:
    found = grammar(ebnf)
    for token in taken:
        found.accept_token(token)
    assert is_dead_end(found, len(WORDS)) is dead


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


def finished(ebnf: str, reason: object) -> Any:
    request = SimpleNamespace(grammar=grammar(ebnf), vocab_size=len(WORDS), to_finish=reason)
    assert blame([], None, request, [3]) == []
    return request.to_finish


def test_a_dead_end_is_the_requests_fault() -> None:
    abort = FINISH_ABORT("Grammar accept_token failed", HTTPStatus.INTERNAL_SERVER_ERROR, "x")
    told = finished(DEAD, abort)
    assert told.status_code == HTTPStatus.BAD_REQUEST
    assert "allows no token; mend" in told.message
    assert finished(FINE, abort) is abort  # a token that was let through and is not allowed: ours
    assert finished(DEAD, None) is None
