"""Torch forms of the small Triton operators on the speculative path, and guards around CUDA calls.

Upstream: sglang/srt/managers/overlap_utils.py and sglang/srt/speculative/spec_utils.py
import Triton operators by value, so the consumers' names are the targets.
sglang/srt/speculative/dspark_components/dspark_worker_v2.py calls `record_stream` without asking
for the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.patches.seam import Seam


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows `indices` of each buffer."""
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden


def row_argmax(x: Tensor) -> Tensor:
    """Argmax of each row; the lowest index wins a tie, as in the Triton operator."""
    return x.argmax(dim=-1)


_record_stream = Tensor.record_stream


def record_stream(self: Tensor, stream: Any) -> None:
    """`Tensor.record_stream`, silent on CPU tensors, which have no streams."""
    if self.device.type != "cpu":
        _record_stream(self, stream)


def no_fused_write(self: Any, pool: Any) -> None:
    """REPLACE hook: no fused write, the draft falls back to plain torch."""


SEAMS = (
    Seam(
        name="cpu-gather-spec-extras",
        target="sglang.srt.managers.overlap_utils.gather_spec_extras",
        kind="replace",
        hook=gather_spec_extras,
        signature="(indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf)",
        why="upstream gathers the relay's buffers with a Triton kernel",
        device="cpu",
    ),
    Seam(
        name="cpu-row-argmax",
        target="sglang.srt.speculative.spec_utils.row_argmax",
        kind="replace",
        hook=row_argmax,
        signature="(x)",
        why="upstream's argmax over the vocabulary is a Triton kernel",
        device="cpu",
    ),
    Seam(
        name="cpu-record-stream",
        target="torch.Tensor.record_stream",
        kind="set",
        hook=record_stream,
        expected_repr="<method 'record_stream' of 'torch._C.TensorBase' objects>",
        why="DSPARK and DFLASH call it on CPU tensors, where torch raises",
        device="cpu",
    ),
    Seam(
        name="cpu-fused-kv-write",
        target="sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle",
        kind="replace",
        hook=no_fused_write,
        signature="(self, pool)",
        why="the draft's fused context write for bfloat16 is a Triton kernel",
        device="cpu",
    ),
)
