"""Parts of the sweep's report: tiles, labels, colours, what is verified, and its use by hand."""

from __future__ import annotations

import csv
import io
import re
from html import unescape
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.transforms import Bbox

from sglang_dspark.loadtest.report import data as report_data
from sglang_dspark.loadtest.report.data import Run, verified_drafts
from sglang_dspark.loadtest.report.figures import Drawn, draw_all
from sglang_dspark.loadtest.report.page import make_report
from sglang_dspark.loadtest.report.page_model import MIX
from sglang_dspark.loadtest.report.page_reference import Choice, outcome
from sglang_dspark.loadtest.report.tables import accepted_positions
from sglang_dspark.loadtest.report.tiles import tiles
from sglang_dspark.loadtest.sweep.run_dir import SUMMARY_FILE, Level, read_summary, write
from tests.loadtest.made_run import GAMMA, SURVIVAL, USERS, make_run, true_model
from tests.loadtest.test_report import CHROMIUM, in_browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def drawn(folder: Path) -> dict[str, Drawn]:
    return {each.stem: each for each in draw_all(Run.read(folder))}


def with_levels(folder: Path, change: dict[tuple[str, float], float], like: str = "") -> Path:
    """Closed levels of (arm, users) made so many times as fast; `like`: all arms as that one."""
    summary = read_summary(folder)
    models = {row.level: row for row in summary.levels if (row.arm, row.loop) == (like, "closed")}

    def changed(row: Level) -> Level:
        source = models.get(row.level, row) if row.loop == "closed" else row
        factor = change.get((row.arm, row.level), 1.0) if row.loop == "closed" else 1.0
        assert source.tokens_per_s is not None
        middle = source.tokens_per_s
        scaled = middle.model_copy(
            update={name: factor * getattr(middle, name) for name in ("low", "mid", "high")}
        )
        update = {"tokens_per_s": scaled, "speed_p50": source.speed_p50}
        return row.model_copy(update=update)

    rows = [changed(row) if row.trials == 3 else row for row in summary.levels]
    write(folder / SUMMARY_FILE, summary.model_copy(update={"levels": rows}))
    return folder


def test_the_tiles_are_the_summarys_figures(folder: Path) -> None:
    run = Run.read(folder)
    found = {tile.label: tile for tile in tiles(run)}
    first = run.summary.matched[0]
    matched = found[f"speed per user, {first.over} over {first.under} at the same throughput"]
    assert first.low is not None
    assert matched.value == f"{first.mid:.2f}x"
    assert matched.detail == f"95%: {first.low:.2f} to {first.high:.2f}, faster"
    for users, said in ((USERS[0], "1 user"), (USERS[-1], f"{USERS[-1]} users")):
        (row,) = [
            each
            for each in run.summary.ratios
            if (each.over, each.under, each.loop) == ("dspark", "plain", "closed")
            and (each.what, each.level) == ("tokens_per_s", users)
        ]
        assert found[f"throughput, dspark over plain, {said}"].value == f"{row.mid:.2f}x"
    goodput = {arm.arm: f"{arm.tokens_per_s:.0f}" for arm in run.summary.slas[0].arms}
    served = found["goodput of dspark: median user 30 tok/s, slowest tenth 20 tok/s"]
    assert (served.value, served.detail) == (
        f"{goodput['dspark']} tok/s",
        f"plain: {goodput['plain']}",
    )
    html = make_report(folder).html
    assert html.index('class="tiles"') < html.index('id="play"') < html.index('id="frontier"')
    for tile in found.values():
        assert f"<b>{tile.value}</b><span>{tile.label}</span>" in html


def test_tiles_of_one_trial_claim_nothing(tmp_path: Path) -> None:
    found = tiles(Run.read(make_run(tmp_path, trials=1)))
    said = [tile.detail for tile in found if tile.value.endswith("x")]
    assert said == ["too few trials for an interval"] * 3


def test_acceptance_has_a_row_for_each_arm_and_kind_of_prompt(folder: Path) -> None:
    run = Run.read(folder)
    table = accepted_positions(run)
    assert table is not None
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    drafting = [name for name in run.arms if run.arm(name).gamma]
    assert set(rows) == {(name, kind) for name in drafting for kind in SURVIVAL}
    for kind in SURVIVAL:
        steps, length, *shares = rows["dspark-fixed-gamma", kind]
        values = [float(share.rstrip("%")) / 100 for share in shares]
        assert len(values) == GAMMA
        assert values == pytest.approx(list(SURVIVAL[kind])[:GAMMA], abs=0.02)
        assert float(length) == pytest.approx(1 + sum(values), abs=0.02)
        assert int(steps) > 0


def test_verified_drafts_are_counted_by_who_verifies(folder: Path) -> None:
    run = Run.read(folder)
    fixed = verified_drafts(run, "dspark-fixed-gamma")
    assert fixed is not None
    assert len(set(fixed.admitted)) == 1
    shares = [a / b for a, b in zip(fixed.accepted, fixed.admitted, strict=True)]
    assert shares == pytest.approx([sum(s[k] for s in SURVIVAL.values()) / 3 for k in range(GAMMA)])
    chosen = verified_drafts(run, "dspark")
    assert chosen is not None
    truth = outcome(true_model(), Choice(MIX, "dspark", USERS[0], GAMMA, 0.5, 1.2))
    assert chosen.admitted[0] > chosen.admitted[-1]
    assert chosen.accepted[0] / chosen.admitted[0] > shares[0]
    assert chosen.accepted[0] / chosen.admitted[0] == pytest.approx(
        truth.accepted[0] / truth.admitted[0], abs=0.05
    )
    assert verified_drafts(run, "plain") is None
    html = make_report(folder).html
    assert html.index("Of the drafts verified, accepted") < html.index("tau by kind of prompt")


def test_acceptance_of_verified_drafts_comes_first(drawn: dict[str, Drawn]) -> None:
    first, *others = drawn["acceptance"].figure.axes
    assert first.get_title() == "of drafts verified"
    assert [axes.get_title() for axes in others] == [f"of all steps: {d}" for d in sorted(SURVIVAL)]


def test_every_pair_of_arms_has_a_scale_of_its_own(drawn: dict[str, Drawn]) -> None:
    panels = drawn["matched"].figure.axes
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == ["dspark / mtp1", "dspark / plain", "dspark / dspark-fixed-gamma"]
    assert len({axes.get_xlim() for axes in panels}) == len(panels)


def boxes(drawn: Drawn) -> list[Bbox]:
    """Return the bounding boxes of the texts within the axes."""
    return [text.get_window_extent() for axes in drawn.figure.axes for text in axes.texts]


def test_no_label_covers_another(tmp_path: Path, drawn: dict[str, Drawn]) -> None:
    """Not even where all arms are at the same points."""
    same = with_levels(make_run(tmp_path), {}, like="plain")
    (crowded,) = [each for each in draw_all(Run.read(same)) if each.stem == "frontier"]
    assert len(boxes(crowded)) > 3 * len(USERS)
    for figure in (crowded, drawn["frontier"], drawn["matched"]):
        for one, other in combinations(boxes(figure), 2):
            assert Bbox.intersection(one, other) is None


def test_no_colour_stands_for_two_things() -> None:
    arms = report_data._COLOURS
    spare = report_data._SPARE
    policies = report_data.POLICY_COLOURS
    same = {"plain": "plain", "fixed": "dspark-fixed-gamma", "dspark": "dspark"}
    same["static"] = "dspark-static-threshold"
    for policy, arm in same.items():
        assert policies[policy] == arms[arm]
    used = [*arms.values(), *spare, policies["algorithm1"]]
    assert len(set(used)) == len(used)
    css = (Path(report_data.__file__).parent / "report.css").read_text()
    page = {colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", css)}
    assert not page & {colour.lower() for colour in used} - {report_data.GREY}


def test_points_say_their_values(folder: Path) -> None:
    run = Run.read(folder)
    told = [unescape(text) for text in re.findall(r'data-tip="([^"]*)"', make_report(folder).html)]
    for arm in run.arms:
        for level in run.levels(arm, "closed"):
            assert level.tokens_per_s is not None
            assert level.speed_p50 is not None
            users = f"{level.level:g} {'user' if level.level == 1 else 'users'}"
            figures = (
                f"{level.tokens_per_s.mid:.1f} tokens/s in all, {level.speed_p50.mid:.1f} a user"
            )
            assert f"{arm}, {users}: {figures}" in told
    assert any(text.startswith("dspark / mtp1, all levels: ") for text in told)
    assert any(re.fullmatch(r"dspark, position 1: \d+% of those verified", t) for t in told)


def test_where_the_model_misses_the_table_says_so(tmp_path: Path) -> None:
    html = make_report(with_levels(make_run(tmp_path), {("dspark", 4): 1 / 1.27})).html
    (row,) = re.findall(r"<tr><td>dspark</td><td>4</td>(?:(?!</tr>).)*%</td>.*?</tr>", html)
    assert "<td>+27.0%</td>" in row
    assert row.endswith("<td>missed</td></tr>")
    assert html.count("<td>missed</td>") == 1


HANDS = """
    const over = (element) => element.dispatchEvent(new Event("pointerover", { bubbles: true }));
    const box = document.getElementById("tip");
    result.hidden = box.hidden;
    over(document.querySelector("#frontier-title").parentElement.nextElementSibling.querySelector("[data-tip]"));
    result.figure = [box.hidden, box.textContent];
    over(document.querySelector("#chart-throughput circle[data-arm=dspark]"));
    result.dot = box.textContent;
    over(document.querySelector("#chart-throughput circle[data-tip*=model]"));
    result.curve = box.textContent;
    over(document.body);
    result.gone = box.hidden;
    const drawn = (policy) => [...document.querySelectorAll(`#chart-throughput polyline[data-policy=${policy}]`)]
      .map((line) => [line.classList.contains("missed"), line.getAttribute("points").split(" ").length]);
    result.missed = { dspark: drawn("dspark"), plain: drawn("plain") };
    const told = () => document.getElementById("readout").textContent;
    const move = (value) => {
      const input = document.getElementById("requests");
      input.value = value;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    };
    move(4); result.there = told(); move(1); result.elsewhere = told();
    const saved = [];
    URL.createObjectURL = (blob) => { saved.push(blob.type); return "blob:made"; };
    HTMLAnchorElement.prototype.click = function () { saved.push(this.download, this.href); };
    const tables = [...document.querySelectorAll("table[data-name]")];
    const named = (name) => tables.find((table) => table.dataset.name.startsWith(name));
    result.buttons = document.querySelectorAll("button.csv").length - tables.length;
    named("Closed loop: speed").parentElement.previousElementSibling.querySelector(".csv").click();
    result.saved = saved;
    result.speeds = csvOf(named("Closed loop: speed"));
    result.ratios = csvOf(named("Paired ratios"));
"""  # noqa: E501 - one expression a line reads better


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_in_hand(tmp_path: Path) -> None:
    run = Run.read(with_levels(make_run(tmp_path / "run"), {("dspark", 4): 1 / 1.27}))
    found = in_browser(make_report(run.folder).html, HANDS, tmp_path)
    assert "error" not in found, found
    assert found["breaches"] == 0
    assert found["hidden"] is True
    assert found["figure"][0] is False
    assert "tokens/s in all" in found["figure"][1]
    assert re.fullmatch(r"dspark, 1 user, measured: [\d.]+ tokens/s", found["dot"])
    assert re.fullmatch(r"[a-zA-Z0-9 ()]+, 1 user, model: [\d.]+ tokens/s", found["curve"])
    assert found["gone"] is True
    # The model is 27% above the measured point at 4 users: dotted from 3 to 5, which are nearest.
    assert [missed for missed, _ in found["missed"]["dspark"]] == [False, True, False]
    assert found["missed"]["dspark"][1][1] == 1 + 3
    assert [missed for missed, _ in found["missed"]["plain"]] == [False]
    assert "Do not trust it: at 4 users the model is 27% above what was measured." in found["there"]
    assert "trust" not in found["elsewhere"]
    assert found["buttons"] == 0
    assert found["saved"] == ["text/csv", "closed-loop-speed-95-interval.csv", "blob:made"]
    rows = list(csv.reader(io.StringIO(found["speeds"])))
    assert rows[0][:5] == ["arm", "users", "tokens/s", "tokens/s, low", "tokens/s, high"]
    assert all(len(row) == len(rows[0]) for row in rows)
    (row,) = [row for row in rows if row[:2] == ["dspark", "8"]]
    (level,) = [level for level in run.levels("dspark", "closed") if level.level == 8]
    assert level.tokens_per_s is not None
    bounds = (level.tokens_per_s.mid, level.tokens_per_s.low, level.tokens_per_s.high)
    assert row[2:5] == [f"{bound:.1f}" for bound in bounds]
    ratios = list(csv.reader(io.StringIO(found["ratios"])))
    assert ratios[0][2:5] == ["throughput", "throughput, low", "throughput, high"]
    assert all(float(row[3]) <= float(row[2]) <= float(row[4]) for row in ratios[1:] if row[3])
