"""Loads served models with quantised experts, for test_moe_codes.py: `python -m ... FOLDER`.

One line of JSON by format: bytes of the experts' tensors and of their codes and scales in the file;
whether hidden states are those of a model that was given the restored values; errors by fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.moe.moe_model import DSparkMoEModel
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.checkpoint import (
    GLOBAL_SCALE,
    SCALE,
    UNQUANTISED,
    bytes_of,
    expert_names,
    restore_tensors,
)
from tests.backends.cpu import moe_ranks
from tests.drafter.helpers import tiny_config

GATE = "layers.0.mlp.experts.gate_proj"
Tensors = dict[str, Tensor]
FAULTS: dict[str, Callable[[Tensors], Tensors]] = {
    "no scales": lambda t: {n: v for n, v in t.items() if n != GATE + SCALE},
    "scales of others": lambda t: t | {GATE + SCALE: t[GATE + SCALE][:, :1].contiguous()},
    "codes of others": lambda t: t | {GATE: t[GATE][:, :-2].contiguous()},
    "no codes": lambda t: t | {GATE: torch.zeros(4, 256, 64)},
}


def refusal(c: DrafterConfig, tensors: Tensors) -> str:
    try:
        moe_ranks.built(c, tensors)
    except DSparkError as error:
        return str(error)
    return "nothing"


def many(model: DSparkMoEModel) -> Tensor:
    """A layer's own part for more rows than the compiled kernels support."""
    y = torch.randn(300, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return model.layers[0]._own_part(y)


def main(folder: Path) -> None:
    said: dict[str, Any] = {}
    with moe_ranks.groups(0, 1, 1, folder / "store"):
        for form in ("fp8", "mxfp4", "nvfp4"):
            c = tiny_config(**moe_ranks.BASE, **moe_ranks.SHAPES[form])
            plain = replace(c, expert_format=UNQUANTISED)
            stored = moe_ranks.weights_of(c)
            model, other = (
                moe_ranks.built(c, stored),
                moe_ranks.built(plain, restore_tensors(stored, form)),
            )
            layers = [layer.mlp for layer in model.layers]
            held = [part for mlp in layers for part in (mlp.experts, mlp.shared_experts)]
            parts = [t for m in held for t in (*m.parameters(), *m.buffers())]
            names = [n + s for n in expert_names(stored) for s in ("", SCALE, GLOBAL_SCALE)]
            found, expected = (moe_ranks.drafted(each, 1, 0) for each in (model, other))
            again = {n: t.flip(0) if n == GATE else t for n, t in stored.items()}
            before = many(model)
            same = torch.equal(before, many(other))
            model.load_weights(iter(again.items()))
            said[form] = {
                "held": sum(t.numel() * t.element_size() for t in parts),
                "stored": bytes_of({n: stored[n] for n in names if n in stored}),
                "same": all(torch.equal(found[n], expected[n]) for n in found),
                "same_for_many": same,
                "compiled": model.layers[0].compiled.shared is not None,
                "updated": not torch.equal(before, many(model)),
                "refused": {name: refusal(c, fault(stored)) for name, fault in FAULTS.items()},
                "codes in an unquantised drafter": refusal(plain, stored),
                "codes alone": refusal(plain, {GATE: stored[GATE]}),
                "shared": type(model.layers[0].shared).__name__,
            }
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
