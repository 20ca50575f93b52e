"""Files of golden acceptance: read, refused by one line, and what is made of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.mixes import cell_prompts, load_mix
from sglang_dspark.loadtest.servers.workload import render
from sglang_dspark.models import golden, simulated
from sglang_dspark.models.golden import ensure_golden, load_golden
from sglang_dspark.shipped import shipped

NAMES = sorted(file.stem for file in (shipped("configs") / "golden").glob("*.yaml"))
FILE = "shape: tiny\ndoubtful: 0.4\nright: 0.5\notherwise: 0.9\nsource: made up\n"


def test_what_ships_is_read_and_names_its_source() -> None:
    assert {"qwen3-0.6b", "qwen3-1.7b"} < set(NAMES)
    for name in NAMES:
        assert load_golden(Path(name)).source
    assert set(golden.SHAPES) == simulated.SHAPES.keys()
    paper = load_golden(Path("qwen3-0.6b"))
    acceptance = simulated.Acceptance(paper.doubtful, paper.right, paper.otherwise)
    assert acceptance.mean == pytest.approx(0.85, abs=0.001)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("shape: tiny", "shape: huge", "no shape 'huge'; there are qwen3-0.6b"),
        ("right: 0.5", "right: 1.5", "right: Input should be less than 1"),
        ("right: 0.5\n", "", "right: Field required"),
        ("source: made up", "source: ''", "source: "),
        ("source: made up", "sources: made up", "sources"),
        (FILE, "[1]", "a mapping of fields is wanted"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(DSparkError) as error:
        load_golden(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_says_what_ships() -> None:
    with pytest.raises(DSparkError, match=r"no file qwen5.*it has .*qwen3-0.6b"):
        load_golden(Path("qwen5"))


def test_drafts_are_right_as_often_as_the_file_says() -> None:
    asked = simulated.Acceptance(doubtful=0.3, right=0.6, otherwise=0.95)
    shape = simulated.Shape(8, 4, 1, 1, 8, 8, 151_936, draft_layers=1, gamma=5, rank=4)
    known = simulated.table(shape, asked)
    right = ~known.wrong[len(simulated.SPECIALS) :]
    said = torch.sigmoid(known.confidence)[len(simulated.SPECIALS) :]
    assert float(right.float().mean()) == pytest.approx(asked.mean, abs=0.005)
    for chance, share in ((asked.right, asked.doubtful), (asked.otherwise, 1 - asked.doubtful)):
        these = (said - chance).abs() < 1e-3  # the confidence head knows which tokens are doubtful
        assert float(these.float().mean()) == pytest.approx(share, abs=0.005)
        assert float(right[these].float().mean()) == pytest.approx(chance, abs=0.01)


def test_answers_consist_of_what_can_be_drafted() -> None:
    asked = simulated.Acceptance(doubtful=0.3, right=0.6, otherwise=0.95)
    shape, size = simulated.SHAPES["tiny"], 128
    known = simulated.table(shape, asked, size)
    assert known.drafted is not None
    assert len(known.drafted) == size
    assert int(known.drafted.min()) >= len(simulated.SPECIALS)
    seen, token = set(), int(known.drafted[0])
    for _ in range(size):
        seen.add(token)
        token = int(known.follows[token])
    assert seen == set(known.drafted.tolist()), "one cycle through them all"
    assert int((known.follows == -1).sum()) == shape.vocab - len(simulated.SPECIALS) - size
    with pytest.raises(ValueError, match="draft_vocab 600 is more than the shape's 508 words"):
        simulated.table(shape, asked, 600)


def test_prompts_of_a_sweep_have_different_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token alone decides the answer: with one for all prompts a sweep of any length would
    measure one answer's acceptance, not the file's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = ensure_golden(load_golden(Path("smoke")), "cpu")
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    prompts = cell_prompts(load_mix("words"), "completions", partial(render, made.target))
    last = [tokenizer(str(prompt.content)).input_ids[-1] for prompt in prompts]
    assert len(set(last)) > 90


def test_a_reduced_vocabulary_is_the_drafters(tmp_path: Path) -> None:
    """By upstream's reading of it: ours gathers rows by `restricted_tokens`, MTP by a token map."""
    from sglang_dspark.drafter.heads import restricted_tokens
    from sglang_dspark.families.mtp.checkpoint import TOKEN_MAP

    asked = simulated.Acceptance(doubtful=0.3, right=0.6, otherwise=0.95)
    shape = simulated.SHAPES["tiny"]
    simulated.write_models(tmp_path, shape, asked, "cpu", 128)
    known = simulated.table(shape, asked, 128)
    assert known.drafted is not None
    weights = load_file(tmp_path / "dspark" / "model.safetensors")
    w1, w2 = (weights[f"markov_head.markov_w{i}.weight"].float() for i in (1, 2))
    found = restricted_tokens(w1, w2)
    assert found is not None
    assert torch.equal(found, known.drafted)
    drafts = known.drafted[(w1[known.drafted] @ w2[known.drafted].T).argmax(-1)]
    right = drafts == known.follows[known.drafted]
    assert torch.equal(right, ~known.wrong[known.drafted])
    told = torch.sigmoid(
        w1[known.drafted] @ weights["confidence_head.proj.weight"][0, -32:].float()
    )
    assert float((told - torch.sigmoid(known.confidence[known.drafted])).abs().max()) < 0.01
    assert (tmp_path / "mtp" / TOKEN_MAP).is_file()


@pytest.mark.parametrize("words", [600, 100])
def test_a_vocabulary_that_cannot_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = load_golden(Path("smoke")).model_copy(update={"draft_vocab": words})
    with pytest.raises(DSparkError, match=f"draft_vocab {words} must be a multiple of 16 and at"):
        ensure_golden(asked, "cpu")
    assert not (tmp_path / "cache").exists()


def test_models_are_made_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "g.yaml").write_text(FILE)
    asked = load_golden(tmp_path / "g.yaml")
    made = ensure_golden(asked, "cpu")
    assert (made.target / "model.safetensors").is_file()
    assert sorted(made.drafters) == ["dspark", "mtp"]
    assert all((folder / "config.json").is_file() for folder in made.drafters.values())
    before = (made.target / "model.safetensors").stat().st_mtime_ns
    assert ensure_golden(asked, "cpu") == made
    assert (made.target / "model.safetensors").stat().st_mtime_ns == before
    other = asked.model_copy(update={"right": 0.6})
    assert ensure_golden(other, "cpu").target != made.target
