"""Replace operators, calls, tables and dtypes of GPUs on the speculative path.

Upstream: sglang/srt/managers/overlap_utils.py, sglang/srt/speculative/spec_utils.py and
dflash_utils.py import operators by value, so the consumers' names are the targets; the one of
dflash_utils.py is None on a CPU. DSPARK's sampling masks are derived from the target's distribution
there, too. sglang/srt/speculative/draft_utils.py makes EAGLE's attention backends.
sglang/srt/speculative/dspark_components/dspark_worker_v2.py calls `record_stream` on any device.
`ModelRunner._extend_forward_kwargs` (sglang/srt/model_executor/model_runner.py) casts input
embeddings to bfloat16, so a float32 draft, whose block is passed as embeddings, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dspark.backends.cpu import accept
from sglang_dspark.backends.cpu.boot import ATTENTION_BACKEND
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

_DFLASH = "sglang.srt.speculative.dflash_utils"
SEAMS = Seams(device="cpu")
SEAMS.replace(
    "cpu-target-probs",
    f"{_DFLASH}.build_speculative_verify_target_probs",
    why="upstream's distribution ignores min-p, and with top-k and top-p both set it differs "
    "from plain decoding's",
)(accept.build_target_probs)
SEAMS.set(
    "cpu-tree-sampling-dflash",
    f"{_DFLASH}.tree_speculative_sampling_target_only",
    expected_repr="None",
    why="upstream has no operator for a CPU here, so sampling with DFLASH fails",
)(accept.chain_speculative_sampling_target_only)
SEAMS.set(
    "cpu-dflash-sampling",
    f"{_DFLASH}._DFLASH_SAMPLING_VERIFY_AVAILABLE",
    expected_repr="False",
    why="without it DFLASH serves sampled requests greedily",
)(True)


@SEAMS.around(
    "cpu-draft-attention",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
    why="EAGLE's draft attention backends come from a closed table of names",
)
def create_draft_backend(
    original: Callable[..., Any],
    self: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Add our name to the table (AROUND hook); `stamps_children` marks multi-step drafting."""
    from sglang_dspark.backends.cpu import attention

    def ours() -> tuple[str, Any]:
        runner, steps = self.draft_model_runner, self.speculative_num_steps
        if stamps_children:
            return ATTENTION_BACKEND, attention.DsparkCpuMultiStepDraftBackend(runner, steps)
        return ATTENTION_BACKEND, attention.DsparkCpuAttnBackend(runner)

    table = {**backend_map, ATTENTION_BACKEND: ours}
    return original(self, backend_name, table, error_template, stamps_children)


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
) -> Any:
    """Return the cache slot of each request's last token, [R]; -1 for an empty prefix."""
    return upstream.get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


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
