"""Register our CPU attention backend with SGLang, for the target and for drafts."""

from __future__ import annotations

from sglang_dspark.backends.cpu import attention_registry
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-attention-choice",
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="before",
        hook=attention_registry.offer_backend,
        signature="(parser)",
        why="a backend's name must be registered before the command line is parsed",
        device="cpu",
    ),
    Seam(
        name="cpu-draft-attention",
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        kind="around",
        hook=attention_registry.create_draft_backend,
        signature="(self, backend_name, backend_map, error_template, stamps_children=False)",
        why="EAGLE's draft attention backends come from a closed table of names",
        device="cpu",
    ),
)
