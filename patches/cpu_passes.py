"""The two passes of a DSPARK step around SGLang's runner: draft block and verify windows.

The hooks: `sglang_dspark/serving/cpu/short_passes.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import short_passes

_DSPARK = "sglang.srt.speculative.dspark_components"

SEAMS = (
    Seam(
        name="cpu-short-draft-pass",
        target=f"{_DSPARK}.dspark_draft.DraftBlockProposer._run_forward",
        kind="around",
        hook=short_passes.run_draft,
        signature="(self, *, batch, draft_input, verify_window, bs, device, embed_module, "
        "draft_sampler=None, sampling_info=None, anchor_prepared=False)",
        why="SGLang's Python around the draft's layers costs half as much as the layers",
        device="cpu",
    ),
    Seam(
        name="cpu-short-verify-pass",
        target=f"{_DSPARK}.dspark_verify.TargetVerifyExecutor._forward_prepared_verify",
        kind="around",
        hook=short_passes.run_verify,
        signature="(self, *, batch, verify_input, seq_lens_cpu_backup, seq_lens_sum_backup)",
        why="the same around the target's verify pass, which plans attention twice besides",
        device="cpu",
    ),
)
