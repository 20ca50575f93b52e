"""Published drafters of the `speculators` library: read, converted, and drafting as trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.drafter import DrafterConfig, DSparkDrafter, load_drafter
from sglang_dspark.drafter.deepspec import save_deepspec
from sglang_dspark.drafter.heads import allowed_vocabulary
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.checkpoint import convert_drafter, validate_drafter
from tests.drafter.published import Published, drafts
from tests.drafter.published_layouts import LLAMA3

WINDOWED = {"window": 6, "sliding": (0, 1)}
SHAPES: dict[str, dict[str, Any]] = {
    "whole vocabulary": {"columns": 61},
    "reduced": {},
    "reduced, gated": {"markov": "gated"},
    "reduced, rnn": {"markov": "rnn"},
    "reduced, rank 15": {"rank": 15},
    "reduced, confidence of h": {"with_markov": False},
    "window": {"columns": 61, **WINDOWED},
    "window, bidirectional": {"columns": 61, "non_causal": True, **WINDOWED},
    "window in the last layer": {"columns": 61, "window": 2, "sliding": (1,)},
    "1 + N": {"columns": 61, "from_anchor": False},
    "1 + N, gated": {"columns": 61, "from_anchor": False, "markov": "gated"},
    "llama3 rotation": {"columns": 61, "rotary": LLAMA3, "head_dim": 16},
    "all": {"rotary": LLAMA3, "from_anchor": False, **WINDOWED},
    "all, one layer full": {"from_anchor": False, "layers": 3, "window": 6, "sliding": (0, 2)},
}


def target_of(p: Published, path: Path) -> Target:
    """A target's folder with its LM head."""
    path.mkdir(exist_ok=True)
    assert p.target_head is not None
    save_file({"lm_head.weight": p.target_head}, path / "model.safetensors", {"format": "pt"})
    return Target(str(path), p.hidden, p.vocab, 4, "LlamaForCausalLM")


def opened(p: Published, path: Path) -> DSparkDrafter:
    assert p.embed is not None
    assert p.target_head is not None
    return load_drafter(path, p.embed, p.target_head)


@torch.no_grad()
def drafted(
    drafter: DSparkDrafter, features: Tensor, anchor: int, temperature: float
) -> tuple[list[int], Tensor | None, Tensor]:
    """Tokens, distributions and confidence logits of one block of the reference engine."""
    n = torch.tensor([len(features)])
    context = drafter.context_kv(features[None], torch.arange(len(features))[None])
    h = drafter.forward_block(torch.tensor([anchor]), n, context, n)
    temperatures = torch.tensor([temperature]) if temperature else None
    generator = torch.Generator().manual_seed(0)
    block = drafter.draft(torch.tensor([anchor]), h, temperatures, generator)
    probs = None if block.probs is None else block.probs[0]
    return block.tokens[0].tolist(), probs, block.confidence_logits[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("context", [1, 4, 11])
def test_it_drafts_as_it_was_trained(name: str, context: int, tmp_path: Path) -> None:
    """As published and after conversion."""
    p = Published(**SHAPES[name])
    published = p.write(tmp_path / "published")
    convert_drafter(published, tmp_path / "converted", target_of(p, tmp_path / "target"))
    features = torch.randn(context, 2 * p.hidden, generator=torch.Generator().manual_seed(9))
    expected = drafts(p, features, 7)
    for path in (published, tmp_path / "converted"):
        drafter = opened(p, path)
        tokens, probs, confidence = drafted(drafter, features, 7, 0.0)
        assert tokens == expected.tokens
        assert probs is None
        torch.testing.assert_close(confidence, expected.confidence, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["reduced", "all", "reduced, rnn"])
def test_what_verification_divides_by_is_what_drafted(name: str, tmp_path: Path) -> None:
    """The first draft's distribution is the trained one; 0 outside the draft vocabulary."""
    p = Published(**SHAPES[name])
    drafter = opened(p, p.write(tmp_path / "d"))
    features = torch.randn(8, 2 * p.hidden, generator=torch.Generator().manual_seed(9))
    tokens, probs, _ = drafted(drafter, features, 7, 1.0)
    assert probs is not None
    torch.testing.assert_close(probs[0], drafts(p, features, 7).probs[0], atol=1e-5, rtol=1e-4)
    outside = torch.ones(p.vocab, dtype=torch.bool)
    outside[p.token_ids()] = False
    assert not probs[:, outside].any()
    assert set(tokens) <= set(p.token_ids().tolist())
    assert len(probs) == len(tokens) == p.block - (0 if p.from_anchor else 1)


def test_windows_and_rotation_matter(tmp_path: Path) -> None:
    """The shapes above would pass with another window if the context behind it had no effect."""
    features = torch.randn(11, 64, generator=torch.Generator().manual_seed(9))
    variants = [
        {},
        {"rotary": LLAMA3},
        WINDOWED,
        {**WINDOWED, "window": 5},
        {**WINDOWED, "non_causal": True},
    ]
    confidence = [drafts(Published(**v), features, 7).confidence for v in variants]  # type: ignore[arg-type]
    for i, one in enumerate(confidence):
        for other in confidence[:i]:
            assert (one - other).abs().max() > 1e-2


def test_the_scaling_is_transformers() -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from sglang_dspark.drafter.rotary import read_scaling

    published = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
    config = Qwen3Config(head_dim=64, rope_parameters={**published, "rope_theta": 5e5})
    expected, attention = ROPE_INIT_FUNCTIONS["llama3"](config)
    scaling = read_scaling("rope_parameters", published)
    assert scaling is not None
    assert attention == 1.0
    plain = 5e5 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(scaling.scale(plain, 5e5), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"factor": None}, "rope_parameters.factor must be a number above 0, not None"),
        ({"factor": 0.5}, "rope_parameters needs a factor from 1"),
        ({"low_freq_factor": 4.0}, "low_freq_factor below high_freq_factor"),
        ({"original_max_position_embeddings": "8192"}, "original_max_position_embeddings must be"),
        ({"rope_type": "linear"}, "rope_parameters {.*linear.* is not supported"),
    ],
)
def test_an_impossible_rotation_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    p = Published(rotary={**LLAMA3, **change})
    with pytest.raises(DSparkError, match=says):
        DrafterConfig.from_dir(p.write(tmp_path / "d"))


def test_rotation_by_layer_type_is_the_windows(tmp_path: Path) -> None:
    """The library rotates all layers by the one of `sliding_attention` where there is one."""
    p = Published(rotary={"rope_type": "default"}, **WINDOWED)  # type: ignore[arg-type]
    layers = p.config()["transformer_layer_config"]
    by_type = {
        "full_attention": {"rope_type": "default", "rope_theta": 5.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e4},
    }
    changed = {**layers, "rope_parameters": by_type}
    path = p.write(tmp_path / "d", transformer_layer_config=changed)
    assert DrafterConfig.from_dir(path).rope_theta == 7e4


def test_the_converted_drafter_is_served(tmp_path: Path) -> None:
    p = Published(**SHAPES["all"])
    target = target_of(p, tmp_path / "target")
    published = p.write(tmp_path / "published")
    with pytest.raises(DSparkError, match="dspark models convert"):
        validate_drafter(published, target)
    convert_drafter(published, tmp_path / "converted", target)
    validate_drafter(tmp_path / "converted", target, needs_confidence=True)
    config = DrafterConfig.from_dir(tmp_path / "converted")
    assert (config.gamma, config.sample_from_anchor, config.markov_rank) == (4, False, 16)
    assert (config.window, config.causal_window, config.full_layers) == (6, True, None)
    read = opened(p, tmp_path / "converted")
    found = allowed_vocabulary(read.markov_head)
    assert found is not None
    assert found.tolist() == p.token_ids().tolist()


def test_a_converted_drafter_without_windows_is_stock_sglangs(tmp_path: Path) -> None:
    p = Published(from_anchor=False)
    convert_drafter(p.write(tmp_path / "p"), tmp_path / "c", target_of(p, tmp_path / "target"))
    assert DrafterConfig.from_dir(tmp_path / "c").to_json()["sample_from_anchor"] is False
    assert '"Qwen3DSparkModel"' in (tmp_path / "c" / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_fewer_bits_is_still_the_targets(dtype: torch.dtype, tmp_path: Path) -> None:
    p = Published()
    p.tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in p.tensors.items()}
    opened(p, p.write(tmp_path / "d"))


def _set(name: str, value: Any) -> Any:
    def change(p: Published) -> None:
        p.tensors[name] = value(p.tensors[name])

    return change


def _drop(*names: str) -> Any:
    def change(p: Published) -> None:
        for name in names:
            del p.tensors[name]

    return change


def _twice(d2t: Tensor) -> Tensor:
    d2t = d2t.clone()
    d2t[1] = d2t[0] - 1
    return d2t


def _unset(p: Published) -> None:
    p.tensors["d2t"] = torch.zeros_like(p.tensors["d2t"])
    del p.tensors["t2d"]


REFUSED = {
    "d2t too short": (_set("d2t", lambda t: t[:-1]), r"the weight d2t has shape \[19\]"),
    "no d2t": (_drop("d2t"), r"lacks the weight d2t \[20\]"),
    "d2t of zeros": (_set("d2t", torch.zeros_like), "t2d marks 20 tokens and d2t names 20 which"),
    "d2t of zeros alone": (_unset, "d2t is 0 throughout and there is no t2d"),
    "d2t beyond": (_set("d2t", lambda t: t + 61), "d2t names tokens outside the vocabulary of 61"),
    "d2t below": (_set("d2t", lambda t: t - 61), "d2t names tokens outside the vocabulary of 61"),
    "d2t twice": (_set("d2t", _twice), "d2t names a token twice"),
    "d2t in floats": (_set("d2t", lambda t: t.float()), "d2t is stored as F32, not I64"),
    "t2d too short": (_set("t2d", lambda t: t[:-1]), r"the weight t2d has shape \[60\]"),
    "t2d unset": (_set("t2d", torch.zeros_like), "t2d marks 0 tokens and d2t names 20 which"),
    "t2d of others": (_set("t2d", lambda t: t.flip(0)), "t2d marks 20 tokens and d2t names 20"),
    "own head": (_set("lm_head.weight", lambda t: t * 1.1), "lm_head.weight differs from the"),
    "whole head": (
        _set("lm_head.weight", lambda t: t[:-1]),
        r"lm_head.weight has shape \[19, 32\]",
    ),
    "head with NaN": (_set("lm_head.weight", lambda t: t * torch.nan), "lm_head.weight holds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_vocabulary_is_refused_by_its_tensor(name: str, tmp_path: Path) -> None:
    change, says = REFUSED[name]
    p = Published()
    change(p)
    path = p.write(tmp_path / "d")
    with pytest.raises(DSparkError, match=says) as eval_error:
        opened(p, path)
    with pytest.raises(DSparkError, match=says) as convert_error:
        convert_drafter(path, tmp_path / "out", target_of(p, tmp_path / "target"))
    for error in (str(eval_error.value), str(convert_error.value)):
        assert str(path) in error
        assert ";" in error
        assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_maps_that_may_be_absent(tmp_path: Path) -> None:
    """`t2d` says nothing that d2t does not, and a head that is not stored is the target's."""
    p = Published()
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(9))
    expected = drafts(p, features, 7).tokens
    del p.tensors["t2d"], p.tensors["embed_tokens.weight"]
    head = p.tensors.pop("lm_head.weight")
    path = p.write(tmp_path / "d")
    assert drafted(opened(p, path), features, 7, 0.0)[0] == expected
    nowhere = Target(str(tmp_path / "nowhere"), 32, 61, 4)
    convert_drafter(path, tmp_path / "out", nowhere)  # nothing to compare
    p.tensors["lm_head.weight"] = head
    with pytest.raises(DSparkError, match=r"target .*nowhere: its LM head cannot be read"):
        convert_drafter(p.write(path), tmp_path / "other", nowhere)


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_are_read(prefix: str, tmp_path: Path) -> None:
    p = Published()
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(9))
    expected = drafts(p, features, 7).tokens
    p.tensors = {f"{prefix}{name}": tensor for name, tensor in p.tensors.items()}
    assert drafted(opened(p, p.write(tmp_path / "d")), features, 7, 0.0)[0] == expected


def test_fixes_are_named(tmp_path: Path) -> None:
    p = Published(**SHAPES["all"])
    for field, fix in (
        ("sample_from_anchor", r"`true` if .*, or `false` if that row drafts nothing"),
        ("mask_token_id", "write the id whose embedding it was trained with"),
    ):
        with pytest.raises(DSparkError, match=rf"{field} is None; .*{fix}"):
            opened(p, p.write(tmp_path / "d", **{field: None}))
    rnn = Published(from_anchor=False, markov="rnn")
    with pytest.raises(DSparkError, match="sample_from_anchor false with markov_head_type 'rnn'"):
        opened(rnn, rnn.write(tmp_path / "rnn"))


def test_layers_with_a_window_are_listed(tmp_path: Path) -> None:
    p = Published(columns=61, window=2, sliding=(1,))
    config = DrafterConfig.from_dir(p.write(tmp_path / "d"))
    assert [config.has_window(i) for i in range(2)] == [False, True]
    whole = DrafterConfig.from_dir(Published(columns=61).write(tmp_path / "whole"))
    assert (whole.window, whole.has_window(0)) == (None, False)


def test_deepspecs_format_has_no_such_drafter(tmp_path: Path) -> None:
    p = Published(columns=61, from_anchor=False)
    drafter = opened(p, p.write(tmp_path / "d"))
    with pytest.raises(DSparkError, match="in DeepSpec's format the anchor's row drafts"):
        save_deepspec(drafter, tmp_path / "out")
