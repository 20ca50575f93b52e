"""Run the kit's stage `first` on the faked GPU, every part of it once.

    tools/gpu/faked/python -m tools.gpu.faked.first

Shapes, loads and traces are small, and waits long: two cores compile for minutes. Rows are those of
the stage. Its answers are noise, so it reports wrong tokens and ends with status 1. Other failures
(a start, a request without an answer, a trace without steps) would occur on a GPU too.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from sglang_dspark.loadtest.servers.server import ServerSpec
from tools.gpu.kit import first, ladder, rounds, sampled, steps
from tools.gpu.kit.servers import Load

_STAGE_S, _START_S, _ROUND_S, _ANSWER_S = 3600.0, 900.0, 300.0, 600.0
_POOL = "--max-total-tokens=4096"  # the pool is in this machine's memory


def main() -> int:
    """Run the stage with small loads and return its status."""
    os.environ.setdefault("KIT_SECONDS", f"{_STAGE_S:.0f}")
    ladder.READY_S = ladder.AGAIN_S = first.READY_S = first.AGAIN_S = _START_S
    rounds.ROUND_S = _ROUND_S
    sampled.ANSWER_S = steps.ANSWER_S = _ANSWER_S
    first._COMPILE_S = _START_S
    shape = first.LOADS["cuda"][0]
    first.LOADS["cuda"] = (shape, Load((1, 2), 1, 16, 12), (2,))
    cells = (rounds.Cell(1, "greedy"), rounds.Cell(2, "T=1"))
    first.TRACES["cuda"] = (cells, steps.Traced(prompt=16, answer=48, steps=4))
    first.ATTENDED = (1, 2)
    shared = first._shared

    def small(stage: first.Stage, spec: ServerSpec) -> ServerSpec:
        given = shared(stage, spec)
        return replace(given, arguments=(*given.arguments, _POOL))

    first._shared = small
    return first.main()


if __name__ == "__main__":
    sys.exit(main())
