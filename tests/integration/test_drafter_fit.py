"""A served drafter with spoiled weights: one warning, one metric, plain decoding's output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.schedule.first_drafts import LEAST, LEAST_TO_STOP
from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_features import metric

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

USERS, TOKENS = 8, 40
WARNING = "the drafter does not fit the target"
OFF = "drafting is switched off"


@pytest.fixture(scope="module")
def spoiled(demo_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter with random matrices of its own size."""
    folder = tmp_path_factory.mktemp("spoiled")
    (folder / "config.json").write_bytes((demo_drafter / "config.json").read_bytes())
    weights, noise = load_file(demo_drafter / "model.safetensors"), torch.Generator()
    noise.manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() > 1:
            drawn = torch.randn(weight.shape, generator=noise) * weight.float().std()
            weights[name] = drawn.to(weight.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["guarded", pytest.param("minimum", marks=pytest.mark.slow)])
def misfit(
    request: pytest.FixtureRequest, pool: ServerPool, demo_target: Path, spoiled: Path
) -> Iterator[Served]:
    """With the defaults; and with a minimum of acceptance where each step would draft."""
    schedule = {"guarded": "{}", "minimum": "{threshold: 0.0, min_acceptance: 0.3}"}[request.param]
    config, name = pool.folder / f"{request.param}.yaml", f"misfit-{request.param}"
    config.write_text(f"schedule: {schedule}\n")
    flags = (*DSPARK_FLAGS, str(spoiled), "--max-running-requests", "16", "--enable-metrics")
    yield pool.start(name, demo_target, *flags, "--dspark-config", str(config))
    pool.stop(name)


def answers(server: Served, users: int = USERS) -> list[list[int]]:
    sampling = {"ignore_eos": True}
    found = server.generate_all(
        PROMPTS[:16], users, max_new_tokens=TOKENS, sampling_params=sampling
    )
    return [answer["output_ids"] for answer in found]


def few_of(line: str) -> int:
    """Return the first drafts that a line counts; at most one in 50 of them was accepted."""
    accepted, verified = re.findall(r"(\d+) of (\d+) first drafts were accepted", line)[0]
    assert 50 * int(accepted) <= int(verified)
    return int(verified)


def labelled(server: Served, name: str, label: str) -> float:
    rows = server.request("GET", "/metrics").text.splitlines()
    return sum(float(r.rsplit(" ", 1)[1]) for r in rows if r.startswith(name) and label in r)


def lines(server: Served, text: str) -> list[str]:
    return [line for line in server.log.splitlines() if text in line]


def test_it_is_logged_once_and_answers_as_plain_decoding(misfit: Served, plain: Served) -> None:
    expected = answers(plain)
    for _ in range(4):  # how much is drafted depends on the machine
        warned = bool(lines(misfit, WARNING))
        assert answers(misfit) == expected
        if warned and "misfit-guarded" in misfit.pool.servers:
            break  # a round after the warning, which was the only one
    (line,) = lines(misfit, WARNING)
    assert "sglang-dspark: " in line
    assert few_of(line) >= LEAST
    assert "eval --target TARGET --drafter DRAFTER" in line
    assert metric(misfit, "sglang:dspark_drafter_misfit") == 1
    stopped = lines(misfit, OFF)
    if "misfit-minimum" in misfit.pool.servers:
        (line,) = stopped
        assert few_of(line) >= LEAST_TO_STOP
        assert labelled(misfit, "sglang:dspark_steps_total", 'mode="off"') > 8
        before = metric(misfit, "sglang:dspark_admitted_drafts_total")
        answers(misfit)
        assert metric(misfit, "sglang:dspark_admitted_drafts_total") == before, "it drafts again"
    else:
        assert stopped == []


@pytest.mark.slow
def test_a_drafter_that_fits_is_not_logged(dspark: Served, plain: Served) -> None:
    """Two users at a time, again if need be: how much is drafted depends on the machine."""
    expected = answers(plain)
    for _ in range(6):
        assert answers(dspark, users=2) == expected
        accepted = labelled(dspark, "sglang:dspark_accepted_drafts_total", 'position="1"')
        if accepted > LEAST:
            break
    assert accepted > LEAST
    assert metric(dspark, "sglang:dspark_drafter_misfit") == 0
    assert lines(dspark, WARNING) == lines(dspark, OFF) == []
