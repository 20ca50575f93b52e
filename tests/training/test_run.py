"""From prompts to a drafter on a tiny random target: the whole path, with a kill in the middle."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.config import RunConfig, load_config
from sglang_dspark.training.plan import planned_prompts
from sglang_dspark.training.provenance import target_sha256
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.setup import prepare
from sglang_dspark.training.store import StoreReader, StoreWriter

TEMPLATE = (
    "{% for m in messages %}<u> {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    words = ["<u>", "<a>", "<e>", "<m>", *[f"w{i}" for i in range(60)]]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config(target_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    lines = [
        json.dumps(
            {"id": f"p{i}", "domain": ("math", "code", "chat")[i % 3], "prompt": f"w{i} w{i + 9}"}
        )
        for i in range(24)
    ]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    raw = {
        "run_dir": root / "out",
        "data": {
            "target": target_dir,
            "prompts": [root / "prompts.jsonl"],
            "store": root / "store",
            "rows": 5,
            "max_new_tokens": 20,
            "threads": 1,
        },
        "drafter": {
            "gamma": 3,
            "layers": 1,
            "target_layer_ids": [0, 1],
            "markov_rank": 8,
            "draft_vocab": 40,
            "mask_token_id": 3,
        },
        "schedule": {
            "steps": 40,
            "anchors_per_sequence": 4,
            "warmup_steps": 4,
            "learning_rate": 3e-3,
            "log_every": 10,
            "checkpoint_every": 20,
            "threads": 1,
            "held_out_every": 8,
            "ema": 0.5,
        },
    }
    cfg = RunConfig.model_validate(raw)
    _generate(cfg)
    return cfg


def _generate(cfg, limit=None):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(cfg.data.target))
    target = TargetModel.load(cfg.data.target, cfg.drafter.target_layer_ids)
    meta = {
        "target_sha256": target_sha256(cfg.data.target),
        "layer_ids": list(cfg.drafter.target_layer_ids),
    }
    writer = StoreWriter(cfg.data.store, meta, sequences_per_shard=7)
    todo = [p for p in planned_prompts(cfg.data, tokenizer) if p.id not in writer.done][:limit]
    generator = ResponseGenerator(target, cfg.data.rows, 64, frozenset({2}))
    for response in generator.run(iter(todo), lambda _: None):
        writer.add(response)
    writer.flush()
    return len(todo)


def test_store_holds_what_the_target_says(config):
    """Greedy answers, states and partition functions equal a plain pass over the whole sequence."""
    reader = StoreReader(config.data.store)
    assert len(reader) == 24
    model = LlamaForCausalLM.from_pretrained(config.data.target, dtype=torch.float32)
    greedy = 0
    for i in range(len(reader)):
        r = reader[i]
        with torch.no_grad():
            out = model(r.tokens[None], output_hidden_states=True)
        n, p = len(r.tokens), r.prompt_len
        features = torch.cat([out.hidden_states[1][0], out.hidden_states[2][0]], -1)
        torch.testing.assert_close(
            r.features[: n - 1].float(), features[: n - 1], atol=0.05, rtol=0.02
        )
        z = out.logits[0].logsumexp(-1)
        torch.testing.assert_close(
            r.log_partition[p - 1 : n - 1], z[p - 1 : n - 1], atol=1e-4, rtol=1e-4
        )
        if r.temperature == 0:
            greedy += 1
            assert torch.equal(out.logits[0, p - 1 : n - 1].argmax(-1), r.tokens[p:])
    assert greedy >= 8


def test_generation_resumes_without_repeating(config):
    assert _generate(config) == 0
    ids = [row["id"] for row in StoreReader(config.data.store).rows]
    assert len(ids) == len(set(ids)) == 24


def test_training_learns_and_resume_is_exact(config, tmp_path):
    whole = config.model_copy(update={"run_dir": tmp_path / "whole"})
    trainer, _ = prepare(whole)
    taus = []
    trainer.run(lambda step, means: taus.append(means["loss"]))
    assert taus[-1] < taus[0]
    half_schedule = config.schedule.model_copy(update={"checkpoint_every": 20})
    part = config.model_copy(update={"run_dir": tmp_path / "part", "schedule": half_schedule})
    first, _ = prepare(part)
    for _ in range(20):
        first.train_step()
    first.save()
    second, note = prepare(part)
    assert "step 20" in note
    second.run(lambda *_: None)
    a = load_file(str(tmp_path / "whole" / "drafter" / "model.safetensors"))
    b = load_file(str(tmp_path / "part" / "drafter" / "model.safetensors"))
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_another_target_or_layers_are_refused(config):
    other = config.drafter.model_copy(update={"target_layer_ids": (1,)})
    with pytest.raises(DSparkError, match="layer_ids"):
        prepare(config.model_copy(update={"drafter": other}))


def test_not_finite_loss_stops_and_keeps_the_checkpoint(config, tmp_path):
    trainer, _ = prepare(config.model_copy(update={"run_dir": tmp_path}))
    trainer.train_step()
    trainer.save()
    with torch.no_grad():
        trainer.optimiser.parameters[0].fill_(float("nan"))
    with pytest.raises(DSparkError, match="learning_rate"):
        trainer.train_step()
    assert load_file(str(tmp_path / "state.safetensors"))["parameter.0"].isfinite().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [("run_dir: [", "not YAML"), ("run_dir: x", "data"), ("run_dir: x\nbogus: 1", "bogus")],
)
def test_bad_configs_name_the_field(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(DSparkError, match=message):
        load_config(tmp_path / "c.yaml")
