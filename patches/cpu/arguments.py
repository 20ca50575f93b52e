"""Accept the speculative algorithms on a CPU, keep overlap scheduling, fill free slots at once.

Upstream: sglang/srt/arg_groups/speculative_hook.py. `_handle_dspark` checks the device's name;
`_handle_dflash` checks the platform. EAGLE and NGRAM disable the overlap schedule on every CPU.

With DSPARK upstream keeps up to four freed slots of a full server empty and admits requests in
groups (sglang/srt/managers/min_free_slots_delayer.py), as its draft makes each prefill slow. Ours
takes a few milliseconds, and an empty slot costs more: with 8 users on 8 slots, two of three steps
had seven requests. `--min-free-slots-delay` sets another number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.schedule import rehearsal
from sglang_dspark.serving import on_demand, startup, upstream

SEAMS = Seams(device="cpu")


class _AsAccelerator:
    """A resolving view whose `device` has a name that `_handle_dspark` accepts."""

    device = "xpu"

    def __init__(self, view: Any):
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


@SEAMS.around(
    "cpu-dspark-device",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="upstream rejects DSPARK by the device's name",
)
def handle_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """Run `_handle_dspark` on a view of the arguments with another device (AROUND hook)."""
    resolving_view = upstream.speculative_hook.resolving_view
    if resolving_view(server_args).device != "cpu":
        original(server_args)
        return
    upstream.speculative_hook.resolving_view = lambda args: _AsAccelerator(resolving_view(args))
    try:
        original(server_args)
    finally:
        upstream.speculative_hook.resolving_view = resolving_view
    arguments = resolving_view(server_args)
    if arguments.min_free_slots_delay is None and arguments.pp_size == 1:
        upstream.declare_resolution(server_args, "sglang-dspark", min_free_slots_delay=1)
    if not on_demand.active():  # no server starts in this process
        rehearsal.compile_early()  # now: the scheduler starts only after seconds of imports


@SEAMS.around(
    "cpu-eagle-chains",
    "sglang.srt.arg_groups.speculative_hook._auto_choose_speculative_params",
    why="without parameters upstream drafts trees for Llama, and a CPU verifies chains",
)
def choose_chain(
    original: Callable[..., tuple[int, int, int]], server_args: Any, model_arch: str
) -> tuple[int, int, int]:
    """Return steps, topk 1 and drafted tokens, with upstream's number of steps (AROUND hook)."""
    steps = original(server_args, model_arch)[0]
    return steps, 1, steps + 1


@SEAMS.replace(
    "cpu-spec-overlap",
    "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
    why="upstream turns the overlap schedule off for EAGLE and NGRAM on a CPU",
)
def keep_overlap(server_args: Any) -> None:
    """Keep the overlap schedule, as our operators follow the relay's order (REPLACE hook).

    Stops the server for drafts that no CPU operator verifies.
    """
    asked = upstream.resolving_view(server_args)
    if asked.speculative_algorithm == "NGRAM":
        startup.stop(
            "--speculative-algorithm NGRAM: its operators have no CPU form; use DSPARK, EAGLE or "
            "EAGLE3, or leave it out"
        )
    if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0:
        startup.stop("SGLANG_SIMULATE_ACC_LEN: a CPU accepts what the target does; unset it")
    for name in ("eagle_topk", "accept_threshold_single", "accept_threshold_acc"):
        value = getattr(asked, f"speculative_{name}")
        if value not in (None, 1):
            startup.stop(
                f"--speculative-{name.replace('_', '-')} {value}: a CPU verifies chains of drafts "
                "by the target's distribution alone; set it to 1 or leave it out"
            )
