"""Runs the copy of `benchmarks.bandwidth` in Triton's interpreter, in a process of its own: the
interpreter must be chosen before Triton is imported. Prints what was copied wrongly, as JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_dspark.benchmarks.bandwidth import copy_triton


def main() -> None:
    wrong = []
    for count in (1, 8191, 8192, 20_000):
        source = torch.arange(1, count + 1, dtype=torch.int32)
        room = torch.zeros(count + 5, dtype=torch.int32)
        copy_triton(source, room[:count])
        if not torch.equal(room[:count], source) or bool(room[count:].any()):
            wrong.append(count)
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
