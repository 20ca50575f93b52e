"""Run our draft steps, accept rule and commit in the graphs of a DSPARK worker on a GPU.

Upstream: sglang/srt/speculative/dspark_components/{dspark_verify,dspark_draft}.py.
The tail of the draft's graph (dspark_draft_sampler.py) imports `draft_markov_block` by name.
SGLang still runs a vanilla head's steps in that graph.
"""

from __future__ import annotations

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.draft import draft_steps
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cuda")
SEAMS.around(
    "cuda-graph-epilogue",
    "sglang.srt.speculative.dspark_components.dspark_verify.DsparkVerifyEpilogue.capture_hook",
    signature="(self, runner, out, forward_batch, num_tokens)",
    why="upstream scatters logits to windows of all slots, needs a dozen launches to accept, and "
    "leaves the commit of a dense draft to the host",
)(graph_epilogue.run)
SEAMS.around(
    "cuda-draft-steps",
    "sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block",
    signature="(*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, "
    "noise, tp_sync, logits_out=None, greedy_draft=False)",
    why="upstream launches a product and two kernels for every position of a block",
)(draft_steps)
