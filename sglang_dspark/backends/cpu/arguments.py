"""Lets the speculative algorithms be asked for on a CPU, with overlap scheduling.

Upstream: sglang/srt/arg_groups/speculative_hook.py. `_handle_dspark` looks at the
device's name instead of asking the platform, as `_handle_dflash` does; EAGLE and NGRAM turn the
overlap schedule off on every CPU.

With DSPARK upstream leaves up to four freed seats of a full server empty and admits requests in
groups (sglang/srt/managers/min_free_slots_delayer.py), as its draft makes each prefill dear. Ours
takes a few milliseconds for it, and an empty seat costs more: with 8 users on 8 seats, two of three
steps had seven requests. So a freed seat is filled at once unless `--min-free-slots-delay` says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.serving import upstream


class _AsAccelerator:
    """A resolving view whose `device` has a name that `_handle_dspark` lets pass."""

    def __init__(self, view: Any):
        self._view = view

    @property
    def device(self) -> str:
        return "xpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def handle_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND hook: the handler reads the arguments through a view that names another device."""
    resolving_view = upstream.speculative_hook.resolving_view
    if resolving_view(server_args).device != "cpu":
        original(server_args)
        return
    upstream.speculative_hook.resolving_view = lambda args: _AsAccelerator(resolving_view(args))
    try:
        original(server_args)
    finally:
        upstream.speculative_hook.resolving_view = resolving_view
    _fill_seats_at_once(server_args)


def _fill_seats_at_once(server_args: Any) -> None:
    """A request is admitted when one seat is free, where the user named no number of seats."""
    arguments = upstream.resolving_view(server_args)
    if arguments.min_free_slots_delay is None and arguments.pp_size == 1:
        upstream.declare_resolution(server_args, "sglang-dspark", min_free_slots_delay=1)


def keep_overlap(server_args: Any) -> None:
    """REPLACE hook: our operators keep to the relay's order, so the overlap schedule may stay."""
