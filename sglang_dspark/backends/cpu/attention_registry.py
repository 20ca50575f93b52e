"""Register our attention backend with SGLang, for target and draft.

Upstream: sglang/srt/server_args.py (names are checked while the command line is parsed),
sglang/srt/arg_groups/choices.py, srt/layers/attention/attention_registry.py, and
sglang/srt/speculative/draft_utils.py, `DraftBackendFactory._create_backend`: EAGLE's draft
backends are made from closed tables of names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.serving import upstream

ATTENTION_BACKEND = "dspark_cpu"


def register_attention() -> None:
    """Add the backend's name to the command line and to the registry; idempotent.

    Upstream: sglang/srt/arg_groups/choices.py and srt/layers/attention/attention_registry.py.
    """
    for names in (upstream.ATTENTION_BACKEND_CHOICES, upstream.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)
    upstream.register_attention_backend(ATTENTION_BACKEND)(_create_attention)


def _create_attention(runner: Any) -> Any:
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    return DsparkCpuAttnBackend(runner)


def offer_backend(*args: Any, **kwargs: Any) -> None:
    """Register the name: BEFORE hook of `ServerArgs.add_cli_args`."""
    pass

    register_attention()


def create_draft_backend(
    original: Callable[..., Any],
    self: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Add our name to the table (AROUND hook); `stamps_children` marks multi-step drafting."""
    from sglang_dspark.backends.cpu.attention import (
        DsparkCpuAttnBackend,
        DsparkCpuMultiStepDraftBackend,
    )

    pass

    def single() -> tuple[str, Any]:
        return ATTENTION_BACKEND, DsparkCpuAttnBackend(self.draft_model_runner)

    def stepwise() -> tuple[str, Any]:
        backend = DsparkCpuMultiStepDraftBackend(
            self.draft_model_runner, self.topk, self.speculative_num_steps
        )
        return ATTENTION_BACKEND, backend

    table = {**backend_map, ATTENTION_BACKEND: stepwise if stamps_children else single}
    return original(self, backend_name, table, error_template, stamps_children)
