"""Redact the server's keys in its log, in `/server_info` and in the launch command.

Upstream, sglang/srt/server_args.py: the log's line `server_args=…`, `/server_info` and the
schedulers' states show `ServerArgs.resolved_dict`, and next to it the launch command that
`prepare_server_args` saves. Both contain the keys in plain text: a reader of the log can use the
server, and a client of the server can read the administrator's key.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
MASK = "<hidden>"


@SEAMS.after(
    "hidden-keys-settings",
    "sglang.srt.server_args.ServerArgs.resolved_dict",
    why="upstream writes the API keys into the log and answers them to every client",
    issue="sgl-project/sglang#37457",
    drop_when="upstream redacts keys in resolved_dict, which logs and /server_info show",
)
def hide_in_settings(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """Mask the keys that are set (AFTER hook of `ServerArgs.resolved_dict`)."""
    return {**result, **{name: MASK for name in KEYS if result.get(name)}}


@SEAMS.after(
    "hidden-keys-command",
    "sglang.srt.server_args.prepare_server_args",
    why="upstream answers the launch command with the API keys in it",
    issue="sgl-project/sglang#39449",
    drop_when="upstream redacts keys in the launch command that it reports",
)
def hide_in_command(result: Any, argv: list[str]) -> None:
    """Mask the keys in the saved launch command (AFTER hook of `prepare_server_args`).

    By value: a flag may be shortened, have its value in the same word, or be read from a file.
    """
    values = {value for name in KEYS if (value := getattr(result, name))}
    for value in sorted(values, key=len, reverse=True):  # one key may be a part of another
        result._launch_command = result._launch_command.replace(value, MASK)
