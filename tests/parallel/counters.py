"""Read a server's counters, by replica."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Counted:
    """Totals of one replica: decode steps, drafts verified, drafts accepted."""

    steps: float
    verified: float
    accepted: float

    def cut_by_confidence(self, gamma: int) -> bool:
        """Return whether windows were cut, and some of the remaining drafts were wrong."""
        return 0 < self.accepted < self.verified < gamma * self.steps


def counted(page: str) -> dict[str, Counted]:
    """By `dp_rank`, which is empty without replicas; all series must be of their first rank."""
    found: dict[str, dict[str, float]] = {}
    lines = re.findall(r"^sglang:dspark_(\w+)_total\{(.*?)\} (\S+)", page, re.MULTILINE)
    for name, written, value in lines:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', written))
        assert labels["tp_rank"] == "0"
        sums = found.setdefault(labels.get("dp_rank", ""), {})
        sums[name] = sums.get(name, 0.0) + float(value)
    return {
        replica: Counted(sums["steps"], sums["admitted_drafts"], sums["accepted_drafts"])
        for replica, sums in found.items()
    }
