"""New weights in a running server: the target's are taken, the drafter's stay, int8 refuses.

The targets are tables, so it is known which of them answered; the drafter knows one table, so its
accepted drafts tell whether it is still itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("weight-updates")]
TOKENS = 24


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_models.build(tmp_path_factory.mktemp("other"), seed=1)


def start(pool: ServerPool, pair: TinyPair, weights: str) -> Served:
    config = pool.folder / f"updated-{weights}.json"
    config.write_text(json.dumps({"cpu": {"weights": weights}, "schedule": {"mode": "static"}}))
    flags = (*DSPARK_FLAGS, str(pair.drafter), "--dspark-config", str(config))
    return pool.start(f"updated-{weights}", pair.target, *flags)


def followed(pair: TinyPair, first: int) -> list[int]:
    """Return the greedy tokens of a table after a token."""
    tokens = [first]
    for _ in range(TOKENS):
        tokens.append(int(pair.logits[tokens[-1]].argmax()))
    return tokens[1:]


def update(server: Served, target: Path, **fields: str) -> dict[str, object]:
    server.flush_cache()  # waits for the last answer's request, beside which an update fails
    body = {"model_path": str(target), **fields}
    found: dict[str, object] = server.request("POST", "/update_weights_from_disk", json=body).json()
    return found


def answers(server: Served, pair: TinyPair) -> float:
    """Drafts accepted a step, of answers that are the table's."""
    drafts = steps = 0
    for first in (10, 20, 30):
        sampling = {"ignore_eos": True}
        answer = server.generate([first], max_new_tokens=TOKENS, sampling_params=sampling)
        assert answer["output_ids"] == followed(pair, first)
        drafts += answer["meta_info"]["spec_num_correct_drafts"]
        steps += answer["meta_info"]["spec_verify_ct"]
    return drafts / steps


def test_the_target_takes_new_weights_and_the_drafter_keeps_its_own(
    pool: ServerPool, tiny: TinyPair, other: TinyPair
) -> None:
    server = start(pool, tiny, "float32")
    before = answers(server, tiny)
    assert before > 1
    for pair, most in ((other, before / 2), (tiny, before)):
        updated = update(server, pair.target)
        assert updated["success"] is True, updated
        assert answers(server, pair) <= most
    assert answers(server, tiny) == before
    for path, fields, why in (
        (tiny.target, {"load_format": "nope"}, "is not one of auto"),
        (tiny.drafter, {}, "only the target's weights can be updated"),
    ):
        refused = update(server, path, **fields)
        assert refused["success"] is False
        assert why in str(refused["message"])
    assert answers(server, tiny) == before


def test_int8_weights_are_not_exchanged_and_the_server_goes_on(
    pool: ServerPool, noisy: TinyPair, other: TinyPair
) -> None:
    server = start(pool, noisy, "int8")
    assert "are kept as int8" in server.log
    first = server.generate([10], max_new_tokens=TOKENS)["output_ids"]
    answer = update(server, other.target)
    assert answer["success"] is False
    assert "start it with the new ones" in str(answer["message"])
    server.flush_cache()
    assert server.generate([10], max_new_tokens=TOKENS)["output_ids"] == first
