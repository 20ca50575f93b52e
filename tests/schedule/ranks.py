"""What each of two gloo ranks does in the test of tiers; a module of its own, as it is spawned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch.distributed as dist

from sglang_dspark.schedule.agreement import TierAgreement

GAMMA, RANKS = 5, 2
TIERS = (8, 16, 24, 32, 48)


def rank_main(rank: int, steps: int, folder: str) -> None:
    """Join the group, take all steps, write [own tokens, tier, depth] of each to a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    agreement = TierAgreement(TIERS, dist.group.WORLD)
    own = np.random.default_rng(rank + 7)
    seen = []
    for _ in range(steps):
        idle = own.random() < 0.2
        tokens = 0 if idle else int(own.integers(1, 60))
        tier = agreement.agree(tokens, 0 if idle else int(own.integers(0, GAMMA + 1)))
        seen.append([tokens, tier.tokens, tier.depth])
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
