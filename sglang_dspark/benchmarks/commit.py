"""Times packing and projecting of accepted rows on a CUDA device, against projecting whole windows
as SGLang does: `python -m sglang_dspark.benchmarks.commit`. Without such a device it says so and
measures nothing.

Prints one JSON row a shape: `{op, shape, rows, ours_us, pack_us, peer, peer_us}`, medians of
CUDA-event times; both products are torch's, [rows, 12800] x [12800, 2560] in bfloat16 (five layers
of a 4B target).
"""

from __future__ import annotations

import json

import torch
from torch.nn.functional import linear

from sglang_dspark.benchmarks.admission import microseconds
from sglang_dspark.benchmarks.commit_shapes import step
from sglang_dspark.kernels.commit_rows import pack_triton

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7))
FEATURES, HIDDEN = 12_800, 2_560
SHARE = 0.4  # of the drafts, verified


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HIDDEN, FEATURES, dtype=torch.bfloat16, device="cuda")
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        case = step(generator, requests, gamma, FEATURES, turn=10, device="cuda")
        verified = requests + round(SHARE * requests * gamma)
        case = case._replace(emitted=case.emitted.clamp(max=2), rows=verified)
        pack = microseconds(lambda case=case: pack_triton(*case).hidden)  # type: ignore[misc]
        ours = microseconds(lambda case=case: linear(pack_triton(*case).hidden, weight))  # type: ignore[misc]
        peer = microseconds(lambda case=case: linear(case.hidden, weight))  # type: ignore[misc]
        found.append(
            {
                "op": "commit",
                "shape": [requests, gamma, FEATURES],
                "rows": verified,
                "ours_us": ours,
                "pack_us": pack,
                "peer": "torch, whole windows",
                "peer_us": peer,
            }
        )
    return found


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
