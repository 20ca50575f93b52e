"""Answers in the store: what the target says, turn after turn; and what a bad input says."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import (
    calibration_prompts,
    demo_prompts,
    evaluation_prompts,
)
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.collect import plan_answers, write_self_prompts
from sglang_dspark.training.plan import planned_prompts, store_size
from sglang_dspark.training.prompts import read_prompts
from sglang_dspark.training.store import StoreReader, StoreWriter
from tests.training.conftest import generate, room_for


def _data(config, **changes):
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def test_store_holds_what_the_target_says(config):
    """Greedy answers, states and partition functions equal a plain pass over the conversation."""
    reader = StoreReader(config.data.store)
    assert len(reader) == 24
    model = LlamaForCausalLM.from_pretrained(config.data.target, dtype=torch.float32)
    greedy = conversations = 0
    for i in range(len(reader)):
        r = reader[i]
        assert r.answers == reader.answers(i)
        with torch.no_grad():
            out = model(r.tokens[None], output_hidden_states=True)
        n = len(r.tokens)
        features = torch.cat([out.hidden_states[1][0], out.hidden_states[2][0]], -1)
        torch.testing.assert_close(
            r.features[: n - 1].float(), features[: n - 1], atol=0.05, rtol=0.02
        )
        z = out.logits[0].logsumexp(-1)
        conversations += len(r.answers) == 2
        for a, b in r.answers:
            torch.testing.assert_close(
                r.log_partition[a - 1 : b - 1], z[a - 1 : b - 1], atol=1e-4, rtol=1e-4
            )
            if r.temperature == 0:
                greedy += 1
                assert torch.equal(out.logits[0, a - 1 : b - 1].argmax(-1), r.tokens[a:b])
    assert greedy >= 8
    assert conversations == 6


def test_later_turns_follow_the_chat_template(config):
    """A conversation reads as the template writes it; a cut answer still gets its stop token."""
    tokenizer = AutoTokenizer.from_pretrained(str(config.data.target))
    turns = {p.id: p.turns for p in read_prompts(config.data.prompts[0])}
    reader = StoreReader(config.data.store)
    for i in range(len(reader)):
        r = reader[i]
        if len(r.answers) < 2:
            continue
        (a, b), (c, _) = r.answers
        said = tokenizer.decode(r.tokens[a:b]).removesuffix("<e>").strip()
        messages = [
            {"role": "user", "content": turns[r.id][0]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": turns[r.id][1]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer(text).input_ids == r.tokens[:c].tolist()


def test_generation_resumes_without_repeating(config):
    assert generate(config) == 0
    ids = [row["id"] for row in StoreReader(config.data.store).rows]
    assert len(ids) == len(set(ids)) == 24


def test_a_line_torn_by_a_kill_is_dropped(config, tmp_path):
    cfg = _data(config, store=tmp_path / "store")
    assert generate(cfg) == 24
    index = tmp_path / "store" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:20]) + lines[20][:9])
    assert generate(cfg) == 4
    reader = StoreReader(tmp_path / "store")
    assert len({row["id"] for row in reader.rows}) == 24
    assert all(len(reader[i].features) == len(reader[i].tokens) for i in range(24))


def test_a_broken_line_is_named_and_skipped_or_stops(tmp_path, config):
    file = tmp_path / "p.jsonl"
    good = json.dumps({"prompt": "w1 w2"})
    bad = ["{", "[1]", '{"turns": []}', '{"text": "w3"}', '{"turns": ["w1", 7]}', '{"prompt": " "}']
    file.write_text("\n".join([good, *bad, good]))
    skipped = []
    rows = read_prompts(file, strict=False, skipped=skipped.append)
    assert [row.id for row in rows] == ["p-1", "p-8"]
    assert [int(reason.split("line ")[1].split(":")[0]) for reason in skipped] == [2, 3, 4, 5, 6, 7]
    assert "not JSON" in skipped[0]
    assert "none of `turns`, `prompt`, `messages`" in skipped[3]
    with pytest.raises(DSparkError, match="line 2: not JSON"):
        read_prompts(file)
    with pytest.raises(DSparkError, match="line 2: not JSON"):
        planned_prompts(_data(config, prompts=(file,), strict=True).data, None)


@pytest.mark.parametrize("own", [demo_prompts, evaluation_prompts, calibration_prompts])
def test_the_packages_own_prompts_are_kept_out(tmp_path, config, own):
    asked = own()[0].turns[0]
    file = tmp_path / "p.jsonl"
    rows = [{"id": "ours", "prompt": "  " + asked.upper()}, {"id": "other", "prompt": "w1 w2"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = AutoTokenizer.from_pretrained(str(config.data.target))
    skipped = []
    planned = planned_prompts(_data(config, prompts=(file,)).data, tokenizer, skipped.append)
    assert [p.id for p in planned] == ["other"]
    assert "one of the package's own prompts" in skipped[0]


def test_size_is_known_before_and_matches_the_files(config):
    target = TargetModel.load(config.data.target, config.drafter.target_layer_ids)
    tokenizer = AutoTokenizer.from_pretrained(str(config.data.target))
    size = store_size(config.data, target.config, 2, planned_prompts(config.data, tokenizer, None))
    reader = StoreReader(config.data.store)
    tokens = sum(row["n"] for row in reader.rows)
    files = sum(f.stat().st_size for f in config.data.store.glob("shard-*.safetensors"))
    assert files == pytest.approx(tokens * size.bytes_per_token, rel=0.1)
    assert size.total >= tokens * size.bytes_per_token
    assert size.logit_bytes_per_token == 4 + 2 * 2 * 32 + 2 * 64


def test_other_targets_tokenizers_and_layers_are_refused(config, tmp_path):
    target = TargetModel.load(config.data.target)
    meta = json.loads((config.data.store / "meta.json").read_text())
    for key, words in [("target_sha256", "another target"), ("tokenizer_sha256", "tokenizer")]:
        store = tmp_path / key
        store.mkdir()
        (store / "meta.json").write_text(json.dumps(meta | {key: "0" * 64}))
        with pytest.raises(DSparkError, match=words):
            plan_answers(_data(config, store=store), target.config, lambda _: None)
    with pytest.raises(DSparkError, match=r"layers \[3\] do not exist"):
        TargetModel.load(config.data.target, (3,))


def test_a_full_disk_is_one_line_and_nothing_is_lost(config, tmp_path):
    reader = StoreReader(config.data.store)
    writer = StoreWriter(tmp_path, {"target_sha256": "", "layer_ids": []})
    writer.add(reader[0])
    writer.flush()
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    writer.add(reader[1])
    with room_for(500), pytest.raises(DSparkError, match=r"cannot write .*shard-00001"):
        writer.flush()
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize("rows", [1, 24])
def test_sampled_answers_do_not_depend_on_their_company(config, tmp_path, rows):
    cfg = _data(config, store=tmp_path / "store", rows=rows, threads=1)
    assert generate(cfg) == 24
    stores = StoreReader(config.data.store), StoreReader(cfg.data.store)
    first, second = ({s.rows[i]["id"]: s[i] for i in range(24)} for s in stores)
    assert sum(r.temperature > 0 for r in first.values()) == 8
    assert all(torch.equal(first[name].tokens, second[name].tokens) for name in first)


def test_equal_ids_are_refused_and_both_files_named(config, tmp_path):
    files = [tmp_path / folder / "train.jsonl" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps({"prompt": f"w1 w{len(str(file))}"}))
    cfg = _data(config, prompts=tuple(files), store=tmp_path / "store")
    with pytest.raises(DSparkError) as caught:
        generate(cfg)
    said = f"{files[0]}, line 1 and {files[1]}, line 1 have the same id train-1: "
    assert str(caught.value).startswith(said)
    assert not cfg.data.store.exists()
    files[1].write_text(json.dumps({"id": "mine", "prompt": "w1"}))
    assert generate(cfg) == 2


class _KilledError(Exception):
    pass


def _killed_at(number):
    def show(done, total):
        if done == number:
            raise _KilledError

    return show


def test_self_written_prompts_go_on_after_a_kill(config, tmp_path):
    """As if it had not been: what was in flight, or tried in vain, is neither lost nor repeated."""
    data = _data(config, self_prompts=tmp_path / "self.jsonl", rows=4).data
    whole = data.model_copy(update={"self_prompts": tmp_path / "whole.jsonl"})
    target = TargetModel.load(data.target)
    kept = write_self_prompts(whole, target, 40, lambda *_: None)
    with pytest.raises(_KilledError):
        write_self_prompts(data, target, 40, _killed_at(20))
    assert not data.self_prompts.exists()
    part = tmp_path / "self.jsonl.part"
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    numbers = [int(row["id"].removeprefix("self-")) for row in rows]
    assert len(rows) == 19
    assert numbers != sorted(numbers), "all were made in order: nothing is tested"
    assert {len(row["turns"]) for row in rows} == {0, 1}
    with part.open("a") as torn:
        torn.write('{"id": "se')
    done = []
    assert write_self_prompts(data, target, 40, lambda n, total: done.append((n, total))) == kept
    assert done == [(n, 40) for n in range(20, 41)]
    text = data.self_prompts.read_text()
    assert text == whole.self_prompts.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == kept == len({row["turns"][0] for row in rows}) > 5
    assert not part.exists()


def test_a_part_without_what_was_tried_in_vain_goes_on(config, tmp_path):
    """Of an earlier version."""
    data = _data(config, self_prompts=tmp_path / "self.jsonl", rows=4).data
    row = {"id": "self-5", "domain": "chat", "source": "self", "turns": ["w1 w2 w3 w4 w5"]}
    (tmp_path / "self.jsonl.part").write_text(json.dumps(row) + "\n")
    write_self_prompts(data, TargetModel.load(data.target), 12, lambda *_: None)
    assert row in [json.loads(line) for line in data.self_prompts.read_text().splitlines()]


def test_prompts_are_not_written_without_a_chat_template(config, tmp_path):
    bare = tmp_path / "target"
    shutil.copytree(config.data.target, bare)
    (bare / "chat_template.jinja").unlink()
    data = _data(config, target=bare, self_prompts=tmp_path / "self.jsonl").data
    with pytest.raises(DSparkError, match="has no chat template, which prompts are written with"):
        write_self_prompts(data, TargetModel.load(bare), 4, lambda *_: None)
    assert {each.name for each in tmp_path.iterdir()} == {"target"}
