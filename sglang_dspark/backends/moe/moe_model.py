"""Run a drafter with experts in SGLang.

Attention, K/V injection and heads are those of the dense DSPARK drafts; layers have experts
(drafter/moe.py) on one or several residual streams.

Subclasses sglang/srt/models/dspark.py and models/dflash.py; patches/step/drafters.py adds
the class to SGLang's model registry. Supports any target whose features DSPARK captures.

With several ranks attention and heads are upstream's; experts are split by experts/sharding.py, and
one sum over the tensor-parallel group, which contains the MoE groups, completes a layer. Every rank
computes router and residual streams from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import expert_ops
from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.backends.moe.block_window import BlockWindow, WindowedAttention
from sglang_dspark.backends.moe.moe_config import drafter_shape
from sglang_dspark.drafter.hyper_connections import HyperConnection, StreamRead, open_streams
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.coded import CodedShared, require_parts
from sglang_dspark.experts.dispatch import RoutedExperts
from sglang_dspark.experts.sharding import (
    Part,
    RankMoE,
    Split,
    check_split,
    mlp_of_rank,
    tensors_of_rank,
)
from sglang_dspark.serving import upstream


def split_here() -> Split:
    """Return this rank's share by SGLang's MoE groups. Raises DSparkError if not its TP group."""
    p = upstream.get_parallel()
    if p.moe_ep_size * p.moe_tp_size != p.tp_size:
        raise DSparkError(
            f"a drafter with experts is split over all --tp-size {p.tp_size} ranks, experts "
            f"{p.moe_ep_size} ways and their width {p.moe_tp_size} ways; use --moe-dp-size 1"
        )
    return Split(
        Part(p.moe_ep_rank, p.moe_ep_size),
        Part(p.moe_tp_rank, p.moe_tp_size),
        Part(p.tp_rank, p.tp_size),
    )


def in_graphs() -> bool:
    """Return whether SGLang will capture this server's decode passes, the draft's included."""
    return (
        upstream.current_platform.capabilities.graph_capture
        and upstream.get_exec().graph.cuda_graph_config.decode.backend != upstream.Backend.DISABLED
    )


class MoEDecoderLayer(nn.Module):
    """Pre-norm attention and experts; the names of its weights are those of the checkpoint."""

    attention_conv = None  # upstream's layers may have them
    mlp_conv = None

    def __init__(
        self,
        config: Any,
        layer_id: int,
        attention_conv: None = None,
        mlp_conv: None = None,
        quant_config: Any = None,
        prefix: str = "",
    ):
        super().__init__()
        c = drafter_shape(config)
        self.self_attn = upstream.DFlashAttention(config=config, layer_id=layer_id)
        split = split_here()
        self.mlp, self.ranks = mlp_of_rank(c, split), split.ranks
        self.input_layernorm = upstream.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = upstream.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.attn_residual = HyperConnection(c.residual_streams, c.hidden_size, c.rms_norm_eps)
        self.mlp_residual = HyperConnection(c.residual_streams, c.hidden_size, c.rms_norm_eps)
        # Routing and mixing are computed in float32, for any dtype of the weights.
        self.attn_residual.float()
        self.mlp_residual.float()
        if isinstance(self.mlp, RankMoE):
            self.mlp.gate.float()
        self.compiled = _CompiledLayer()
        self.routed: RoutedExperts | None = None
        self.shared: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        return self.input_layernorm.weight.dtype

    def use_compiled(self) -> None:
        """Use the fast path for the present weights, if it supports them."""
        shared = self.mlp.shared_experts if isinstance(self.mlp, RankMoE) else None
        if isinstance(shared, CodedShared):
            on_cpu = self.input_layernorm.weight.is_cpu and self.dtype == torch.float32
            shared = shared.restored(self.dtype) if on_cpu else None
        self.compiled = _CompiledLayer(
            expert_ops.fast_path(expert_ops.CompiledShared, shared),
            expert_ops.fast_path(expert_ops.CompiledStreams, self.attn_residual),
            expert_ops.fast_path(expert_ops.CompiledStreams, self.mlp_residual),
        )

    def forward(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        """Compute the layer: x [n, d], or [n, streams, d]; positions [n] -> as x."""

        def attend(y: Tensor) -> Tensor:
            return self.self_attn(
                positions=positions,
                hidden_states=self.input_layernorm(y),
                forward_batch=forward_batch,
            )

        x = _connected(self.attn_residual, self.compiled.attn_streams, x, attend)
        return _connected(self.mlp_residual, self.compiled.mlp_streams, x, self._feed)

    def _feed(self, y: Tensor) -> Tensor:
        out = self._own_part(self.post_attention_layernorm(y))
        return upstream.tensor_model_parallel_all_reduce(out) if self.ranks > 1 else out

    def _own_part(self, y: Tensor) -> Tensor:
        """Compute this rank's summand of the layer's output."""
        if not isinstance(self.mlp, RankMoE):
            return self.mlp(y)
        routing = self.mlp.route(y)
        routed = self.mlp.routed if self.routed is None else self.routed
        out = routed(y, routing.experts, routing.weights)
        if self.mlp.shared_experts is None:
            return out
        shared = self.mlp.shared_experts if self.shared is None else self.shared
        short = self.compiled.shared if expert_ops.supports_rows(y) else None
        return out + (shared if short is None else short)(y)


@dataclass(frozen=True)
class _CompiledLayer:
    """A layer's shared experts and residual connections by the fast path; None: the modules'."""

    shared: expert_ops.CompiledShared | None = None
    attn_streams: expert_ops.CompiledStreams | None = None
    mlp_streams: expert_ops.CompiledStreams | None = None


def _connected(
    connection: HyperConnection,
    compiled: expert_ops.CompiledStreams | None,
    x: Tensor,
    block: Callable[[Tensor], Tensor],
) -> Tensor:
    if compiled is None or not expert_ops.supports_rows(x):
        return connection(x, block)
    read, kept = compiled.read(x)
    return compiled.write(x, block(read), kept)


class DSparkMoEModel(upstream.DSparkDraftMixin, upstream.DFlashDraftModel):
    """Draft model of the architecture that `drafter/config.py` writes for drafters with experts, a
    window or residual streams. capturable: whether a graph may contain its passes."""

    decoder_layer_cls = MoEDecoderLayer

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        shape, split = drafter_shape(config), split_here()
        check_split(shape, split, f"drafter {config.name_or_path}")
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.shape, self.split = shape, split
        window, whole = BlockWindow(shape.window), BlockWindow(None)
        self.windows = [window if shape.has_window(i) else whole for i in range(shape.num_layers)]
        for layer, seen in zip(self.layers, self.windows, strict=True):
            if seen.tokens is not None:
                layer.self_attn.attn = WindowedAttention(
                    layer.self_attn.attn, seen, causal=shape.causal_window
                )
        self.capturable = True
        self.streams = self.shape.residual_streams
        if self.streams > 1:
            self.stream_read = StreamRead(
                self.streams, self.shape.hidden_size, self.shape.rms_norm_eps
            ).float()
        self.compiled_read: expert_ops.CompiledRead | None = None

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Draft from block tokens [n], or their embeddings [n, d], at positions [n] -> h [n, d]."""
        x = self.forward_embed(input_ids) if input_embeds is None else input_embeds
        if x.numel():
            if self.streams > 1:
                x = open_streams(x, self.streams).contiguous()
            pairs = zip(self.windows, self.layers, strict=True)
            for window, run in groupby(pairs, key=itemgetter(0)):
                with window.over(forward_batch):
                    for _, layer in run:
                        x = layer(x, positions, forward_batch)
            x = self.norm(self._one(x))
        return upstream.LogitsProcessorOutput(next_token_logits=None, hidden_states=x)

    def _one(self, x: Tensor) -> Tensor:
        """Read the streams after the last layer: [n, streams, d] -> [n, d]."""
        if self.streams == 1:
            return x
        if self.compiled_read is None or not expert_ops.supports_rows(x):
            return self.stream_read(x)
        return self.compiled_read(x)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load this rank's part of a checkpoint's tensors; quantised experts stay codes and scales.

        Raises DSparkError where these do not fit config.json or each other.
        """
        given = {name.removeprefix("model."): tensor for name, tensor in weights}
        tensors = tensors_of_rank(given, self.split)
        require_parts(tensors, self, self.shape.expert_format)
        # The routers' biases, codes and scales: upstream's loader handles only parameters.
        buffers = dict(self.named_buffers())
        super().load_weights((n, tensor) for n, tensor in tensors.items() if n not in buffers)
        for name, buffer in buffers.items():
            if name in tensors:
                buffer.copy_(tensors[name])
        for layer in self.layers:
            layer.use_compiled()
        if self.shape.num_experts:
            self._choose_backends()
        if self.streams > 1:
            self.compiled_read = expert_ops.fast_path(expert_ops.CompiledRead, self.stream_read)

    def _choose_backends(self) -> None:
        """Choose the backend of each layer's experts by experts/dispatch.py."""
        layers, dtype, graphs = list(self.layers), self.layers[0].dtype, in_graphs()
        found = [expert_backends.weights_of(layer.mlp.experts, self.shape) for layer in layers]
        ranks = self.split.ranks
        routed = expert_backends.routed_layers(found, self.shape, ranks, graphs, dtype)
        self.capturable = routed.in_graphs or not graphs
        for layer, experts in zip(layers, routed.layers, strict=True):
            layer.routed = experts
        coded = [layer for layer in layers if isinstance(layer.mlp.shared_experts, CodedShared)]
        if coded:
            parts = [layer.mlp.shared_experts for layer in coded]
            made = expert_backends.shared_layers(parts, self.shape, routed.in_graphs, dtype)
            for layer, shared in zip(coded, made, strict=True):
                layer.shared = shared

    def prune_to_ctx_kv_injection(self) -> None:
        """Keep only the modules that write the context, as upstream's dense class does."""
        self.markov_head = self.confidence_head = None
        for layer in self.layers:
            layer.mlp, layer.compiled, layer.routed = None, _CompiledLayer(), None
            layer.shared = None
            layer.self_attn.o_proj = None
