"""Test that values which end the scheduler are refused first, and which requests an abort ends."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.patches import registry
from sglang_dspark.patches.upstream_fixes.request_limits import (
    TokenizerManager,
    check_decodable,
    check_request,
)


def made(**changed: Any) -> TokenizedGenerateReqInput:
    whole = TokenizedGenerateReqInput(
        rid="a",
        input_text="x",
        input_ids=array("q", [1]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=3),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    return replace(whole, **changed)


def test_a_request_in_order_passes() -> None:
    check_decodable(made())
    check_decodable(made(token_ids_logprob=[4, 5], priority=1, extra_key="x"))


@pytest.mark.parametrize(
    "changed",
    [
        {"priority": "high"},
        {"extra_key": ["x"]},
        {"token_ids_logprob": ["a"]},
        {"sampling_params": SamplingParams(stop="a", sampling_seed="x")},
        {"rid": 5},
        {"return_hidden_states": object()},
    ],
)
def test_a_value_of_another_type_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a field of the request is of a wrong type"):
        check_decodable(made(**changed))


VOCAB, WIDTH = 50, 2
NAN = float("nan")


def asked(**fields: Any) -> None:
    """A prompt of three tokens, and fields, as a model of that vocabulary and width gets it."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH))
    check_request(manager, SimpleNamespace(**fields), [1, 2, 3])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_indices_to_pool": [0, 3]}, "one place or more of the prompt's, 0 to 2"),
        ({"token_indices_to_pool": []}, "token_indices_to_pool"),
        ({"multi_item_delimiter_indices": [-1]}, "multi_item_delimiter_indices"),
        ({"input_embeds": [[0.1, 0.2], [0.1]]}, "every row must have 2 numbers"),
        ({"input_embeds": [[0.1, NAN]]}, "not finite"),
        ({"sampling_params": {"top_p": 1e-60}}, "top_p"),
        ({"sampling_params": {"repetition_penalty": 1e-60}}, "repetition_penalty"),
        ({"sampling_params": {"logit_bias": {"5": 3e38}}}, "logit_bias"),
        ({"session_params": {"7": 1}}, "session_params: unknown '7'"),
        ({"sampling_params": {"stop_regex": "(a|a)*b"}}, "several ways"),
    ],
)
def test_what_would_raise_in_the_scheduler_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asked(**fields)


def test_what_is_in_order_passes() -> None:
    asked(
        token_indices_to_pool=[0, 2],
        input_embeds=[[0.1, 2.0], [0.0, -1.0]],
        session_params={"id": "one"},
        sampling_params={"top_p": 1e-9, "repetition_penalty": 0.01, "logit_bias": {"5": -1e9}},
    )


@pytest.mark.parametrize("asked_for", [True, "last", False])
@pytest.mark.parametrize("algorithm", ["DSPARK", "EAGLE", None])
def test_hidden_states_are_refused_where_dspark_drops_them(
    algorithm: str | None, asked_for: Any
) -> None:
    refused = bool(algorithm == "DSPARK" and asked_for)
    says = pytest.raises(ValueError, match="return_hidden_states") if refused else nullcontext()
    with get_context().override_server_args(speculative_algorithm=algorithm), says:
        asked(return_hidden_states=asked_for)


@pytest.mark.parametrize(
    ("rid", "others", "sent"),
    [
        ("a", ["a", "b"], True),
        ("a", ["a", "a9f0"], False),  # the scheduler would end both
        ("a9f0", ["a", "a9f0"], True),
        ("", ["a"], True),  # of all requests
    ],
)
def test_an_abort_ends_no_other_request(rid: str, others: list[str], sent: bool) -> None:
    gone: list[tuple[str, bool]] = []

    class Theirs:
        rid_to_state = dict.fromkeys(others)

        def abort_request(self, *given: Any) -> None:
            gone.append(given)

    manager: Any = registry.derive(Theirs, TokenizerManager)()
    manager.abort_request(rid, abort_all=not rid)
    assert gone == [(rid, not rid)] * sent
