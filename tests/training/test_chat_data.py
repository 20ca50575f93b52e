"""Own chat data in a training config: written by the chat template, answered by the target or by
the answer that the row gives."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import demo_prompts
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.answering import traces_of_store
from sglang_dspark.training.collect import plan_answers
from sglang_dspark.training.plan import planned_prompts
from sglang_dspark.training.setup import prepare
from sglang_dspark.training.store import StoreReader
from tests.training.conftest import generate
from tests.training.test_data import _data
from tests.training.test_run import _in

CHAT = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6 w7"},
]
SHARE = [{"from": "human", "value": "w8 w9"}, {"from": "gpt", "value": "w10 w11"}]


@pytest.fixture
def files(tmp_path):
    lines, listed = tmp_path / "chats.jsonl", tmp_path / "share.json"
    lines.write_text(json.dumps({"id": "chat", "messages": CHAT}) + "\n")
    listed.write_text(json.dumps([{"conversations": SHARE}, {"prompt": "w12 w13"}], indent=1))
    return lines, listed


def _words(tokenizer, sequence):
    return tokenizer.decode(sequence.tokens).split()


def test_a_conversation_is_the_prompt_up_to_the_users_last_words(config, files):
    tokenizer = AutoTokenizer.from_pretrained(str(config.data.target))
    planned = planned_prompts(_data(config, prompts=files).data, tokenizer)
    prompts = {p.id: p for p in planned}
    said = tokenizer.decode(prompts["chat"].ids)
    assert said.split() == ["<u>", "w1", "w2", "<e>", "<a>", "w3", "<e>", "<u>", "w4", "<e>", "<a>"]
    assert tokenizer.decode(prompts["share-1"].ids).split() == ["<u>", "w8", "w9", "<e>", "<a>"]
    assert set(prompts) == {"chat", "share-1", "share-2"}
    assert not any(p.answer or p.later for p in planned)


def test_given_answers_are_stored_with_the_targets_states(config, files, tmp_path):
    """Tokens as the row says them; states and partition functions as of a plain pass."""
    cfg = _data(config, prompts=files, answers="given", store=tmp_path / "store")
    assert generate(cfg) == 3
    tokenizer = AutoTokenizer.from_pretrained(str(cfg.data.target))
    reader = StoreReader(cfg.data.store)
    found = {reader.rows[i]["id"]: reader[i] for i in range(3)}
    assert _words(tokenizer, found["chat"])[-5:] == ["<a>", "w5", "w6", "w7", "<e>"]
    assert _words(tokenizer, found["share-1"])[-4:] == ["<a>", "w10", "w11", "<e>"]
    model = LlamaForCausalLM.from_pretrained(cfg.data.target, dtype=torch.float32)
    for r in found.values():
        with torch.no_grad():
            out = model(r.tokens[None], output_hidden_states=True)
        n, ((a, b),) = len(r.tokens), r.answers
        features = torch.cat([out.hidden_states[1][0], out.hidden_states[2][0]], -1)
        torch.testing.assert_close(
            r.features[: n - 1].float(), features[: n - 1], atol=0.05, rtol=0.02
        )
        z = out.logits[0].logsumexp(-1)[a - 1 : b - 1]
        torch.testing.assert_close(r.log_partition[a - 1 : b - 1], z, atol=1e-4, rtol=1e-4)
    own = found["share-2"]  # a row without an answer gets the target's
    greedy = out_of(model, own)
    if own.temperature == 0:
        assert torch.equal(greedy, own.tokens[own.prompt_len :])


def out_of(model, response):
    """The likeliest token at each place of the answer."""
    with torch.no_grad():
        logits = model(response.tokens[None]).logits[0]
    return logits[response.prompt_len - 1 : -1].argmax(-1)


def test_a_long_given_answer_is_cut_and_trains(config, tmp_path):
    file = tmp_path / "long.jsonl"
    words = " ".join(f"w{i % 60}" for i in range(90))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{i}"},
                {"role": "assistant", "content": words},
            ]
        }
        for i in range(10)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    cfg = _data(
        config, prompts=(file,), answers="given", store=tmp_path / "store", max_new_tokens=70
    )
    assert generate(cfg) == 10
    reader = StoreReader(cfg.data.store)
    assert {reader.rows[i]["n"] - reader[i].prompt_len for i in range(10)} == {70}
    model = LlamaForCausalLM.from_pretrained(cfg.data.target, dtype=torch.float32)
    with torch.no_grad():
        z = model(reader[0].tokens[None]).logits[0].logsumexp(-1)
    start = reader[0].prompt_len - 1
    kept = reader[0].log_partition[start:-1]
    torch.testing.assert_close(kept, z[start:-1], atol=1e-4, rtol=1e-4)
    trainer, _ = prepare(_in(cfg, tmp_path / "run"))
    assert torch.isfinite(trainer.train_step()).all()


def test_given_and_own_answers_do_not_share_a_store(config, files, tmp_path):
    cfg = _data(config, prompts=files, answers="given", store=tmp_path / "store")
    generate(cfg)
    with pytest.raises(DSparkError, match=r"another data\.answers"):
        plan_answers(_data(cfg, answers="target"), TargetModel.load(cfg.data.target).config, print)
    with pytest.raises(DSparkError, match="not the target's own"):
        traces_of_store(cfg.data.store, cfg.data.target, tmp_path)


def test_what_cannot_be_used_names_file_line_and_field(config, tmp_path):
    file = tmp_path / "bad.jsonl"
    long = [{"role": "user", "content": "w1 " * 40}]
    rows = [{"messages": CHAT[1:]}, {"conversations": [*SHARE, SHARE[1]]}, {"messages": long}]
    file.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "w1"}])))
    tokenizer, skipped = AutoTokenizer.from_pretrained(str(config.data.target)), []
    cfg = _data(config, prompts=(file,))
    assert len(planned_prompts(cfg.data, tokenizer, skipped.append)) == 1
    assert skipped[0] == f"{file}, line 1: messages[0].role: the user must speak first"
    assert skipped[1].startswith(f"{file}, line 2: conversations[2].from: human and gpt must alter")
    assert skipped[2] == f"{file}, line 3: 43 tokens, data.max_prompt_tokens is 24"
    with pytest.raises(
        DSparkError, match=r"bad\.jsonl, line 1: messages\[0\]\.role: .*correct the"
    ):
        planned_prompts(_data(cfg, strict=True).data, tokenizer)


def test_the_packages_own_prompts_in_a_conversation_are_kept_out(config, tmp_path):
    file = tmp_path / "own.jsonl"
    turns = [{"role": "user", "content": demo_prompts()[0].turns[0].upper()}, *CHAT[1:]]
    file.write_text(json.dumps({"messages": turns}) + '\n{"prompt": "w1"}')
    tokenizer, skipped = AutoTokenizer.from_pretrained(str(config.data.target)), []
    planned = planned_prompts(_data(config, prompts=(file,)).data, tokenizer, skipped.append)
    assert [p.id for p in planned] == ["own-2"]
    assert skipped == [f"{file}, line 1: is one of the package's own prompts"]


def test_templates_that_refuse_a_row_or_are_missing_are_one_line(config, tmp_path):
    file = tmp_path / "system.jsonl"
    system = {"role": "system", "content": "w1"}
    file.write_text(json.dumps({"messages": [system, *CHAT]}) + '\n{"prompt": "w1"}')
    tokenizer, skipped = AutoTokenizer.from_pretrained(str(config.data.target)), []
    refuse = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    tokenizer.chat_template = refuse + tokenizer.chat_template
    data = _data(config, prompts=(file,)).data
    assert [p.id for p in planned_prompts(data, tokenizer, skipped.append)] == ["system-2"]
    assert skipped == [f"{file}, line 1: no system here"]
    with pytest.raises(DSparkError, match="line 1: no system here; correct the row"):
        planned_prompts(data.model_copy(update={"strict": True}), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DSparkError, match="has no chat template"):
        planned_prompts(data, tokenizer)
