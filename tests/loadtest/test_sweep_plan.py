"""The plan of a sweep: equal for its arms, balanced, sized by the pilot, within its time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.mixes import Mix, cell_prompts, load_mix
from sglang_dspark.loadtest.client.schedule import Poisson
from sglang_dspark.loadtest.sweep.config import SweepConfig, load_sweep
from sglang_dspark.loadtest.sweep.plan import (
    Supply,
    all_loads,
    cell_plan,
    interleaved,
    rough_seconds,
)
from sglang_dspark.loadtest.sweep.run_dir import Pilot

DEMO = Path(__file__).resolve().parents[2] / "configs" / "sweep" / "cpu-demo.yaml"
# As measured on a machine of 2 cores: tokens/s of the plain server.
PILOT = Pilot(arm="plain", tokens_per_s={1: 40.0, 16: 240.0}, answer_tokens={1: 60.0, 16: 60.0})


@pytest.fixture(scope="module")
def demo() -> SweepConfig:
    return load_sweep(DEMO)


@pytest.fixture(scope="module")
def mix() -> Mix:
    return load_mix("math,code,chat")


def test_the_demo_is_what_was_promised(demo: SweepConfig) -> None:
    assert demo.names == ["plain", "mtp1", "dspark-fixed-gamma", "dspark"]
    assert demo.concurrency == [1, 2, 4, 8, 16]
    assert demo.open.load
    assert demo.trials >= 3
    cells, seconds = rough_seconds(demo, servers=4)
    assert cells == 4 * demo.trials * 7
    assert seconds < 40 * 60
    loads = all_loads(demo, PILOT)
    by_load = sum(load.expected_s for load in loads) * 4 * demo.trials
    assert by_load < 30 * 60  # which leaves ten minutes for starts and slow arms
    quick = load_sweep(DEMO, smoke=True)
    assert set(quick.names) == {"plain", "mtp1", "dspark"}
    assert rough_seconds(quick, servers=3)[1] < 180
    short = load_sweep(DEMO.with_name("demo.yaml"))
    assert (short.names, len(short.concurrency), short.trials) == (
        ["plain", "mtp1", "dspark"],
        3,
        1,
    )
    assert rough_seconds(short, servers=1)[1] < 100  # two of its servers are the demo's own


def test_every_arm_meets_the_same_load(demo: SweepConfig, mix: Mix) -> None:
    prompts = cell_prompts(mix, "chat")
    cells = interleaved(demo, all_loads(demo, PILOT), range(demo.trials))
    assert [cell.order for cell in cells] == list(range(len(cells)))
    assert len({cell.name for cell in cells}) == len(cells)
    met: dict[tuple[str, float, int], set[str]] = {}
    for cell in cells:
        place = (cell.load.loop, cell.load.level, cell.trial)
        plan = cell_plan(demo, cell, Supply(mix, prompts))
        met.setdefault(place, set()).add(plan.schedule.fingerprint())
    assert all(len(prints) == 1 for prints in met.values())
    assert len({next(iter(prints)) for prints in met.values()}) == len(met)  # each place its own
    assert interleaved(demo, all_loads(demo, PILOT), range(demo.trials)) == cells


def test_arms_are_measured_next_to_each_other_in_changing_order(demo: SweepConfig) -> None:
    cells = interleaved(demo, all_loads(demo, PILOT), range(demo.trials))
    blocks = [cells[i : i + 4] for i in range(0, len(cells), 4)]
    for block in blocks:
        assert {cell.arm for cell in block} == set(demo.names)
        assert len({(cell.load.level, cell.trial) for cell in block}) == 1
    firsts = Counter(block[0].arm for block in blocks)
    assert min(firsts[name] for name in demo.names) >= len(blocks) // 8
    before = Counter(
        [c.arm for c in block].index("dspark") < [c.arm for c in block].index("mtp1")
        for block in blocks
    )
    assert abs(before[True] - before[False]) <= len(blocks) // 4
    levels = [block[0].load.level for block in blocks]
    assert levels[:7] == levels[7:14][::-1]


def test_in_turn_an_arm_is_started_once_a_trial(demo: SweepConfig) -> None:
    turns = demo.model_copy(update={"servers": "in-turn"})
    cells = interleaved(turns, all_loads(demo, PILOT), range(2))
    changes = sum(a.arm != b.arm for a, b in pairwise(cells))
    assert changes <= 2 * len(demo.names) - 1


def test_cells_are_sized_by_the_pilot(demo: SweepConfig) -> None:
    loads = {(load.loop, load.level): load for load in all_loads(demo, PILOT)}
    one = loads["closed", 1].arrivals
    assert getattr(one, "requests", None) == round(demo.seconds * 40 / 60)
    for users in demo.concurrency:
        assert getattr(loads["closed", users].arrivals, "requests", 0) >= 3 * users
    rates = [load.arrivals for load in loads.values() if load.loop == "open"]
    expected = [pytest.approx(share * 240 / 60, rel=0.01) for share in demo.open.load]
    assert [each.rate for each in rates if isinstance(each, Poisson)] == expected


def test_given_arrivals_stand_beside(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 5.0}\n{"at": 7.0}\n{"at": 9.0}\n')
    given = [
        {"kind": "trace", "path": str(trace)},
        {"kind": "bursts", "size": 4, "every_s": 2.0, "count": 3},
    ]
    config = SweepConfig(arms=["plain"], concurrency=[2], open={"arrivals": given})
    loads = all_loads(config, PILOT)
    assert [load.level for load in loads] == [2, 0.75, 3.0]
    twice = config.model_copy(
        update={"open": config.open.model_copy(update={"arrivals": [given[0], given[0]]})}
    )
    with pytest.raises(DSparkError, match="same rate"):
        all_loads(twice, PILOT)
    with pytest.raises(DSparkError, match="belongs under concurrency"):
        all_loads(
            config.model_copy(
                update={
                    "open": config.open.model_copy(
                        update={"arrivals": [{"kind": "closed", "users": 1, "requests": 1}]}
                    )
                }
            ),
            PILOT,
        )


def test_the_file_is_read_with_its_smoke_section(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            {"arms": ["plain"], "concurrency": [1, 2], "trials": 4, "smoke": {"trials": 1}}
        )
    )
    assert (load_sweep(path).name, load_sweep(path).trials) == ("mine", 4)
    assert load_sweep(path, smoke=True).trials == 1
    assert load_sweep(path).arms_folder == tmp_path / "../serve"
    for text, said in (("[", "not YAML"), ("- 1", "must be a mapping")):
        path.write_text(text)
        with pytest.raises(DSparkError, match=said):
            load_sweep(path)
    keyed = {"arms": ["plain"], "concurrency": [1], "server_flags": ["--api-key", "s3cret"]}
    path.write_text(yaml.safe_dump(keyed))
    with pytest.raises(DSparkError, match=r"server_flags: leave --api-key out") as refused:
        load_sweep(path)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(DSparkError, match="cannot read the sweep"):
        load_sweep(tmp_path / "absent.yaml")
