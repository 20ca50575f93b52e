"""Notes the variants of our accept kernels that the warm-up launches and that served steps launch.

No kernel runs. In a process of its own, as Triton's interpreter is chosen before Triton is
imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt import runtime_context

from sglang_dspark.backends.cuda import accept_warm_up
from sglang_dspark.backends.cuda.device import GraphDevice
from sglang_dspark.kernels import accept_block, accept_listed, accept_sampled, penalise
from sglang_dspark.step.penalties import OutputCounts, StepPenalties
from sglang_dspark.step.rules import Rules, cuts_of, own_rule
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.step.verify import VerifyInput, VerifyOutput
from sglang_dspark.verify.acceptance import Acceptance
from tests.step.penalised import request

GAMMA, V = 3, 2080  # more than the longest list
# Place of an integer that is not specialised among the arguments: requests, number of stops.
UNSPECIALISED = {"_accept_kernel": 20, "_penalise_kernel": 12}
KERNELS = (
    (accept_sampled, "_accept_kernel"),
    (accept_block, "_judge_kernel"),
    (accept_block, "_keep_kernel"),
    (accept_listed, "_list_kernel"),
    (accept_listed, "_cut_kernel"),
    (accept_listed, "_keep_kernel"),
    (penalise, "_penalise_kernel"),
)


class Noting:
    """In place of a kernel: notes what Triton would compile for each launch."""

    def __init__(self, name: str, seen: set[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            told = [_kind(each) for each in args]
            if self._name in UNSPECIALISED:
                del told[UNSPECIALISED[self._name]]
            for name in ("requests", "begin", "count", "total"):
                options.pop(name, None)
            constants = [f"{name}={options[name]}" for name in sorted(options)]
            self._seen.add(f"{self._name}({', '.join(told + constants)})")

        return launch


def _kind(value: Any) -> str:
    """Of an argument: None, a type, or what Triton makes of an integer."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {'aligned' if value.data_ptr() % 16 == 0 else 'odd'}"
    return "1" if value == 1 else "16" if value % 16 == 0 else "int"


def device() -> GraphDevice:
    """Of a worker without graphs; SGLang's own rules are not run."""
    executor = SimpleNamespace(
        verify_epilogue=None,
        _tp_sync=SimpleNamespace(sync=lambda site, value: value),
        accept_and_finalize=lambda **given: None,
    )
    worker = SimpleNamespace(
        device="cpu",
        gamma=GAMMA,
        verify_num_draft_tokens=GAMMA + 1,
        draft_model=SimpleNamespace(confidence_head=object()),
        model_runner=SimpleNamespace(
            decode_cuda_graph_runner=None,
            sampler=SimpleNamespace(
                _sample_from_probs=lambda probs, info, at, simple: (probs.argmax(-1), None)
            ),
        ),
        _verify_executor=executor,
        _kv_injector=SimpleNamespace(),
    )
    return GraphDevice(worker, SimpleNamespace())  # type: ignore[arg-type]


def block() -> Any:
    logits = torch.zeros(1, GAMMA, V)
    return SimpleNamespace(greedy_draft=False, corrected_logits=logits)


def served(rng: np.random.Generator, shape: accept_warm_up.Shape) -> Any:
    """A step of random requests, of all settings in one batch."""
    requests = int(rng.integers(1, 6))
    settings = [
        accept_warm_up.SETTINGS[i] for i in rng.integers(0, len(accept_warm_up.SETTINGS), requests)
    ]
    drafted = bool(rng.integers(2))
    asked = accept_warm_up._pass(shape, requests, {}, 0, drafted=drafted)
    usual = {"temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0}
    params = [
        SimpleNamespace(**usual | ({"top_k": 1} if rng.random() < 0.2 else each))
        for each in settings
    ]
    if all(each.top_k == 1 for each in params):
        params[0].top_k = 1 << 30
    rows = [r for r, each in enumerate(settings) if "seed" in each and params[r].top_k > 1]
    seeds = Seeds(torch.tensor(rows), torch.tensor(rows)) if rows else None
    cuts = cuts_of(params)
    asked.batch.sampling_info = accept_warm_up.sampling_info(params, torch.device("cpu"))
    changed = {**vars(asked), "rules": Rules(seeds, None, cuts, own_rule(cuts, seeds))}
    logits = torch.randn(requests * (GAMMA + 1), V)
    verified = VerifyOutput(SimpleNamespace(next_token_logits=logits), None)
    return VerifyInput(**changed), verified


def penalised(device: GraphDevice, asked: VerifyInput, verified: VerifyOutput) -> None:
    """Every second request has penalties, and forbids as many stops as it has a number."""
    places = list(range(0, asked.requests, 2))
    reqs = [
        request([5] * place, min_new_tokens=9 * (place % 4), stop_token_ids=set(range(place)))
        for place in places
    ]
    step = StepPenalties(OutputCounts(), reqs, places, places, list(range(len(places))))
    logits = verified.outputs.next_token_logits
    device.penalise(step, logits, asked.read_ids, asked.batch.seq_lens)


def variants(rule: str) -> dict[str, Any]:
    """Launched by the warm-up, and by 400 served steps."""
    shape = accept_warm_up.Shape(GAMMA, torch.zeros(1, V), block())
    chosen = device()
    chosen._by_our_rule._rule = rule  # type: ignore[assignment]
    found: dict[str, set[str]] = {"warmed": set(), "served": set()}
    rng = np.random.default_rng(0)
    ours = 0
    for name, seen in found.items():
        with ExitStack() as patched:
            for module, kernel in KERNELS:
                patched.enter_context(mock.patch.object(module, kernel, Noting(kernel, seen)))
            patched.enter_context(mock.patch.object(GraphDevice, "_finalized", _as_it_is))
            if name == "warmed":
                accept_warm_up.warm_up(chosen, shape, 16)
                continue
            for _ in range(400):
                asked, verified = served(rng, shape)
                penalised(chosen, asked, verified)
                ours += isinstance(chosen.accept(asked, verified), Acceptance)
    return {
        "missing": sorted(found["served"] - found["warmed"]),
        "served": len(found["served"]),
        "warmed": len(found["warmed"]),
        "ours": ours,
    }


def _as_it_is(device: GraphDevice, asked: VerifyInput, outcome: Acceptance) -> Acceptance:
    return outcome


def main() -> None:
    """Of both rules."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    backend = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    runtime_context.get_exec = lambda: backend
    print(json.dumps({rule: variants(rule) for rule in ("block", "token")}))


if __name__ == "__main__":
    main()
