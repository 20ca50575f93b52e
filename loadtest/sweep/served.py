"""Configure a sweep of running servers from what they report, without a sweep file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.arms import Arm
from sglang_dspark.loadtest.servers.ask import Served
from sglang_dspark.loadtest.sweep.config import Comparison, SweepConfig, require_no_credentials

USERS = (1, 2, 4, 8)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_SCHEMES = ("http://", "https://")
_SCHEDULES = "DSPARK"


@dataclass(frozen=True)
class Address:
    """One `--url`. name: "" to name the arm by its algorithm."""

    name: str
    url: str


def parse_address(text: str) -> Address:
    """Read `URL` or `NAME=URL`. Raises DSparkError for anything else, and for credentials."""
    require_no_credentials(text)
    name, url = ("", text) if text.startswith(_SCHEMES) else _split(text)
    if not url.startswith(_SCHEMES):
        raise DSparkError(f"--url {text!r} is no address; write http://HOST:PORT or NAME=http://…")
    if name and not _NAME.fullmatch(name):
        raise DSparkError(
            f"--url {text!r}: an arm's name is of a-z, 0-9 and -, and begins with a letter or digit"
        )
    return Address(name, url.rstrip("/"))


def parse_users(text: str) -> list[int]:
    """Read `1,2,4,8`. Raises DSparkError unless they ascend."""
    try:
        users = [int(part) for part in text.split(",")]
    except ValueError:
        users = []
    if not users or users[0] < 1 or sorted(set(users)) != users:
        raise DSparkError(f"--concurrency {text!r}: write numbers of users, ascending, as 1,2,4,8")
    return users


def sweep_of(
    addresses: Sequence[Address], served: Sequence[Served]
) -> tuple[SweepConfig, list[Arm]]:
    """Build the default sweep of these servers, and its arms. served: one of each address.

    Raises DSparkError if they cannot be compared: different models, one server or name twice, or
    one that schedules and does not report what it verified.
    """
    _require_comparable(served)
    arms = [_arm(address, each) for address, each in zip(addresses, served, strict=True)]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise DSparkError(f"two servers are {name!r}; name them: --url NAME=URL")
    baseline = next((a.name for a in arms if a.drafter is None), names[0])
    others = [arm for arm in arms if arm.name != baseline]
    scheduled = [arm.name for arm in others if _schedules(arm)]
    first = next(iter([*scheduled, *(arm.name for arm in others)]), None)
    models = {arm.name: e.model for arm, e in zip(arms, served, strict=True) if e.other}
    here = not models and _has_template(served[0])
    config = SweepConfig(
        name="servers",
        arms=names,
        urls={arm.name: each.url for arm, each in zip(arms, served, strict=True)},
        models=models,
        baseline=baseline,
        compare=None if first is None else Comparison(over=first, under=baseline),
        target=served[0].tokenizer if here else served[0].model,
        device="cpu" if served[0].device == "cpu" else "cuda",
        api="completions" if here else "chat",
        concurrency=list(USERS),
    )
    return config, arms


def _split(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    return (name, url) if separator else ("", text)


def _require_comparable(served: Sequence[Served]) -> None:
    sglang = [each for each in served if not each.other]
    first = (sglang or served)[0]
    for number, each in enumerate(served):
        if each.url in [other.url for other in served[:number]]:
            raise DSparkError(f"--url names {each.url} twice; name each server once")
        for what, ours, theirs in (
            ("model", first.model, each.model),
            ("tokenizer", first.tokenizer, each.tokenizer),
        ):
            # Vendors name one model differently: the caller knows what they serve.
            if not each.other and _place(ours) != _place(theirs):
                raise DSparkError(
                    f"{first.url} serves the {what} {ours} and {each.url} {theirs}: arms of one "
                    "sweep share it; serve the same, or sweep them apart"
                )
        if each.algorithm == _SCHEDULES and not each.metrics:
            raise DSparkError(
                f"{each.url} drafts with {_SCHEDULES} and does not say how much it verifies; "
                "start it with --enable-metrics"
            )


def _place(name: str) -> str:
    """Return a folder's real path, so that two spellings are one; an id unchanged."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _has_template(served: Served) -> bool:
    """Return whether prompts can be rendered here (`workload.render`).

    Otherwise the server renders them in its chat interface, which streams no token ids.
    """
    return (Path(served.tokenizer) / "chat_template.jinja").is_file()


def _arm(address: Address, served: Served) -> Arm:
    name = address.name or re.sub("[^a-z0-9]+", "-", served.algorithm.lower()).strip("-")
    if served.other:
        return Arm(name=name or "other", about=f"{served.model}, another server at {served.url}")
    if not served.algorithm:
        return Arm(name=name or "plain", about=f"no speculation, at {served.url}")
    return Arm(
        name=name,
        about=f"{served.algorithm}, {served.drafts} drafts a step, at {served.url}",
        drafter=served.algorithm.lower(),
        arguments=[
            f"--speculative-algorithm={served.algorithm}",
            f"--speculative-num-draft-tokens={served.drafts + 1}",
        ],
    )


def _schedules(arm: Arm) -> bool:
    return f"--speculative-algorithm={_SCHEDULES}" in arm.arguments
