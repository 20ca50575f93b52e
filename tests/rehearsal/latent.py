"""DeepSeek-V4 on a CPU: torch where SGLang's model class and its cache have CUDA kernels alone.

Upstream (0.5.23): sglang/srt/models/{deepseek_v4,deepseek_v4_dspark}.py, their backend
sglang/srt/layers/attention/deepseek_v4_backend.py and their cache sglang/srt/mem_cache/
deepseek_v4_memory_pool.py. Config, weights, cache, attention metadata, graphs' inputs and step are
upstream's. Layers that attend a window only (compress ratio 0) are covered; those that compress
their past have further kernels. Installed by DSPARK_REHEARSAL_LATENT=1.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

NOPE, ROPE_BYTES, TILE = 448, 128, 64  # of a cached row: values in FP8, bytes in bf16, per scale
DATA, SCALES = NOPE + ROPE_BYTES, 8  # bytes of a row in a page's two parts
WINDOW_PAGE = 256  # rows of a page of windows
LARGEST, BIAS = 448.0, 127  # of float8_e4m3fn; of an exponent stored as a byte

OPTIONS = {  # upstream's own switches away from kernels that have no stand-in here
    "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
}


def rotate(x: Tensor, freqs_cis: Tensor, positions: Tensor, inverse: bool = False) -> None:
    """Rotate x [n, ..., r] in place by complex freqs_cis [positions, r / 2]."""
    turns = freqs_cis[positions.long()]
    turns = turns.conj() if inverse else turns
    turns = turns.view(len(turns), *[1] * (x.ndim - 2), turns.shape[-1])
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    x.copy_(torch.view_as_real(pairs * turns).flatten(-2))


def fused_rope_inplace(
    q: Tensor, k: Tensor | None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False
) -> None:
    """Rotate queries and keys in place."""
    for x in (q, k):
        if x is not None:
            rotate(x, freqs_cis, positions, inverse)


def normed(x: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension in float32, without a weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fused_q_norm_rope(
    q_input: Tensor, q_output: Tensor, eps: float | None, freqs_cis: Tensor, positions: Tensor
) -> None:
    """Normalise queries [n, H, 512] if eps is given, and rotate their last dimensions."""
    q = q_input.float().clone() if eps is None else normed(q_input, eps)
    rotate(q[..., -2 * freqs_cis.shape[-1] :], freqs_cis, positions)
    q_output.copy_(q)


def store_rows(
    kv: Tensor,
    kv_weight: Tensor,
    eps: float,
    freqs_cis: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    **_options: Any,
) -> None:
    """Normalise, rotate and quantise rows [n, 512] into a cache; those at -1 are skipped."""
    rows = normed(kv, eps) * kv_weight.float()
    rotate(rows[:, NOPE:], freqs_cis, positions)
    stored = out_loc >= 0
    rows, loc = rows[stored], out_loc[stored].long()
    nope = rows[:, :NOPE].unflatten(-1, (-1, TILE))
    exponents = torch.ceil(torch.log2(nope.abs().amax(-1).clamp(min=1e-4) / LARGEST))
    quantised = (nope / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn).flatten(1)
    rope = rows[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    page, data, scales = _places(loc, page_size)
    cache = kvcache.view(torch.uint8)
    cache[page, data] = torch.cat([quantised.view(torch.uint8), rope], dim=1)
    cache[page, scales] = (exponents + BIAS).to(torch.uint8)


def load_rows(cache: Tensor, loc: Tensor, page_size: int) -> Tensor:
    """Return the rows [..., 512] at loc [...] of a cache [pages, bytes] in float32."""
    page, data, scales = _places(loc, page_size)
    content, exponents = cache[page, data], cache[page, scales].float() - BIAS
    nope = content[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float()
    nope = nope.unflatten(-1, (-1, TILE)) * torch.exp2(exponents)[..., None]
    rope = content[..., NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.flatten(-2), rope], dim=-1)


def context_rows(pool: Any, slots: Tensor) -> Tensor:
    """Return the last rows [layers, 128 or fewer, 512] that a draft's cache holds of slots [n]."""
    loc = pool.translate_loc_from_full_to_swa(slots[-pool.sliding_window :]).long()
    caches = [pool.get_swa_raw_buffer(layer) for layer in range(pool.layer_num)]
    return torch.stack([load_rows(each.view(torch.uint8), loc, WINDOW_PAGE) for each in caches])


def _places(loc: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages [..., 1] of rows and the bytes of their data and scales (`KVLayout.V4`)."""
    page, row = loc[..., None] // page_size, loc[..., None] % page_size
    data = row * DATA + torch.arange(DATA)
    scales = page_size * DATA + row * SCALES + torch.arange(NOPE // TILE)
    return page, data, scales


def attend(
    q: Tensor,
    k_cache: Tensor,
    softmax_scale: float,
    indices: Tensor,
    topk_length: Tensor,
    attn_sink: Tensor,
    extra_k_cache: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend from q [n, 1, H, 512] to the cached rows `indices` [n, 1, k], with sinks [heads].

    Upstream pads H to 64; heads without a sink are padding. Rows are keys and values at once.
    """
    assert extra_k_cache is None, "there are no compressed layers"
    pages, page_size = k_cache.shape[:2]
    size = page_size * (DATA + SCALES)
    cache = k_cache.as_strided((pages, size), (k_cache.stride(0), 1)).view(torch.uint8)
    loc, heads = indices[:, 0].long(), len(attn_sink)
    seen = (torch.arange(loc.shape[1]) < topk_length[:, None]) & (loc >= 0)
    rows = load_rows(cache, loc.clamp(min=0), page_size).where(seen[..., None], 0.0)
    scores = torch.einsum("nhd,nkd->nhk", q[:, 0, :heads].float(), rows) * softmax_scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sinks = attn_sink.float()[None, :, None].expand(len(q), -1, -1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    out = torch.zeros_like(q)
    out[:, 0, :heads] = torch.einsum("nhk,nkd->nhd", weights, rows).to(q.dtype)
    return out, None


def hc_split_sinkhorn(
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split mixes [..., m (m + 2)] of m streams into their three mixing coefficients."""
    pre, post, comb = mixes.float().split([hc_mult, hc_mult, hc_mult**2], dim=-1)
    of_pre, of_post, of_comb = hc_base.split([hc_mult, hc_mult, hc_mult**2])
    mixing = (comb * hc_scale[2] + of_comb).unflatten(-1, (hc_mult, hc_mult)).softmax(-1) + eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    first = torch.sigmoid(pre * hc_scale[0] + of_pre) + eps
    last = 2 * torch.sigmoid(post * hc_scale[1] + of_post)
    return first.to(mixes.dtype), last.to(mixes.dtype), mixing.to(mixes.dtype)


def mhc_combine(x_flat: Tensor, pre: Tensor, hc: int, out_dtype: torch.dtype) -> Tensor:
    """Weigh and add the streams of x_flat [n, hc * d]."""
    return (pre.float()[..., None] * x_flat.float().unflatten(1, (hc, -1))).sum(1).to(out_dtype)


def project_groups(o: Tensor, wo_a: Tensor, **_options: Any) -> Tensor:
    """Project o [n, G, d] by wo_a [G, r, d], whose type is bf16 for any model."""
    return torch.einsum("tgd,grd->tgr", o, wo_a.to(o.dtype))


STAND_INS = (  # module of SGLang, name in it, what takes its place
    ("srt.models.deepseek_v4", "fused_rope_inplace", fused_rope_inplace),
    ("srt.models.deepseek_v4", "fused_q_norm_rope", fused_q_norm_rope),
    ("srt.models.deepseek_v4", "_apply_wo_a_bf16_matmul", project_groups),
    ("srt.models.deepseek_v4_dspark", "fused_rope_inplace", fused_rope_inplace),
    ("srt.models.deepseek_v4_dspark", "fused_q_norm_rope", fused_q_norm_rope),
    ("srt.models.deepseek_v4_dspark", "_apply_wo_a_bf16_matmul", project_groups),
    ("srt.mem_cache.deepseek_v4_memory_pool", "fused_k_norm_rope_flashmla", store_rows),
    ("kernels.ops.layernorm.mhc", "hc_split_sinkhorn", hc_split_sinkhorn),
    ("kernels.ops.layernorm.mhc", "mhc_combine", mhc_combine),
)


def install() -> None:
    """Put the stand-ins into SGLang's modules; before a model is made."""
    os.environ.update(OPTIONS)
    for module, name, stand_in in STAND_INS:
        target = import_module(f"sglang.{module}")
        assert hasattr(target, name), f"{module} has no {name}"
        setattr(target, name, stand_in)
    _install_backend()
    _install_model()
    allocation = import_module("sglang.srt.mem_cache.allocation")
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    # The pool's classes are upstream's, so its question to a platform outside its tree is settled.
    configurator = import_module("sglang.srt.mem_cache.kv_cache_configurator")
    configurator.reject_out_of_tree_path = lambda *args, **options: None


def _install_backend() -> None:
    module = import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    backend = module.DeepseekV4AttnBackend
    backend._flash_mla_with_kvcache = staticmethod(attend)
    backend._swa_interleaved = False
    backend._move_to_device = lambda self, values: torch.tensor(values, dtype=torch.int32)
    module._create_flashmla_metadata = lambda *args, **options: None


def _install_model() -> None:
    model = import_module("sglang.srt.models.deepseek_v4")
    head = import_module("sglang.kernels.ops.layernorm.mhc_head")
    head.fused_hc_head = model.hc_head_torch
    rope_of = model.get_rope_wrapper
    # Layers without compression read no rotation of this kind, and a CPU's is scaled ones alone.
    model.get_rope_wrapper = lambda **options: (
        None if options["rope_scaling"] is None else rope_of(**options)
    )
