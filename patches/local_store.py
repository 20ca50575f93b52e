"""Keeps the store at which ranks meet at the address they meet at.

The hook: `sglang_dspark/serving/local_store.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import local_store

SEAMS = (
    Seam(
        name="local-store",
        target="torch.distributed.rendezvous._create_c10d_store",
        kind="around",
        hook=local_store.meet_locally,
        signature="(hostname, port, rank, world_size, timeout, use_libuv=True)",
        why="torch opens an unguarded port on every interface, wherever the ranks meet",
    ),
)
