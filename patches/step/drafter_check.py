"""Refuse a drafter that does not fit the target, before any process is spawned."""

from __future__ import annotations

from sglang_dspark.backends import drafter_check
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="drafter-check",
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        kind="before",
        hook=drafter_check.check_drafter,
        signature="(server_args)",
        why="upstream finds a drafter that does not fit late, with a traceback, or not at all",
    ),
)
