"""Recorded loads: read as they were published, or refused with file and line; replayed exactly."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.mixes import Mix
from sglang_dspark.loadtest.client.replay import Material, Replay
from sglang_dspark.loadtest.client.traces import BLOCK, RecordedLoad, Traced, read_trace
from sglang_dspark.loadtest.servers.workload import require_room
from sglang_dspark.loadtest.sweep.config import SweepConfig, load_sweep
from sglang_dspark.loadtest.sweep.plan import (
    PlannedCell,
    Supply,
    all_loads,
    cell_plan,
    rough_seconds,
    trace_load,
)
from sglang_dspark.loadtest.sweep.run_dir import Pilot
from tools.traces.make import FOLDER, made

MOONCAKE = FOLDER / "made-mooncake.jsonl"
BURSTGPT = FOLDER / "made-burstgpt.csv"
HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
PILOT = Pilot(arm="plain", tokens_per_s={1: 40.0}, answer_tokens={1: 60.0})
MATERIAL = Material(((5, 6, 7), (8, 9), (10, 11, 12, 13)))


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_the_made_traces_are_what_the_script_makes() -> None:
    for name, text in made().items():
        assert (FOLDER / name).read_text() == text
    prompts = read_trace(MOONCAKE, "mooncake").rows
    assert len(prompts) == 40
    assert len({row.blocks[0] for row in prompts}) < len(prompts)  # some begin alike
    burst = read_trace(BURSTGPT, "burstgpt")
    assert (len(burst.rows), burst.left_out) == (38, 2)


def test_mooncake_is_read(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 500, "input_length": 512, "output_length": 9, "hash_ids": [7]}\n\n'
        '{"timestamp": 1750.5, "input_length": 513, "output_length": 2, "hash_ids": [7, -1]}\n'
        '{"timestamp": 1800, "input_length": 1, "output_length": 0, "hash_ids": [8]}\n'
    )
    found = read_trace(written(tmp_path, text), "mooncake")
    assert found.rows == (Traced(1, 0.0, 512, 9, (7,)), Traced(3, 1.2505, 513, 2, (7, -1)))
    assert (found.left_out, found.seconds) == (1, 1.2505)


def test_burstgpt_is_read_with_the_columns_of_both_releases(tmp_path: Path) -> None:
    text = HEAD + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,0,0,0,API log\n"
    found = read_trace(written(tmp_path, text), "burstgpt")
    assert (found.rows, found.left_out) == ((Traced(2, 0.0, 472, 18),), 1)
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n1,a,2,ChatGPT,3,4,7,x\n9,b,2,ChatGPT,5,6,11,x\n10,c,2,ChatGPT,50,6,56,x\n"
    )
    path = written(tmp_path, "\ufeff" + text)
    found = read_trace(path, "burstgpt", longest=20)
    assert found.rows == (Traced(2, 0.0, 3, 4), Traced(3, 8.0, 5, 6))
    assert found.left_out == 1
    assert len(read_trace(path, "burstgpt", first=1).rows) == 1


ROW = '{"timestamp": 1, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]}\n'
WRONG = [
    ("mooncake", ROW + "{", ":2: .*; write "),
    ("mooncake", ROW.replace("600", "1025"), ":1: 2 hash_ids for a prompt of 1025 .*begun: 3"),
    ("mooncake", ROW.replace("600", "512"), ":1: 2 hash_ids for a prompt of 512 .*begun: 1"),
    ("mooncake", ROW.replace("600", "0"), ":1: 0 is no integer from 1"),
    ("mooncake", ROW.replace("600", "1.5"), ":1: 1.5 is no integer"),
    ("mooncake", ROW.replace('"output_length": 9, ', ""), ":1: no 'output_length'"),
    ("mooncake", ROW.replace("[7, 8]", "7"), ":1: .*; write "),
    ("mooncake", ROW.replace("[7, 8]", '["a", "b"]'), ":1: 'a' is no integer"),
    ("mooncake", ROW.replace(": 1,", ": -1,"), ":1: -0.001 is no time"),
    ("mooncake", ROW.replace(": 1,", ": true,"), ":1: timestamp is True"),
    ("mooncake", ROW.replace(": 1,", ": NaN,"), ":1: .*NaN"),
    ("mooncake", ROW.replace(": 1,", ": 2,") + ROW, ":2: 0.001 s is before .*sort the file"),
    ("mooncake", "\n", "holds no request to send"),
    ("burstgpt", "at,tokens\n1,2\n", ":1: no column Timestamp, Request tokens, Response tokens"),
    ("burstgpt", HEAD + "1,x,2,3,5,y\nsoon,x,2,3,5,y\n", ":3: .*soon.*; write seconds"),
    ("burstgpt", HEAD + "inf,x,2,3,5,y\n", ":2: inf is no time"),
    ("burstgpt", HEAD + "1,x,2.5,3,5,y\n", ":2: .*2.5"),
    ("burstgpt", HEAD + "1,x,0,3,3,y\n", ":2: 0 is no integer from 1"),
    ("burstgpt", HEAD + "1,x\n", ":2: no value under Re"),
    ("burstgpt", HEAD + "1,x,2,0,2,y\n", r"holds no request to send \(1 skipped\)"),
    ("burstgpt", "", ":1: no column"),
]


@pytest.mark.parametrize(("kind", "text", "said"), WRONG)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, kind: str, text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DSparkError, match=said) as error:
        read_trace(path, kind)  # type: ignore[arg-type]  # a parameter of the test
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes", "absent", "."):
        for kind in ("mooncake", "burstgpt"):
            with pytest.raises(DSparkError, match="cannot read the trace"):
                read_trace(tmp_path / name, kind)  # type: ignore[arg-type]  # of the loop


@st.composite
def recorded(draw: st.DrawFn) -> RecordedLoad:
    """Requests whose blocks are equal now and then, or unknown."""
    rows = []
    for line in range(1, draw(st.integers(1, 8)) + 1):
        length = draw(st.integers(1, 3 * BLOCK))
        blocks = [draw(st.integers(0, 4)) for _ in range(-(-length // BLOCK))]
        known = draw(st.booleans())
        rows.append(Traced(line, float(line - 1), length, 5, tuple(blocks) if known else ()))
    return RecordedLoad(Path("made"), tuple(rows), 0)


@given(recorded(), st.integers(0, 3))
def test_prompts_are_as_long_as_stated_and_share_what_was_shared(
    load: RecordedLoad, seed: int
) -> None:
    prompts = [list(each.content) for each in Replay(load).prompts(MATERIAL, seed)]
    assert prompts == [list(each.content) for each in Replay(load).prompts(MATERIAL, seed)]
    vocabulary = set(MATERIAL.vocabulary)
    for row, prompt in zip(load.rows, prompts, strict=True):
        assert len(prompt) == row.prompt_tokens
        assert set(prompt) <= vocabulary  # type: ignore[arg-type]  # token ids
    for a, one in zip(load.rows, prompts, strict=True):
        for b, other in zip(load.rows, prompts, strict=True):
            alike = 0
            for x, y in zip(a.blocks, b.blocks, strict=False):
                if x != y:
                    break
                alike += 1
            length = min(alike * BLOCK, len(one), len(other))
            assert one[:length] == other[:length]
            # Where the recorded prompts part, these part within a mark's few tokens.
            rest = list(zip(one[length:], other[length:], strict=False))
            if a is not b and len(rest) > 4:
                assert any(x != y for x, y in rest[:4])


def test_trials_get_other_text_and_speed_moves_the_times(tmp_path: Path) -> None:
    load = read_trace(MOONCAKE, "mooncake", first=6)
    one, other = (Replay(load).prompts(MATERIAL, seed)[0].content for seed in (1, 2))
    assert one != other
    assert sorted(set(one)) == sorted(set(other))  # type: ignore[type-var]  # token ids
    twice = Replay(load, 2.0)
    assert twice.seconds == load.seconds / 2
    at = [arrival.at for arrival in twice.schedule().arrivals]
    assert at == [row.at / 2 for row in load.rows]
    lengths = [arrival.max_new_tokens for arrival in twice.schedule().arrivals]
    assert lengths == [row.answer_tokens for row in load.rows]


def test_little_text_is_refused() -> None:
    with pytest.raises(DSparkError, match="too little text"):
        Material(((4, 4),))


def sweep_file(folder: Path, trace: dict[str, object], **other: object) -> Path:
    import yaml

    path = folder / "mine.yaml"
    fields = {"arms": ["plain"], "concurrency": [1], "seconds": 2, "open": {"trace": trace}}
    path.write_text(yaml.safe_dump({**fields, **other}))
    return path


def test_a_sweep_plans_the_trace(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(MOONCAKE.read_text())
    trace = {"file": "t.jsonl", "format": "mooncake", "speed": 4, "first": 10}
    config = load_sweep(sweep_file(tmp_path, trace))
    load = all_loads(config, PILOT)[-1]
    rows = read_trace(MOONCAKE, "mooncake", first=10).rows
    assert load.loop == "open"
    assert load.level == pytest.approx(10 / max(1.0, rows[-1].at / 4), rel=0.01)
    assert load.expected_s == pytest.approx(rows[-1].at / 4 + 2)
    cells, seconds = rough_seconds(config, 1)
    assert cells == 3 * 2
    assert seconds > 3 * (2 + rows[-1].at / 4)

    supply = Supply(Mix((EvalPrompt("a", "x", ("hi",)),), ((0,),)), (), MATERIAL)
    plans = [cell_plan(config, PlannedCell("plain", load, t, 0), supply) for t in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0].prompts != plans[2].prompts
    assert plans[0].ignore_eos
    assert [len(each.content) for each in plans[0].prompts] == [row.prompt_tokens for row in rows]
    assert plans[0].schedule.users is None
    assert all(a.at <= b.at for a, b in pairwise(plans[0].schedule.arrivals) if a.at and b.at)
    plans[0].save(tmp_path / "plan.json")
    kept = CellPlan.load(tmp_path / "plan.json")
    assert kept.schedule == plans[0].schedule
    sent = kept.body(kept.schedule.arrivals[0])
    assert sent == plans[0].body(plans[0].schedule.arrivals[0])
    with pytest.raises(DSparkError, match="need the target's tokenizer"):
        cell_plan(config, PlannedCell("plain", load, 0, 0), Supply(supply.mix, ()))


def test_a_wrong_trace_in_a_sweep_is_one_line(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"file": "x", "format": "soap"}, "open.trace.format"),
        ({"file": "x", "format": "mooncake", "first": 0}, "open.trace.first"),
        ({"file": "x", "format": "mooncake", "speed": 0}, "open.trace.speed"),
        ({"format": "mooncake"}, "open.trace.file"),
    ]
    for trace, said in wrong:
        with pytest.raises(DSparkError, match=said):
            load_sweep(sweep_file(tmp_path, trace))
    fine: dict[str, object] = {"file": "x", "format": "mooncake"}
    with pytest.raises(DSparkError, match="which chat does not take"):
        load_sweep(sweep_file(tmp_path, fine, api="chat"))
    config = load_sweep(sweep_file(tmp_path, fine))
    with pytest.raises(DSparkError, match="cannot read the trace"):
        rough_seconds(config, 1)


def test_a_request_beyond_the_targets_context_is_named(tmp_path: Path) -> None:
    load = RecordedLoad(Path("t"), (Traced(3, 0.0, 10, 5), Traced(4, 1.0, 10, 6)), 0)
    for content in (
        '{"max_position_embeddings": 15}',
        '{"text_config": {"max_position_embeddings": 15}}',
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DSparkError, match=r"t:4: 16 tokens, .*context is 15.*longest"):
            require_room(tmp_path, load)
    for content in ("{}", '{"max_position_embeddings": 16}'):
        (tmp_path / "config.json").write_text(content)
        require_room(tmp_path, load)


def test_the_shipped_sweep_reads_its_traces() -> None:
    file = Path(__file__).resolve().parents[2] / "configs" / "sweep" / "cpu-trace.yaml"
    for smoke, requests in ((False, 40), (True, 8)):
        config: SweepConfig = load_sweep(file, smoke)
        assert config.open.trace is not None
        assert getattr(trace_load(config, config.open.trace).arrivals, "requests", 0) == requests
