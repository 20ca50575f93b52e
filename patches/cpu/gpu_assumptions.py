"""Replace small Triton operators, CUDA calls and GPU dtypes on the speculative path by torch's.

Upstream: sglang/srt/managers/overlap_utils.py and sglang/srt/speculative/spec_utils.py import
Triton operators by value, so the consumers' names are the targets.
sglang/srt/speculative/dspark_components/dspark_worker_v2.py calls `record_stream` on any device.
`ModelRunner._extend_forward_kwargs` (sglang/srt/model_executor/model_runner.py) casts input
embeddings to bfloat16, so a float32 draft, whose block is passed as embeddings, fails.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams(device="cpu")


@SEAMS.replace(
    "cpu-gather-spec-extras",
    "sglang.srt.managers.overlap_utils.gather_spec_extras",
    why="upstream gathers the relay's buffers with a Triton kernel",
)
def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gather rows `indices` of each buffer."""
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden


@SEAMS.replace(
    "cpu-last-slot",
    "sglang.srt.mem_cache.allocation.get_last_loc",
    why="with pages of several tokens upstream reads the last slots by a Triton kernel",
)
def get_last_loc(
    req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor
) -> Tensor:
    """Return the cache slot of each request's last token, [R]; -1 for an empty prefix."""
    found: Tensor = upstream.get_last_loc_torch(
        req_to_token, req_pool_indices_tensor, prefix_lens_tensor
    )
    return found


@SEAMS.replace(
    "cpu-row-argmax",
    "sglang.srt.speculative.spec_utils.row_argmax",
    why="upstream's argmax over the vocabulary is a Triton kernel",
)
def row_argmax(x: Tensor) -> Tensor:
    """Return the argmax of each row; the lowest index wins a tie, as in the Triton operator."""
    return x.argmax(dim=-1)


_record_stream = Tensor.record_stream


@SEAMS.set(
    "cpu-record-stream",
    "torch.Tensor.record_stream",
    expected_repr="<method 'record_stream' of 'torch._C.TensorBase' objects>",
    why="DSPARK and DFLASH call it on CPU tensors, where torch raises",
)
def record_stream(self: Tensor, stream: Any) -> None:
    """Record the stream, except on CPU tensors, which have no streams."""
    if self.device.type != "cpu":
        _record_stream(self, stream)


@SEAMS.after(
    "cpu-embedding-dtype",
    "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
    why="upstream casts input embeddings to bfloat16, also where the model's dtype is float32",
)
def keep_embedding_dtype(
    result: dict[str, Any], self: Any, forward_batch: Any, pp_proxy_tensors: Any
) -> dict[str, Any]:
    """Cast input embeddings to the model's own dtype (AFTER hook of `_extend_forward_kwargs`).

    Batches with overridden rows are built from the result and stay unchanged.
    """
    if "input_embeds" in result and forward_batch.replace_embeds is None:
        result["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return result
