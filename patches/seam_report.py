"""Report the seams to `dspark doctor`: the object at each target, and the patches in place.

The doctor loads the plugins in its own process, so a seam reported as installed is in
place.
"""

from __future__ import annotations

import contextlib
import io

from sglang_dspark.patches import all_seams, registry
from sglang_dspark.patches.registry import Mismatch
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import startup, upstream, upstream_check
from sglang_dspark.serving.diagnosis import Diagnosis, SeamReport


def look_at_seams(found: Diagnosis) -> None:
    """Check every seam, load all plugins as a server does, and report which seams are in place.

    Adds a report of each to `found`, and to its problems each fault that prevents a start.
    """
    device = startup.active_device()
    settings = found.config.get("values")  # None if the file is faulty, which is reported
    fixes = settings["upstream_fixes"]["value"] if settings else True
    seams, wanted = all_seams(), all_seams(upstream_fixes=fixes)
    if count := len(seams) - len(wanted):
        found.notes.append(f"upstream_fixes is false: {count} fixes of SGLang are not installed")
    if startup.switched_off() is not None:
        wanted = ()
    # An upgrade is prepared without a GPU: targets of CUDA seams can be read there too.
    devices = ("any", device, "cuda" if device == "cpu" else device)
    checks = {seam.name: registry.mismatch(seam) for seam in wanted if seam.device in devices}
    wrong = [each for each in checks.values() if each is not None]
    here = [str(each) for each in wrong if each.seam.device in ("any", device)]
    found.problems += here
    found.notes += [f"on a GPU: {each}" for each in wrong if str(each) not in here]
    if wanted and not here and not upstream_check.missing():
        _load_plugins(found)
    for seam in seams:
        state = _state(seam, device) if seam in wanted else "not installed"
        found.seams.append(_seam_report(seam, checks, state))


def _state(seam: Seam, device: str) -> str:
    if seam.device not in ("any", device):
        return "inert"
    if seam not in registry.installed:
        return "not installed"
    return "installed" if registry.took(seam) else "mismatch"


def _seam_report(seam: Seam, checks: dict[str, Mismatch | None], state: str) -> SeamReport:
    """Make the report of one seam. checks: by name, of the seams that were checked."""
    expected, wrong = registry.expectation(seam), checks.get(seam.name)
    found = expected if seam.name in checks else "not looked at"
    return SeamReport(
        name=seam.name,
        target=seam.target,
        kind=seam.kind,
        device=seam.device,
        expected=expected,
        found=wrong.found if wrong else found,
        signature_ok=wrong is None,
        state="mismatch" if wrong else state,
        why=seam.why,
        issue=seam.issue,
        drop_when=seam.drop_when,
    )


def _load_plugins(found: Diagnosis) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            upstream.load_plugins()
    except SystemExit:
        found.problems.append(said.getvalue().strip() or "a plugin ended the process")
