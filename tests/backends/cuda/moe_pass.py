"""A draft pass of the served model with experts on the path of a GPU: `python -m ... FOLDER`.

One line of JSON: how far its hidden states are from those of the CPU's own path, in float32 and as
a GPU's server loads it, in bfloat16; the dtypes of its parts; and what becomes of the pass where
tensors have no values, as in a captured graph.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dspark.backends.cpu import expert_ops
from sglang_dspark.backends.moe import block_window
from sglang_dspark.backends.moe.moe_model import DSparkMoEModel
from tests.backends.cpu.attention_world import verify_pass
from tests.backends.cpu.moe_ranks import (
    BASE,
    CASE,
    EXPERTS,
    VOCAB,
    built,
    drafted,
    groups,
    world_of,
)
from tests.backends.cuda.test_block_window import Silent
from tests.drafter.helpers import tiny_config


def as_on_a_gpu() -> None:
    """Without what serves a CPU."""
    block_window.by_plan = lambda batch: False
    expert_ops.supports_rows = lambda x: False


def windowed(model: DSparkMoEModel, mode: Any = None) -> Tensor:
    """h [n, d] of one pass over the draft blocks, by a backend that must not attend; mode: of the
    pass itself."""
    world = world_of(1, 0, len(model.layers))
    batch = verify_pass(world)
    spans = zip(CASE.prefix, CASE.lens, strict=True)
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    tokens = torch.arange(len(positions)) * 5 % VOCAB
    context = forward_context(ForwardContext(attn_backend=Silent(world)))
    with context, torch.no_grad(), mode or nullcontext():
        return model(tokens, positions, batch).hidden_states


def without_values(model: DSparkMoEModel) -> str:
    """Run the pass where no value can be read and no shape may depend on one."""
    try:
        return str(tuple(windowed(model, FakeTensorMode(allow_non_fake_inputs=True)).shape))
    except Exception as error:
        return type(error).__name__


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def main(folder: Path) -> None:
    """Every shape that is tried."""
    said: dict[str, Any] = {}
    with groups(0, 1, 1, folder / "store"):
        shape = tiny_config(**BASE, **EXPERTS)
        model = built(shape)
        expected = drafted(model, 1, 0)["hidden"]
        as_on_a_gpu()
        said["float32"] = difference(windowed(model), expected)
        said["with experts by torch"] = without_values(model)
        said["without experts"] = without_values(built(tiny_config(**BASE)))
        torch.set_default_dtype(torch.bfloat16)
        model = built(shape)
        for layer in model.layers:
            layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel of SGLang's
        found = windowed(model)
        said["bfloat16"] = difference(found, expected)
        layer = model.layers[0]
        parts = {
            "h": found,
            "router": layer.mlp.gate.weight,
            "bias": layer.mlp.gate.e_score_correction_bias,
            "streams": layer.attn_residual.mix.phi,
            "last reading": model.stream_read.weights.phi,
            "experts": layer.mlp.experts.gate_proj,
        }
        said["dtypes"] = {name: str(part.dtype) for name, part in parts.items()}
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
