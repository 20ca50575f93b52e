"""The attending tiny pair and its plain server, as the rehearsal has them, and a schedule in which
windows are cut by confidence alone, not by measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.serving import ServerPool
from tests.rehearsal.conftest import pair, plain, pool

__all__ = ["pair", "plain", "pool"]


@pytest.fixture(scope="session")
def by_confidence(pool: ServerPool) -> Path:
    """A server's configuration: a draft is verified where its survival is a half at least."""
    config = pool.folder / "by-confidence.yaml"
    config.write_text("schedule: {threshold: 0.5}\n")
    return config
