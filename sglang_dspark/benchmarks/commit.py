"""Time the commit of accepted rows on a CUDA device: `python -m sglang_dspark.benchmarks.commit`.

A draft of five layers for a 4B target, in bfloat16. Ours packs R + K rows, projects these, and
writes them. SGLang's operator (sglang/kernels/ops/speculative/dspark/fused_kv_write.py)
writes what was projected of whole windows, as its injection does. Both products and the norm in
between are torch's. `whole` is all of it, `pack` and `write` are one launch each. Rows are those of
`timing.timed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sglang_dspark.benchmarks.commit_shapes import Windows, step
from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.commit_rows import pack_triton
from sglang_dspark.kernels.commit_write import DraftLayers, write_triton

REQUESTS = (1, 16, 64, 256)
GAMMA = 7
FEATURES, HIDDEN = 12_800, 2_560
LAYERS, HEADS, SIZE = 5, 8, 128
LONGEST = 9_008  # positions
PEER = "SGLang fused_kv_norm_rope_write, whole windows"
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

    on_device = torch.Generator(device).manual_seed(requests)

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=on_device, device=device) * shape[-1] ** -0.5
        return made.to(torch.bfloat16)

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


def candidates(
    requests: Sequence[int] = REQUESTS,
    device: str = "cuda",
    sizes: tuple[int, int, int, int, int] = (FEATURES, HIDDEN, LAYERS, HEADS, SIZE),
) -> Iterator[Candidate]:
    """Yield both implementations of every step, and ours in parts. sizes: F, d, L, H, D."""
    for count in requests:
        made = stage(count, GAMMA, sizes, device)
        ways: tuple[tuple[str, str, partial[Call]], ...] = (
            ("whole", "ours", partial(_whole, made)),
            ("whole", PEER, partial(_peer_whole, made)),
            ("pack", "ours", partial(_pack, made)),
            ("write", "ours", partial(_write, made)),
            ("write", PEER, partial(_peer_write, made)),
        )
        shape = (count, GAMMA, sizes[0], made.windows.rows)
        for case, name, make in ways:
            # A server launches it behind the graph of the target's pass.
            yield Candidate("commit", shape, case, name, make, eager=case == "whole")


def _whole(made: Stage) -> Call:
    return made.ours


def _pack(made: Stage) -> Call:
    return lambda: pack_triton(*made.windows)


def _write(made: Stage) -> Call:
    packed = pack_triton(*made.windows)
    projected = made.projected(packed.hidden)
    return lambda: made.write(projected, packed.positions, packed.slots)


def _peer_whole(made: Stage) -> Call:
    write, hidden = made.peer(), made.windows.hidden
    return lambda: write(made.projected(hidden))


def _peer_write(made: Stage) -> Call:
    write, projected = made.peer(), made.projected(made.windows.hidden)
    return lambda: write(projected)


if __name__ == "__main__":
    print_rows(candidates)
