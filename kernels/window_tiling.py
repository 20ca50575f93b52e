"""Choose tile shapes and the number of splits for `window_attention`, only from host constants.

A captured graph replays the choice of its capture, for any contexts and windows. So the choice
does not depend on device values; the kernel skips parts that a short context leaves empty. Chosen
by shared memory and registers as compiled for sm_80 to sm_120; not yet tuned by measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

MOST_ROWS = 64  # of a tile: (window row, query head) pairs
MOST_SPLITS = 32
# Programs for each processor if every slot holds a request. A graph has as many slots as
# tokens, so windows of several rows leave most slots empty.
_PROGRAMS = 8
_SMALL_MEMORY = ((8, 6), (8, 9))  # 100 KiB of shared memory a processor, as in generation 12


@dataclass(frozen=True)
class WindowTiling:
    """Tile shapes and launch parameters.

    rows: (window row, query head) pairs of a tile. blocks: tiles of a window and KV head. keys:
    cached tokens of a step. window: of the window's own keys. splits: most parts of a context.
    least: fewest cached tokens of a part, if there are several parts.
    """

    rows: int
    blocks: int
    keys: int
    window: int
    splits: int
    least: int
    warps: int
    stages: int


def window_tiling(
    requests: int,
    kv_heads: int,
    group: int,
    longest: int,
    size: int,
    processors: int,
    capability: tuple[int, int] | None = None,
) -> WindowTiling:
    """Choose for R slots, KV heads that serve `group` query heads each, and windows of `longest`.

    size: of a head, the larger one of keys and values. processors: of the device. capability: the
    device's; None in the interpreter.
    """
    pairs = group * longest
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(pairs)))
    blocks = triton.cdiv(pairs, rows)
    small = capability is not None and (capability in _SMALL_MEMORY or capability[0] == 12)
    keys = 32 if size > 128 or small else 64
    room = _PROGRAMS * processors // (requests * kv_heads * blocks)
    splits = 1
    while 2 * splits <= min(room, MOST_SPLITS):
        splits *= 2
    return WindowTiling(
        rows=rows,
        blocks=blocks,
        keys=keys,
        window=min(keys, max(16, triton.next_power_of_2(longest))),
        splits=splits,
        # If the slots alone nearly fill the device a short part costs more than it saves.
        least=128 if splits > 4 else 256,
        warps=8 if rows * size > 64 * 128 else 4,
        # Triton prefetches keys that are gathered by index from three stages on.
        stages=3,
    )


@cache
def device_shape(device: torch.device) -> tuple[int, tuple[int, int] | None]:
    """Return processors and capability of a device; one processor where Triton is interpreted."""
    if device.type != "cuda":
        return 1, None
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, torch.cuda.get_device_capability(device)
