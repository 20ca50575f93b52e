"""A target whose layers keep a state (GDN, as Qwen3.5), served: answers are plain decoding's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.conftest import all_verified
from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, ServerPool
from tests.integration.test_greedy_equal import check_equal

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("architectures")]


def test_greedy_tokens_are_equal(pool: ServerPool, tmp_path: Path) -> None:
    pair = tiny_models.build_architecture(tmp_path, "qwen3_5")
    flags = ("--max-running-requests", "8", "--chunked-prefill-size", "32")
    plain = pool.start("qwen3_5-plain", pair.target, *flags)
    drafting = all_verified(pool, "qwen3_5-dspark", pair.target, pair.drafter, *flags)
    assert check_equal(plain, drafting, 4, PROMPTS[::4], 32) > 0
    pool.stop("qwen3_5-dspark")
    config = pool.folder / "short-windows.yaml"
    config.write_text("schedule: {threshold: 0.5}\n")  # of which the drafter's second is the last
    short = pool.start(
        "qwen3_5-short", pair.target, *DSPARK_FLAGS, str(pair.drafter), *flags,
        "--dspark-config", str(config),
    )  # fmt: skip
    assert check_equal(plain, short, 4, PROMPTS[::4], 32) > 0
