"""Hides the server's keys in its log and in what it answers about itself.

The hooks: `sglang_dspark/serving/hidden_keys.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import hidden_keys

SEAMS = (
    Seam(
        name="hidden-keys-settings",
        target="sglang.srt.server_args.ServerArgs.resolved_dict",
        kind="after",
        hook=hidden_keys.hide_in_settings,
        signature="(self)",
        why="upstream writes the API keys into the log and answers them to every client",
    ),
    Seam(
        name="hidden-keys-command",
        target="sglang.srt.server_args.prepare_server_args",
        kind="after",
        hook=hidden_keys.hide_in_command,
        signature="(argv)",
        why="upstream answers the launch command with the API keys in it",
    ),
)
