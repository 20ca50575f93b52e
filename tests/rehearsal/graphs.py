"""Captured graphs on a CPU: capture keeps the function and its outputs, replay runs it again.

Upstream's own runner (0.5.23, sglang/srt/model_executor/runner/decode_cuda_graph_runner.py) stages
its inputs, chooses tiers and slices outputs as on CUDA; only the graph itself is another one. As
there, a graph's outputs are the same tensors at every replay: code that keeps one without a copy
reads the next step's values. DSPARK_REHEARSAL_ALIAS=tokens lets the host's copies of tokens be the
tensors themselves, which must be noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seam

REPLAYS: dict[bool, list[int]] = {False: [], True: []}  # sizes of replayed graphs, by is_draft


def rerun_backend() -> type:
    """The class that stands where upstream has `FullCudaGraphBackend`."""
    from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import (
        BaseCudaGraphBackend,
    )

    class RerunBackend(BaseCudaGraphBackend):  # type: ignore[misc]
        """Functions and static outputs of one runner's graphs, by shape."""

        def __init__(self, runner: Any, *, enable_memory_saver: bool = False) -> None:
            self._runner = runner
            self._graphs: dict[Any, tuple[Callable[[], Any], Any, Any]] = {}

        @contextmanager
        def capture_session(self, stream: Any) -> Iterator[None]:
            yield

        def capture_one(
            self,
            shape_key: Any,
            forward_fn: Callable[[], Any],
            capture_inputs: Any = None,
            post_warmup_hook: Callable[[], None] | None = None,
        ) -> None:
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
            # A graph holds the addresses of the metadata that it was captured with; DeepSeek-V4's
            # is replaced by what the graph itself makes of it.
            metadata = self._runner.attn_backend.forward_metadata
            outputs = forward_fn()
            self._graphs[shape_key] = (forward_fn, outputs, metadata)

        def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
            return shape_key in self._graphs

        @contextmanager
        def replay_session(self) -> Iterator[None]:
            yield

        def replay(self, shape_key: Any, static_forward_batch: Any, **options: Any) -> Any:
            forward_fn, outputs, metadata = self._graphs[shape_key]
            self._runner.attn_backend.forward_metadata = metadata
            copy_into(outputs, forward_fn())
            REPLAYS[self._runner.model_runner.is_draft_worker].append(shape_key.size)
            return outputs

        def cleanup(self) -> None:
            self._graphs.clear()

    return RerunBackend


def copy_into(static: Any, values: Any) -> None:
    """Every tensor of an output into the captured one's; what they are besides is the same."""
    for each in fields(static):
        kept, new = getattr(static, each.name), getattr(values, each.name)
        assert isinstance(kept, Tensor) == isinstance(new, Tensor), each.name
        if isinstance(kept, Tensor):
            kept.copy_(new)


def graph_attention() -> type:
    """Our CPU backend, planned for the slots of a graph: those beyond the batch are padding."""
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
    from sglang_dspark.backends.cpu.attention_plan import plan_of_batch

    class GraphAttention(DsparkCpuAttnBackend):
        supports_ragged_verify_graph = True

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Plans are made on the host: there is no buffer that a graph would read."""

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 1

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            info = batch.spec_info
            layout = getattr(info, "ragged_verify_layout", None)
            if layout is not None and layout.bs != batch.batch_size:
                layout = layout.padded_to_bucket(
                    padded_bs=batch.batch_size, cap=int(info.draft_token_num)
                )
                info = SimpleNamespace(ragged_verify_layout=layout, tree_topk=None)
            view = SimpleNamespace(
                forward_mode=batch.forward_mode,
                seq_lens=batch.seq_lens,
                req_pool_indices=batch.req_pool_indices,
                spec_info=info,
            )
            self.plan = plan_of_batch(view, self.req_to_token_pool.req_to_token)

    return GraphAttention


def capture(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """AROUND hook of `capture_decode_graph`: upstream's runner, where it has one without graphs."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner = DecodeCudaGraphRunner(model_runner)
    return GraphCapture(runner=runner, memory_phase="rehearsed", memory_usage_gb=0, capture_time=0)


def copied(original: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """AROUND hook of `async_d2h`, which copies nothing on a CPU; of results tokens are int64."""
    aliased = os.environ.get("DSPARK_REHEARSAL_ALIAS") == "tokens" and tensor.dtype == torch.int64
    return tensor if aliased else tensor.clone()


def capped(original: Callable[..., Any], *, correct_len: Tensor, verify_lens: Tensor) -> Any:
    """AROUND hook of the torch form: an empty slot's -1 is a bad index there, not in Triton."""
    return original(correct_len=correct_len, verify_lens=verify_lens.clamp(min=1))


def scattered(
    *, compact: Tensor, verify_lens: Tensor, out: Tensor, stride: int, fill_value: float
) -> Tensor:
    """REPLACE hook: compact [T, D] rows into out [R * stride, D], the rest of it fill_value."""
    place = torch.arange(out.shape[0])
    slot, within = place // stride, place % stride
    lens = verify_lens.long()
    source = (lens.cumsum(0) - lens)[slot] + within
    rows = compact[source.clamp(max=compact.shape[0] - 1)]
    return out.copy_(rows.where((within < lens[slot])[:, None], rows.new_tensor(fill_value)))


@contextmanager
def no_stream(stream: Any = None) -> Iterator[Any]:
    """REPLACE hook of `graph_capture`."""
    yield SimpleNamespace(stream=None)


def install() -> None:
    """Replace what no patch covers: the platform's capabilities, and torch's capture queries."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.platforms.interface import PlatformCapabilities

    from sglang_dspark.backends.cpu import platform

    cpu = platform.DsparkCpuPlatform
    cpu.capabilities = PlatformCapabilities(supports_triton=False, graph_capture=True)
    cpu.get_full_graph_backend_cls = lambda self: rerun_backend()
    platform._create_attention = lambda runner: graph_attention()(runner)
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    for module in (torch.cpu, torch.cuda):
        module.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]


_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
_WHY = "there are no graphs on a CPU"

SEAMS = (
    Seam(
        name="rehearsal-graph-capture",
        target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
        ".capture_decode_graph",
        kind="around",
        hook=capture,
        signature="(*, model_runner)",
        why=_WHY,
    ),
    Seam(
        name="rehearsal-graph-context",
        target=f"{_RUNNER}.graph_capture",
        kind="set",
        hook=no_stream,
        signature="(stream=None)",
        why=_WHY,
    ),
    Seam(
        name="rehearsal-graph-stream",
        target=f"{_RUNNER}.get_or_create_global_graph_capture_stream",
        kind="set",
        hook=lambda: None,
        signature="()",
        why=_WHY,
    ),
    Seam(
        name="rehearsal-graph-epilogue",
        target="sglang.srt.speculative.dspark_components.dspark_worker_v2.is_cuda",
        kind="set",
        hook=lambda: True,
        signature="()",
        why="upstream puts the accept rule into a graph on CUDA alone",
    ),
    Seam(
        name="rehearsal-host-copy",
        target="sglang.srt.utils.common.async_d2h",
        kind="around",
        hook=copied,
        signature="(tensor)",
        why="a copy to the host is a copy; upstream skips it on a CPU",
    ),
    Seam(
        name="rehearsal-padded-slots",
        target="sglang.kernels.ops.speculative.dspark.dspark_accept.cap_correct_len",
        kind="around",
        hook=capped,
        signature="(*, correct_len, verify_lens)",
        why="the torch form is never called with padded slots",
    ),
    Seam(
        name="rehearsal-scatter",
        target="sglang.kernels.ops.speculative.dspark.dspark_verify_window"
        ".scatter_compact_to_strided_into",
        kind="replace",
        hook=scattered,
        signature="(*, compact, verify_lens, out, stride, fill_value)",
        why="it is a Triton kernel, with no torch form beside it",
    ),
)
