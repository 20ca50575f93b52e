"""The choice of verification: by our configuration, SGLang's variable, the drafter's head."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import mode
from sglang_dspark.serving.config import CONFIG_VARIABLE


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets schedule.mode and the variable as a user would."""

    def ask(configured: str | None, named: str | None = None) -> None:
        monkeypatch.setenv(CONFIG_VARIABLE, "")
        if configured is not None:
            file = tmp_path / f"{configured}.yaml"
            file.write_text(f"schedule:\n  mode: {configured}\n")
            monkeypatch.setenv(CONFIG_VARIABLE, str(file))
        monkeypatch.setenv(mode.VARIABLE, named or "")  # set first, so that it is put back
        if named is None:
            monkeypatch.delenv(mode.VARIABLE)

    return ask


@pytest.mark.parametrize(
    ("configured", "named", "ours", "then"),
    [
        (None, None, True, "compact"),
        (None, "compact", True, "compact"),
        (None, "static", False, "static"),
        (None, "cap-accept", False, "cap-accept"),
        ("auto", None, True, "compact"),
        ("static", None, False, "static"),
        ("static", "compact", False, "static"),
        ("off", None, False, None),
        ("off", "compact", False, "compact"),
    ],
)
def test_a_drafter_with_a_head(asked, configured, named, ours: bool, then) -> None:
    asked(configured, named)
    assert mode.choice().ours is ours
    mode.prepare(confidence_head=True)
    assert os.environ.get(mode.VARIABLE) == then
    assert mode.choice().ours is ours  # the processes to come decide alike


def test_without_a_head_sglang_builds_none_and_we_schedule_all_the_same(asked) -> None:
    asked(None)
    mode.prepare(confidence_head=False)
    assert mode.VARIABLE not in os.environ
    assert mode.choice().ours


@pytest.mark.parametrize(
    ("configured", "named", "estimated"),
    [
        (None, None, True),
        (None, "compact", True),
        (None, "static", False),
        ("static", None, False),
        ("off", None, False),
        ("off", "compact", False),
    ],
)
def test_confidence_is_estimated_where_we_schedule_and_there_is_no_head(
    asked, configured, named, estimated: bool
) -> None:
    asked(configured, named)
    assert mode.estimates_confidence(has_head=False) is estimated
    assert not mode.estimates_confidence(has_head=True)


def test_the_reason_names_what_the_user_set(asked) -> None:
    asked("static")
    assert "schedule.mode is static" in mode.choice().reason
    asked(None, "static")
    assert "SGLANG_RAGGED_VERIFY_MODE is set to static" in mode.choice().reason


@pytest.mark.parametrize(
    ("configured", "named", "all_of_them"),
    [
        (None, None, False),
        ("auto", "compact", False),
        (None, "static", True),
        ("static", None, True),
        ("static", "compact", True),
        ("static", "cap-accept", True),
    ],
)
def test_a_cpu_schedules_or_verifies_all(asked, configured, named, all_of_them: bool) -> None:
    asked(configured, named)
    assert mode.host_verifies_all() is all_of_them


@pytest.mark.parametrize(
    ("configured", "named", "says"),
    [
        ("off", None, "schedule.mode is off"),
        ("off", "static", "schedule.mode is off"),
        (None, "cap-accept", "SGLANG_RAGGED_VERIFY_MODE is set to cap-accept"),
    ],
)
def test_a_cpu_refuses_sglangs_own_step(asked, configured, named, says: str) -> None:
    asked(configured, named)
    with pytest.raises(DSparkError, match=f"^{says}, which .* none for a CPU: use schedule.mode"):
        mode.host_verifies_all()
