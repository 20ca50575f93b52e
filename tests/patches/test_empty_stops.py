"""Empty stops: as if they were not there, in every form a client may send."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dspark.patches.upstream_fixes import answer_stops
from tests.patches.hooked import put_in
from tests.patches.test_first_stop import request, token


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"stop": ""}, 3),
        ({"stop": [""]}, 3),
        ({"stop": []}, 3),
        ({"stop": ["", "b"]}, 2),
        ({"stop": "b"}, 2),
        ({"stop_regex": ""}, 3),
        ({"stop_regex": [""]}, 3),
        ({"stop_regex": ["", "b$"]}, 2),
    ],
)
def test_an_empty_stop_ends_no_answer(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], kept: int
) -> None:
    put_in(monkeypatch, answer_stops.SEAMS[1:2])
    req = request(max_new_tokens=3, **sampling)
    for word in ("a", "b", "user"):
        req.output_ids.append(token(word))
        req.update_finish_state()
        if req.finished():
            break
    assert len(req.output_ids_through_stop) == kept
