"""Compare SGLang's Triton kernels of delta rule layers with the CPU's operators.

In Triton's interpreter, which must be chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

from sglang_dspark.backends.cpu import delta_rule
from tests.backends.cpu.delta_rule_shapes import LENGTHS, WIDTH, Case
from tests.kernels.interpreter import patch_language_once


def recurrence() -> dict[str, float]:
    """Return the largest differences of outputs, and of states behind each token."""
    case = Case(0)
    found = []
    for run, options in (
        (delta_rule.fused_sigmoid_gating_delta_rule_update_cpu, {}),
        (fused_sigmoid_gating_delta_rule_update, {"disable_state_update": True}),
    ):
        kept = torch.zeros(len(LENGTHS) + 1, WIDTH, *case.states.shape[1:])
        out = run(
            **case.inputs(LENGTHS),
            **options,
            initial_state_source=case.states.clone(),
            intermediate_states_buffer=kept,
        )
        found.append((out, kept))
    (out, kept), (their_out, their_kept) = found
    return {
        "outputs": float((out - their_out).abs().max()),
        "states": float((kept - their_kept).abs().max()),
    }


def convolution() -> dict[str, float]:
    """Return the largest differences of outputs, and of inputs behind each token."""
    torch.manual_seed(1)
    rows, dim, width = len(LENGTHS), 24, 4
    x, states = torch.randn(rows, WIDTH, dim).transpose(1, 2), torch.randn(7, dim, width - 1)
    weight, bias = torch.randn(dim, width), torch.randn(dim)
    found = []
    for run in (delta_rule.causal_conv1d_update_cpu, causal_conv1d_update):
        kept = torch.zeros(rows + 1, WIDTH, dim, width - 1)
        out = run(
            x, states.clone(), weight, bias, "silu",
            conv_state_indices=torch.tensor([2, 5, 1], dtype=torch.int32),
            intermediate_conv_window=kept,
            intermediate_state_indices=torch.arange(rows, dtype=torch.int32),
        )  # fmt: skip
        found.append((out, kept))
    (out, kept), (their_out, their_kept) = found
    return {
        "convolved": float((out - their_out).abs().max()),
        "inputs": float((kept - their_kept).abs().max()),
    }


if __name__ == "__main__":
    patch_language_once()
    print(json.dumps({**recurrence(), **convolution()}))
