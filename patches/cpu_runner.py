"""Small things in workers and runner that assume a GPU.

Upstream (0.5.23): speculative/dspark_components/dspark_worker_v2.py and dflash_worker_v2.py call
`record_stream` on CPU tensors; model_executor/model_runner.py casts draft embeddings to bfloat16;
managers/overlap_utils.py gathers with a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dspark.patches.seam import Seam


def record_stream(original: Callable[..., None], tensor: Tensor, stream: Any) -> None:
    """AROUND hook of `Tensor.record_stream`: host memory belongs to no stream."""
    if tensor.device.type != "cpu":
        original(tensor, stream)


def keep_embedding_dtype(
    result: dict[str, Any], runner: Any, forward_batch: Any, pp_proxy_tensors: Any
) -> dict[str, Any]:
    """AFTER hook of `ModelRunner._extend_forward_kwargs`: embeddings in the model's own dtype."""
    if forward_batch.input_embeds is not None:
        result["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return result


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """REPLACE hook: rows `indices` [R] of each buffer, by plain indexing."""
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden


SEAMS = (
    Seam(
        name="cpu-record-stream",
        target="torch.Tensor.record_stream",
        kind="around",
        hook=record_stream,
        expected_repr="<method 'record_stream' of 'torch._C.TensorBase' objects>",
        why="the DSPARK and DFLASH workers record CPU tensors on a stream, which torch refuses",
        device="cpu",
    ),
    Seam(
        name="cpu-embedding-dtype",
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind="after",
        hook=keep_embedding_dtype,
        signature="(self, forward_batch, pp_proxy_tensors)",
        why="draft embeddings are cast to bfloat16 whatever the model's dtype",
        device="cpu",
    ),
    Seam(
        name="cpu-gather-spec-extras",
        target="sglang.srt.managers.overlap_utils.gather_spec_extras",
        kind="replace",
        hook=gather_spec_extras,
        signature=(
            "(indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf)"
        ),
        why="the overlap loop gathers EAGLE's state with a Triton kernel",
        device="cpu",
    ),
)
