"""Register our attention backend with SGLang.

Upstream: sglang/srt/arg_groups/choices.py and srt/layers/attention/attention_registry.py; names are
checked while the command line is parsed (sglang/srt/server_args.py).
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.serving import upstream

ATTENTION_BACKEND = "dspark_cpu"


def offer_attention() -> None:
    """Add the backend's name to the command line; idempotent."""
    for names in (upstream.ATTENTION_BACKEND_CHOICES, upstream.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)


def register_attention() -> None:
    """Offer the name, and add the backend to the registry that model processes read; idempotent."""
    offer_attention()
    upstream.register_attention_backend(ATTENTION_BACKEND)(_create_attention)


def _create_attention(runner: Any) -> Any:
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    return DsparkCpuAttnBackend(runner)
