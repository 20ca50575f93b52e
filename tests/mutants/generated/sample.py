"""The modules that mutants are generated for, and the order in which they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sglang_dspark.errors import DSparkError
from tests.mutants.generated.operators import Site, generate

AREAS: dict[str, tuple[str, ...]] = {
    "verify": ("sglang_dspark/verify/*.py",),
    "schedule": ("sglang_dspark/schedule/*.py",),
    "step": ("sglang_dspark/step/*.py",),
    "cuda": ("sglang_dspark/backends/cuda/*.py",),
    "loadtest": (
        "loadtest/client/me*.py",  # measure, metrics
        "loadtest/client/schedule.py",
        "loadtest/client/stream.py",
        "loadtest/sweep/sla.py",
        "loadtest/sweep/frontier.py",
        "loadtest/sweep/summary.py",
        "loadtest/sweep/holding.py",
        "loadtest/bench/paired.py",
    ),
    "evaluation": (
        "sglang_dspark/evaluation/statistics.py",
        "sglang_dspark/evaluation/resampling.py",
        "sglang_dspark/intervals.py",
    ),
    "training": (
        "sglang_dspark/families/learning/losses.py",
        "sglang_dspark/training/packing.py",
        "sglang_dspark/training/sampler.py",
        "sglang_dspark/training/optimiser.py",
        "sglang_dspark/families/learning/target_head.py",
    ),
}


def area_of(name: str) -> str:
    """The area of a mutant by its name."""
    file = Path(name.split("::")[0])
    return next(area for area, globs in AREAS.items() if any(file.match(each) for each in globs))


def mutated_files(root: Path) -> list[Path]:
    """Files of every area. Raises DSparkError for a pattern that finds no file."""
    found: list[Path] = []
    for globs in AREAS.values():
        for pattern in globs:
            files = sorted(root.glob(pattern))
            if not files:
                raise DSparkError(f"no file matches {pattern}: name another in {__name__}")
            found += files
    return found


def all_sites(root: Path) -> list[Site]:
    """Every mutant of every area. Raises DSparkError for a pattern that finds no file."""
    return [
        site
        for file in mutated_files(root)
        for site in generate(str(file.relative_to(root)), file.read_text(encoding="utf-8"))
    ]


def drawn(sites: Sequence[Site], count: int, seed: int) -> list[Site]:
    """`count` of them at random, the same for a seed; a larger count begins with the smaller's.

    A mutant's place in the order depends on its name and the seed alone, so that a change of the
    code leaves the rest of the draw as it was.
    """

    def order(site: Site) -> bytes:
        return hashlib.sha256(f"{seed} {site.name}".encode()).digest()

    return sorted(sites, key=order)[:count]
