"""Choose a server's verification once, from configuration, variable and drafter.

    auto    (default) our scheduler: ragged verification, lengths by confidence
    static  every draft is verified
    off     SGLang's own choice, by SGLANG_RAGGED_VERIFY_MODE

SGLang (srt/speculative/ragged_verify.py) reads the variable while models load: a confidence
head is built only in the mode `compact`. So it is set here, before any process is spawned. A user
who sets the variable to another value than `compact` has chosen SGLang's own behaviour. Imports no
sglang.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.config import current_config

VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
COMPACT, STATIC = "compact", "static"


@dataclass(frozen=True)
class Choice:
    """ours: whether our scheduler decides. reason: the reason for it."""

    ours: bool
    reason: str


def choice() -> Choice:
    """Read the choice from configuration and variable, the same in every process of a server."""
    mode = current_config().schedule.mode
    named = os.environ.get(VARIABLE, "").strip()
    if mode != "auto":
        return Choice(False, f"schedule.mode is {mode}")
    if named not in ("", COMPACT):
        return Choice(False, f"{VARIABLE} is set to {named}")
    return Choice(True, "schedule.mode is auto")


def estimates_confidence(*, has_head: bool) -> bool:
    """Return whether drafts are scheduled by their draft probabilities, without a head."""
    return not has_head and choice().ours


def host_verifies_all() -> bool:
    """Return whether a CPU server verifies every draft instead of scheduling.

    Raises DSparkError for a choice that leaves verification to SGLang's own step.
    """
    chosen, named = choice(), os.environ.get(VARIABLE, "").strip()
    if chosen.ours:
        return False
    mode = current_config().schedule.mode
    if mode == STATIC or (mode == "auto" and named == STATIC):
        return True
    raise DSparkError(
        f"{chosen.reason}, which leaves verification to SGLang's own step; it has none for a CPU: "
        "use schedule.mode auto or static"
    )


def prepare(*, confidence_head: bool) -> None:
    """Set SGLang's variable for the processes to come; call before models load.

    confidence_head: whether SGLang builds the parts that the mode `compact` adds. On a CPU a
    drafter without a head needs none of them.
    """
    if current_config().schedule.mode == "static":
        os.environ[VARIABLE] = STATIC
    elif choice().ours and confidence_head:
        os.environ[VARIABLE] = COMPACT
