"""Run the kit's stages: `tools/gpu/run`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu.kit.archive import CACHES, unpack_parts
from tools.gpu.kit.runner import ROOT, Places, run_stages
from tools.gpu.kit.stages import STAGES
from tools.gpu.packing.arrival import kit_home, take_in


def main() -> int:
    """Run the chosen stages; return 0, 1 if a stage failed or a piece is damaged, 2 for a bad name.

    A stage that cannot run yet is no failure."""
    began, options = time.monotonic(), _options()
    known = {stage.name: stage for stage in STAGES}
    for name in options.stages:
        if name not in known:
            print(f"kit: no stage {name}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    home = kit_home()
    wrong = take_in(options.pieces, home, lambda text: print(f"kit: {text}", file=sys.stderr))
    wrong += unpack_parts(options.pieces, CACHES, home / CACHES)
    for line in wrong:
        print(f"kit: {line}", file=sys.stderr)
    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    out = options.stamps / "results" if options.out is None else Path(options.out)
    failed = run_stages(
        chosen,
        Places(options.stamps, out, home),
        options.commit or _commit(),
        seconds=options.seconds - (time.monotonic() - began),  # without the time for pieces
        again=bool(options.stages) or options.out is None,
    )
    if failed:
        print(f"kit: failed: {', '.join(failed)}; run them again by name", file=sys.stderr)
    return 1 if failed or wrong else 0


def _options() -> argparse.Namespace:
    listed = "; ".join(f"{stage.name}: {stage.about}" for stage in STAGES)
    parser = argparse.ArgumentParser(prog="tools/gpu/run", description=f"Stages: {listed}.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="all of them unless named")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT"), help="folder for the results; or $OUT"
    )
    runs = ROOT / "runs" / "gpu"
    parser.add_argument("--stamps", type=Path, default=runs, help="folder of what was run before")
    parser.add_argument(
        "--pieces", type=Path, default=runs / "pieces", help="folder of what tools/gpu/pack made"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="how long this call may take"
    )
    parser.add_argument("--commit", default=None, help="of the tree, where there is no git")
    return parser.parse_args()


def _commit() -> str:
    """Return the tree's commit; `unknown` if it has no .git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
