"""The step of an MTP draft (EAGLE, topk 1) in the short forms that DSPARK's step has.

The hooks: `sglang_dspark/backends/cpu/mtp.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import mtp
from sglang_dspark.patches.seam import Seam

_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"

SEAMS = (
    Seam(
        name="cpu-mtp-model",
        target="sglang.srt.models.llama_eagle.LlamaModel.forward",
        kind="around",
        hook=mtp.forward_model,
        signature="(self, input_ids, positions, forward_batch, input_embeds=None, "
        "pp_proxy_tensors=None)",
        why="the same as around a DSPARK draft's layers, so that the comparison is fair",
        device="cpu",
    ),
    Seam(
        name="cpu-mtp-draft",
        target=f"{_WORKER}.draft",
        kind="around",
        hook=mtp.draft_one,
        signature="(self, batch, *, with_topology=False)",
        why="upstream prepares a pass of the draft that a single step does not make",
        device="cpu",
    ),
    Seam(
        name="cpu-mtp-accept",
        target="sglang.srt.speculative.eagle_worker_common.eagle_sample",
        kind="around",
        hook=mtp.sample_greedy,
        signature="(verify_input, batch, logits_output, grammar_mask=None, "
        "uno_target_max_top_k=None, *, watermark_state=None, watermark_full_mask=True)",
        why="upstream reads all logits and walks a tree with some thirty small torch calls",
        device="cpu",
    ),
    Seam(
        name="cpu-mtp-extend",
        target=f"{_WORKER}._draft_extend_for_decode",
        kind="around",
        hook=mtp.extend_verified,
        signature="(self, batch, batch_result, *, kv_loc_plan=None)",
        why="upstream plans the target's pass again and takes rejected rows through the LM head",
        device="cpu",
    ),
)
