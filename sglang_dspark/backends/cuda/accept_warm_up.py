"""Accept made-up steps of every kind of sampling, so that no kernel is compiled while serving.

A Triton kernel is compiled again for each pattern of arguments that are None and for integers that
are 1 or divisible by 16; FlashInfer's modules at their first call. Each kind runs through the
device's own `accept`, drafted or not, with greedy requests in the batch or not, at the numbers of
requests that SGLang's kernels distinguish.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.device import GraphDevice
from sglang_dspark.kernels.accept_listed import LISTS
from sglang_dspark.serving import upstream
from sglang_dspark.step.draft import of_device
from sglang_dspark.step.penalties import OutputCounts, StepPenalties
from sglang_dspark.step.rules import MOST_LISTED, Rules, cuts_of, own_rule
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.step.verify import VerifyInput, VerifyOutput, layout_of

logger = logging.getLogger(__name__)
# A kernel's integer is 1, divisible by 16, or neither; rows of an int32 tensor [3, R] start at
# multiples of 16 bytes, of 8 or of 4 (`blockwise_rejection_triton`).
REQUESTS = (1, 2, 3, 4, 16)
_TOP_K = {"top_k": 20}
_WIDE = {"top_k": 2 * MOST_LISTED}
_TOP_P = {"top_p": 0.95}
_MIN_P = {"min_p": 0.05}
# Lists of each length have separate kernels (kernels/accept_listed.py).
LONGER_LISTS = tuple({"top_k": each // 2} for each in LISTS[1:])
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, _TOP_K, _TOP_K | _TOP_P, _TOP_P, _WIDE, _WIDE | _TOP_P, _MIN_P,
    {"seed": 1}, _TOP_K | {"seed": 1}, _TOP_P | {"seed": 1}, *LONGER_LISTS,
)  # fmt: skip


class Shape(NamedTuple):
    """Shape of a server's steps. logits: of the target, one row. block: a `DraftBlockResult`."""

    gamma: int
    logits: Tensor
    block: Any


def warm_up(device: GraphDevice, shape: Shape, most_requests: int) -> None:
    """Accept a step of each kind by `device`; drop the results.

    A failure is logged and ends the warm-up, not the start, unless the device itself failed.
    """
    try:
        for requests in sorted({min(each, most_requests) for each in REQUESTS}):
            for asked, verified in steps(shape, requests):
                device.accept(asked, verified)
        _penalise(device, shape)
    except Exception as error:
        if of_device(error):
            raise
        logger.warning(
            "sglang-dspark: accept kernels will be compiled while serving", exc_info=True
        )


def _penalise(device: GraphDevice, shape: Shape) -> None:
    """Penalise a request, as in steps without drafts and with drafts."""
    settings = SimpleNamespace(
        frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0
    )
    req = SimpleNamespace(sampling_params=settings, origin_input_ids=[0], output_ids=[0])
    penalties = StepPenalties(OutputCounts(), [req], [0], [0], [0])
    width = shape.gamma + 1
    logits = shape.logits.new_zeros(width, shape.logits.shape[-1])
    ids = torch.zeros(1, width, dtype=torch.int64, device=logits.device)
    for read in (ids[:, :1], ids):
        device.penalise(penalties, logits, read, torch.ones_like(ids[:, 0]))


def steps(shape: Shape, requests: int) -> Iterator[tuple[VerifyInput, VerifyOutput]]:
    """Make steps of this number of requests: each setting, alone and next to a greedy request.

    Our own kernels do not depend on the number of requests: their steps have one request.
    """
    rows = shape.logits.new_zeros(requests * (shape.gamma + 1), shape.logits.shape[-1])
    verified = VerifyOutput(SimpleNamespace(next_token_logits=rows), None)
    for setting in SETTINGS:
        for greedy in (0, 1) if requests > 1 else (0,):
            for drafted in (True, False):
                asked = _pass(shape, requests, setting, greedy, drafted=drafted)
                if requests == 1 or not asked.rules.own_rule:
                    yield asked, verified


def _pass(
    shape: Shape, requests: int, setting: dict[str, Any], greedy: int, *, drafted: bool
) -> VerifyInput:
    """Make a pass whose first `greedy` requests are greedy; all others have the setting."""
    where, gamma = shape.logits.device, shape.gamma
    usual = {"temperature": 1.0, "top_k": upstream.TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
    params = [
        SimpleNamespace(**usual | ({"top_k": 1} if r < greedy else setting))
        for r in range(requests)
    ]
    seeds = None
    if "seed" in setting:
        rows = torch.arange(greedy, requests, device=where)
        seeds = Seeds(rows, torch.ones_like(rows))
    cuts = cuts_of(params)
    info = sampling_info(params, where)
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=where)
    top_ks = [each.top_k for each in params]
    return VerifyInput(
        batch=SimpleNamespace(
            sampling_info=info, seq_lens=torch.ones(requests, dtype=torch.int64, device=where)
        ),
        draft_input=SimpleNamespace(max_top_k=max(top_ks), uniform_top_k_value=None),
        window=None,
        proposal=SimpleNamespace(draft_block=_block(shape, info, drafted=drafted)),
        layout=layout_of(indptr, requests),
        ids=torch.zeros(requests, gamma + 1, dtype=torch.int64, device=where),
        drafted=drafted,
        foldable=False,
        rules=Rules(seeds, None, cuts, own_rule(cuts, seeds)),
    )


def sampling_info(params: list[Any], where: torch.device) -> Any:
    """Make SGLang's `SamplingBatchInfo` of these settings."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=where)

    most = max(each.top_k for each in params)
    return upstream.SamplingBatchInfo(
        temperatures=column("temperature", torch.float32)[:, None],
        top_ps=column("top_p", torch.float32),
        top_ks=column("top_k", torch.int32),
        min_ps=column("min_p", torch.float32),
        is_all_greedy=False,
        is_any_greedy=any(each.top_k <= 1 for each in params),
        need_top_p_sampling=any(each.top_p != 1.0 for each in params),
        need_top_k_sampling=any(each.top_k != upstream.TOP_K_ALL for each in params),
        need_min_p_sampling=any(each.min_p > 0 for each in params),
        max_top_k=None if most >= upstream.TOP_K_ALL else most,
        vocab_size=0,
    )


def _block(shape: Shape, info: Any, *, drafted: bool) -> Any:
    """Make the server's own kind of draft block, or that of a step without drafts."""
    greedy = info.top_ks <= 1  # [R]
    argmax = shape.block.greedy_draft or not drafted
    logits = shape.block.corrected_logits
    return upstream.DraftBlockResult(
        draft_tokens=torch.zeros(len(greedy), shape.gamma, dtype=torch.int64, device=greedy.device),
        corrected_logits=None if argmax else logits.new_zeros(len(greedy), *logits.shape[1:]),
        greedy_mask=greedy,
        temperatures=info.temperatures.reshape(-1),
        greedy_draft=argmax,
    )
