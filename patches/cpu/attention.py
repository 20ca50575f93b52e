"""Register our CPU attention backend with SGLang, for the target and for drafts.

Upstream: `DraftBackendFactory._create_backend` in sglang/srt/speculative/draft_utils.py makes
EAGLE's draft backends from closed tables of names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.backends.cpu import attention_registry
from sglang_dspark.backends.cpu.attention_registry import ATTENTION_BACKEND
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")


@SEAMS.before(
    "cpu-attention-choice",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    signature="(parser)",
    why="a backend's name must be known before the command line is parsed",
)
def offer_backend(*args: Any, **kwargs: Any) -> None:
    """Add our name to the choices (BEFORE hook of `ServerArgs.add_cli_args`)."""
    attention_registry.offer_attention()


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
        runner = self.draft_model_runner
        if not stamps_children:
            return ATTENTION_BACKEND, attention.DsparkCpuAttnBackend(runner)
        steps = self.topk, self.speculative_num_steps
        return ATTENTION_BACKEND, attention.DsparkCpuMultiStepDraftBackend(runner, *steps)

    table = {**backend_map, ATTENTION_BACKEND: ours}
    return original(self, backend_name, table, error_template, stamps_children)
