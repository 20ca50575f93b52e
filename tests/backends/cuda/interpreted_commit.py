"""Steps committed by the operators in Triton's interpreter and by SGLang's own calls, on real draft
models and caches; in a process of its own, as the interpreter is chosen before Triton is imported.
Prints JSON.
"""

from __future__ import annotations

import json
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models import dflash, dspark
from sglang.srt.models.dflash import DFlashAttention
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_dspark.backends.cuda import commit
from sglang_dspark.patches import registry
from sglang_dspark.patches.step.weight_updates import WeightUpdater
from tests.backends.cpu.moe_ranks import BASE, EXPERTS, built, groups
from tests.backends.cpu.test_context_kv import DIM, KV_HEADS, LAYERS, SLOTS, Draft
from tests.backends.cuda.test_commit import WIDTH, injector_of
from tests.drafter.helpers import tiny_config
from tests.kernels.interpreter import patch_language_once

EMITTED = [2, 6, 1, 4]
VERIFIED = [4, 6, 2, 4]


def pool(dtype: torch.dtype = torch.float32, layers: int = LAYERS, first: int = 0) -> Any:
    """A cache that was never written."""
    made = MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=layers,
        device="cpu", enable_memory_saver=False, start_layer=first,
    )  # fmt: skip
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.view(dtype).copy_(torch.full(buffer.shape, -7.0))
    return made


class Step:
    """One pass, the same for every cache: VERIFIED rows, of which EMITTED are committed."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        requests, features = len(EMITTED), model.fc.in_features
        self.slots = torch.randperm(SLOTS, generator=generator)[: requests * WIDTH] + 1
        self.lens = torch.randint(0, 90, (requests,), generator=generator)
        self.hidden = torch.randn(requests * WIDTH, features, generator=generator).to(dtype)

    def rows(self, counts: list[int], padding: int = 0) -> commit.ContextRows:
        """The first counts[r] rows of each window, and rows without a slot."""
        places = torch.arange(WIDTH)
        chosen = (places < torch.tensor(counts)[:, None]).flatten()
        positions = (self.lens[:, None] + places).flatten()
        pad = torch.nn.functional.pad
        return commit.ContextRows(
            pad(self.hidden[chosen], (0, 0, 0, padding), value=3.0),
            pad(positions[chosen], (0, padding)),
            pad(self.slots[chosen], (0, padding)),
        )

    def theirs(self, model: Any, cache: Any) -> None:
        """By SGLang's calls, over whole windows."""
        injector_of(model, cache).inject_ragged(
            batch=SimpleNamespace(seq_lens=self.lens),
            layout=None,
            hidden_strided=self.hidden,
            commit_lens=torch.tensor(EMITTED, dtype=torch.int32),
            bs=len(EMITTED),
            kv_loc_plan=SimpleNamespace(write_ids=lambda translator, cols: self.slots),
        )

    def theirs_by_rows(self, model: Any, cache: Any) -> None:
        """The same row by row, as prefills are written."""
        rows = self.rows(EMITTED)
        injector_of(model, cache).inject_target_hidden(
            target_hidden=rows.hidden, cache_loc=rows.slots, positions=rows.positions
        )

    def off(self, mine: Any, other: Any) -> float:
        """The largest difference of a number, by the largest number of its row.

        Slot 0 is no token's, and rejected rows are ours alone.
        """
        compared = torch.ones(len(mine.k_buffer[0]), dtype=torch.bool)
        compared[self.rows(VERIFIED).slots] = compared[0] = False
        compared[self.rows(EMITTED).slots] = True
        worst = 0.0
        for name in ("k_buffer", "v_buffer"):
            for a, b in zip(getattr(mine, name), getattr(other, name), strict=True):
                a, b = a.view(mine.dtype)[compared].double(), b.view(mine.dtype)[compared].double()
                by_row = (a - b).abs().amax(-1) / b.abs().amax(-1)
                worst = max(worst, float(by_row.max()))
        return worst


def turned(model: Any, **rope: Any) -> Any:
    """With another rotation in all layers."""
    rotary = get_rope(DIM, rope.pop("rotary_dim", DIM), 128, 1e4, dtype=torch.float32, **rope)
    for layer in model.layers:
        layer.self_attn.rotary_emb = rotary
    return model


def biased(model: Any) -> Any:
    """With a bias in all projections."""
    for layer in model.layers:
        projection = layer.self_attn.qkv_proj
        projection.bias = torch.randn(len(projection.weight))
    return model


def narrow(model: Any) -> Any:
    """In bfloat16."""
    model.to(torch.bfloat16)
    for layer in model.layers:
        layer.self_attn.k_norm.to(torch.bfloat16)
        projection = layer.self_attn.qkv_proj
        projection.weight = projection.weight.to(torch.bfloat16)
    return model


def scaled(model: Any) -> Any:
    """With scales of an FP8 cache."""
    for number, layer in enumerate(model.layers):
        attention = layer.self_attn.attn
        attention.k_scale, attention.v_scale = 0.5 + number, torch.tensor(2.0)
    return model


class OfLayers(Draft):
    """With what SGLang calls layer by layer."""

    @staticmethod
    def _layer(index: int) -> Any:
        made = Draft._layer(index)
        for name in ("kv_proj_only", "apply_k_norm", "apply_k_rope"):
            setattr(
                made.self_attn, name, MethodType(getattr(DFlashAttention, name), made.self_attn)
            )
        return made


def single_layer(model: Any) -> Any:
    """With its first layer alone."""
    model.layers = model.layers[:1]
    return model


def behind(model: Any, others: int) -> Any:
    """With layers counted behind those of another stage."""
    for layer in model.layers:
        layer.self_attn.attn.layer_id += others
    return model


def dense() -> Any:
    """Its rotation is its own: SGLang keeps one for all who ask for the same."""
    model = OfLayers().requires_grad_(False)
    rotary = deepcopy(model.layers[0].self_attn.rotary_emb)
    for layer in model.layers:
        layer.self_attn.rotary_emb = rotary
    return model


def committed(
    model: Any, dtype: torch.dtype, padding: int = 0, *, by_rows: bool = False, layers: int = LAYERS
) -> tuple[float, int]:
    """Return our largest difference from SGLang's, and the operator's launches."""
    step, first = Step(model, model.fc.weight.dtype), model.layers[0].self_attn.attn.layer_id
    ours, theirs = pool(dtype, layers, first), pool(dtype, layers, first)
    (step.theirs_by_rows if by_rows else step.theirs)(model, theirs)
    with mock.patch.object(commit, "write_triton", wraps=commit.write_triton) as launch:
        commit.StepCommit(injector_of(model, ours)).write(step.rows(VERIFIED, padding))
    return step.off(ours, theirs), launch.call_count


def parity() -> dict[str, tuple[float, int]]:
    """Every kind of model and cache that the operator takes."""
    some, single = 3, torch.float32
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    found = {
        "rows of the pass": committed(dense(), single),
        "rows that fill a graph's size": committed(dense(), single, some),
        "pairs side by side": committed(turned(dense(), is_neox_style=False), single, some),
        "half of a key": committed(turned(dense(), rotary_dim=DIM // 2), single, some),
        "YaRN": committed(turned(dense(), rope_scaling=yarn), single, some),
        "a bias": committed(biased(dense()), single, some),
        "one layer": committed(single_layer(dense()), single, some, layers=1),
        "layers behind others": committed(behind(dense(), 2), single, some),
        "scales that a wide cache ignores": committed(scaled(dense()), single, some, by_rows=True),
        "bfloat16": committed(narrow(dense()), torch.bfloat16, some),
        "FP8": committed(scaled(dense()), torch.float8_e4m3fn, some, by_rows=True),
    }
    return found


def with_experts() -> tuple[float, int]:
    """The served drafter with experts, two residual streams and a window."""
    folder = Path(tempfile.mkdtemp())
    with groups(0, 1, 1, folder / "store"):
        model = built(tiny_config(**BASE, **EXPERTS))
        return committed(model, torch.float32, 1, layers=len(model.layers))


def gemma(model: Any, cache: Any) -> None:
    for layer in model.layers:
        norm = GemmaRMSNorm(DIM, eps=1e-6)
        norm.weight.data = layer.self_attn.k_norm.weight.data
        layer.self_attn.k_norm = norm


def unlike(model: Any, cache: Any) -> None:
    model.layers[1].self_attn.rotary_emb = get_rope(DIM, DIM, 128, 5e3, dtype=torch.float32)


def epsilon(model: Any, cache: Any) -> None:
    """Another in one layer, which SGLang then projects by itself."""
    model.layers[1].self_attn.k_norm.variance_epsilon = 1e-3


def values(model: Any, cache: Any) -> None:
    for layer in model.layers:
        layer.self_attn.v_scale = 1.0


def rotation(model: Any, cache: Any) -> None:
    rotary = model.layers[0].self_attn.rotary_emb
    rotary.__class__ = type("SomeEmbedding", (type(rotary),), {})


def own_way(model: Any, cache: Any) -> None:
    write = type(model).write_target_hidden_kv
    methods = {"write_target_hidden_kv": lambda self, **given: write(self, **given)}
    model.__class__ = type("OwnDraft", (OfLayers,), methods)


def own_cache(model: Any, cache: Any) -> None:
    store = type(cache)._store_kv_layer
    methods = {"_store_kv_layer": lambda self, *given: store(self, *given)}
    cache.__class__ = type("OwnPool", (MHATokenToKVPool,), methods)


def layout(model: Any, cache: Any) -> None:
    cache.kv_cache_layout = "hnd"


def apart(model: Any, cache: Any) -> None:
    cache.v_buffer = [torch.stack((each, each), -1)[..., 0] for each in cache.v_buffer]


def packed_weights(model: Any, cache: Any) -> None:
    model._stacked_ctx_kv_cache = None  # as SGLang notes it down


REFUSED: dict[str, Callable[[Any, Any], None]] = {
    "GemmaRMSNorm, not RMSNorm": gemma,
    "rotate in unlike ways": unlike,
    "norms of unlike epsilon": epsilon,
    "values are scaled": values,
    "SomeEmbedding, not RotaryEmbedding": rotation,
    "OwnDraft writes": own_way,
    "cache is a OwnPool": own_cache,
    "cache has the layout hnd": layout,
    "row of its cache is not contiguous": apart,
    "projections are no plain weights": packed_weights,
}


def refused(change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """Return warnings, launches and the difference of two steps of one commit."""
    model, ours, theirs = dense(), pool(), pool()
    change(model, ours)
    by, worst = commit.StepCommit(injector_of(model, ours)), 0.0
    launch = mock.patch.object(commit, "write_triton", wraps=commit.write_triton)
    with launch as launched, mock.patch.object(commit.logger, "warning") as warning:
        for seed in (5, 6):
            step = Step(model, seed=seed)
            by.write(step.rows(VERIFIED))
            step.theirs_by_rows(model, theirs)
            worst = max(worst, step.off(ours, theirs) if seed == 5 else 0.0)
    told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return {"told": told, "launches": launched.call_count, "off": worst}


def exchanged() -> dict[str, bool]:
    """Return for each exchanged part whether a later step uses the new one."""
    model, found = dense(), {}
    injector = injector_of(model, pool())
    by = commit.StepCommit(injector)

    def right(name: str) -> None:
        ours, theirs, step = pool(), pool(), Step(model)
        injector.draft_model_runner.token_to_kv_pool = ours
        by.write(step.rows(VERIFIED))
        step.theirs(model, theirs)
        found[name] = step.off(ours, theirs) < 1e-5

    by.write(Step(model).rows(VERIFIED))
    right("cache")
    for layer in model.layers:
        projection = layer.self_attn.qkv_proj
        projection.weight = torch.randn_like(projection.weight) * 0.2
    model._stacked_ctx_kv_cache = False  # SGLang's own copy, which it never renews
    right("weights")
    rotary = model.layers[0].self_attn.rotary_emb
    rotary.cos_sin_cache = torch.cat((rotary.cos_sin_cache, rotary.cos_sin_cache)).flip(-1)
    right("longer positions")
    return found


def end_update(worker: Any) -> None:
    """End an update that names the drafter, as upstream's updater does with our overrides."""

    class Theirs:
        draft_worker = worker

        def end_weight_update(self, recv_req: Any) -> Any:
            return SimpleNamespace(success=True)

    registry.derive(Theirs, WeightUpdater)().end_weight_update(None)  # type: ignore[attr-defined]


def updated(model: Any, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Compare a step after an update in place with one of a new model: ours, SGLang's; whether
    the context that graphs were captured with still holds."""
    step, ours = Step(model, model.fc.weight.dtype), pool(dtype)
    by = commit.StepCommit(injector_of(model, ours))
    by.write(step.rows(VERIFIED))
    context = by.context(torch.device("cpu"))
    if dtype == torch.float32:  # SGLang's launch for bfloat16 does not run here
        step.theirs(model, pool(dtype))
    for layer in model.layers:
        layer.self_attn.k_norm.weight.mul_(3.0)
        layer.self_attn.qkv_proj.weight.neg_()
    worker = DSparkWorkerV2.__new__(DSparkWorkerV2)
    worker.__dict__.update(_hosts_draft=True, draft_model=model)
    end_update(worker)
    by.write(step.rows(VERIFIED))
    theirs, fresh = pool(dtype), pool(dtype)
    if dtype == torch.float32:
        step.theirs(model, theirs)
    new = deepcopy(model)
    new._stacked_ctx_kv_cache, new._fused_kv_write_cache = False, None
    commit.StepCommit(injector_of(new, fresh)).write(step.rows(VERIFIED))
    kept = by.context(torch.device("cpu")) is context
    others = step.off(theirs, fresh) if dtype == torch.float32 else 0.0
    return step.off(ours, fresh), others, kept


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    plain = {"can_dflash_slice_qkv_weight": lambda projection: (True, "")}  # as is OfLayers'
    with mock.patch.multiple(dspark, **plain), mock.patch.multiple(dflash, **plain):
        pairs: dict[str, tuple[float, int]] = parity()
        refusals = {name: refused(change) for name, change in REFUSED.items()}
        said: dict[str, Any] = {"refused": refusals, "exchanged": exchanged()}
        said["updated"] = {
            "float32": updated(dense(), torch.float32),
            "a bias": updated(biased(dense()), torch.float32),
            "bfloat16": updated(narrow(dense()), torch.bfloat16),
        }
        fused = narrow(dense())._fused_kv_write_bundle(pool(torch.bfloat16))
        said["SGLang's launch"] = fused is not None
    pairs["with experts"] = with_experts()
    said["off"] = {name: pair[0] for name, pair in pairs.items()}
    said["launches"] = {name: pair[1] for name, pair in pairs.items()}
    print(json.dumps(said))


if __name__ == "__main__":
    patch_language_once()
    with torch.inference_mode():
        main()
