"""Streaming sessions under DSPARK: a turn is answered as the whole conversation would be.

The target attends, so a slot of the last turn without its keys and values changes the answer.
"""

from __future__ import annotations

import json

import pytest

from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("session-turns")]
TURNS = [[11, 12, 13], [21, 22], [31], [41, 42, 43, 44], [51]]


@pytest.fixture(scope="module")
def server(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Served:
    pair = tiny_models.build_attending(tmp_path_factory.mktemp("attending"))
    config = pool.folder / "sessions.json"
    config.write_text(json.dumps({"schedule": {"mode": "static"}}))
    flags = (*DSPARK_FLAGS, str(pair.drafter), "--dspark-config", str(config))
    flags = (*flags, "--enable-streaming-session", "--enable-mixed-chunk")
    return pool.start("sessions", pair.target, *flags)


@pytest.mark.parametrize("tokens", [1, 5, 8, 16])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_turn_is_answered_as_the_whole_conversation(
    server: Served, tokens: int, penalty: float
) -> None:
    wanted = {"capacity_of_str_len": 0, "streaming": True}
    session = {"id": server.request("POST", "/open_session", json=wanted).json()}
    sampling = {"ignore_eos": True, "frequency_penalty": penalty}
    said: list[int] = []
    for turn in TURNS:
        asked = {"max_new_tokens": tokens, "sampling_params": sampling}
        answer = server.generate(turn, session_params=session, **asked)["output_ids"]
        said += turn
        assert answer == server.generate(said, **asked)["output_ids"]
        said += answer
    server.request("POST", "/close_session", json={"session_id": session["id"]})


def test_mixed_chunks_are_off_and_it_is_said(server: Served) -> None:
    assert "sglang-dspark: off: --enable-mixed-chunk: penalties" in server.log
    found = server.request("GET", "/server_info").json()
    assert found["enable_mixed_chunk"] is False
