"""Test that a server listens on loopback alone, requires its keys, and never prints them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from sglang_dspark.patches.upstream_fixes.key_redaction import MASK
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

KEY, ADMIN = secrets.token_hex(16), secrets.token_hex(16)
BODY = {"text": "Once upon", "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def guarded(pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    """The tiny pair behind two keys, as talkative as it gets; one key as `--flag=value`."""
    keys = ("--api-key", KEY, f"--admin-api-key={ADMIN}")
    talk = ("--log-level", "debug", "--log-requests", "--log-requests-level", "3")
    yield pool.start(
        *("tiny-keys", noisy.target, *DSPARK_FLAGS, str(noisy.drafter)),
        *("--enable-metrics", *keys, *talk),
    )
    pool.stop("tiny-keys")


def test_the_key_is_asked_for(guarded: Served) -> None:
    right, wrong = ({"authorization": f"Bearer {key}"} for key in (KEY, KEY[::-1]))
    assert guarded.request("POST", "/generate", json=BODY).status_code == 401
    assert guarded.request("POST", "/generate", json=BODY, headers=wrong).status_code == 401
    assert guarded.request("POST", "/generate", json=BODY, headers=right).status_code == 200
    assert guarded.request("GET", "/metrics").status_code == 200, "Prometheus needs no key"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_who_asks_the_server_about_itself_learns_no_key(guarded: Served, path: str) -> None:
    answer = guarded.request("GET", path, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    told = answer.json()
    assert told["api_key"] == told["admin_api_key"] == MASK
    assert told["launch_command"].count(MASK) == 2
    assert [each["api_key"] for each in told["internal_states"]] == [MASK]
    assert not [key for key in (KEY, ADMIN) if key in answer.text]


def test_the_log_has_no_key(guarded: Served) -> None:
    """It is looked at last, when requests with a right key and a wrong one have been logged."""
    headers = {"authorization": f"Bearer {KEY}"}
    assert guarded.request("POST", "/generate", json=BODY, headers=headers).status_code == 200
    (settings,) = (line for line in guarded.log.splitlines() if "server_args={" in line)
    assert f"'api_key': '{MASK}'" in settings
    assert f"'admin_api_key': '{MASK}'" in settings
    assert "Once upon" in guarded.log, "requests are logged"
    assert not [key for key in (KEY, ADMIN, KEY[::-1]) if key in guarded.log]


def test_nothing_listens_beyond_loopback(guarded: Served) -> None:
    """None of its processes: not for HTTP, not for its ranks to meet."""
    found = guarded.listens()
    assert ("127.0.0.1", guarded.process.spec.port) in found
    assert len(found) > 1
    assert {address for address, _ in found} == {"127.0.0.1"}
