"""Shapes that this machine's CPU can serve and that need the same kernels as the real ones.

Heads, head size and gamma are unchanged: SGLang's JIT modules are compiled for them. Layers are as
few as DSPARK's feature layers allow.
"""

from __future__ import annotations

from dataclasses import replace

from sglang_dspark.benchmarks import layers
from sglang_dspark.models.simulated import SHAPES, Shape

_SMALL = {"layers": 4, "draft_layers": 1, "intermediate": 512, "vocab": 1024, "rank": 32}
_HIDDEN = 256
_LAYER = {"width": 512, "inner": 256, "experts": 16}


def small(shape: Shape, **given: int) -> Shape:
    """Return the shape with few layers and small tables; `given` replaces fields of it."""
    return replace(shape, **{**_SMALL, **given})


def shrink_shapes() -> None:
    """Replace the shapes of real models, so that the kit's stages build and serve small ones.

    Hidden size and expert layers shrink too, because a stage serves up to 128 users.
    """
    for name, shape in SHAPES.items():
        if shape.hidden > _HIDDEN:
            SHAPES[name] = small(shape, hidden=_HIDDEN)
    layers.LAYERS = tuple(replace(each, **_LAYER) for each in layers.LAYERS)
