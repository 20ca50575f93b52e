"""Time the commit of a pass on a CUDA device: `python -m sglang_dspark.benchmarks.commit`.

A draft of five layers for a 4B target, in bfloat16. Ours projects and writes the packed rows of the
pass, R + K. SGLang's operator (sglang/kernels/ops/speculative/dspark/fused_kv_write.py)
writes projections of whole windows, as its injection does. Both products and the norm between
them are torch's. `whole` is all of it, `write` is one launch. Rows are those of `timing.timed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
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
    """A pass and the draft whose context it is written to.

    hidden: [T, F]. positions, slots, places: [T] int64, places in windows of `width` rows. emitted:
    [R]. fc: [d, F]; norm: [d]; stacked: [L * 2 * H * D, d]; cos_sin: [longest, D].
    """

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    emitted: Tensor
    width: int
    layers: DraftLayers
    fc: Tensor
    norm: Tensor
    stacked: Tensor
    cos_sin: Tensor

    def projected(self, hidden: Tensor) -> Tensor:
        """Project [n, F] to [n, L * 2 * H * D]."""
        features = linear(hidden, self.fc)
        return linear(rms_norm(features, features.shape[-1:], self.norm, 1e-6), self.stacked)

    def ours(self) -> None:
        """Project the pass's rows and write them."""
        self.write(self.projected(self.hidden))

    def write(self, projected: Tensor) -> None:
        """Write projected rows by our last launch."""
        write_triton(self.layers, projected, self.cos_sin, self.positions, self.slots)

    def windows(self, rows: Tensor) -> Tensor:
        """Spread rows of the pass, [T, ...], in window order, [R * width, ...]."""
        spread = rows.new_zeros(len(self.emitted) * self.width, *rows.shape[1:])
        return spread.index_copy(0, self.places, rows)

    def peer(self) -> Callable[[Tensor], None]:
        """Prepare SGLang's last launch, over whole windows. Raises ImportError without SGLang."""
        module = import_module("sglang.kernels.ops.speculative.dspark.fused_kv_write")
        count, heads, size = self.layers.sizes
        positions, slots = self.windows(self.positions), self.windows(self.slots)

        def write(projected: Tensor) -> None:
            module.fused_kv_norm_rope_write(
                projected,
                self.layers.table,
                self.layers.norms,
                self.cos_sin,
                positions,
                slots,
                count,
                heads * size,
                size,
                self.layers.epsilon,
                commit_lens=self.emitted,
                locs_row_width=self.width,
            )

        return write


def stage(requests: int, gamma: int, sizes: tuple[int, int, int, int, int], device: str) -> Stage:
    """Make a pass. sizes: F, d, L, H, D. SHARE of all drafts are verified, evenly over the
    requests up to one, and half of the verified rows are emitted."""
    features, hidden, layers, heads, size = sizes
    generator = torch.Generator().manual_seed(requests)
    width, verified = gamma + 1, requests + round(SHARE * requests * gamma)
    ends = torch.linspace(0, verified, requests + 1).round().long()
    rows = ends.diff()  # [R]
    request = torch.repeat_interleave(torch.arange(requests), rows)
    place = torch.arange(verified) - ends[request]
    lens = torch.randint(0, LONGEST - width, (requests,), generator=generator)
    slots = 1 + torch.randperm(verified, generator=generator)

    on_device = torch.Generator(device).manual_seed(requests)

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=on_device, device=device) * shape[-1] ** -0.5
        return made.to(torch.bfloat16)

    caches = [random(verified + 1, heads, size) for _ in range(2 * layers)]
    angles = torch.rand(LONGEST, size // 2, generator=generator) * 6.3
    return Stage(
        hidden=random(verified, features),
        positions=(lens[request] + place).to(device),
        slots=slots.to(device),
        places=(request * width + place).to(device),
        emitted=((rows + 1) // 2).int().to(device),
        width=width,
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
            ("write", "ours", partial(_write, made)),
            ("write", PEER, partial(_peer_write, made)),
        )
        shape = (count, GAMMA, sizes[0], len(made.hidden))
        for case, name, make in ways:
            # Ours ends the graph of the target's pass; SGLang's injection is launched after it.
            yield Candidate("commit", shape, case, name, make, eager=case == "whole")


def _whole(made: Stage) -> Call:
    return made.ours


def _write(made: Stage) -> Call:
    projected = made.projected(made.hidden)
    return lambda: made.write(projected)


def _peer_whole(made: Stage) -> Call:
    write, hidden = made.peer(), made.windows(made.hidden)
    return lambda: write(made.projected(hidden))


def _peer_write(made: Stage) -> Call:
    write, projected = made.peer(), made.projected(made.windows(made.hidden))
    return lambda: write(projected)


if __name__ == "__main__":
    print_rows(candidates)
