"""The out-of-tree platform class that SGLang's core asks for defaults and capabilities.

Adapts sglang/srt/platforms/interface.py. It stays an out-of-tree platform, not the
in-tree CPU one, because only then does the core ask it for the attention backend, the draft's
attention backend and the speculative algorithms it serves.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_dspark.backends.cpu import parallel
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "dspark_cpu"
ALGORITHMS = frozenset({"DSPARK", "DFLASH", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"})


class DsparkCpuPlatform(upstream.CpuDeviceMixin, upstream.SRTPlatform):
    """CPU without AVX512/AMX kernels: torch and Numba operators, no graphs, no Triton."""

    _enum = upstream.PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = upstream.PlatformCapabilities(supports_triton=False, graph_capture=False)

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Runs after `handle_cpu_backends`, which names a backend that needs AMX."""
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            # Upstream makes float32 checkpoints float16, for GPUs: 8 rows of the demo target take
            # 125 ms in it and 49 in float32, which our compiled kernels are written for.
            server_args.dtype = "float32"
            logger.info("sglang-dspark: dtype float32, which the CPU kernels compute in")
        if not current_config().cpu.overlap and not server_args.enable_prefill_delayer:
            # A pass computes on the thread that schedules. Overlapping hides nothing, and every
            # result is read a step late: first tokens, freed seats, ends of answers.
            server_args.disable_overlap_schedule = True
        parallel.prepare(server_args)
        # An idle scheduler would poll without a pause and take a core from the clients.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """What SGLang asks for when /start_profile begins; without it the server would end."""
        return torch.profiler.ProfilerActivity.CPU.name

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The same as torch knows it."""
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Once in each process that builds a model runner, before it does."""
        from sglang_dspark.backends.cpu import fused_ops, threads

        threads.limit_this_process()
        fused_ops.register(self.get_dispatch_key_name())
        register_attention()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Weights are in place, in a process that forks no other: threads may begin."""
        from sglang_dspark.backends.cpu import heap

        heap.keep_small()


def register_attention() -> None:
    """Make the backend's name known to the command line and to the registry; repeatable.

    Upstream: sglang/srt/arg_groups/choices.py and srt/layers/attention/attention_registry.py.
    """
    for names in (upstream.ATTENTION_BACKEND_CHOICES, upstream.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)
    upstream.register_attention_backend(ATTENTION_BACKEND)(_create_attention)


def _create_attention(runner: Any) -> Any:
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    return DsparkCpuAttnBackend(runner)
