"""Load the target for the reference engine and the trainer: any Hugging Face causal LM.

It has a preallocated slot cache, many requests in one pass, and the hidden states that the
drafter reads (paper, 3.1: features of a fixed set of target layers).
A smaller `lens` in the next call rolls back a row's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from sglang_dspark.common.files import FAULTS, brief
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.decode_attention import decode_attention

_ATTENTION = "dspark_slots"


def _slot_attention(
    module: nn.Module,
    query: Tensor,  # [R, Hq, q, D]
    key: Tensor,  # [R, Hkv, T, D]
    value: Tensor,  # [R, Hkv, T, D]
    attention_mask: Tensor,  # [R, 1, q, T] bool
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend with a mask; fold each KV group into the query rows instead of copying K and V."""
    rows, heads, q, dim = query.shape
    if q == 1 and key.dtype == torch.bfloat16 and key.device.type == "cpu":
        visible = attention_mask[:, 0, 0].sum(-1)
        return decode_attention(query[:, :, 0], key, value, visible, scaling)[:, None], None
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * q, dim).to(key.dtype)
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    out = out.view(rows, heads, q, value.shape[-1]).transpose(1, 2)
    return out.contiguous().to(query.dtype), None


AttentionInterface.register(_ATTENTION, _slot_attention)


class SlotCache:
    """Keys and values of `rows` requests, `[layers][rows, Hkv, max_len, D]`.

    Implements the part of Transformers' cache protocol that decoder layers call (`update`).
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        max_len: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.max_len = max_len
        shape = (rows, heads, max_len, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._rows: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.long)
        self._visible = 0

    def plan(self, rows: Tensor | None, positions: Tensor, visible: int) -> None:
        """Prepare to write `positions` [R, q] of `rows` [R] (None: all, in order)."""
        self._rows, self._positions, self._visible = rows, positions, visible

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Write [R, Hkv, q, D] of one layer; return everything visible [R, Hkv, T, D]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        rows = self._rows
        index = torch.arange(len(keys), device=keys.device) if rows is None else rows
        keys[index[:, None], :, self._positions] = key.transpose(1, 2).to(keys.dtype)
        values[index[:, None], :, self._positions] = value.transpose(1, 2).to(values.dtype)
        if rows is not None:
            keys, values = keys[rows], values[rows]
        return keys[:, :, : self._visible], values[:, :, : self._visible]


class _HalfLinear(nn.Linear):
    """Linear layer whose product runs in bfloat16 while the residual stream stays float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


def _whole_model(path: Path) -> Any:
    """Load a directory's float32 model. Raises DSparkError if a part is missing or damaged."""
    if not (path / "config.json").is_file():
        raise DSparkError(f"no model at {path}: expected a directory with config.json")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError, *FAULTS) as error:
        raise DSparkError(f"cannot load the model {path} ({brief(error)}); get it again") from None
    if found["missing_keys"]:  # Transformers would continue with random weights
        missing = sorted(found["missing_keys"])
        raise DSparkError(
            f"the weights in {path} lack {len(missing)} tensors of config.json's model, such as "
            f"{missing[0]}; get the model again"
        )
    _require_plain_logits(model.config, path)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if states := kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise DSparkError(
            f"the target {path} has layers that keep a state ({', '.join(sorted(states))}), which "
            "training and evaluation do not read; train its drafter with DeepSpec or Speculators"
        )
    return model


def _require_plain_logits(config: Any, path: Path) -> None:
    """Raise DSparkError if logits are more than products with the LM head.

    Drafts are computed as such products, here and in SGLang: the distributions would differ.
    """
    for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"):
        if getattr(config, name, None) not in (None, 1.0):
            raise DSparkError(
                f"the logits of {path} are scaled or capped ({name} {getattr(config, name)} in its "
                "config.json), which drafters are not trained for; choose another target"
            )


@dataclass(frozen=True)
class TargetOutput:
    """`hidden` [R, q, d] before the LM head, `features` [R, q, m*d] of the chosen layers."""

    hidden: Tensor
    features: Tensor


class TargetModel:
    """A frozen target with slots; see `load`."""

    def __init__(self, model: Any, layer_ids: Sequence[int], cache_dtype: torch.dtype):
        self.config = model.config
        layers = model.model.layers
        bad = [i for i in layer_ids if not 0 <= i < len(layers)]
        if bad:
            raise DSparkError(
                f"target layers {bad} do not exist: the model has layers 0..{len(layers) - 1}; "
                "choose feature layers in that range"
            )
        self.layer_ids = tuple(layer_ids)
        self.cache_dtype = cache_dtype
        self._model = model
        self._captured: dict[int, Tensor] = {}
        for i in layer_ids:
            layers[i].register_forward_hook(self._capture(i))

    @classmethod
    def load(
        cls,
        path: Path | str,
        layer_ids: Sequence[int] = (),
        *,
        half_products: bool = False,
        device: torch.device | str = "cpu",
    ) -> TargetModel:
        """Load a float32 model from a local directory.

        layer_ids: decoder layers whose output becomes a feature (Transformers' hidden_states[i+1]).
        half_products: matrix products and cache in bfloat16 (data generation on CPUs that have it);
            measurements of acceptance use float32.
        Raises DSparkError if the directory has no complete model or a layer is out of range.
        """
        model = _whole_model(Path(path)).eval()
        model.requires_grad_(False).to(device)
        if half_products:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
                    module.__class__ = _HalfLinear
        return cls(model, layer_ids, torch.bfloat16 if half_products else torch.float32)

    def _capture(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._captured[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    @property
    def num_layers(self) -> int:
        """Count the decoder layers of the model."""
        return len(self._model.model.layers)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights and of inputs."""
        return self.head_weight.device

    @property
    def embed_weight(self) -> Tensor:
        """Return the token embedding [V, d], times its scale, as SGLang passes it to drafters."""
        embedding = self._model.get_input_embeddings()
        scale: Tensor | None = getattr(embedding, "embed_scale", None)
        return embedding.weight if scale is None else embedding.weight * scale

    @property
    def head_weight(self) -> Tensor:
        """Return the LM head [V, d] (the embedding if tied)."""
        return self._model.get_output_embeddings().weight

    def product_weights(self) -> list[Tensor]:
        """List every weight [N, K] of a product or a lookup, a tied one once."""
        modules = (m for m in self._model.modules() if isinstance(m, nn.Linear | nn.Embedding))
        return list({id(module.weight): module.weight for module in modules}.values())

    def before_products(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the input of every product of weights: [..., K] -> the same shape and dtype."""
        for module in self._model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, given: (change(given[0]),))

    def new_cache(self, rows: int, max_len: int) -> SlotCache:
        """Create empty slots for `rows` requests of at most `max_len` tokens."""
        c = self.config
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return SlotCache(
            c.num_hidden_layers,
            rows,
            c.num_key_value_heads,
            max_len,
            dim,
            self.cache_dtype,
            self.device,
        )

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, lens: Tensor, cache: SlotCache, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run tokens [R, q] at positions lens..lens+q-1 of each row; `rows` [R] selects slots.

        Tokens past a row's real end (padding) are harmless: later calls overwrite them. They are
        never visible, because a query sees only positions up to its own.
        """
        q = tokens.shape[1]
        positions = lens[:, None] + torch.arange(q, device=lens.device)  # [R, q]
        visible = int(lens.max()) + q
        if visible > cache.max_len:
            raise ValueError(f"{visible} tokens do not fit the cache of {cache.max_len}")
        cache.plan(rows, positions, visible)
        columns = torch.arange(visible, device=lens.device)
        mask = columns <= positions[:, None, :, None]  # [R, 1, q, T]
        out = self._model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        features = [self._captured[i] for i in self.layer_ids]
        self._captured.clear()
        empty = out.last_hidden_state.new_empty(*tokens.shape, 0)
        return TargetOutput(out.last_hidden_state, torch.cat(features, -1) if features else empty)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head: [..., d] -> [..., V] float32."""
        return self._model.get_output_embeddings()(hidden).float()
