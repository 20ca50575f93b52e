"""A server's keys, hidden in what it tells of itself.

Upstream, sglang/srt/server_args.py: `ServerArgs.resolved_dict` is what the log's line
`server_args=…`, `/server_info` and the schedulers' states are made of, and the launch command that
`prepare_server_args` notes is shown beside it. Both hold the keys as they were given: whoever may
read the log may use the server, and whoever may use it reads the administrator's key.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam

KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
MASK = "<hidden>"


def hide_in_settings(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """AFTER hook of `ServerArgs.resolved_dict`: the same settings, keys masked where one is set."""
    return {**result, **{name: MASK for name in KEYS if result.get(name)}}


def hide_in_command(result: Any, argv: list[str]) -> None:
    """AFTER hook of `prepare_server_args`: masks the keys in the launch command that it noted.

    By value, as a flag may be shortened, hold its value or stand before it, or come from a file.
    """
    values = {value for name in KEYS if (value := getattr(result, name))}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        result._launch_command = result._launch_command.replace(value, MASK)


SEAMS = (
    Seam(
        name="hidden-keys-settings",
        target="sglang.srt.server_args.ServerArgs.resolved_dict",
        kind="after",
        hook=hide_in_settings,
        signature="(self)",
        why="upstream writes the API keys into the log and answers them to every client",
    ),
    Seam(
        name="hidden-keys-command",
        target="sglang.srt.server_args.prepare_server_args",
        kind="after",
        hook=hide_in_command,
        signature="(argv)",
        why="upstream answers the launch command with the API keys in it",
    ),
)
