"""Name the fallbacks of a server: each is counted in `/metrics` and logged once.

No fallback costs an answer. `reason` of `sglang:dspark_fallbacks` is one of these names.
"""

from __future__ import annotations

from enum import Enum


class Fallback(Enum):
    """A fallback. meaning: the failure and its consequence, for docs/metrics.md."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Fallback:
        """Make a member whose value is its name in `/metrics`."""
        fallback = object.__new__(cls)
        fallback._value_ = name
        fallback.meaning = meaning
        return fallback

    DRAFTS_LOSE = "realised gain", "drafting was found to lose: a load decodes plainly"
    DRAFT_FAILED = (
        "draft failed",
        "a draft ended with an error: its step decodes plainly, and drafting rests for a while",
    )
    ACCEPTANCE_LOW = (
        "acceptance below minimum",
        "first drafts were accepted less often than `schedule.min_acceptance`: all steps decode "
        "plainly, and drafting is tried again seldom",
    )
    NO_CONFIDENCE = (
        "confidence not finite",
        "confidences of a step were NaN or infinite: those drafts count as certain to be rejected",
    )
    NO_TIME = (
        "step time impossible",
        "a step took no time or less by its clock: nothing is learned from it",
    )
    RESULT_LATE = (
        "result late",
        "a step's result came more than three steps late: plans were made without it",
    )
    RESULT_LOST = "result lost", "a step's result never came: nothing is learned from it"
    NO_HEAD = (
        "no confidence head",
        "a start with a drafter that has none: confidence is estimated from its draft "
        "probabilities",
    )
    STS_REFUSED = (
        "sts.json refused",
        "a start whose `sts.json` is another drafter's, or broken: confidence is calibrated online",
    )
    TIMES_REFUSED = (
        "step times refused",
        "a start whose cached step times are of something else, or broken: they are measured again",
    )
    TIMES_NOT_SAVED = (
        "step times not saved",
        "a start that cannot write its step times: the next start measures them again",
    )
