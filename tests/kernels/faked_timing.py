"""Times the benchmarks' candidates on a faked H200, in a process of its own: kernels compile for
sm_90 and do nothing, graphs are captured by a single call. Prints a JSON object.
"""

# ruff: noqa: E402 - the device is faked before anything asks for it

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from tools.gpu.faked.device import fake_device
from tools.gpu.faked.kernels import fake_triton

fake_device()
fake_triton()

from sglang_dspark.benchmarks import (
    accept,
    admission,
    bandwidth,
    certainty,
    commit,
    experts,
    greedy,
    markov,
    operators,
    pass_rows,
    penalise,
    timing,
    window_attention,
)
from sglang_dspark.benchmarks.layers import NOMINAL_H100, Layer
from sglang_dspark.benchmarks.timing import Call, Candidate
from sglang_dspark.kernels import grouped_gemm
from tools.gpu.kit import operators as stage

timing._FLUSH = 1024  # type: ignore[misc]
LAYER = Layer("small", 1024, 512, 8, 2)


def rows() -> list[dict[str, Any]]:
    """A row of every implementation of a small step."""
    found: list[dict[str, Any]] = []
    for candidates in (
        accept.candidates((2,), vocab=1024),
        commit.candidates((2,), sizes=(96, 48, 2, 4, 16)),
        markov.candidates((2,), vocab=1024),
        greedy.candidates((2,), vocab=1024),
        admission.candidates((2,)),
        pass_rows.candidates((2,)),
        penalise.candidates((2,), vocab=1024),
        certainty.candidates((2,), vocab=1024),
        window_attention.candidates((2,), sizes=(4, 2, 16), contexts=(20,)),
        broken(),
    ):
        found += timing.timed_all(candidates)
    return found


def broken() -> Iterator[Candidate]:
    """Peers that are not there, and that wait for the device."""

    def waiting() -> Call:
        return refuse

    yield Candidate("broken", (1,), "", "SGLang missing", missing)
    yield Candidate("broken", (1,), "", "torch waits", waiting)


def missing() -> Call:
    """As an import that fails."""
    raise ModuleNotFoundError("No module named 'flashinfer'")


def refuse() -> None:
    """As torch does while synchronisation is forbidden."""
    if FORBIDDEN and FORBIDDEN[-1] == "error":
        raise RuntimeError("called a synchronizing CUDA operation")


FORBIDDEN: list[str] = []


def forbid(mode: str) -> None:
    """Note the argument of `set_sync_debug_mode`."""
    FORBIDDEN.append(mode)


def variants(kernel: JITFunction) -> int:
    """Count the variants of a kernel that this process compiled."""
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


def expert_rows() -> dict[str, Any]:
    """Rows of a small layer, and variants that they compile beyond those compiled ahead."""
    matrix = experts.Matrix((LAYER,), ("bf16 x mxfp4",), (1, 16), ("uniform",))
    ahead = experts.compile_kernels(matrix)
    kernel = grouped_gemm._grouped_kernel
    before = variants(kernel)
    found = list(experts.measured(matrix, NOMINAL_H100))
    return {"cases": ahead, "ahead": before, "more": variants(kernel) - before, "rows": found}


def timed_until() -> dict[str, Any]:
    """Statuses of the stage's timing: all timed, a fault of ours, no time left."""

    def of(*names: str) -> Iterator[Candidate]:
        yield from (Candidate("broken", (1,), "", name, missing) for name in names)

    statuses = {}
    for case, names, left in (
        ("a peer is missing", ("SGLang missing",), 60.0),
        ("ours fails", ("ours, broken",), 60.0),
        ("no time", ("SGLang missing",), 1.0),
    ):
        stage.candidates = lambda _, names=names: of(*names)  # type: ignore[attr-defined]
        statuses[case] = stage.time_all(True, lambda left=left: left)
    return statuses


def main() -> None:
    torch.cuda.set_sync_debug_mode = forbid  # type: ignore[assignment]
    operators.OPERATORS["small"] = lambda requests: greedy.candidates(requests, vocab=1024)
    print(
        json.dumps(
            {
                "rows": rows(),
                "bandwidth": bandwidth.bytes_per_second(1 << 20),
                "experts": expert_rows(),
                "shares": [operators.compile_share("small", part, 3) for part in range(3)],
                "statuses": timed_until(),
                "forbidden": FORBIDDEN[-1],
            }
        )
    )


if __name__ == "__main__":
    main()
