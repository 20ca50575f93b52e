"""Generated mutants that no test can kill, each with the argument why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
