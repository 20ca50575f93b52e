"""Steps accepted by the operator in Triton's interpreter and by torch, from the same uniforms; in a
process of its own, as the interpreter is chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_dspark.backends.cuda import accept as cuda_accept
from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.step.accept import accept, sampled_rule
from sglang_dspark.step.rules import cuts_of
from sglang_dspark.step.seeds import Seeds
from tests.backends.cpu.draft_world import ALL, settings
from tests.kernels.interpreter import patch_language_once
from tests.step.test_step_accept import GAMMA, batch, needing, spread

REQUESTS = 9
OPERATORS = {"block": "accept_block_triton", "token": "accept_triton"}
LISTED = "accept_listed_triton"
LISTS = (4, 8)  # shorter than the vocabulary, so that some are incomplete


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
        "seeds beside top-k": (window, lens, logits, block, needing(cut), anchors, seeds),
        "argmax drafts": (window, lens, logits, argmax, needing(free), anchors, seeds),
    }


@contextmanager
def configured(rule: str) -> Iterator[None]:
    """`verify.rule` in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dspark.yaml")
        path.write_text(f"verify: {{rule: {rule}}}\n")
        sampled_rule.cache_clear()
        with mock.patch.dict(os.environ, {CONFIG_VARIABLE: str(path)}):
            yield


def how(step: tuple[Any, ...]) -> dict[str, Any]:
    """The options of `StepAccept` for a step."""
    lens, info = step[1], step[4]
    kinds = zip(
        info.temperatures.flatten().tolist(), info.top_ks.tolist(), info.top_ps.tolist(),
        info.min_ps.tolist(), strict=True,
    )  # fmt: skip
    names = ("temperature", "top_k", "top_p", "min_p")
    cuts = cuts_of(SimpleNamespace(**dict(zip(names, each, strict=True))) for each in kinds)
    return {"cuts": cuts, "rows": int(lens.sum()) + 1}


def compared(rule: str) -> dict[str, Any]:
    """Differences by step, and how often which operator and torch were asked."""
    different = {}
    with configured(rule), mock.patch.object(cuda_accept, "accept", wraps=accept) as in_torch:
        ours = cuda_accept.StepAccept()
        spied = {name: getattr(cuda_accept, name) for name in OPERATORS.values()}
        spied[LISTED] = partial(cuda_accept.accept_listed_triton, lists_of=LISTS)
        spies = {name: mock.Mock(wraps=each) for name, each in spied.items()}
        with mock.patch.multiple(cuda_accept, **spies):
            for name, step in steps().items():
                torch.manual_seed(9)
                found = ours(*step, **how(step))
                torch.manual_seed(9)
                expected = accept(*step)
                same = torch.equal(found.accepted, expected.accepted)
                different[name] = not (same and torch.equal(found.bonus, expected.bonus))
        ran = {name: spy.call_count for name, spy in spies.items()}
    return {"different": different, "ran": ran, "torch": in_torch.call_count}


def refused() -> dict[str, Any]:
    """Count the fallbacks to torch, and return the warnings."""
    ours = cuda_accept.StepAccept()
    window, lens, logits, *rest = steps()["cuts"]
    with (
        mock.patch.object(cuda_accept, "accept", wraps=accept) as in_torch,
        mock.patch.object(cuda_accept.logger, "warning") as warning,
    ):
        for _ in range(2):
            step = (window, lens, logits.double(), *rest)
            ours(*step, **how(step))
    told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return {"torch": in_torch.call_count, "told": told}


def main() -> None:
    """Of both rules; what the operators refuse."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    rules = {rule: compared(rule) for rule in OPERATORS}
    sampled_rule.cache_clear()
    print(json.dumps({"rules": rules, "refused": refused()}))


if __name__ == "__main__":
    patch_language_once()
    main()
