"""Starts with something wrong: the server serves and says so, or refuses in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.loadtest.servers.server import ServerSpec
from sglang_dspark.serving.fallbacks import Fallback
from tests.drafter.helpers import strip_head
from tests.faults.conftest import Note, start_live
from tests.faults.live import FLAGS, Live, Outcome
from tests.integration import tiny_models
from tests.integration.serving import CPU_FLAGS, DSPARK_FLAGS, HOST, ServerPool, run_to_the_end
from tests.integration.test_bad_startup import drop_weight, refused, truncate
from tests.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("faults")]

SHIPPED = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dspark"
TIME_LIMIT_S = 240.0
Breakage = Callable[[Path], None]


@dataclass(frozen=True)
class BadStart:
    """fault, happens: for the page. breaks: the cache of the live server, or a copy of its
    drafter. fallback: what is counted. says: the line of the log."""

    fault: str
    breaks: Breakage
    happens: str
    fallback: Fallback
    says: str
    cache: bool = True


def kept_table(cache: Path) -> Path:
    """The step times in a cache."""
    (path,) = (cache / "sglang-dspark" / "costs").glob("*.json")
    return path


def of_another(**key: Any) -> Breakage:
    """The kept step times were measured under another key."""

    def change(cache: Path) -> None:
        path = kept_table(cache)
        table = json.loads(path.read_text())
        table["key"] |= key
        rows = [row[: table["key"]["gamma"] + 1] for row in table["draft_seconds"]]
        path.write_text(json.dumps({**table, "draft_seconds": rows}))

    return change


def cut(cache: Path) -> None:
    path = kept_table(cache)
    path.write_bytes(path.read_bytes()[:100])


def unwritable(cache: Path) -> None:
    """For root too: a file stands where the folder of step times should be."""
    shutil.rmtree(cache / "sglang-dspark" / "costs")
    (cache / "sglang-dspark" / "costs").write_text("")


def foreign_sts(drafter: Path) -> None:
    shutil.copyfile(SHIPPED / "sts.json", drafter / "sts.json")


AGAIN = "they are measured again"
BAD = {
    "device": BadStart(
        "step times of another device",
        of_another(device="another processor"),
        AGAIN,
        Fallback.TIMES_REFUSED,
        "was measured elsewhere (device:",
    ),
    "model": BadStart(
        "step times of another model",
        of_another(model="another target"),
        AGAIN,
        Fallback.TIMES_REFUSED,
        "was measured elsewhere (model:",
    ),
    "gamma": BadStart(
        "step times for another gamma",
        of_another(gamma=3),
        AGAIN,
        Fallback.TIMES_REFUSED,
        "was measured elsewhere (gamma:",
    ),
    "corrupt cache": BadStart(
        "the file of step times is cut off",
        cut,
        AGAIN,
        Fallback.TIMES_REFUSED,
        "a new measurement replaces it",
    ),
    "unwritable cache": BadStart(
        "the folder of step times cannot be written",
        unwritable,
        "they are measured, and again at the next start",
        Fallback.TIMES_NOT_SAVED,
        "cannot write step times to",
    ),
    "foreign sts.json": BadStart(
        "`sts.json` of another drafter",
        foreign_sts,
        "confidence is calibrated online from the identity",
        Fallback.STS_REFUSED,
        "was fitted to another drafter",
        cache=False,
    ),
    "no head": BadStart(
        "a drafter without a confidence head",
        strip_head,
        "confidence is estimated from its draft probabilities",
        Fallback.NO_HEAD,
        "the drafter has no confidence head",
        cache=False,
    ),
}
QUICK = ("device",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BAD]
)
def test_a_start_that_falls_back(
    pool: ServerPool, pair: tiny_models.TinyPair, live: Live, note: Note, tmp_path: Path, name: str
) -> None:
    bad = BAD[name]
    broken = tmp_path / "broken"
    shutil.copytree(live.folder / "cache" if bad.cache else pair.drafter, broken)
    bad.breaks(broken)
    cache = {"XDG_CACHE_HOME": str(broken)} if bad.cache else {}
    used = pair if bad.cache else replace(pair, drafter=broken)
    started = start_live(pool, "bad-start", used, live.expected_long, **cache)
    try:
        ready = started.served.process.ready_after or 0.0
        assert started.log_count(bad.says) == 1
        recovered = ready + started.recovered()
        assert started.fallbacks(bad.fallback) == 1
        assert started.count("sglang:dspark_fallbacks_total") == 1, "it fell back from more"
        started.lossless()
        assert started.count("sglang:dspark_accepted_drafts_total") > 0
        started.at_rest()
    finally:
        pool.stop("bad-start")
    counted = f"`{bad.fallback.value}`"
    note(Outcome(f"a start with {bad.fault}", bad.happens, counted, recovered, 0, 1))


def not_a_number(drafter: Path) -> None:
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    tensors["markov_head.markov_w2.weight"][7, 3] = torch.nan
    save_file(tensors, file, {"format": "pt"})


REFUSED: dict[str, tuple[str, Breakage, str]] = {
    "truncated": ("a drafter whose weights are cut off", truncate, "is truncated or corrupt"),
    "NaN": (
        "a drafter with a weight that is NaN",
        not_a_number,
        "markov_head.markov_w2.weight holds NaN or infinite values",
    ),
    "head": (
        "a drafter that lacks its confidence head's weights",
        drop_weight("confidence_head.proj.weight"),
        "lacks the weight confidence_head.proj.weight",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_start_that_is_refused(
    pair: tiny_models.TinyPair, note: Note, tmp_path: Path, name: str
) -> None:
    fault, breaks, says = REFUSED[name]
    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)
    breaks(drafter)
    flags = (*CPU_FLAGS, *DSPARK_FLAGS, str(drafter), *FLAGS)
    spec = ServerSpec("refused", pair.target, free_ports(), flags, HOST)
    ended = run_to_the_end(spec, dict(os.environ), TIME_LIMIT_S)
    refused(ended, says)
    happens = "the server refuses to start, in one line"
    note(Outcome(f"a start with {fault}", happens, f"`{says}`", ended.seconds, 0, 0))
