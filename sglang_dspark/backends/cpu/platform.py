"""Define the out-of-tree platform class that gives SGLang defaults and capabilities.

Adapts sglang/srt/platforms/interface.py. It is an out-of-tree platform, not the in-tree CPU one,
because SGLang reads the attention backends and the supported speculative algorithms only from such
a platform.

A model process also returns the holes of its heap to the system. A step's tensors of varying sizes
are allocated between small ones that stay, and glibc keeps the holes: the resident set grows for
hours while memory in use is constant. A lower mmap threshold stops that too, but then every step
maps new pages (dev/LOG.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from typing import Any

import torch

from sglang_dspark.backends.cpu import rank_resources
from sglang_dspark.backends.cpu.boot import ATTENTION_BACKEND
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config

logger = logging.getLogger(__name__)
ALGORITHMS = frozenset({"DSPARK", "DFLASH", "EAGLE", "EAGLE3", "STANDALONE"})
TRIM_EVERY_S = 30.0  # a call costs a few milliseconds, and the next steps map pages again
TRIM_THREAD = "dspark-heap"


class DsparkCpuPlatform(upstream.CpuDeviceMixin, upstream.SRTPlatform):
    """CPU without AVX512/AMX kernels: torch and Numba operators, no graphs, no Triton."""

    _enum = upstream.PlatformEnum.OOT

    def __init__(self) -> None:
        """Offer our attention backend; the command line, which is parsed later, checks names."""
        upstream.ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
        upstream.DRAFT_ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set CPU defaults, after `handle_cpu_backends` has set a backend that requires AMX."""
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            # Upstream makes float32 checkpoints float16, for GPUs: 8 rows of the demo target cost
            # 125 ms in it and 49 in float32, which our compiled kernels support.
            server_args.dtype = "float32"
            logger.info("sglang-dspark: dtype float32, which the CPU kernels compute in")
        # Bfloat16 by default: rounded inputs of a convolution would differ from those in a window.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        if not current_config().cpu.overlap and not server_args.enable_prefill_delayer:
            # A pass computes on the thread that schedules. Overlap hides no work and delays each
            # result by a step: first tokens, freed slots, EOS.
            server_args.disable_overlap_schedule = True
        rank_resources.prepare(server_args)
        # An idle scheduler would poll without a pause and occupy a core.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the activity for /start_profile; without these methods the server would exit."""
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_profiler_activity_str(self) -> str:
        return self.get_torch_profiler_activity().name

    def init_backend(self) -> None:
        """Set up a process, once, before it builds a model runner."""
        from sglang_dspark.backends.cpu import fused_ops, threads

        torch.set_num_threads(threads.chosen_threads())
        fused_ops.register(self.get_dispatch_key_name())
        upstream.register_attention_backend(ATTENTION_BACKEND)(_create_attention)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Start the trimming thread, once: after weights are loaded a process forks no other."""
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; it releases the GIL
        if trim is not None and all(each.name != TRIM_THREAD for each in threading.enumerate()):
            threading.Thread(target=_trim, args=(trim,), name=TRIM_THREAD, daemon=True).start()


def _create_attention(runner: Any) -> Any:
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    return DsparkCpuAttnBackend(runner)


def _trim(malloc_trim: Any) -> None:
    while True:
        time.sleep(TRIM_EVERY_S)
        malloc_trim(0)
