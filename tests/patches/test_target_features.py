"""Features of targets whose classes hand none to DSPARK, against Transformers' hidden states."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

pytest.importorskip("sglang")

import sglang.srt.models
from safetensors.torch import load_file
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.models.dspark import project_through_lm_head

from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.patches.step import targets
from sglang_dspark.serving.target_features import returns_features
from tests.backends.cpu.attention_world import Case, World, extend_pass
from tests.backends.cpu.test_layer_stack import one_rank

__all__ = ["one_rank"]
LAYERS, VOCAB = 3, 64
BY_HOOKS = ("Gemma3", "Granite", "Ernie4_5", "StableLm", "Olmo2", "Starcoder2")
NAMED = {"Ernie4_5": "Ernie4_5_ForCausalLM"}  # SGLang's class, where it is named otherwise
TIED = ("Gemma3",)
SCALES = {  # as published models have them, other than one
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0}
}


def pair_of(name: str, folder: Path) -> tuple[Any, Any]:
    """A small random model of Transformers, and SGLang's with the same weights."""
    config_class = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")
    config = config_class(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=name in TIED,
        **({} if name == "Qwen2" else {"head_dim": 16}), **SCALES.get(name, {}),
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.2)
    theirs.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"  # SGLang's Gemma 3 is a model of Transformers, too
    served = sglang_class(NAMED.get(name, f"{name}ForCausalLM"))(config)
    served.load_weights(list(load_file(folder / "model.safetensors").items()))
    return theirs, served.requires_grad_(False)


def sglang_class(name: str) -> Any:
    for file in Path(sglang.srt.models.__path__[0]).glob("*.py"):
        if f"\nclass {name}(" in file.read_text():
            return getattr(importlib.import_module(f"sglang.srt.models.{file.stem}"), name)
    raise AssertionError(name)


def capture(model: Any, layer_ids: list[int], **changed: Any) -> dict[str, Any]:
    """Call the patch as SGLang does; return what it hands on to SGLang's function."""
    handed: dict[str, Any] = {}
    arguments = {
        "model": model,
        "eagle_use_aux_hidden_state": False,
        "eagle_aux_hidden_state_layer_ids": None,
        "dflash_use_aux_hidden_state": True,
        "dflash_target_layer_ids": layer_ids,
        "is_dspark": True,
    }
    targets.capture_features(handed.update, **{**arguments, **changed})
    return handed


def pass_of(tokens: Tensor) -> tuple[Any, Any]:
    """A prefill of one request, and the backend that attends."""
    world = World(Case((0,), (len(tokens),), heads=4, kv_heads=2))
    world.kv_pool = MHATokenToKVPool(
        size=world.kv_pool.size, page_size=1, dtype=torch.float32, head_num=2, head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    backend, batch = DsparkCpuAttnBackend(world.runner()), extend_pass(world)
    batch.input_ids, batch.positions = tokens, torch.arange(len(tokens))
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    backend.init_forward_metadata(batch)
    return backend, batch


def features_of(run: Callable[..., Any], tokens: Tensor) -> Any:
    backend, batch = pass_of(tokens)
    previous = set_forward_context(ForwardContext(attn_backend=backend))
    try:
        with torch.inference_mode():
            return run(tokens, batch.positions, batch)
    finally:
        set_forward_context(previous)


def streams_of(theirs: Any, tokens: Tensor, layer_ids: list[int]) -> Tensor:
    """Outputs of Transformers' layers, [n, m * d]."""
    found: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, i=i: found.update({i: out if isinstance(out, Tensor) else out[0]})
        )
        for i, layer in enumerate(theirs.model.layers)
    ]
    with torch.inference_mode():
        theirs(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([found[i][0] for i in layer_ids], -1)


def tokens_of(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [*BY_HOOKS, "Qwen2", "Glm4"])
def test_features_are_transformers_hidden_states(name: str, tmp_path: Path) -> None:
    theirs, served = pair_of(name, tmp_path)
    layer_ids = [0, 2] if name in BY_HOOKS else [0, 1]  # upstream's own loops miss the last layer
    assert capture(served, layer_ids)["dflash_use_aux_hidden_state"] is False
    first = tokens_of(20, 0)
    features_of(served.model, tokens_of(9, 1))  # a pass without logits leaves nothing behind
    for tokens in (first, tokens_of(7, 2)):
        found = features_of(served, tokens).hidden_states
        torch.testing.assert_close(
            found, streams_of(theirs, tokens, layer_ids), rtol=1e-4, atol=1e-4
        )
    if name in BY_HOOKS:  # replays of graphs would keep a prefill's features in memory
        (hook,) = served.model.layers[layer_ids[0]]._forward_hooks.values()
        assert hook.__self__._features == []


@pytest.mark.usefixtures("one_rank")
def test_the_last_layer_of_a_class_with_eagle3s_hook_is_read_by_hooks(tmp_path: Path) -> None:
    """Its own loop would return one layer less, which ends the server at the first request."""
    theirs, served = pair_of("Qwen2", tmp_path)
    capture(served, [0, 2])
    tokens = tokens_of(20, 0)
    found = features_of(served, tokens).hidden_states
    torch.testing.assert_close(found, streams_of(theirs, tokens, [0, 2]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["Qwen2", "Glm4"])
def test_layers_that_share_a_stream_are_read_by_hooks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other classes of that form are; these have a hook, which is hidden."""
    theirs, served = pair_of(name, tmp_path)
    monkeypatch.setattr(targets, "FEATURE_HOOKS", ())
    monkeypatch.setattr(targets, "EAGLE3_HOOK", "none")
    capture(served, [0, 2])
    tokens = tokens_of(20, 0)
    found = features_of(served, tokens).hidden_states
    torch.testing.assert_close(found, streams_of(theirs, tokens, [0, 2]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_upstreams_own_features_of_gemma3_are_not(tmp_path: Path) -> None:
    """The reason for `INCOMPLETE`; where this fails, upstream has changed it."""
    theirs, served = pair_of("Gemma3", tmp_path)
    served.set_eagle3_layers_to_capture([0, 1])
    tokens = tokens_of(20, 0)
    found = features_of(served, tokens).hidden_states
    assert (found - streams_of(theirs, tokens, [0, 1])).abs().max() > 0.1


@pytest.mark.usefixtures("one_rank")
def test_a_processor_without_layers_is_left_as_it_is(tmp_path: Path) -> None:
    _, served = pair_of("Granite", tmp_path)
    capture(served, [0, 1])
    features_of(served, tokens_of(5, 0))
    _, batch = pass_of(tokens_of(5, 0))
    hidden = torch.ones(5, 64)
    for more in ((), (None,)):
        with torch.inference_mode():
            plain = served.logits_processor(batch.input_ids, hidden, served.lm_head, batch, *more)
        assert torch.equal(plain.hidden_states, hidden)
        assert plain.next_token_logits.shape == (1, VOCAB)


@pytest.mark.usefixtures("one_rank")
def test_a_replayed_prefill_returns_the_features_of_its_graph(tmp_path: Path) -> None:
    """SGLang puts what a graph of `model.model` returned in the place of its forward."""
    _, served = pair_of("Granite", tmp_path)
    capture(served, [0, 1])
    tokens = tokens_of(5, 0)
    expected = features_of(served, tokens).hidden_states
    returned = features_of(served.model.forward, tokens)
    served.model.forward = lambda *_, **__: returned
    assert torch.equal(features_of(served, tokens).hidden_states, expected)


@pytest.mark.usefixtures("one_rank")
def test_a_second_call_adds_nothing(tmp_path: Path) -> None:
    """SGLang sets attention up again in some starts."""
    _, served = pair_of("Granite", tmp_path)
    capture(served, [0, 1])
    capture(served, [0, 1])
    assert features_of(served, tokens_of(5, 0)).hidden_states.shape == (5, 2 * 64)


def test_features_have_memory_of_their_own() -> None:
    rows, batch = torch.ones(2, 4), SimpleNamespace(residual_stream=None)
    for name, output in (("Olmo2ForCausalLM", rows), ("StableLmForCausalLM", (rows, rows))):
        found = targets.residual_stream(name, output, batch)
        assert torch.equal(found, rows)
        assert found.data_ptr() != rows.data_ptr()


@pytest.mark.usefixtures("one_rank")
def test_drafts_project_through_a_tied_embedding(tmp_path: Path) -> None:
    _, served = pair_of("Gemma3", tmp_path)
    capture(served, [0])
    hidden = torch.randn(3, 64)
    with torch.inference_mode():
        found = project_through_lm_head(hidden, served.lm_head)
    torch.testing.assert_close(found, hidden @ served.model.embed_tokens.weight.T)
    assert int(served.lm_head.org_vocab_size) == VOCAB


class Worker:
    """The method of SGLang's `DSparkWorkerV2` that the patch extends."""

    def _resolve_target_embed_tokens(self, target_model: Any) -> Any:
        return target_model.get_input_embeddings()


def test_the_embedding_of_every_target_is_found() -> None:
    worker: Any = type("DSparkWorkerV2", (targets.DSparkWorker, Worker), {})()
    named = SimpleNamespace(get_input_embeddings=lambda: "own")
    inner = SimpleNamespace(get_input_embeddings=lambda: "inner")
    bare = SimpleNamespace(embed_tokens="embed_tokens")
    for model, expected in (
        (named, "own"),
        (SimpleNamespace(model=inner), "inner"),
        (SimpleNamespace(model=bare), "embed_tokens"),
    ):
        assert worker._resolve_target_embed_tokens(model) == expected
        assert model.get_input_embeddings() == expected  # drafting asks again


@pytest.mark.parametrize("hook", ["set_dspark_layers_to_capture", "set_dflash_layers_to_capture"])
def test_a_class_with_a_hook_is_upstreams(hook: str) -> None:
    model = SimpleNamespace(**{hook: None, "set_eagle3_layers_to_capture": None})
    handed = capture(model, [1])
    assert handed["dflash_use_aux_hidden_state"] is True
    assert handed["dflash_target_layer_ids"] == [1]


def test_other_algorithms_are_upstreams() -> None:
    handed = capture(SimpleNamespace(), [1], dflash_use_aux_hidden_state=False)
    assert handed["dflash_use_aux_hidden_state"] is False


def test_the_hook_of_eagle3_gets_the_same_ids() -> None:
    asked: list[list[int]] = []
    capture(SimpleNamespace(set_eagle3_layers_to_capture=asked.append), [1, 4])
    assert asked == [[1, 4]]


class Pairs(torch.nn.Module):
    """A layer that returns two values of an unknown form."""

    def forward(self, hidden: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class Unknown(torch.nn.Module):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Pairs()])
        self.logits_processor = torch.nn.Identity()


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_read_stops_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        capture(torch.nn.Linear(2, 2), [0])
    assert "Linear has no model.layers or no logits_processor" in capsys.readouterr().err
    model = Unknown()
    capture(model, [0])
    _, batch = pass_of(tokens_of(5, 0))
    with pytest.raises(SystemExit):
        model.model.layers[0](torch.zeros(2, 2), batch)
    assert "those of Unknown return 2 values" in capsys.readouterr().err
    two = SimpleNamespace(pp_size=2)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: two)
    with pytest.raises(SystemExit):
        capture(Unknown(), [0])
    assert "set --pp-size 1 in place of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "returned"),
    [
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),  # inherits the hook
        ("Qwen2ForCausalLM", True),  # has EAGLE-3's
        ("Gemma3ForCausalLM", True),
        ("Gemma3ForConditionalGeneration", False),  # its decoder is another class's
        ("Olmo2ForCausalLM", True),
        ("CohereForCausalLM", False),  # has no LM head for drafts to share
        ("BaichuanForCausalLM", False),  # layers of two values that were not compared
        ("GPTJForCausalLM", False),  # other names
        ("NoSuchForCausalLM", True),
        ("", True),
    ],
)
def test_what_the_files_say_of_a_target(
    architecture: str, returned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert returns_features(architecture) is returned
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    assert returns_features(architecture)
