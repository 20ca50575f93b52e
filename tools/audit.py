"""List known vulnerabilities of the installed packages by pip-audit; a warning, never a failure.

    .venv/bin/python -m tools.audit

pip-audit runs in its own environment (`uv tool run`), so that the audited one is unchanged. It
queries PyPI; an index that only serves packages has no advisories, which is logged in one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 50
UV = Path(sys.executable).with_name("uv")


def command(packages: str) -> list[str]:
    """Return the pip-audit command for a folder of installed packages, killed at the time limit."""
    audit = ["pip-audit", "--path", packages, "--format", "json", "--progress-spinner", "off"]
    return ["timeout", str(LIMIT_S), str(UV), "tool", "run", "--quiet", *audit]


def ask(words: Sequence[str]) -> list[str]:
    """Run the command and return the lines to print."""
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        return [f"nothing was audited: {words[0]} does not run ({error.strerror})"]
    if done.returncode == 124:
        return [f"nothing was audited: no answer within {LIMIT_S} s"]
    if done.returncode == 127:
        return ["nothing was audited: uv, which runs pip-audit, is not installed here"]
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return [f"nothing was audited: the advisory service was not reached ({said[-1][:200]})"]
    return list(findings(dependencies))


def findings(dependencies: Sequence[dict[str, Any]]) -> Iterator[str]:
    """List pip-audit's findings, package by package, as lines."""
    known = [each for each in dependencies if "vulns" in each]
    if not known:
        count = len(dependencies)
        yield f"nothing was audited: the index has no advisories on any of {count} packages"
        return
    faulty = [each for each in known if each["vulns"]]
    yield f"{len(known)} of {len(dependencies)} packages audited, {len(faulty)} with known faults"
    for each in faulty:
        for fault in each["vulns"]:
            fixed = ", ".join(fault["fix_versions"]) or "no version yet"
            yield f"{each['name']} {each['version']}: {fault['id']}, fixed in {fixed}"


if __name__ == "__main__":
    for line in ask(command(sysconfig.get_path("purelib"))):
        print(f"audit: {line}")
