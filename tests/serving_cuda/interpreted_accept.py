"""Steps accepted by the operator in Triton's interpreter and by torch, from the same uniforms; in a
process of its own, as the interpreter is chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_dspark.serving.cuda import accept as cuda_accept
from sglang_dspark.serving.step.accept import accept
from sglang_dspark.serving.step.seeds import Seeds
from tests.kernels.interpreter import patch_language_once
from tests.serving.test_step_accept import GAMMA, batch, needing, spread
from tests.serving_cpu.draft_world import ALL, settings

REQUESTS = 16


def steps() -> dict[str, tuple[Any, ...]]:
    """Greedy requests and min-p; seeds; top-k and top-p; drafts of an argmax."""
    generator = torch.Generator().manual_seed(4)
    window, lens, rows, block, info = batch(REQUESTS, generator)
    logits, anchors = spread(rows, lens, GAMMA + 1), torch.arange(50, 50 + REQUESTS)
    places = torch.arange(1, REQUESTS, 3)
    seeds = Seeds(places, torch.randint(-(2**62), 2**62, places.shape, generator=generator))
    warm = torch.rand(REQUESTS, generator=generator) + 0.5
    cut = settings(warm, torch.full((REQUESTS,), 4), torch.full((REQUESTS,), 0.85))
    free = settings(warm, torch.full((REQUESTS,), ALL))
    block.draft_tokens = window[:, 1:]
    argmax = type(block)(**{**vars(block), "greedy_draft": True, "corrected_logits": None})
    return {
        "min-p, some greedy": (window, lens, logits, block, info, anchors, None),
        "seeds": (window, lens, logits, block, info, anchors, seeds),
        "cuts": (window, lens.int(), logits.bfloat16(), block, needing(cut), anchors, None),
        "argmax drafts": (window, lens, logits, argmax, needing(free), anchors, seeds),
    }


def main() -> None:
    """Differences by step, how often torch stood in, what was told."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    ours, different = cuda_accept.StepAccept(), {}
    with mock.patch.object(cuda_accept, "accept", wraps=accept) as in_torch:
        for name, step in steps().items():
            torch.manual_seed(9)
            found = ours(*step)
            torch.manual_seed(9)
            expected = accept(*step)
            same = torch.equal(found.accepted, expected.accepted)
            different[name] = not (same and torch.equal(found.bonus, expected.bonus))
        by_operator = not in_torch.called
        window, lens, logits, *rest = steps()["cuts"]
        with mock.patch.object(cuda_accept.logger, "warning") as warning:
            for _ in range(2):
                ours(window, lens, logits.double(), *rest)
        told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        stood_in = in_torch.call_count
    report = {"different": different, "by_operator": by_operator, "torch": stood_in, "told": told}
    print(json.dumps(report))


if __name__ == "__main__":
    patch_language_once()
    main()
