"""List the features scheduled by confidence on a GPU, and those with every draft verified.

Decided from the arguments before any model loads, because SGLang builds the confidence
head and captures ragged graphs only in the mode `compact`. `SCHEDULED` and `FEATURES` are the table
of docs/gpu.md; each row of the latter is a rule with a name, and the log names the first that
applies. `GPUS` is its table of attention backends where the user names none: SGLang's own choice
is flashinfer off Hopper, which has no ragged windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Their verify passes support ragged windows, eager and in graphs; Triton by our patches.
RAGGED_BACKENDS = frozenset({"fa3", "fa4", "triton", "trtllm_mha", "trtllm_mla"})
_XQA = (9, 12)  # generations of GPUs on which trtllm_mha is XQA
_FLASHINFER = "flashinfer"  # SGLang's default for DSPARK off Hopper


@dataclass(frozen=True)
class Gpu:
    """The attention backend of a generation of GPUs if the user names none.

    generation: major compute capability. models: examples. ours: whether we declare the backend;
    False: SGLang does.
    """

    generation: int
    models: str
    backend: str
    ours: bool


GPUS = (
    Gpu(8, "A100 (sm_80), A10, A40, RTX 3090 (sm_86), L4, L40S, RTX 4090 (sm_89)", "triton", True),
    Gpu(9, "H100, H200 (sm_90)", "fa3", False),
    Gpu(10, "B200 (sm_100), B300 (sm_103)", "trtllm_mha", True),
    Gpu(12, "RTX 5090, RTX PRO 6000 (sm_120)", "triton", True),
)


@dataclass(frozen=True)
class Start:
    """Inputs of the rules. args: SGLang's resolved arguments.

    recurrent: whether the target keeps a recurrent state. delta_rule: whether that is GDN's.
    variables: the environment. by_lengths: whether the configuration sets lengths that do not sum
    to a K fixed before drafting. generation: the GPU's, 9 of an H100. own_attention: whether the
    target replaces or wraps the attention backend.
    """

    args: Any
    recurrent: bool
    variables: dict[str, str]
    by_lengths: bool = False
    generation: int = 9
    own_attention: bool = False
    delta_rule: bool = False


@dataclass(frozen=True)
class Feature:
    """name: as the documentation lists it. why: the obstacle. holds: whether it applies."""

    name: str
    why: str
    holds: Callable[[Start], bool]


def verify_backend(args: Any) -> str:
    """Return the verify pass's attention backend (see `--speculative-attention-mode`)."""
    if args.speculative_attention_mode == "decode":
        chosen = args.decode_attention_backend
    else:
        chosen = args.prefill_attention_backend
    return str(chosen or args.attention_backend)


def _is_deterministic(args: Any) -> bool:
    """Return whether `TritonAttnBackend` runs all passes on its unified kernel."""
    return bool(args.enable_deterministic_inference or args.rl_on_policy_target)


def _replays(args: Any) -> bool:
    """Return whether GDN layers verify by another kernel than Triton's, as SGLang resolves it."""
    decode = args.linear_attn_decode_backend or args.linear_attn_backend
    verify = args.linear_attn_verify_backend or (decode if decode == "flashinfer" else "triton")
    return bool(args.enable_linear_replayssm_spec) or verify != "triton"


def _is_set(name: str) -> Callable[[Start], bool]:
    return lambda start: start.variables.get(name, "").strip().lower() not in ("", "0", "false")


FEATURES = (
    Feature(
        "schedule.threshold, schedule.algorithm early-stop",
        "a threshold, or early stop, finds K after drafting, too late to choose a graph; "
        "leave schedule.threshold out and schedule.algorithm at search",
        lambda start: start.by_lengths,
    ),
    Feature(
        "attention backends other than fa3, fa4, triton, trtllm_mha, trtllm_mla",
        "this attention backend has no ragged windows; --attention-backend triton and fa3 have",
        lambda start: verify_backend(start.args) not in RAGGED_BACKENDS,
    ),
    Feature(
        "trtllm_mha on Hopper and on consumer Blackwell",
        "trtllm_mha is XQA on this GPU, which has no ragged windows; "
        "--attention-backend fa3 and triton have",
        lambda start: verify_backend(start.args) == "trtllm_mha" and start.generation in _XQA,
    ),
    Feature(
        "triton with deterministic inference",
        "triton's deterministic kernel takes every window for gamma + 1 rows wide; "
        "--attention-backend fa3 does not",
        lambda start: verify_backend(start.args) == "triton" and _is_deterministic(start.args),
    ),
    Feature(
        "decode context parallelism",
        "SGLang has no ragged windows over a split cache (--dcp-size)",
        lambda start: int(start.args.dcp_size) > 1,
    ),
    Feature(
        "pipeline parallelism",
        "SGLang verifies on the last of several stages (--pp-size)",
        lambda start: int(start.args.pp_size) > 1,
    ),
    Feature(
        "data-parallel attention",
        "SGLang has no ragged graphs of a dense drafter there (--enable-dp-attention)",
        lambda start: bool(start.args.enable_dp_attention),
    ),
    Feature(
        "LoRA",
        "adapters have not been tried with ragged passes (--enable-lora)",
        lambda start: bool(start.args.enable_lora),
    ),
    Feature(
        "two-batch overlap",
        "SGLang refuses ragged graphs beside it (--enable-two-batch-overlap)",
        lambda start: bool(start.args.enable_two_batch_overlap),
    ),
    Feature(
        "prefill and decode on different servers",
        "batches there come without a prefill of their own (--disaggregation-mode)",
        lambda start: str(start.args.disaggregation_mode or "null") != "null",
    ),
    Feature(
        "a target with a recurrent state other than GDN's (Mamba, KDA, Lightning)",
        "the target keeps a recurrent state, and only GDN's was tried with ragged windows",
        lambda start: start.recurrent and not start.delta_rule,
    ),
    Feature(
        "GDN verified by another kernel than Triton's, or with its replay",
        "this kernel takes all windows of recurrent layers for equally long; "
        "--linear-attn-verify-backend triton without --enable-linear-replayssm-spec does not",
        lambda start: start.delta_rule and _replays(start.args),
    ),
    Feature(
        "a target with attention of its own (MiniMax-M3, Dots 3)",
        "the target replaces the attention backend by its own, which has no ragged windows",
        lambda start: start.own_attention,
    ),
    Feature(
        "SGLANG_DSPARK_DEFER_CONTEXT_KV",
        "SGLANG_DSPARK_DEFER_CONTEXT_KV is set",
        _is_set("SGLANG_DSPARK_DEFER_CONTEXT_KV"),
    ),
    Feature(
        "SGLANG_SIMULATE_ACC_LEN",
        "SGLANG_SIMULATE_ACC_LEN is set",
        lambda start: float(start.variables.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0,
    ),
)

# Scheduled features: with which options, and a note on each.
SCHEDULED = (
    (
        f"attention backends {', '.join(sorted(RAGGED_BACKENDS))}; CUDA graphs or eager",
        "scheduled by confidence",
    ),
    ("the overlap loop", "scheduled; K comes from confidences two steps old"),
    (
        "`--disable-overlap-schedule`",
        "scheduled; K comes from the step before, and SGLang waits for the lengths of each step",
    ),
    (
        "fa3, fa4 outside graphs (more requests than any graph, or none captured)",
        "scheduled; SGLang waits for the lengths of each step",
    ),
    ("`--tp-size`", "scheduled; the first rank decides K and lengths for all"),
    (
        "a drafter without a confidence head",
        "scheduled; confidence is estimated from the largest probability of each draft position",
    ),
    (
        "a drafter that runs once a token (Eagle3, MTP), on one rank",
        "scheduled by estimated confidence; its steps are in the draft's graph, always gamma deep",
    ),
    ("a block whose first row drafts nothing (`sample_from_anchor: false`)", "scheduled"),
    (
        "a drafter with experts, residual streams or a window (`DSparkMoEModel`)",
        "scheduled; the draft's graph holds it where a backend of its experts may be captured, "
        "else it drafts outside graphs and the log says so",
    ),
)


def default_backend(
    sglangs: str, args: Any, capability: tuple[int, int], *, asymmetric: bool
) -> str | None:
    """Return the attention backend to declare in place of SGLang's default; None: keep the default.

    sglangs: its default. args: as far as they are resolved. capability: the GPU's, (8, 9) of an
    L40S. asymmetric: whether keys and values of the target have different widths. Source: SGLang's
    `get_default_attn_backend` in arg_groups/model_override_base.py.
    """
    named = (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
        args.speculative_draft_attention_backend,
    )
    if sglangs != _FLASHINFER or any(named) or args.enable_mis:  # --enable-mis requires flashinfer
        return None
    gpu = next((each for each in GPUS if each.generation == capability[0]), None)
    if gpu is None or not gpu.ours:
        return None
    if gpu.backend == "trtllm_mha":
        return _trtllm(args, asymmetric=asymmetric)
    return gpu.backend if _triton_reads(str(args.kv_cache_dtype), capability) else None


def _trtllm(args: Any, *, asymmetric: bool) -> str | None:
    """Return trtllm_mha, or fa4 if keys and values are asymmetric; None if other arguments change.

    trtllm_mha overrides page sizes that it cannot read, and SGLang rejects it with a unified pool.
    """
    if args.enable_unified_memory or str(args.kv_cache_dtype) not in (*_PLAIN, "fp8_e4m3"):
        return None
    if asymmetric:
        return "fa4" if args.page_size is None else None
    return "trtllm_mha" if args.page_size in (None, 16, 32, 64, 128) else None


_PLAIN = ("auto", "bf16", "bfloat16")  # cache dtypes without a scale


def _triton_reads(cache_dtype: str, capability: tuple[int, int]) -> bool:
    """Return whether Triton compiles loads of the cache: fp8_e4m3 requires sm_89."""
    return cache_dtype in (*_PLAIN, "fp8_e5m2") or (
        cache_dtype == "fp8_e4m3" and capability >= (8, 9)
    )


def obstacle(start: Start) -> str | None:
    """Return the reason why this start verifies every draft; None: it is scheduled."""
    return next((each.why for each in FEATURES if each.holds(start)), None)
