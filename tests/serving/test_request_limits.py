"""What the scheduler's decoder would not take is refused before it is sent there."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec.structs import replace
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.serving.request_limits import check_decodable


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
    check_decodable(made(), None, None)
    check_decodable(made(token_ids_logprob=[4, 5], priority=1, extra_key="x"), None, None)


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
        check_decodable(made(**changed), None, None)
