"""Limits of OpenAI's interfaces: what was asked for, and errors without the server's paths."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

from sglang_dspark.patches.upstream_fixes import other_apis
from tests.patches.hooked import put_in


@pytest.mark.parametrize(
    ("asked", "default", "limit"),
    [(4, None, 4), (1, None, 1), (4, 3, 3), (None, None, None), (None, 7, 5)],
)
def test_all_tokens_are_given(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, default: int | None, limit: int | None
) -> None:
    put_in(monkeypatch, other_apis.SEAMS[1:])
    request = ResponsesRequest(input="Hi", max_output_tokens=asked)
    assert request.to_sampling_params(default)["max_new_tokens"] == limit


def test_an_invalid_body_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, other_apis.SEAMS[1:])
    where = {"file": "/srv/http_server.py", "line": 7, "function": "f", "path": "POST /v1"}
    wrong = {"loc": ("body", "max_tokens"), "msg": "max_tokens must be positive"}
    told = str(RequestValidationError([wrong], endpoint_ctx=where))  # type: ignore[arg-type]
    assert "max_tokens must be positive" in told
    assert "/srv" not in told
