"""Training on a tiny random target: it learns, resumes exactly, survives kills and full disks."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sglang_dspark.cli import train
from sglang_dspark.drafter import load_drafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.mtp.shape import MTPShape
from sglang_dspark.models.identity import target_sha256
from sglang_dspark.training.config import RunConfig, load_config, without_slow_halves
from sglang_dspark.training.distributed import gathered
from sglang_dspark.training.journal import Journal
from sglang_dspark.training.setup import prepare
from sglang_dspark.training.states import ComputedStates
from tests.training.conftest import generate, room_for
from tests.training.test_data import _data
from tools import answers


def _in(config, path, **schedule):
    changed = config.schedule.model_copy(update=schedule)
    return config.model_copy(update={"run_dir": path, "schedule": changed})


def _same_files(a, b):
    a, b = load_file(str(a)), load_file(str(b))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_training_learns_and_resume_is_exact(config, tmp_path):
    whole, _ = prepare(_in(config, tmp_path / "whole"))
    reports = {}
    whole.run(lambda step, means: reports.update({step: means}))
    assert reports[40]["loss"] < reports[10]["loss"]
    assert reports[40]["held_out_tau"] > 1
    assert 0 <= reports[40]["held_out_ece"] <= 1
    part = _in(config, tmp_path / "part")
    first, _ = prepare(part)
    for _ in range(20):
        first.train_step()
    first.save()
    second, note = prepare(part)
    assert "step 20" in note
    again = {}
    second.run(lambda step, means: again.update({step: means}))
    for key in ("loss", "tau", "held_out_loss", "held_out_tau", "held_out_ece"):
        assert again[40][key] == reports[40][key]
    for name in ("drafter/model.safetensors", "state.safetensors"):
        _same_files(tmp_path / "whole" / name, tmp_path / "part" / name)
    run = json.loads((tmp_path / "part" / "run.json").read_text())
    assert {"argv", "commit", "config", "environment", "target_sha256"} <= run.keys()


@pytest.mark.parametrize("at", [20, 40])
def test_a_drafter_follows_the_state_that_it_was_killed_behind(config, tmp_path, monkeypatch, at):
    """In the middle of training and behind its last step."""

    class KilledError(Exception):
        pass

    whole, _ = prepare(_in(config, tmp_path / "whole"))
    whole.run(lambda *_: None)
    run = _in(config, tmp_path / "part")
    first, _ = prepare(run)
    export = first.learner.export

    def killed(path):
        if first.step == at:
            raise KilledError
        export(path)

    monkeypatch.setattr(first.learner, "export", killed)
    with pytest.raises(KilledError):
        first.run(lambda *_: None)
    second, note = prepare(run)
    assert note == f"going on from step {at}"
    second.run(lambda *_: None)
    _same_files(*(tmp_path / each / "drafter" / "model.safetensors" for each in ("whole", "part")))


def test_a_killed_process_goes_on_to_the_same_weights(config, tmp_path):
    """SIGKILL of a real run, somewhere behind its first checkpoint."""
    raw = _in(config, tmp_path / "killed", steps=400, checkpoint_every=10, log_every=200)
    (tmp_path / "c.yaml").write_text(raw.model_dump_json())  # JSON is YAML
    state = tmp_path / "killed" / "state.safetensors"
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "train", "drafter"]
    process = subprocess.Popen([*command, "--config", str(tmp_path / "c.yaml")])
    try:
        deadline = time.monotonic() + 600
        while not state.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
    resumed, note = prepare(raw)
    assert "going on from step" in note
    assert resumed.step < 400
    last = resumed.step + 3
    straight, _ = prepare(raw.model_copy(update={"run_dir": tmp_path / "straight"}))
    for trainer in (resumed, straight):
        while trainer.step < last:
            sums = trainer.train_step()
        trainer.final = sums
    assert torch.equal(resumed.final, straight.final)
    for a, b in zip(resumed.optimiser.shards, straight.optimiser.shards, strict=True):
        assert torch.equal(a, b)


def test_no_average_exports_the_weights(config, tmp_path):
    trainer, _ = prepare(_in(config, tmp_path, steps=3, ema=0.0))
    trainer.run(lambda *_: None)
    assert trainer.optimiser.average is None
    saved = load_file(str(tmp_path / "drafter" / "model.safetensors"))
    weight = dict(trainer.learner.module.named_parameters())["backbone.fc.weight"]
    assert torch.equal(saved["fc.weight"], weight.bfloat16())


def test_the_average_is_exported(config, tmp_path):
    """Seventeen steps: the average moved after the 8th and the 16th, the weights after each."""
    trainer, _ = prepare(_in(config, tmp_path, steps=17, ema=0.999))
    trainer.run(lambda *_: None)
    weights = dict(trainer.learner.module.named_parameters())
    weight = weights["backbone.fc.weight"].detach().clone()
    with trainer.optimiser.averaged():
        average = weights["backbone.fc.weight"].detach().clone()
    saved = load_file(str(tmp_path / "drafter" / "model.safetensors"))["fc.weight"]
    assert torch.equal(saved, average.bfloat16())
    assert not torch.equal(saved, weight.bfloat16())


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_export_drafts_what_was_trained(config, tmp_path, head):
    """The engine's drafter has the reduced vocabulary, and the trainer's logits for it."""
    shape = config.drafter.model_copy(update={"markov_head_type": head})
    cfg = _in(config.model_copy(update={"drafter": shape}), tmp_path, steps=12, ema=0.0)
    trainer, _ = prepare(cfg)
    trainer.run(lambda *_: None)
    target = TargetModel.load(config.data.target)
    drafter = load_drafter(tmp_path / "drafter", target.embed_weight, target.head_weight)
    ids = torch.tensor(json.loads((tmp_path / "vocabulary.json").read_text()))
    assert torch.equal(drafter.draft_ids, ids)
    with torch.no_grad():
        h, previous = torch.randn(7, 1, 32).bfloat16().float(), torch.arange(7)
        embedded = drafter.markov_head.embed(previous)
        latent, _ = drafter.markov_head.latent(embedded, h[:, 0], drafter.markov_head.start(7))
        loaded = drafter.base_logits(h[:, 0]) + drafter.markov_head.bias(latent)[..., ids]
        mine, _ = trainer.learner._sequential(previous[:, None].expand(7, 3), h.expand(7, 3, 32))
        trained = trainer.learner._logits(h[:, 0], mine[:, 0])
    torch.testing.assert_close(loaded, trained, atol=0.05, rtol=0.02)
    block = drafter.draft(previous, torch.randn(7, 3, 32), torch.ones(7))
    assert torch.isin(block.tokens, ids).all()
    outside = torch.ones(64, dtype=torch.bool)
    outside[ids] = False
    assert float(block.probs[..., outside].max()) == 0


def test_states_computed_in_the_step_give_the_same_losses(config, tmp_path):
    stored, _ = prepare(_in(config, tmp_path / "stored"))
    bare = _data(config, store=tmp_path / "store", cache=False)
    assert generate(bare) == 24
    shards = list((tmp_path / "store").glob("shard-*.safetensors"))
    assert all("features" not in load_file(str(shard)) for shard in shards)
    fresh, _ = prepare(_in(bare, tmp_path / "fresh"))
    assert isinstance(fresh.source, ComputedStates)
    # the same tokens and anchors: draws of the first store, in both
    fresh.source.reader = stored.source.reader
    for _ in range(3):
        draws = stored.sampler.draw(4, 4)
        a, b = stored.losses(draws)[0], fresh.losses(draws)[0]
        assert float(a.total.detach()) == pytest.approx(float(b.total.detach()), abs=2e-3)
        torch.testing.assert_close(a.accept, b.accept, atol=5e-3, rtol=0)
    fresh, _ = prepare(_in(bare, tmp_path / "fresh"))
    fresh.train_step()
    with pytest.raises(DSparkError, match="cached"):
        prepare(_in(_data(bare, cache=True), tmp_path / "wrong"))


def test_another_target_or_layers_are_refused(config, tmp_path):
    def asked(**changes):
        shape = config.drafter.model_copy(update=changes)
        return config.model_copy(update={"drafter": shape})

    with pytest.raises(DSparkError, match="layer_ids"):
        prepare(_in(asked(target_layer_ids=(1,)), tmp_path))
    with pytest.raises(DSparkError, match=r"\[7\]"):
        prepare(_in(_data(asked(target_layer_ids=(7,)), cache=False), tmp_path))
    trainer, _ = prepare(_in(config, tmp_path))
    trainer.train_step()
    trainer.save()
    with pytest.raises(DSparkError, match=r"another shape \(markov_rank 8, here 4\)"):
        prepare(_in(asked(markov_rank=4), tmp_path))
    with pytest.raises(DSparkError, match=r"another shape \(draft_vocab 40, here 30\)"):
        prepare(_in(asked(draft_vocab=30), tmp_path))


def test_training_goes_on_from_another_drafter(config, tmp_path):
    first, _ = prepare(_in(config, tmp_path / "first"))
    first.run(lambda *_: None)
    trained = first.validate()["held_out_loss"]
    shape = config.drafter.model_copy(update={"start_from": tmp_path / "first" / "drafter"})
    again = _in(config, tmp_path / "again").model_copy(update={"drafter": shape})
    second, _ = prepare(again)
    assert second.validate()["held_out_loss"] == pytest.approx(trained, rel=0.02)  # bfloat16 file
    for file in ("first", "again"):
        assert (tmp_path / file / "vocabulary.json").read_text() == (
            tmp_path / "first" / "vocabulary.json"
        ).read_text()
    for change, says in (
        ({"layers": shape.layers + 1}, "num_layers"),
        ({"draft_vocab": shape.draft_vocab - 1}, "drafter.draft_vocab says"),
    ):
        other = shape.model_copy(update=change)
        run = _in(config, tmp_path / says).model_copy(update={"drafter": other})
        with pytest.raises(DSparkError, match=says):
            prepare(run)


def test_mtp_goes_on_from_another_drafter(config, tmp_path):
    shape = MTPShape(kind="mtp", gamma=1, target_layer_ids=(0, 1), draft_vocab=40)
    mtp = config.model_copy(update={"drafter": shape})
    first, _ = prepare(_in(mtp, tmp_path / "first"))
    untrained = first.validate()["held_out_loss"]
    first.run(lambda *_: None)
    trained = first.validate()["held_out_loss"]
    assert trained < 0.97 * untrained

    def started(**change: int) -> RunConfig:
        going = {"start_from": tmp_path / "first" / "drafter", **change}
        changed = mtp.model_copy(update={"drafter": shape.model_copy(update=going)})
        return _in(changed, tmp_path / str(change))

    second, _ = prepare(started())
    assert second.validate()["held_out_loss"] == pytest.approx(trained, rel=0.01)  # bfloat16 file
    assert second.learner.module.draft_ids.tolist() == first.learner.module.draft_ids.tolist()
    with pytest.raises(DSparkError, match=r"another shape: .*gamma=1.*gamma=2"):
        prepare(started(gamma=2))
    with pytest.raises(DSparkError, match=r"drafts from 40 tokens, drafter\.draft_vocab says 30"):
        prepare(started(draft_vocab=30))


def test_a_state_with_other_shapes_is_refused_in_one_line(config, tmp_path):
    run = _in(config, tmp_path / "run", steps=1)
    trainer, _ = prepare(run)
    trainer.run(lambda *_: None)
    file = tmp_path / "run" / "state.safetensors"
    with safe_open(str(file), framework="pt") as handle:
        meta = handle.metadata()
    state = load_file(str(file))
    state["parameter.0"] = torch.zeros(3, 5, 7)
    save_file(state, str(file), meta)
    with pytest.raises(DSparkError, match=r"does not fit this drafter .* choose a new run_dir$"):
        prepare(run)


@pytest.mark.parametrize("size", [30, 50])
def test_a_vocabulary_without_a_state_is_chosen_anew(config, tmp_path, size):
    """Nothing was trained with it yet: it may be of another size, target or start."""
    prepare(_in(config, tmp_path))
    shape = config.drafter.model_copy(update={"draft_vocab": size})
    trainer, _ = prepare(_in(config.model_copy(update={"drafter": shape}), tmp_path))
    ids = json.loads((tmp_path / "vocabulary.json").read_text())
    assert trainer.learner.module.draft_ids.tolist() == ids
    assert len(ids) == size


def _begun(config, tmp_path):
    """The config of a run that has done a step."""
    run = _in(config, tmp_path / "run")
    trainer, _ = prepare(run)
    trainer.train_step()
    trainer.save()
    return run


def _with_objective(config, **weights):
    return config.model_copy(update={"objective": ObjectiveConfig(**weights)})


@pytest.mark.parametrize(("name", "was", "now"), [("held_out_every", 8, 4), ("seed", 0, 1)])
def test_a_run_does_not_go_on_with_another_split(config, tmp_path, name, was, now):
    run = _begun(config, tmp_path)
    with pytest.raises(DSparkError, match=f"trained with {name} {was}, here it is {now}: go on"):
        prepare(_in(run, run.run_dir, **{name: now}))
    assert prepare(run)[1] == "going on from step 1"


def test_a_run_does_not_go_on_for_another_target(config, tmp_path):
    run = _begun(config, tmp_path)
    file = tmp_path / "run" / "state.safetensors"
    with safe_open(str(file), framework="pt") as handle:
        meta = handle.metadata()
    state = load_file(str(file))
    save_file(state, str(file), meta | {"target_sha256": "0" * 64})
    here = target_sha256(run.data.target)
    with pytest.raises(DSparkError, match=f"with target_sha256 0{{64}}, here it is {here}: go on"):
        prepare(run)
    del meta["target_sha256"]  # states of earlier versions do not tell
    save_file(state, str(file), meta)
    assert prepare(run)[1] == "going on from step 1"


@pytest.mark.parametrize("other", [{"tv": 0.45}, {"ce": 0.2}, {"confidence": 0.5}])
def test_a_run_does_not_go_on_with_another_objective(config, tmp_path, other):
    run = _begun(config, tmp_path)
    with pytest.raises(DSparkError, match=r"the former to go on, or choose a new run_dir$"):
        prepare(_with_objective(run, **other))
    assert prepare(run)[1] == "going on from step 1"


def test_a_state_of_half_the_norm_goes_on_with_half_the_weight(config, tmp_path):
    """Before states had a format, tv 0.9 weighed half the L1 norm: the same objective is 0.45."""
    run = _begun(config, tmp_path)
    file = tmp_path / "run" / "state.safetensors"
    with safe_open(str(file), framework="pt") as handle:
        meta = handle.metadata()
    del meta["format"]
    save_file(load_file(str(file)), str(file), meta)
    with pytest.raises(DSparkError, match=r"trained with .* tv 0\.45, .* says .* tv 0\.9,"):
        prepare(run)
    assert prepare(_with_objective(run, tv=0.45))[1] == "going on from step 1"


def test_not_finite_loss_stops_and_keeps_the_checkpoint(config, tmp_path):
    trainer, _ = prepare(_in(config, tmp_path))
    trainer.train_step()
    trainer.save()
    with torch.no_grad():
        trainer.optimiser.parameters[0].fill_(float("nan"))
    with pytest.raises(DSparkError, match="learning_rate"):
        trainer.train_step()
    assert load_file(str(tmp_path / "state.safetensors"))["parameter.0"].isfinite().all()
    assert prepare(_in(config, tmp_path))[0].step == 1


@pytest.mark.parametrize("full", ["state.safetensors", "drafter/model.safetensors"])
def test_a_full_disk_is_one_line_and_keeps_the_last_files(config, tmp_path, full):
    trainer, _ = prepare(_in(config, tmp_path))
    trainer.train_step()
    trainer.save()
    before = (tmp_path / full).read_bytes()
    trainer.train_step()
    room = 5000
    if full.startswith("drafter"):
        room = 2 * (tmp_path / "state.safetensors").stat().st_size
        (tmp_path / f"{full}.tmp").mkdir()  # the state can be written, the drafter cannot
    with room_for(room), pytest.raises(DSparkError, match=r"cannot write .*kept"):
        trainer.save()
    assert (tmp_path / full).read_bytes() == before
    assert not (tmp_path / "state.safetensors.tmp").exists()


def test_metrics_have_one_history(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with Journal(file, 0) as journal:
        for step in (10, 20, 30):
            journal.write(step, {"loss": 1.0})
    with file.open("a") as torn:
        torn.write('{"step": 4')
    with Journal(file, 20) as journal:
        journal.write(30, {"loss": 2.0})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_gathered_leaves_plain_parameters_alone():
    layer = torch.nn.Linear(3, 2)
    kept = layer.weight
    with gathered(layer):
        assert layer.weight is kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_dir: [", "no training config .*line 1"),
        ("run_dir: x", "data"),
        ("run_dir: x\nbogus: 1", "bogus"),
        ("drafter: {kind: dspark, rank: 3}", "rank"),
        ("drafter: {kind: medusa}", "medusa"),
        ("drafter: 7", "drafter"),
        ("data: {temperatures: []}", r"data\.temperatures: .* at least 1"),
        ("data: {temperatures: [0.5, -1]}", r"data\.temperatures\.1: .* equal to 0, found -1"),
        ("schedule: {log_every: 0}", r"schedule\.log_every: .* equal to 1"),
        ("schedule: {checkpoint_every: 0}", r"schedule\.checkpoint_every: .* equal to 1"),
        ("serving: {port: 70000}", "serving.port"),
        ("serving: {check: perhaps}", "serving.check"),
        (
            "run_dir: x\ndata: {target: t, store: s}\nserving: {check: true}\n"
            "drafter: {kind: eagle3, target_layer_ids: [1]}",
            "serving.check is for DSpark",
        ),
    ],
)
def test_bad_configs_name_the_field(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(DSparkError, match=message):
        load_config(tmp_path / "c.yaml")


def test_fields_set_on_the_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run_dir: x\ndata: {target: t, store: s, temperatures: [0.0]}\n"
        "drafter: {target_layer_ids: [1], mask_token_id: 3}"
    )
    cfg = load_config(
        file,
        (
            "schedule.learning_rate=2e-3",
            "run_dir=y",
            "data.temperatures=[0.0, 1.0]",
            "drafter.kind=dflash",
        ),
    )
    assert cfg.schedule.learning_rate == 2e-3
    assert str(cfg.run_dir) == "y"
    assert cfg.data.temperatures == (0.0, 1.0)
    assert cfg.drafter.kind == "dflash"
    assert load_config(file).drafter.kind == "dspark"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schedule.steps", "--set schedule.steps: write FIELD=VALUE"),
        ("=3", "write FIELD=VALUE"),
        ("schedule.step=3", "schedule.step: no such field; did you mean steps"),
        ("schedule.steps=0", "schedule.steps: .*greater than or equal to 1, found 0"),
        ("run_dir.x=3", "--set run_dir.x=3: run_dir has no fields"),
        ("data.temperatures=[0.0", "--set data.temperatures"),
    ],
)
def test_bad_fields_on_the_command_line(tmp_path, change, message):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run_dir: x\ndata: {target: t, store: s}\n"
        "drafter: {target_layer_ids: [1], mask_token_id: 3}"
    )
    with pytest.raises(DSparkError, match=message):
        load_config(file, (change,))


def test_an_empty_file_has_no_field_to_set(tmp_path):
    (tmp_path / "c.yaml").write_text("")
    with pytest.raises(DSparkError, match="--set run_dir=x: the file has no fields"):
        load_config(tmp_path / "c.yaml", ("run_dir=x",))


@pytest.mark.parametrize("command", [[], ["prompts"], ["data"], ["drafter"]])
def test_each_command_sets_fields(tmp_path, command):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run_dir: x\ndata: {target: t, store: s}\n"
        "drafter: {target_layer_ids: [1], mask_token_id: 3}"
    )
    arguments = [*command, "--config", str(file), "--set", "schedule.steps=0"]
    with pytest.raises(DSparkError, match=r"schedule\.steps: .*, found 0"):
        CliRunner().invoke(train.app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(("gpu", "has"), [(False, False), (False, True), (True, False)])
def test_emulated_halves_are_skipped(tmp_path, monkeypatch, gpu, has):
    """Drop bfloat16 products if neither a GPU nor the CPU has them; else return the same config."""
    monkeypatch.setattr("sglang_dspark.training.config.has_bfloat16_products", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    (tmp_path / "c.yaml").write_text(
        "run_dir: x\ndata: {target: t, store: s, half_products: true}\n"
        "drafter: {target_layer_ids: [1], mask_token_id: 3}\nschedule: {half_products: true}"
    )
    asked = load_config(tmp_path / "c.yaml")
    used = without_slow_halves(asked)
    stay = gpu or has
    assert (used is asked) is stay
    assert used.data.half_products is used.schedule.half_products is stay
    assert without_slow_halves(used) is used


@pytest.mark.parametrize("load", [answers.open_config, train._load])
def test_one_line_says_that_half_products_are_ignored(tmp_path, monkeypatch, capsys, load):
    monkeypatch.setattr("sglang_dspark.training.config.has_bfloat16_products", lambda: False)
    for module in ("sglang_dspark.cli._workload", "tools.answers"):
        monkeypatch.setattr(f"{module}.target_dir", lambda name, console: tmp_path)
    head = "run_dir: x\ndata: {target: t, store: s, half_products: "
    tail = "}\ndrafter: {target_layer_ids: [1], mask_token_id: 3}"
    for asked, said in (("true", 1), ("false", 0)):
        (tmp_path / "c.yaml").write_text(head + asked + tail)
        cfg = load(tmp_path / "c.yaml")
        assert (cfg.data.target, cfg.data.half_products) == (tmp_path, False)
        assert capsys.readouterr().err.count("c.yaml: half_products is ignored: this CPU") == said
