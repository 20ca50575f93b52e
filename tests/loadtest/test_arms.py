"""Arms: every shipped file is good, differs only in what it says, and bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dspark.common.files import load_yaml
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.arms import find_arms, load_arm
from sglang_dspark.loadtest.sweep.config import load_sweep
from sglang_dspark.loadtest.sweep.plan import rough_seconds
from sglang_dspark.loadtest.sweep.setup import choose_arms, drafter_folders, gamma_of
from sglang_dspark.models.golden import KINDS, load_golden

SWEEPS = Path(__file__).resolve().parents[2] / "configs" / "sweep"
FOLDER = Path(__file__).resolve().parents[2] / "configs" / "serve"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture
def drafters(tmp_path: Path) -> dict[str, Path]:
    folders = {kind: tmp_path / kind for kind in ("dspark", "mtp", "eagle3", "dflash")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (folders["mtp"] / "token_map.pt").write_bytes(b"")
    return folders


def test_the_arms_of_the_paper_are_there() -> None:
    dspark = {"dspark", "dspark-fixed-gamma", "dspark-static-threshold"}
    assert {"plain", "mtp1", "mtp3", "mtp5"} | dspark <= set(SHIPPED)
    assert [arm.name for arm in find_arms(SHIPPED, FOLDER)] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_servers_share_all_but_their_own(
    name: str, drafters: dict[str, Path], tmp_path: Path
) -> None:
    (arm,) = find_arms([name], FOLDER)
    spec = arm.server(tmp_path, drafters, 32300, "cuda", tmp_path / "run", ("--mem=1",))
    assert spec.arguments[:4] == ("--device", "cuda", "--mem=1", "--enable-metrics")
    own = [a for a in spec.arguments[4:] if a not in arm.arguments]
    assert all(a.startswith(("--speculative-draft", "--speculative-token")) for a in own)
    assert len(own) == {None: 0, "dspark": 1, "eagle3": 1, "dflash": 1, "mtp": 2}[arm.drafter]
    if arm.config:
        written = Path(spec.environment["SGLANG_DSPARK_CONFIG"])
        assert json.loads(written.read_text()) == arm.config


def test_the_chain_of_an_mtp_arm_is_its_number() -> None:
    for number in (1, 3, 5):
        (arm,) = find_arms([f"mtp{number}"], FOLDER)
        assert f"--speculative-num-steps={number}" in arm.arguments
        assert f"--speculative-num-draft-tokens={number + 1}" in arm.arguments


def test_what_is_not_there_is_said(drafters: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match=r"no arm 'mtp2'.*holds dflash-scheduled, .*mtp1"):
        find_arms(["mtp2"], FOLDER)
    with pytest.raises(DSparkError, match="named twice"):
        find_arms(["plain", "plain"], FOLDER)
    mtp1, upstream = find_arms(["mtp1", "upstream-dspark"], FOLDER)
    with pytest.raises(DSparkError, match="needs a GPU"):
        upstream.server(tmp_path, drafters, 1, "cpu", tmp_path)
    with pytest.raises(DSparkError, match="needs a drafter 'mtp'; the sweep names dspark"):
        mtp1.server(tmp_path, {"dspark": tmp_path}, 1, "cpu", tmp_path)
    with pytest.raises(DSparkError, match=r"no config\.json"):
        mtp1.server(tmp_path, {"mtp": tmp_path}, 1, "cpu", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: x\ncolour: red\n", "colour"),
        ("about: x\narguments: [--port=1]\n", "--port is set by the sweep"),
        ("about: x\narguments: [--port, '1']\n", "set by the sweep"),
        ("about: x\narguments: [port]\n", "--flag=value"),
        ("about: x\narguments: [--api-key=s3cret]\n", "leave --api-key out"),
        ("about: x\narguments: [--admin-api=s3cret]\n", "leave --admin-api out"),
        ("about: x\ndrafter: mtp\n", "come together"),
        ("about: x\narguments: [--speculative-algorithm=EAGLE]\n", "come together"),
        ("about: x\nenvironment: {A: 1}\n", "environment.A"),
        ("- about\n", "mapping"),
        ("about: [\n", "not YAML"),
        ("{}", "about"),
    ],
)
def test_a_bad_arm_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(DSparkError, match=message) as raised:
        load_arm(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def trains(drafter: str) -> bool:
    """Return whether a shipped training configuration makes this drafter, or what is converted."""
    files = SWEEPS.parent.glob("train/**/*.yaml")
    runs = [load_yaml(file)["run_dir"] for file in files]
    return any(drafter in (f"{run}/drafter", f"{run}-dspark") for run in runs)


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_sweep_finds_its_arms_and_drafters(path: Path) -> None:
    for smoke in (False, True):
        config = load_sweep(path, smoke)
        arms = choose_arms(config)
        asked = {arm.drafter for arm in arms} - {None}
        if config.golden is not None:  # its drafters are made, of a file that ships too
            assert load_golden(Path(config.golden))
            assert asked <= set(KINDS)
            continue
        trained = {kind for kind, path in config.drafters.items() if trains(path)}
        assert not trained or path.stem == "headless"
        folders = drafter_folders(config, [arm for arm in arms if arm.drafter not in trained])
        assert asked - trained == set(folders)
        drafting = [arm for arm in arms if arm.drafter in folders]
        assert all(gamma_of(arm, folders) for arm in drafting)
        assert not any(gamma_of(arm, folders) for arm in arms if arm.drafter is None)
        assert rough_seconds(config, len(arms))[0] > 0


def test_one_sweep_has_every_way_of_drafting() -> None:
    config = load_sweep(SWEEPS / "all-arms.yaml")
    arms = choose_arms(config)
    gammas = {arm.name: gamma_of(arm, drafter_folders(config, arms)) for arm in arms}
    assert {name: gammas[name] for name in ("plain", "mtp1", "mtp3", "mtp5")} == {
        "plain": 0,
        "mtp1": 1,
        "mtp3": 3,
        "mtp5": 5,
    }
    schedules = [arm.config.get("schedule", {}) for arm in arms if arm.drafter == "dspark"]
    assert schedules == [{"mode": "static"}, {"threshold": 0.5}, {}]
