"""Report the seams to `dspark doctor`: the object at each target, and the patches in place.

The doctor loads the plugins in its own process, so a seam reported as installed is in
place.
"""

from __future__ import annotations

import contextlib
import io

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches import all_seams, registry
from sglang_dspark.patches.registry import SeamCheck
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import startup, upstream, upstream_check
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.diagnosis import Diagnosis, SeamReport


def look_at_seams(found: Diagnosis) -> None:
    """Check every seam, load all plugins as a server does, and report which seams are in place.

    Adds a report of each to `found`, and to its problems each fault that prevents a start.
    """
    device = startup.active_device()
    seams = all_seams()
    off = startup.switched_off() is not None
    wanted = all_seams(upstream_fixes=_fixes_wanted())
    if len(wanted) < len(seams):
        count = len(seams) - len(wanted)
        found.notes.append(f"upstream_fixes is false: {count} fixes of SGLang are not installed")
    live = [s for s in wanted if not off and not registry.is_inert(s, device=device)]
    checks = {seam.name: registry.check_seam(seam) for seam in live}
    mismatches = [check for check in checks.values() if not check.ok]
    found.problems += [registry.mismatch(check) for check in mismatches]
    # An upgrade is prepared without a GPU: targets of CUDA seams can be read there too.
    others = [s for s in wanted if not off and device == "cpu" and s.device == "cuda"]
    checks |= {seam.name: registry.check_seam(seam) for seam in others}
    elsewhere = [checks[seam.name] for seam in others if not checks[seam.name].ok]
    found.notes += [f"on a GPU: {registry.mismatch(check)}" for check in elsewhere]
    if not off and not mismatches and not upstream_check.missing():
        _load_plugins(found)
    for seam in seams:
        absent = off or seam not in wanted
        state: str = "not installed" if absent else registry.state_of(seam, device=device)
        found.seams.append(_seam_report(seam, checks.get(seam.name), state))


def _seam_report(seam: Seam, check: SeamCheck | None, state: str) -> SeamReport:
    """Make the report of one seam. check: None where the target was not checked."""
    if check is not None and not check.ok:
        state = "mismatch"
    return SeamReport(
        name=seam.name,
        target=seam.target,
        kind=seam.kind,
        device=seam.device,
        expected=registry.expectation(seam),
        found=check.found if check else "not looked at",
        signature_ok=check.ok if check else True,
        state="not installed" if state == "pending" else state,
        why=seam.why,
        issue=seam.issue,
        drop_when=seam.drop_when,
    )


def _fixes_wanted() -> bool:
    """Return whether the configuration enables the fixes; true if it cannot be read."""
    try:
        return current_config().upstream_fixes
    except DSparkError:  # `look_at_config` reports it
        return True


def _load_plugins(found: Diagnosis) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            upstream.load_plugins()
    except SystemExit:
        found.problems.append(said.getvalue().strip() or "a plugin ended the process")
