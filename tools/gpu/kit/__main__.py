"""`tools/gpu/run`: the kit's command line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.gpu.kit.runner import ROOT, run_stages
from tools.gpu.kit.stages import STAGES


def main() -> int:
    """Status 0 when every stage ended well, 1 when one failed, 2 for a name that is none."""
    listed = "; ".join(f"{stage.name}: {stage.about}" for stage in STAGES)
    parser = argparse.ArgumentParser(prog="tools/gpu/run", description=f"Stages: {listed}.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="all of them unless named")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT"), help="folder for the results; or $OUT"
    )
    parser.add_argument(
        "--stamps", type=Path, default=ROOT / "runs" / "gpu", help="folder of what was run before"
    )
    parser.add_argument("--commit", default=None, help="of the tree, where there is no git")
    options = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    for name in options.stages:
        if name not in known:
            print(f"kit: no stage {name}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    out = options.stamps / "results" if options.out is None else Path(options.out)
    failed = run_stages(chosen, options.stamps, out, options.commit or _commit())
    if failed:
        print(f"kit: failed: {', '.join(failed)}; run them again by name", file=sys.stderr)
    return 1 if failed else 0


def _commit() -> str:
    """The tree's commit; `unknown` where it came without git's folder."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
