"""Check that a stage's parcels have arrived. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tools.gpu.packing.arrival import SGLANG, has, waits_for
from tools.gpu.packing.pieces import read_manifest

ROOT = Path(__file__).resolve().parents[3]


def waiting(needs: Sequence[str], home: Path) -> str | None:
    """Name the parcels that a stage waits for; return None if it can run.

    A parcel may arrive in pieces. Its contents may be present already: SGLang installed, the demo's
    drafter in a checkout that is not slim.
    """
    absent = [name for name in needs if not (has(name, home) or _here(name))]
    if not absent:
        return None
    if not read_manifest(home):
        return "waits for the pieces of tools/gpu/pack"
    pieces = waits_for(absent, home)
    return f"waits for pieces {', '.join(pieces)}" if pieces else "waits for pieces that install"


def _here(name: str) -> bool:
    if name == SGLANG:
        return find_spec("sglang") is not None
    return name == "smollm" and any(ROOT.glob("drafters/smollm2-135m-dspark/*.safetensors"))
