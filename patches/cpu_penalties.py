"""Penalties and min_new_tokens under DSPARK on a CPU, each verified row with its own.

The hooks: `sglang_dspark/serving/cpu/penalised_passes.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import penalised_passes

_EXECUTOR = "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor"

SEAMS = (
    Seam(
        name="cpu-penalties-ragged",
        target=f"{_EXECUTOR}.run_compact",
        kind="around",
        hook=penalised_passes.run_compact,
        signature="(self, *, batch, layout, draft_block_ids, draft_tokens, bs, device, "
        "sampling_info, verify_window, inject_gate=False)",
        why="upstream's penalties have no effect under DSPARK",
        device="cpu",
    ),
    Seam(
        name="cpu-penalties",
        target=f"{_EXECUTOR}.run_non_compact",
        kind="around",
        hook=penalised_passes.run_non_compact,
        signature="(self, *, batch, draft_input, verify_ids_2d, verify_window, sampling_info)",
        why="upstream's penalties have no effect under DSPARK",
        device="cpu",
    ),
)
