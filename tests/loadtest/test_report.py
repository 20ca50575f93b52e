"""The sweep's report: the page holds what the run says, loads nothing, and its model is right."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.report import page_model, page_reference
from sglang_dspark.loadtest.report.data import Run, model_of
from sglang_dspark.loadtest.report.page import make_report
from sglang_dspark.loadtest.report.page_model import MIX, LoadModel, Workload, mean_logits
from sglang_dspark.loadtest.report.page_reference import POLICIES, Choice, outcome
from sglang_dspark.loadtest.report.timeline import moments, shown_cells
from sglang_dspark.loadtest.sweep.run_dir import SUMMARY_FILE, read_summary, write
from tests.loadtest.made_run import (
    CONTEXT,
    GAMMA,
    SCALE,
    SURVIVAL,
    TABLE,
    USERS,
    make_run,
    true_model,
)

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CSP_BREACHES = "addEventListener('securitypolicyviolation', () => { window.breaches += 1; });"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return make_report(folder).html


class Page(HTMLParser):
    """Parse what a browser would load, and all ids and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.figures: list[dict[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loads += [given[n] for n in ("src", "srcset", "data", "action") if n in given]
        if "href" in given:
            self.loads.append(given["href"])
        self.loads += re.findall(r"url\(([^)]*)\)", " ".join(given.values()))
        self.ids += [given["id"]] if "id" in given else []
        if tag == "svg" and "figure" in given.get("class", ""):
            self.figures.append(given)


def test_the_page_says_what_the_run_says_and_fits(folder: Path, html: str) -> None:
    verdict = read_summary(folder).verdict
    assert "dspark" in verdict
    assert re.search(r'<p class="verdict" id="verdict">([^<]*)</p>', html).group(1) == verdict  # type: ignore[union-attr]
    assert len(html.encode()) < 3_000_000
    for text in ("0" * 40, "configs/sweep/made.yaml", "sha256 cdcdcdcdcdcdcdcd", "two cores"):
        assert text in html
    # A void cell is named, and a server's message cannot become markup.
    assert "is void: the client was late by 9.0 ms at p99" in html


def test_every_figure_has_a_title_and_a_caption_that_says_what_to_read(html: str) -> None:
    page = Page(html)
    stems = [figure["aria-labelledby"].split()[0].removesuffix("-title") for figure in page.figures]
    assert stems == ["frontier", "matched", "concurrency", "open-loop", "acceptance", "timeline"]
    for stem in stems:
        caption = re.search(rf'id="{stem}-caption">([^<]*)<', html)
        assert caption is not None
        assert len(caption.group(1)) > 80
    assert len(page.ids) == len(set(page.ids))


def test_simulated_acceptance_is_said_everywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", golden="qwen3-0.6b")
    found = make_report(run)
    titles = re.findall(r"<(?:h1|h3|span id=\"[a-z-]+-title\")>([^<]*)<", found.html)
    assert len(titles) > 10
    assert [title for title in titles if "simulated acceptance" not in title] == []
    assert read_summary(run).verdict.startswith("simulated acceptance: ")
    for drawn in found.figures:
        assert drawn.figure.get_suptitle() == "simulated acceptance"
    measured = make_report(make_run(tmp_path / "measured"))
    assert "simulated acceptance" not in measured.html
    assert [drawn.figure.get_suptitle() for drawn in measured.figures] == [""] * 6


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    page = Page(html)
    assert page.loads
    assert all(target.startswith(("#", "data:,")) for target in page.loads)
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)
    scripts = "".join(re.findall(r"<script>(.*?)</script>", html, re.DOTALL))
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|innerHTML|eval\(", scripts)


def test_the_model_is_found_again_from_the_run(folder: Path) -> None:
    model = model_of(Run.read(folder))
    assert model.scale == pytest.approx(SCALE, rel=0.01)
    assert model.speed_scale == pytest.approx(SCALE, rel=0.01)
    assert model.spread == pytest.approx(1.2, abs=0.05)
    eight = TABLE.seconds[2] + 8 * TABLE.per_context * CONTEXT
    assert model.tokens[8] == pytest.approx(eight)
    assert {n: w.survival for n, w in model.workloads.items()} == SURVIVAL
    assert [w.share for w in model.workloads.values()] == pytest.approx([1 / 3] * 3)


def test_without_a_fixed_arm_acceptance_is_that_of_what_was_verified(tmp_path: Path) -> None:
    make_run(tmp_path, arms=("plain", "mtp1", "dspark"), trials=1)
    model = model_of(Run.read(tmp_path))
    for name, expected in SURVIVAL.items():
        assert model.workloads[name].survival == pytest.approx(expected, abs=0.01)
    assert "roughly right" in model.acceptance_from
    assert model.spread_from.startswith("assumed")


def test_the_report_compares_the_model_with_what_was_measured(html: str) -> None:
    table = html[html.index("The model against what was measured") :]
    errors = [float(x) for x in re.findall(r"<td>([+-]\d+\.\d)%</td>", table)]
    assert len(errors) == 3 * len(USERS)  # plain, fixed gamma, dspark; MTP is not modelled
    assert max(map(abs, errors)) < 2


@pytest.mark.parametrize("spread", [0.0, 0.7, 3.0])
def test_mean_survival_is_the_measured_one_for_any_spread(spread: float) -> None:
    survival = SURVIVAL["code"]
    logits = mean_logits(survival, spread)
    around = page_model.deviation(np.arange(page_model.POPULATION), np.arange(8), spread).ravel()
    chances = page_model.sigmoid(logits[None, :] + around[:, None])
    assert chances.cumprod(axis=1).mean(axis=0) == pytest.approx(survival, abs=1e-9)


def test_fixed_lengths_by_hand() -> None:
    model = true_model()
    found = outcome(model, Choice("math", "fixed", 4, 2, 0.5, 0.0))
    seconds = model.tokens[12] + 4 * model.per_request + model.draft[3][2]
    tau = 1 + sum(SURVIVAL["math"][:2])
    assert found.tau == pytest.approx(tau, rel=1e-6)
    assert found.tokens_per_s == pytest.approx(SCALE * 4 * tau / seconds, rel=1e-6)


def test_policies_order_themselves_as_the_scheduler_promises() -> None:
    model = true_model()
    for requests in (1, 4, 8, 16):
        rates = {
            policy: outcome(model, Choice(MIX, policy, requests, GAMMA, 0.5, 1.2)).tokens_per_s
            for policy in POLICIES
        }
        assert rates["dspark"] > 0.99 * max(rates["plain"], rates["fixed"])
    assert rates["fixed"] < 0.8 * rates["plain"]  # what 16 users make of verifying everything


def test_a_rising_spread_is_found_in_what_the_scheduler_accepts() -> None:
    truth = true_model(2.0)
    seen = []
    for requests in (2, 8):
        found = outcome(truth, Choice(MIX, "dspark", requests, GAMMA, 0.5, 2.0))
        drafts = 1000 * sum(found.admitted)
        accepted = 1000 * sum(found.accepted)
        seen.append(page_reference.Selection(requests, drafts, accepted))
    assert page_reference.fitted_spread(true_model(0.5), seen) == pytest.approx(2.0, abs=0.03)
    poor = [replace(each, accepted=0.5 * each.accepted) for each in seen]
    assert page_reference.fitted_spread(truth, poor) == 0
    perfect = [replace(each, accepted=each.verified) for each in seen]
    assert page_reference.fitted_spread(truth, perfect) is None


def choices() -> list[Choice]:
    """Every policy and workload, loads and parameters of all kinds."""
    return [
        Choice(workload, policy, requests, length, threshold, spread)
        for policy in POLICIES
        for workload, requests, length, threshold, spread in (
            (MIX, 1, 1, 0.5, 1.2),
            (MIX, 3, 2, 0.0, 0.0),
            (MIX, 16, 3, 0.8, 2.5),
            ("math", 5, 3, 0.3, 4.0),
            ("chat", 8, 2, 0.65, 0.6),
        )
    ]


def models() -> list[LoadModel]:
    """The made machine, and one of tiers whose draft costs the same at every depth."""
    smooth = true_model()
    tiers = tuple(0.02 + 0.015 * math.ceil(b / 12) for b in range(len(smooth.tokens)))
    level = tuple((-0.001, 0.004, 0.004, 0.004) for _ in smooth.draft)
    never = {"chat": Workload(0.3, (0.5, 0.0, 0.0), 10), "math": Workload(0.7, (1.0, 0.9, 0.9), 10)}
    return [smooth, replace(smooth, tokens=tiers, draft=level, workloads=never)]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_scripts_compute_what_python_does() -> None:
    script = (Path(page_model.__file__).parent / "page_model.js").read_text()
    script += """
        const input = JSON.parse(require("fs").readFileSync(0));
        const all = input.models.map((m) => {
          prepared.clear();
          return input.choices.map((c) => outcome(m, c));
        });
        console.log(JSON.stringify(all));
    """
    given = {
        "models": [model.as_json() for model in models()],
        "choices": [asdict(choice) for choice in choices()],
    }
    done = subprocess.run(
        [str(NODE), "-e", script], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for model, row in zip(models(), json.loads(done.stdout), strict=True):
        for choice, found in zip(choices(), row, strict=True):
            expected = asdict(outcome(model, choice))
            for name, value in found.items():
                assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-12), (choice, name)


def in_browser(html: str, script: str, folder: Path) -> dict[str, Any]:
    """Return `result` after `script` runs in the page, in headless Chromium."""
    counted = html.replace("<head>", f"<head><script>window.breaches = 0; {CSP_BREACHES}</script>")
    report = (
        "<script>const result = {}; try {" + script + "} catch (e) { result.error = String(e); }"
        "result.breaches = window.breaches;"
        "const out = document.createElement('pre'); out.id = 'test-result';"
        "out.textContent = JSON.stringify(result); document.body.append(out);</script>"
    )
    (folder / "page.html").write_text(counted + report)
    done = subprocess.run(
        [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu",
         "--disable-dev-shm-usage",
         f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--dump-dom", (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    found = re.search(r'<pre id="test-result">([^<]*)</pre>', done.stdout)
    assert found is not None, done.stderr[-500:]
    return json.loads(unescape(found.group(1)))  # type: ignore[no-any-return]


PLAY = """
    const move = (id, value) => {
      const input = document.getElementById(id);
      input.value = value;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    };
    const rows = () => Object.fromEntries([...document.querySelectorAll("#policy-table tbody tr")]
      .map((row) => [row.dataset.policy, [...row.cells].map((cell) => cell.textContent)]));
    const line = (policy) => document
      .querySelector(`#chart-throughput polyline[data-policy=${policy}]`).getAttribute("points");
    const ring = () => document.querySelector("#chart-frontier .ring").getAttribute("cx");
    const paper = () => getComputedStyle(document.body).backgroundColor;
    result.start = { rows: rows(), dspark: line("dspark"), fixed: line("fixed"), ring: ring() };
    move("requests", 8); move("length", 1);
    result.moved = { rows: rows(), fixed: line("fixed"), dspark: line("dspark"), ring: ring(),
                     told: document.getElementById("readout").textContent };
    document.querySelector("input[name=workload][value=chat]").click();
    document.querySelector("input[name=policy][value=algorithm1]").click();
    result.chat = { rows: rows(), told: document.getElementById("readout").textContent };
    const controls = [...document.querySelectorAll("#controls input")];
    result.named = controls.every((input) => input.labels.length > 0 && input.tabIndex >= 0);
    result.kinds = [...new Set(controls.map((input) => input.type))].sort();
    result.dots = document.querySelectorAll("#chart-frontier circle[data-arm]").length;
    const button = document.getElementById("theme");
    button.click(); result.dark = paper(); button.click(); result.light = paper();
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_in_a_browser(folder: Path, html: str, tmp_path: Path) -> None:
    found = in_browser(html, PLAY, tmp_path)
    assert "error" not in found
    assert found["breaches"] == 0  # the page's own policy forbids every request
    start, moved, chat = found["start"], found["moved"], found["chat"]
    assert start["ring"] != moved["ring"]
    assert start["fixed"] != moved["fixed"]  # another fixed length is another curve,
    assert start["dspark"] == moved["dspark"]  # and none of DSpark's business
    model = model_of(Run.read(folder))
    for workload, rows, length in ((MIX, moved["rows"], 1), ("chat", chat["rows"], 1)):
        for policy, cells in rows.items():
            truth = outcome(model, Choice(workload, policy, 8, length, 0.5, model.spread))
            assert cells[1:3] == [f"{truth.tokens_per_s:.1f}", f"{truth.speed:.1f}"]
            assert cells[4:6] == [f"{truth.tau:.2f}", f"{truth.drafts:.2f}"]
    assert "8 users on the mix" in moved["told"]
    assert chat["told"].startswith("Algorithm 1")
    assert found["named"]
    assert found["kinds"] == ["radio", "range"]
    assert found["dots"] == 4 * len(USERS)
    assert found["dark"] != found["light"]


def test_the_timeline_is_the_growth_between_readings(folder: Path) -> None:
    cells = shown_cells(Run.read(folder))
    assert [(c.arm, c.loop, c.level) for c in cells] == [
        ("dspark", "closed", 1), ("dspark", "closed", 8), ("dspark", "open", 1.5)
    ]  # fmt: skip
    truth = outcome(true_model(), Choice(MIX, "dspark", 8, GAMMA, 0.5, 1.2))
    course = moments(cells[1].timeline)
    assert [moment.at for moment in course] == [i + 0.5 for i in range(10)]
    for moment in course:
        assert moment.budget == pytest.approx(8 * truth.drafts)
        assert moment.skipped == pytest.approx(truth.skipped, abs=1e-9)
        assert moment.tokens_per_s == pytest.approx(240)


def test_a_run_without_step_times_says_so_and_its_texts_stay_texts(tmp_path: Path) -> None:
    make_run(tmp_path, tables=False, trials=1)
    summary = read_summary(tmp_path)
    nasty = "</script><script>alert(1)</script>"
    write(tmp_path / SUMMARY_FILE, summary.model_copy(update={"verdict": nasty, "notes": [nasty]}))
    html = make_report(tmp_path).html
    assert "no arm of the run kept its measured step times" in html
    assert 'id="controls"' not in html
    assert "Throughput against speed per user" in html
    assert nasty not in html
    assert html.count("<script") == 1


def test_a_single_trial_without_a_scheduler_can_be_reported(tmp_path: Path) -> None:
    make_run(tmp_path, arms=("plain", "mtp1"), trials=1)
    html = make_report(tmp_path).html
    assert "one trial is too few to tell" in html
    assert "no winner" in html
    assert 'id="timeline"' not in html


def test_the_command_writes_page_and_figures(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "load.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "load.html").read_text().startswith("<!doctype html>")
    pictures = sorted(path.name for path in (tmp_path / "load").iterdir())
    assert "frontier.png" in pictures
    assert len(pictures) == 6
    assert all((tmp_path / "load" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)


def test_what_is_no_sweep_is_refused(folder: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([str(tmp_path)], "name a sweep's folder"),
        ([], "a sweep's folder, --drafters, --intervals or --records"),
        ([str(folder), "--drafters"], "a sweep's folder, --drafters, --intervals or --records"),
    ):
        with pytest.raises(DSparkError, match=said):
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    shutil.copytree(folder, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "cells")
    with pytest.raises(DSparkError, match="no cell that counts"):
        make_report(tmp_path / "empty")


def test_goodput_of_every_arm_is_shown(folder: Path, html: str) -> None:
    rows = set(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td><td>", html))
    levels = read_summary(folder).slas
    assert html.count("<h3>Goodput under the service level: ") == len(levels) > 0
    for level in levels:
        for arm in level.arms:
            served = arm.kind != "infeasible"
            figures = (f"{arm.tokens_per_s:.1f}", f"{arm.load:.3g}") if served else ("-", "-")
            assert (arm.arm, *figures) in rows
    assert "Goodput is the highest total throughput" in html
