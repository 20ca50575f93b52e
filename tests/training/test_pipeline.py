"""`dspark train --config`: from nothing to a drafter in one go; what is done is not repeated."""

import json
import re
import shutil
from importlib.util import find_spec

import pytest
import transformers
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.drafter import load_drafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel


def test_one_command_trains_from_nothing_and_goes_on(config, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1 w2"}\n{"prompt": 3}\n')
    changes = {
        "prompts": (file,),
        "self_prompts": tmp_path / "self.jsonl",
        "self_prompt_count": 30,
        "store": tmp_path / "store",
    }
    quick = {"steps": 8, "validate_every": 4, "log_every": 4, "held_out_every": 2}
    schedule = config.schedule.model_copy(update=quick)
    calibration = config.calibration.model_copy(update={"limit": 4, "max_new_tokens": 24})
    cfg = config.model_copy(
        update={
            "run_dir": tmp_path / "run",
            "data": config.data.model_copy(update=changes),
            "schedule": schedule,
            "calibration": calibration,
        }
    )
    (tmp_path / "c.yaml").write_text(cfg.model_dump_json())  # JSON is YAML
    command = ["train", "--config", str(tmp_path / "c.yaml")]
    stopped = CliRunner().invoke(app, [*command, "--strict"])
    assert "line 2" in str(stopped.exception)
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "line 2: a user turn must be text" in first.output
    assert re.search(r"[1-9]\d* prompts skipped(, all reasons in .*)?; --strict", first.output)
    assert re.search(r"x 200 bytes = .* GB free\); full logits would take 260 bytes", first.output)
    target = TargetModel.load(cfg.data.target)
    load_drafter(tmp_path / "run" / "drafter", target.embed_weight, target.head_weight)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8]
    assert {"loss", "tau", "steps_per_s", "held_out_tau", "held_out_ece"} <= json.loads(
        lines[-1]
    ).keys()
    if find_spec("sglang_dspark.cli.calibrate"):
        assert (tmp_path / "run" / "drafter" / "sts.json").is_file()
    before = (tmp_path / "self.jsonl").read_text()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert "0 prompts to answer" in again.output
    assert "going on from step 8" in again.output
    assert "calibrated already" in again.output
    assert (tmp_path / "self.jsonl").read_text() == before
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines
    drafter = ["--drafter", str(tmp_path / "run" / "drafter"), "--out", str(tmp_path / "sts.json")]
    on_store = ["calibrate", "--target", str(cfg.data.target), "--trace", str(tmp_path / "store")]
    seen = CliRunner().invoke(app, [*on_store, *drafter])
    assert f"drafter was trained on {tmp_path / 'store'}: what is fitted" in seen.output


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_layers_that_the_target_has_not_are_refused_before_data_is_made(config, tmp_path, kind):
    shape = {"kind": kind, "layers": 4, "target_layer_ids": [0, 1], "mask_token_id": 3}
    changes = {"prompts": (), "self_prompts": tmp_path / "self.jsonl", "store": tmp_path / "store"}
    raw = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    raw = json.loads(raw.model_dump_json()) | {"drafter": shape, "run_dir": str(tmp_path / "run")}
    (tmp_path / "c.yaml").write_text(json.dumps(raw))  # JSON is YAML
    ended = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "c.yaml")])
    assert isinstance(ended.exception, DSparkError)
    assert "drafter.layers 4 is more than the target's 3" in str(ended.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize("name", ["Qwen2", "Gemma3"])
def test_targets_of_other_kinds_are_trained_for(name, config, target_dir, tmp_path):
    """Gemma 3's layers have norms that a draft's lack, so drafts begin with random weights."""
    folder = tmp_path / "target"
    shutil.copytree(target_dir, folder)
    small = json.loads((target_dir / "config.json").read_text())
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    fields += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "eos_token_id")
    kind = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")
    made = kind(**{key: small[key] for key in fields}, head_dim=8, pad_token_id=0, bos_token_id=1)
    getattr(transformers, f"{name}ForCausalLM")(made).save_pretrained(folder)
    cfg = config.model_copy(
        update={
            "run_dir": tmp_path / "run",
            "data": config.data.model_copy(
                update={"target": str(folder), "store": tmp_path / "store"}
            ),
            "schedule": config.schedule.model_copy(update={"steps": 2, "held_out_every": 4}),
        }
    )
    (tmp_path / "c.yaml").write_text(cfg.model_dump_json())
    command = ["train", "data", "--config", str(tmp_path / "c.yaml")]
    assert CliRunner().invoke(app, command).exit_code == 0
    command[1] = "drafter"
    if name == "Gemma3":
        refused = CliRunner().invoke(app, command)
        assert "(post_feedforward_layernorm.weight): set drafter.init" in str(refused.exception)
        command += ["--set", "drafter.init_from_target=false"]
    trained = CliRunner().invoke(app, command)
    assert trained.exit_code == 0, trained.output
    target = TargetModel.load(folder)
    load_drafter(tmp_path / "run" / "drafter", target.embed_weight, target.head_weight)
