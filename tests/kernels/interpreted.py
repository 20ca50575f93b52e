"""Runs the Triton admission in Triton's interpreter, in a process of its own: the interpreter must
be chosen before Triton is imported. Prints JSON: how many batches, the first ones that differ, and
what of the rules they exercise. The argument: how many small ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from sglang_dspark.benchmarks.shapes import Batch, batch, batches
from sglang_dspark.kernels.admission import admit_torch, admit_triton, keys_torch
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.gains import gains
from sglang_dspark.step.engine import confidence_by
from tests.kernels.interpreter import patch_language_once
from tests.step.windows import indptr_of

MOST_SHOWN = 9  # a fault need not be shown 2,000 times


def small_batches(count: int, seed: int = 0) -> Iterator[Batch]:
    """`count` of at most 9 requests and 8 drafts, on the host: quick where kernels are slow."""
    generator = np.random.default_rng(seed)
    for turn in range(count):
        requests, gamma = (int(generator.integers(1, most)) for most in (10, 9))
        yield batch(generator, requests, gamma, turn)


def on_the_host(case: Batch) -> torch.Tensor:
    """The same step by the compiled planner."""
    requests, gamma = case.logits.shape
    terms = case.terms.numpy()
    lines = terms[:, :gamma], terms[:, gamma : 2 * gamma]
    confidence = confidence_by(case.logits.float().numpy(), *lines)
    lengths = admit(
        gains(confidence, terms[:, -3].astype("float32")),
        case.drafts,
        Workspace(requests, gamma),
        limits=terms[:, -2].astype("int64"),
        floors=terms[:, -1].astype("int64"),
    )
    return indptr_of(lengths.tolist())


def main(small: int) -> None:
    """Compare all three on every batch of the shared generator."""
    different, count, by_request, cut = [], 0, 0, 0
    for case in chain(batches("cpu"), small_batches(small)):
        if len(different) > MOST_SHOWN:
            break
        count += 1
        found = admit_triton(*case)
        for name, other in (("torch", admit_torch(*case)), ("host", on_the_host(case))):
            if not torch.equal(found, other):
                different.append([name, count, *case.logits.shape])
        by_request += not torch.equal(found, by_request_first(case))
        cut += 0 < int(found[-1]) - len(case.logits) < case.logits.numel()
    print(
        json.dumps({"batches": count, "different": different, "by_request": by_request, "cut": cut})
    )


def by_request_first(case: Batch) -> torch.Tensor:
    """Equal survivals ranked by request, then position: the batches must tell that apart."""
    keys = keys_torch(case.logits, case.terms).T  # [R, gamma]
    order = torch.argsort(keys.flatten(), descending=True, stable=True)
    chosen = order[: min(case.drafts, int((keys >= 0).sum()))] // keys.shape[1]
    return indptr_of(torch.bincount(chosen, minlength=len(keys)).tolist())


if __name__ == "__main__":
    patch_language_once()
    main(int(sys.argv[1]))
