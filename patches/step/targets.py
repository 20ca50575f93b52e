"""Serve targets whose classes pass no features of their layers to a DSPARK drafter.

Upstream: `configure_aux_hidden_state_capture` in
sglang/srt/model_executor/model_runner_components/attention_backend_setup.py raises for a class that
has neither `set_dspark_layers_to_capture` nor `set_dflash_layers_to_capture`. Two alternatives
remain (sglang_dspark/serving/target_features.py has the classes):

- `set_eagle3_layers_to_capture`, with the same layer ids and the same states (Qwen2,
  GLM-4.5, MiniMax-M2 and others). Not Gemma 3's: it omits the residual stream
  (sgl-project/sglang#39286).
- Hooks on the layers (`LayerFeatures`), for every other model of decoder layers.

To drop when upstream captures the features of every such model; requested and proposed in
sgl-project/sglang#34771 and sgl-project/sglang#39028.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import startup, upstream
from sglang_dspark.serving.target_features import (
    EAGLE3_HOOK,
    FEATURE_HOOKS,
    INCOMPLETE,
    SUMMED,
    WHOLE,
)

SEAMS = Seams()


@SEAMS.around(
    "target-features",
    "sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
    signature="(*, model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
    "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark)",
    why="upstream refuses targets whose classes have no hook of DSPARK's or DFLASH's",
)
def capture_features(
    original: Callable[..., None],
    *,
    model: Any,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: Sequence[int] | None,
    **others: Any,
) -> None:
    """Capture the features of a class without a hook that upstream calls (AROUND hook)."""
    ours = dflash_use_aux_hidden_state and not any(hasattr(model, name) for name in FEATURE_HOOKS)
    original(
        model=model,
        dflash_use_aux_hidden_state=dflash_use_aux_hidden_state and not ours,
        dflash_target_layer_ids=dflash_target_layer_ids,
        **others,
    )
    if not ours:
        return
    layer_ids = list(dflash_target_layer_ids or ())
    # Most classes capture the input of the next layer; hooks read the output of the last one.
    last = len(getattr(getattr(model, "model", None), "layers", ())) - 1
    complete = type(model).__name__ not in INCOMPLETE and last not in layer_ids
    if hasattr(model, EAGLE3_HOOK) and complete:
        model.set_eagle3_layers_to_capture(layer_ids)
    else:
        _attach(model, layer_ids)


@SEAMS.subclass(
    "target-embedding",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2",
    why="upstream asks for a method that some targets lack",
)
class DSparkWorker(Upstream):
    """Upstream's worker, for a target without a method that returns its embedding."""

    def _resolve_target_embed_tokens(self, target_model: Any) -> Any:
        """Return the target's embedding, which drafts share; add the missing method."""
        inner: Any = getattr(target_model, "model", None)
        if not hasattr(target_model, "get_input_embeddings"):
            theirs = getattr(inner, "get_input_embeddings", None)
            target_model.get_input_embeddings = theirs or (lambda: inner.embed_tokens)
        return super()._resolve_target_embed_tokens(target_model)


def _attach(model: Any, layer_ids: Sequence[int]) -> None:
    """Hook the layers of a model; stop the server for a model with another structure."""
    inner: Any = getattr(model, "model", None)
    layers, processor = getattr(inner, "layers", None), getattr(model, "logits_processor", None)
    name, stages = type(model).__name__, upstream.get_parallel().pp_size
    if not isinstance(layers, nn.ModuleList) or not isinstance(processor, nn.Module):
        startup.stop(
            f"DSPARK reads features of the target's layers, and {name} has no model.layers or no "
            "logits_processor; remove --speculative-algorithm"
        )
    if stages > 1:
        startup.stop(
            f"DSPARK reads features of the layers of {name} by hooks, on one pipeline stage alone; "
            f"set --pp-size 1 in place of {stages}"
        )
    tied = getattr(model, "lm_head", None)
    if isinstance(tied, nn.Embedding):
        head: Any = tied  # drafts read fields that SGLang's LM heads have
        head.quant_method, head.org_vocab_size = None, head.num_embeddings
    LayerFeatures(model, layer_ids)


class LayerFeatures:
    """Hooks that return the residual stream after some layers with a model's output.

    The output of `model.model` becomes (hidden, features), as in upstream's models that capture
    features, and the input of the logits processor is split again. A prefill's graph contains
    only `model.model` (model_executor/runner/prefill_cuda_graph_runner.py), and no hook runs when
    it is replayed.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        """Hook layers `layer_ids`: in ascending order, each in 0 .. number of layers - 1."""
        self._name = type(model).__name__
        self._features: list[Tensor] = []  # [n, d] each, of the pass in progress
        model.model.forward = self._over(model.model.forward)
        for layer_id in layer_ids:
            model.model.layers[layer_id].register_forward_hook(self._keep, with_kwargs=True)
        model.logits_processor.register_forward_pre_hook(_split, with_kwargs=True)

    def _over(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def forward(*inputs: Any, **named: Any) -> tuple[Any, list[Tensor]]:
            self._features = []
            hidden = theirs(*inputs, **named)
            # A graph's replays never run this line again: keep no reference to a prefill's rows.
            found, self._features = self._features, []
            return hidden, found

        return forward

    def _keep(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        given = (*inputs, *named.values())
        batch = next(each for each in given if isinstance(each, upstream.ForwardBatch))
        self._features.append(residual_stream(self._name, output, batch))


def _split(
    processor: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split the second argument of `LogitsProcessor.forward`; the features are the fifth."""
    ids, output, *others = inputs
    if not isinstance(output, tuple):
        return inputs, named
    hidden, features = output
    if len(others) > 2:
        return (ids, hidden, *others[:2], features, *others[3:]), named
    return (ids, hidden, *others), {**named, "aux_hidden_states": features}


def residual_stream(name: str, output: Any, batch: Any) -> Tensor:
    """Return the stream after a layer, [n, d], in its own memory: later layers write in place.

    name: the model's class. output: of the layer. Stops the server for an unknown form.
    """
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    if batch.residual_stream is not None:  # upstream's layers keep their parts there
        stream: Tensor = upstream.residual_snapshot(hidden, batch)
        return stream
    if isinstance(output, Tensor) or name in WHOLE:
        return hidden.clone()
    if name in SUMMED:
        return hidden + output[1]
    startup.stop(
        f"DSPARK reads features of the target's layers, and those of {name} return "
        f"{len(output)} values that are not known to be hidden states and residual; "
        "remove --speculative-algorithm"
    )
