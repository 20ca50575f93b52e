"""tools/answers.py: a store's answers in one file, and the same store made from it."""

import json
import lzma

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.collect import answer, plan_answers
from sglang_dspark.training.store import StoreReader
from tools.answers import _TOGETHER, _in_groups, add_states, pack, unpack


@pytest.fixture
def bare(config, tmp_path):
    """A configuration whose prompts have one turn and whose store keeps no states."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"q{i}", "domain": "math", "prompt": f"w{i} w{i + 9}"} for i in range(9)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    changes = {"prompts": (prompts,), "store": tmp_path / "store", "cache": False}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def answered(cfg):
    target = TargetModel.load(cfg.data.target, ())
    answer(plan_answers(cfg, target.config, print), cfg.data, target, 9, lambda *_: None)
    return rows_of(cfg)


def rows_of(cfg):
    reader = StoreReader(cfg.data.store)
    return {
        row["id"]: (row["domain"], row["temperature"], *map(str, reader.tokens(i)))
        for i, row in enumerate(reader.rows)
    }


def elsewhere(cfg, tmp_path):
    changes = {"store": tmp_path / "again"}
    return cfg.model_copy(update={"data": cfg.data.model_copy(update=changes)})


def test_the_store_comes_back_token_by_token(bare, tmp_path):
    made = answered(bare)
    assert len(made) == 9
    assert pack(bare, tmp_path / "a.xz") == 9
    other = elsewhere(bare, tmp_path)
    assert unpack(other, tmp_path / "a.xz") == (9, 0)
    assert rows_of(other) == made
    assert unpack(other, tmp_path / "a.xz") == (0, 0), "what is there is not added again"
    assert answered(other) == made, "nothing was left to answer"


def test_an_answer_to_a_changed_prompt_is_skipped(bare, tmp_path):
    answered(bare)
    pack(bare, tmp_path / "a.xz")
    [file] = bare.data.prompts
    file.write_text(file.read_text().replace('"w3 w12"', '"w3 w13"').replace("q5", "q55"))
    other = elsewhere(bare, tmp_path)
    assert unpack(other, tmp_path / "a.xz") == (8, 1)
    kept = {f"q{i}" for i in range(9)} - {"q3", "q5"}
    assert set(rows_of(other)) == kept | {"q55"}, "a prompt may have another id"


def test_packing_keeps_answers_whose_prompts_are_gone(bare, tmp_path):
    answered(bare)
    file = tmp_path / "a.xz"
    pack(bare, file)
    before = rows_of(bare)
    [prompts] = bare.data.prompts
    was = prompts.read_text()
    prompts.write_text(was.replace('"w3 w12"', '"w3 w13"').replace('"q3"', '"new"'))
    other = elsewhere(bare, tmp_path)
    unpack(other, file)
    assert len(answered(other)) == 9
    assert pack(other, file) == 10
    assert pack(other, file) == 10, "what the file has is not added again"
    prompts.write_text(was)
    third = bare.data.model_copy(update={"store": tmp_path / "third"})
    third = bare.model_copy(update={"data": third})
    assert unpack(third, file) == (9, 1)
    assert rows_of(third) == before


def test_added_states_are_those_of_a_store_that_kept_them(bare, tmp_path):
    answered(bare)
    changes = {"store": tmp_path / "cached", "cache": True}
    kept = bare.model_copy(update={"data": bare.data.model_copy(update=changes)})
    target = TargetModel.load(kept.data.target, kept.drafter.target_layer_ids)
    answer(plan_answers(kept, target.config, print), kept.data, target, 9, lambda *_: None)
    assert add_states(bare, tmp_path / "states") == 9
    assert add_states(bare, tmp_path / "states") == 0, "what is there is not added again"
    first, second = StoreReader(tmp_path / "cached"), StoreReader(tmp_path / "states")
    assert second.meta["cached"]
    found = {second[i].id: second[i] for i in range(len(second))}
    for i in range(len(first)):
        expected, got = first[i], found[first[i].id]
        assert torch.equal(got.tokens, expected.tokens)
        assert got.answers == expected.answers
        for name in ("features", "hidden", "log_partition"):
            torch.testing.assert_close(
                getattr(got, name), getattr(expected, name), rtol=0.02, atol=0.02
            )
    foreign = bare.drafter.model_copy(update={"target_layer_ids": (1,)})
    with pytest.raises(DSparkError, match="states of other layers"):
        add_states(bare.model_copy(update={"drafter": foreign}), tmp_path / "states")


def test_what_cannot_be_packed_or_read_is_one_line(config, bare, tmp_path):
    with pytest.raises(DSparkError, match="has states"):
        pack(config, tmp_path / "a.xz")
    assert not (tmp_path / "a.xz").exists()
    for damaged in (b"", b"text", lzma.compress(b"text")):
        (tmp_path / "b.xz").write_bytes(damaged)
        with pytest.raises(DSparkError, match=r"b\.xz is no file of answers"):
            unpack(bare, tmp_path / "b.xz")
    answered(bare)
    pack(bare, tmp_path / "a.xz")
    other = elsewhere(bare, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.answers.check_meta", lambda *_: {"target_sha256": "other"})
        with pytest.raises(DSparkError, match="answers of another target_sha256"):
            unpack(other, tmp_path / "a.xz")
    meta = bare.data.store / "meta.json"
    meta.write_text(meta.read_text().replace('"target_sha256": "', '"target_sha256": "f'))
    packed = (tmp_path / "a.xz").read_bytes()
    with pytest.raises(DSparkError, match="answers of another target_sha256"):
        pack(bare, tmp_path / "a.xz")
    assert (tmp_path / "a.xz").read_bytes() == packed


def test_a_store_of_states_that_is_stopped_is_a_sample_of_the_answers():
    lengths = list(range(1000, 0, -1))
    order = _in_groups(range(104, 1000), lengths)
    assert sorted(order) == list(range(104, 1000))
    groups = [order[i : i + _TOGETHER] for i in range(0, len(order), _TOGETHER)]
    assert all(max(group) - min(group) == _TOGETHER - 1 for group in groups), "of like lengths"
    first = [lengths[i] for i in order[:300]]
    assert abs(sum(first) / len(first) - 448) < 150, "of all lengths"
