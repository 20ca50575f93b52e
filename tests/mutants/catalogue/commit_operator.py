"""The commit's write as a Triton operator, and what it is told of a draft model and its cache."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNEL = "kernels/commit_write.py"
STEP = "sglang_dspark/backends/cuda/commit.py"
CONTEXT = "sglang_dspark/backends/cuda/draft_context.py"
PARITY = ("tests/kernels/test_commit_write.py::test_interpreted_kernel_equals_torch",)
_STEPS = "tests/backends/cuda/test_commit.py"
WRITTEN = (f"{_STEPS}::test_one_launch_writes_what_upstream_writes",)
REFUSED = (f"{_STEPS}::test_what_the_operator_does_not_know_is_upstreams_and_said_once",)
EXCHANGED = (f"{_STEPS}::test_weights_and_caches_that_were_exchanged_are_looked_up_anew",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...] = PARITY) -> Mutant:
    return Mutant(name=name, area="commit", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "a commit writes rows that are nobody's",
        KERNEL,
        "    if slot <= 0:\n",
        "    if slot < 0:\n",
    ),
    _mutant(
        "committed keys are rotated backwards",
        KERNEL,
        "tl.where(second, partner, -partner) * sine",
        "tl.where(second, -partner, partner) * sine",
    ),
    _mutant(
        "the other half of a committed key has this half's weight",
        KERNEL,
        "partner = partner * inverse * other_weight",
        "partner = partner * inverse * weight",
    ),
    _mutant(
        "committed keys are normed over the padded head",
        KERNEL,
        "tl.sum(key * key, 1) / size + epsilon",
        "tl.sum(key * key, 1) / size_block + epsilon",
    ),
    _mutant(
        "committed keys are normed without epsilon",
        KERNEL,
        "tl.sum(key * key, 1) / size + epsilon",
        "tl.sum(key * key, 1) / size",
    ),
    _mutant(
        "what is not rotated of a committed key is lost",
        KERNEL,
        "cosine = tl.load(angles, mask=turned, other=1.0)",
        "cosine = tl.load(angles, mask=turned, other=0.0)",
    ),
    _mutant(
        "a layer's keys are committed as its values",
        KERNEL,
        "tl.load(own + heads * size + d,",
        "tl.load(own + d,",
    ),
    _mutant(
        "committed values have the keys' scale",
        KERNEL,
        "_store(cache + 1, scale + 1,",
        "_store(cache + 1, scale,",
    ),
    _mutant(
        "committed numbers beyond FP8 are no numbers",
        KERNEL,
        "row = tl.clamp(row, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)",
        "row = tl.where(tl.abs(row) > 448.0, float('nan'), row)",
    ),
    _mutant(
        "a commit takes the rows of a shared cache for its own",
        KERNEL,
        "k.stride(0), v.stride(0)]",
        "k[0].numel(), v[0].numel()]",
    ),
    _mutant(
        "a commit takes wider rows of a projection for dense",
        KERNEL,
        "        projected.stride(0),\n",
        "        projected.shape[1],\n",
    ),
    _mutant(
        "pairs side by side are taken for halves",
        CONTEXT,
        "neox=attention[0].rotary_emb.is_neox_style",
        "neox=True",
        WRITTEN,
    ),
    _mutant(
        "a commit leaves the projection's bias out",
        CONTEXT,
        'linear(hidden, stacked["weight"], stacked["bias"])',
        'linear(hidden, stacked["weight"])',
        WRITTEN,
    ),
    _mutant(
        "a commit scales what SGLang's cache keeps as it is",
        CONTEXT,
        "if attention.qkv_proj.weight.dtype is pool.dtype:",
        "if attention.attn.k_scale is None:",
        WRITTEN,
    ),
    _mutant(
        "a draft's layers are looked up by their number in the model",
        CONTEXT,
        "int(layer.self_attn.attn.layer_id) - int(pool.start_layer)",
        "int(layer.self_attn.attn.layer_id) % 3",
        WRITTEN,
    ),
    _mutant(
        "scaled values are committed as they are",
        CONTEXT,
        "        if part.v_scale is not None:\n",
        "        if False:\n",
        REFUSED,
    ),
    _mutant(
        "a cache by heads is written by slots",
        CONTEXT,
        'if pool.kv_cache_layout != "nhd":',
        "if False:",
        REFUSED,
    ),
    _mutant(
        "what the kernel refuses is launched",
        CONTEXT,
        "return commit_write.why_not(_layers_of(model, pool), first.rotary_dim)",
        "return None",
        REFUSED,
    ),
    _mutant(
        "a model that writes its context in its own way is overruled",
        CONTEXT,
        "return all(o is getattr(upstream.DSparkDraftMixin, n)",
        "return any(o is getattr(upstream.DSparkDraftMixin, n)",
        REFUSED,
    ),
    _mutant(
        "a cache that stores in its own way is overruled",
        CONTEXT,
        "    if any(o is not getattr(upstream.MHATokenToKVPool, n)",
        "    if all(o is not getattr(upstream.MHATokenToKVPool, n)",
        REFUSED,
    ),
    _mutant(
        "why a commit is SGLang's is said in every step",
        STEP,
        "                self._refused = (model, pool)\n",
        "",
        REFUSED,
    ),
    _mutant(
        "a commit goes on with weights and caches of before",
        STEP,
        "if self._context is None or not self._context.holds(model, pool):",
        "if self._context is None:",
        EXCHANGED,
    ),
    _mutant(
        "rows of a commit are projected though SGLang projects no more",
        STEP,
        "if rows >= len(hidden) and self._resolved",
        "if rows > len(hidden) and self._resolved",
        (f"{_STEPS}::test_the_cache_is_upstreams",),
    ),
)
