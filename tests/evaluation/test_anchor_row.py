"""A published drafter whose config.json does not say whether its anchor row drafts: measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.drafter import DrafterConfig
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.evaluation import prompts
from sglang_dspark.evaluation.anchor_row import FIELD
from tests.drafter.published import Published
from tests.integration import tiny_models

# By what the drafter is: weights of its base logits, which are the target's in the anchor's row and
# 0 in the others, and of its transition bias, which is the target's in every row.
RIGHT = {"true": (1.0, 0.0), "false": (-3.0, 2.0), "both": (1.0, 1.0)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyPair:
    """A target whose mask token has an embedding of zeros."""
    made = tiny_models.build(tmp_path_factory.mktemp("pair"))
    weights = read_tensors(made.target)
    weights["embed_tokens.weight"][tiny_models.SPECIALS.index("<mask>")] = 0
    named = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in weights.items()}
    save_file(named, made.target / "model.safetensors", {"format": "pt"})
    return made


def published(folder: Path, pair: tiny_models.TinyPair, base: float, bias: float) -> Path:
    """Write a drafter without the field."""
    target, heads = read_tensors(pair.target), read_tensors(pair.drafter)
    embedding, width = target["embed_tokens.weight"], tiny_models.HIDDEN
    made = Published(
        hidden=width,
        vocab=len(embedding),
        columns=len(embedding),
        head_dim=16,
        rank=width,
        features=(1, 2),
        embed=embedding,
        target_head=target["lm_head.weight"],
    )
    for name, tensor in made.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    made.tensors["norm.weight"] = torch.full((width,), base)
    made.tensors["markov_head.markov_w1.weight"] = heads["markov_head.markov_w1.weight"]
    made.tensors["markov_head.markov_w2.weight"] = bias * heads["markov_head.markov_w2.weight"]
    path = made.write(folder)
    raw = made.config()
    del raw[FIELD]
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("fits", RIGHT)
def test_the_reading_that_fits_is_converted(
    fits: str, pair: tiny_models.TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [prompts.EvalPrompt(str(i), "chat", (chr(65 + i) * 4,)) for i in range(24)]
    monkeypatch.setattr(prompts, "evaluation_prompts", lambda: few * 4)
    source, out = published(tmp_path / "published", pair, *RIGHT[fits]), tmp_path / "out"
    before = (source / "config.json").read_bytes()
    arguments = ["models", "convert", str(source), "--target", str(pair.target)]
    ended = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert (source / "config.json").read_bytes() == before
    if fits == "both":
        said = str(ended.exception)
        assert "measuring does not tell: of " in said
        assert "write the value that it was trained with" in said
        assert not out.exists()
        return
    assert ended.exit_code == 0, ended.output
    assert f"{FIELD} is {fits}: " in ended.stderr
    config = DrafterConfig.from_dir(out)
    assert config.sample_from_anchor == (fits == "true")
    assert config.gamma == (5 if fits == "true" else 4)
