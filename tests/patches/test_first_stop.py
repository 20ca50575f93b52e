"""Test that an answer ends at the same token whether a step yields several tokens or one."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_dspark.patches.upstream_fixes.answer_stops import end_at_the_first

WORDS = ("</s>", "user", "\n", "\n\n", "a", "b", "ab", "ba", " ")
HALVES = ("Ã", "©")  # how a byte-level vocabulary writes the two bytes of é
STRINGS = ("user", "\n", "\n\n", "a", "b", "ab", "bab", "ser\n", "é", "\ufffd", "</s>")
PATTERNS = ("a$", "^b", "b.a", "[ab]{3}", "(?<!a)b", "user\\b")


def tokenizer_of() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [word.replace("\n", "Ċ").replace(" ", "Ġ") for word in WORDS]
    known = list(dict.fromkeys([*spelled, *HALVES, *alphabet]))
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.additional_stop_token_ids = None  # as SGLang loads it
    return fast


TOKENIZER = tokenizer_of()
EOS, NONE = 0, -7  # NONE: what a pass gives where its logits are no numbers
TOKENS = range(len(WORDS) + len(HALVES))


def token(word: str) -> int:
    return NONE if word == "nan" else (*WORDS, *HALVES).index(word)


def request(**sampling: Any) -> Req:
    params = SamplingParams(**{"max_new_tokens": 100, **sampling})
    params.normalize(TOKENIZER)
    req = Req("one", "", array("q", [5]), params, eos_token_ids={EOS}, vocab_size=400)
    req.tokenizer = TOKENIZER
    return req


def told(req: Req) -> tuple[Any, list[int]]:
    reason = req.finished_reason
    return reason and reason.to_json(), list(req.output_ids_through_stop)


def one_by_one(tokens: list[int], ends: bool = False, **sampling: Any) -> tuple[Any, list[int]]:
    """Plain decoding. ends: the last token brings the grammar to its end."""
    req = request(**sampling)
    for place, each in enumerate(tokens, 1):
        req.grammar = SimpleNamespace(is_terminated=lambda p=place: ends and p == len(tokens))
        req.output_ids.append(each)
        req.update_finish_state()
        if req.finished():
            break
    return told(req)


def in_windows(
    tokens: list[int], sizes: list[int], ends: bool = False, **sampling: Any
) -> tuple[Any, list[int]]:
    req, at = request(**sampling), 0
    for size in [*sizes, *[1] * len(tokens)]:
        window = tokens[at : at + size]
        at += len(window)
        if not window or req.finished():
            break
        grammar = SimpleNamespace(is_terminated=lambda p=at: ends and p == len(tokens))
        req.grammar = grammar
        req.output_ids.extend(window)
        end_at_the_first(Req.update_finish_state, req, len(window))
        assert req.grammar is grammar
        assert list(req.output_ids) == tokens[:at] or req.finished_reason.to_json() == NAN
    return told(req)


NAN = {"type": "stop", "matched": "NaN happened"}


@pytest.mark.parametrize(
    ("words", "sampling", "kept"),
    [
        (["</s>", "\n", "user"], {"stop": ["user"]}, 1),
        (["b", "\n", "\n\n"], {"stop": ["\n\n", "\n"]}, 2),
        (["a", "b", "user"], {"stop": ["user"], "stop_regex": ["b$"]}, 2),
        (["a", "b", "user"], {"stop": ["user"], "max_new_tokens": 2}, 2),
        (["a", "</s>", "b"], {"stop_regex": ["b$"]}, 2),
        (["Ã", "©", "user"], {"stop": ["user", "\ufffd"]}, 1),
        (["Ã", "©", "user"], {"stop": ["zz", "\ufffd"]}, 1),
        (["</s>", "b", "user"], {"stop": ["zz", "user"]}, 1),
        (["</s>", "b", "user"], {"stop": ["user", "zz"]}, 1),
        (["</s>", "b", "user"], {"stop": ["zz", "user", "ba"]}, 1),
        (["a", "b", "user"], {"stop": ["zz"]}, 3),
        (["</s>", "nan", "a"], {"stop": ["user"]}, 1),
        (["a", "nan", "</s>"], {"stop": ["user"]}, 2),
    ],
)
def test_the_first_of_two_stops_ends_the_answer(
    words: list[str], sampling: dict[str, Any], kept: int
) -> None:
    tokens = [token(word) for word in words]
    reason, through = in_windows(tokens, [3], **sampling)
    assert (reason, through) == one_by_one(tokens, **sampling)
    assert len(through) == kept


@settings(max_examples=400)
@given(
    tokens=st.lists(st.sampled_from([*TOKENS, *TOKENS, NONE, 1000]), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 8), max_size=6),
    stop=st.lists(st.sampled_from(STRINGS), max_size=3),
    stop_regex=st.lists(st.sampled_from(PATTERNS), max_size=2),
    max_new_tokens=st.sampled_from([1, 3, 7, 100]),
    ignore_eos=st.booleans(),
    ends=st.booleans(),
)
def test_windows_end_where_single_tokens_do(
    tokens: list[int], sizes: list[int], ends: bool, **sampling: Any
) -> None:
    if not (sampling["stop"] or sampling["stop_regex"]):  # upstream's own way: others come first
        tokens = [each for each in tokens if each in TOKENS] or [EOS]
    assert in_windows(tokens, sizes, ends, **sampling) == one_by_one(tokens, ends, **sampling)


def test_a_byte_that_is_no_character_hides_no_stop() -> None:
    """A vocabulary of bytes and pieces, as Llama 2's: bytes in a row are text, or none are."""
    known = {each: i for i, each in enumerate(["</s>", "<0x0A>", "<0xF0>", "a"])}
    bare = Tokenizer(models.BPE(vocab=known, merges=[], byte_fallback=True))
    bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    req = request(stop=["\n\n"])
    req.tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>")
    req.tokenizer.additional_stop_token_ids = None
    req.output_ids.extend([3, 1, 1, 2])
    assert "\n" not in req.tail_str(4)
    end_at_the_first(Req.update_finish_state, req, 4)
    assert list(req.output_ids_through_stop) == [3, 1, 1]


def test_without_stops_upstream_is_asked_once() -> None:
    req = request()
    calls: list[Any] = []
    req.output_ids.extend([1, 2, 3])
    end_at_the_first(lambda *given: calls.append(given), req, 3)
    assert calls == [(req, 3)]
    assert list(req.output_ids) == [1, 2, 3]


def test_an_abort_ends_it_with_all_its_tokens() -> None:
    req = request(stop=["a"])
    req.output_ids.extend([token("a"), token("b")])
    req.to_finish = FINISH_ABORT("gone")
    end_at_the_first(Req.update_finish_state, req, 2)
    assert req.finished_reason.message == "gone"
    assert len(req.output_ids_through_stop) == 2


def test_an_answer_that_has_ended_stays_so() -> None:
    req = request(stop=["a"])
    req.output_ids.extend([token("a"), token("b")])
    req.finished_reason = FINISH_LENGTH(length=2)
    end_at_the_first(Req.update_finish_state, req, 2)
    assert isinstance(req.finished_reason, FINISH_LENGTH)
    assert req.finished_len is None
