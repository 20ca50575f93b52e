"""Times the commit of accepted rows on a CUDA device against SGLang's: `python -m
sglang_dspark.benchmarks.commit`. Without such a device it says so and measures nothing.

Prints one JSON row a shape: `{op, shape, rows, ours_us, pack_us, write_us, peer, peer_us,
peer_write_us}`, medians of CUDA-event times, in bfloat16, of a draft of five layers for a 4B
target. Ours packs R + K rows, projects these, and writes them; SGLang's operator (sglang/kernels/
ops/speculative/dspark/fused_kv_write.py, 0.5.23) is looked up by name and writes what was projected
of whole windows, as its injection does. Both products and the norm in between are torch's. Where
it is not installed the row has the reason and no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sglang_dspark.benchmarks.admission import microseconds
from sglang_dspark.benchmarks.commit_shapes import Windows, step
from sglang_dspark.kernels.commit_rows import pack_triton
from sglang_dspark.kernels.commit_write import DraftLayers, write_triton

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7))
FEATURES, HIDDEN = 12_800, 2_560
LAYERS, HEADS, SIZE = 5, 8, 128
LONGEST = 9_008  # positions
SHARE = 0.4  # of the drafts, verified


@dataclass(frozen=True)
class Stage:
    """A step's windows and the draft that they are committed to.

    fc: [d, F]; norm: [d]; stacked: [L * 2 * H * D, d]; cos_sin: [longest, D].
    """

    windows: Windows
    layers: DraftLayers
    fc: Tensor
    norm: Tensor
    stacked: Tensor
    cos_sin: Tensor

    def projected(self, hidden: Tensor) -> Tensor:
        """[n, F] to [n, L * 2 * H * D]."""
        features = linear(hidden, self.fc)
        return linear(rms_norm(features, features.shape[-1:], self.norm, 1e-6), self.stacked)

    def ours(self) -> None:
        """Packed, projected, written."""
        packed = pack_triton(*self.windows)
        self.write(self.projected(packed.hidden), packed.positions, packed.slots)

    def write(self, projected: Tensor, positions: Tensor, slots: Tensor) -> None:
        """The last launch of ours."""
        write_triton(self.layers, projected, self.cos_sin, positions, slots)

    def peer(self) -> Callable[[Tensor], None]:
        """The last launch of SGLang's, over whole windows; raises where there is none."""
        module = import_module("sglang.kernels.ops.speculative.dspark.fused_kv_write")
        given, (count, heads, size) = self.windows, self.layers.sizes
        width = given.slots.shape[1]
        positions = given.lens[:, None] + torch.arange(width, device=given.lens.device)

        def write(projected: Tensor) -> None:
            module.fused_kv_norm_rope_write(
                projected,
                self.layers.table,
                self.layers.norms,
                self.cos_sin,
                positions.flatten(),
                given.slots.flatten(),
                count,
                heads * size,
                size,
                self.layers.epsilon,
                commit_lens=given.emitted,
                locs_row_width=width,
            )

        return write


def stage(requests: int, gamma: int, sizes: tuple[int, int, int, int, int], device: str) -> Stage:
    """sizes: F, d, L, H, D. No request emits more than one draft, and SHARE of all are verified."""
    features, hidden, layers, heads, size = sizes
    generator = torch.Generator().manual_seed(requests)
    case = step(generator, requests, gamma, features, turn=10, device=device)
    slots = 1 + torch.randperm(requests * (gamma + 1), generator=generator)
    verified = requests + round(SHARE * requests * gamma)
    case = case._replace(
        emitted=case.emitted.clamp(max=2),
        rows=max(verified, int(case.emitted.clamp(max=2).sum())),
        slots=slots.view(requests, -1).to(device),
    )

    def random(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return made.to(torch.bfloat16).to(device)

    caches = [random(len(slots) + 1, heads, size) for _ in range(2 * layers)]
    angles = torch.rand(LONGEST, size // 2, generator=generator) * 6.3
    return Stage(
        # Rejected rows are no numbers in the shapes of the tests; a product would carry them on.
        windows=case._replace(hidden=case.hidden.to(torch.bfloat16).nan_to_num()),
        layers=DraftLayers(
            caches[:layers],
            caches[layers:],
            norms=1 + random(layers, size),
            scales=torch.ones(layers, 2, device=device),
            epsilon=1e-6,
        ),
        fc=random(hidden, features),
        norm=1 + random(hidden),
        stacked=random(layers * 2 * heads * size, hidden),
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1).to(device),
    )


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        made = stage(requests, gamma, (FEATURES, HIDDEN, LAYERS, HEADS, SIZE), "cuda")
        found.append(
            {
                "op": "commit",
                "shape": [requests, gamma, FEATURES],
                "rows": made.windows.rows,
                **_ours(made),
                "peer": "SGLang fused_kv_norm_rope_write, whole windows",
                **_theirs(made),
            }
        )
    return found


def _ours(made: Stage) -> dict[str, object]:
    packed = pack_triton(*made.windows)
    projected = made.projected(packed.hidden)
    return {
        "ours_us": microseconds(lambda: made.ours()),
        "pack_us": microseconds(lambda: pack_triton(*made.windows)),
        "write_us": microseconds(lambda: made.write(projected, packed.positions, packed.slots)),
    }


def _theirs(made: Stage) -> dict[str, object]:
    try:
        write, hidden = made.peer(), made.windows.hidden
        projected = made.projected(hidden)
        return {
            "peer_us": microseconds(lambda: write(made.projected(hidden))),
            "peer_write_us": microseconds(lambda: write(projected)),
        }
    except Exception as error:
        return {"peer_us": None, "reason": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
