"""Keys are masked wherever they stand, and what has none stays as it is.

That SGLang's own texts go through here is the business of tests/integration/test_security.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark.patches.upstream_fixes.key_redaction import (
    KEYS,
    MASK,
    hide_in_command,
    hide_in_settings,
)


def test_settings_keep_their_fields_and_lose_their_keys() -> None:
    given = {"api_key": "one", "admin_api_key": "two", "ssl_keyfile_password": "three", "port": 1}
    assert hide_in_settings(given, None) == {**dict.fromkeys(KEYS, MASK), "port": 1}
    assert given["api_key"] == "one", "the server goes on with its own"


def test_a_key_that_is_not_set_is_seen_to_be_none() -> None:
    given: dict[str, Any] = {"api_key": None, "admin_api_key": "", "ssl_keyfile_password": None}
    assert hide_in_settings(given, None) == given


def command(text: str, **keys: str) -> str:
    args = SimpleNamespace(**{**dict.fromkeys(KEYS), **keys}, _launch_command=text)
    hide_in_command(args, [])
    return str(args._launch_command)


@pytest.mark.parametrize("form", ["--api-key {}", "--api-key={}", "--api-k {}", "-x {} --port 1"])
def test_a_command_shows_no_key_however_it_was_given(form: str) -> None:
    assert command(form.format("s3cret"), api_key="s3cret") == form.format(MASK)


def test_a_key_that_is_a_part_of_another_gives_nothing_of_it_away() -> None:
    shown = command("--api-key abc --admin-api-key abcdef", api_key="abc", admin_api_key="abcdef")
    assert shown == f"--api-key {MASK} --admin-api-key {MASK}"


def test_a_command_without_keys_stays_as_it_is() -> None:
    assert command("--model-path x --port 1") == "--model-path x --port 1"


def test_sglang_has_the_settings_that_are_hidden() -> None:
    """Were one renamed, its key would be shown again; and a new one would be."""
    from sglang.srt.server_args import ServerArgs, record_fields

    names = {field.name for field in record_fields(ServerArgs)}
    words = ("api_key", "password", "secret")
    assert {name for name in names if any(word in name for word in words)} == set(KEYS)
