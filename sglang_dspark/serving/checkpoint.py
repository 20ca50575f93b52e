"""Checks a drafter against its target before any weight is loaded.

Format: the generic dense draft classes of sglang/srt/models/dspark.py (0.5.23), whose own loader
leaves missing backbone weights uninitialised without a word. Only config.json and the headers of
the safetensors files are read. Pure: imports no sglang; serving/drafter_check.py calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_dspark.common.files import FAULTS, brief, fault, load_json
from sglang_dspark.drafter import speculators
from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.drafter.fields import Fields, raw_config
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.moe_checkpoint import moe_shapes

DENSE_ARCHITECTURES = frozenset({"Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel"})
OTHER_ARCHITECTURES = frozenset(
    {"DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark", "Lfm2DSparkDraftModel"}
)
# Targets that hand out a layer's output as the next layer's input (`layers_to_capture` in their
# forward, 0.5.23): nothing comes after the last layer, and the first request would end the server.
LAST_LAYER_UNREADABLE = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


@dataclass(frozen=True)
class Target:
    """What a drafter must fit: the target's path (for messages), sizes and architecture."""

    path: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    architecture: str = ""


@dataclass(frozen=True)
class DrafterFacts:
    """The fields of a drafter's config.json that must fit the target and the weights."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gamma: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    confidence_head: bool
    confidence_with_markov: bool
    quantized: bool


def validate_drafter(
    path: Path,
    target: Target,
    *,
    block_size: int | None = None,
    draft_tokens: int | None = None,
    needs_confidence: bool = False,
    weights: bool = True,
) -> None:
    """Raise `DSparkError` unless the drafter in directory `path` fits `target`.

    block_size, draft_tokens: what was asked for by --speculative-dspark-block-size (gamma) and
    --speculative-num-draft-tokens (gamma + 1); without the former gamma is the drafter's own.
    needs_confidence: the verify mode that was asked for reads the confidence head.
    weights: False looks at config.json only, for a drafter whose weights are not here yet.
    Architectures of other families (OTHER_ARCHITECTURES) are checked for whole files only.
    """
    config = read_config(path)
    architecture = check_architecture(path, config)
    shapes = read_shapes(path) if weights else None
    if architecture in OTHER_ARCHITECTURES:
        return
    facts = parse_facts(path, config, architecture)
    _check_sizes(path, facts, target)
    _check_layers(path, facts, target)
    _check_gamma(path, facts.gamma, block_size, draft_tokens)
    if needs_confidence and not facts.confidence_head:
        raise DSparkError(
            f"drafter {path} has no confidence head (enable_confidence_head is false), which "
            "SGLANG_RAGGED_VERIFY_MODE needs; unset it, or use a drafter that has one"
        )
    if shapes is not None:
        expected = expected_shapes(facts) if architecture != MOE_ARCHITECTURE else moe_shapes(path)
        check_weights(path, expected, shapes)


def read_config(path: Path) -> dict[str, Any]:
    """The drafter's config.json in SGLang's layout. Raises `DSparkError` for another layout, and as
    `drafter.fields.raw_config` does."""
    config = raw_config(path)
    if speculators.MARK in config:
        raise DSparkError(
            f"drafter {path} has the layout of Speculators ({speculators.MARK} in config.json), "
            f"which SGLang does not read; write one that it reads: dspark models convert {path} "
            "--target TARGET --out FOLDER"
        )
    return config


def check_architecture(path: Path, config: dict[str, Any]) -> str:
    """The drafter's one architecture name. Raises `DSparkError` when DSPARK cannot load it."""
    names = config.get("architectures")
    known = DENSE_ARCHITECTURES | OTHER_ARCHITECTURES | {MOE_ARCHITECTURE}
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in known:
        return str(names[0])
    raise DSparkError(
        f"drafter {path}: architectures {brief(names, 60)} in config.json is no DSpark drafter "
        f"(known: {', '.join(sorted(known))}); name another drafter (--drafter; of a server "
        "--speculative-draft-model-path)"
    )


def parse_facts(path: Path, config: dict[str, Any], architecture: str) -> DrafterFacts:
    """Read the fields we check. Raises `DSparkError` naming a field missing or of a wrong type."""
    fields = Fields(config, path)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    targets = fields.get("num_target_layers")
    return DrafterFacts(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=hidden // heads),
        vocab_size=fields.integer("vocab_size"),
        gamma=fields.integer("block_size"),
        target_layer_ids=fields.layer_ids(),
        num_target_layers=None if targets is None else fields.integer("num_target_layers"),
        mask_token_id=fields.integer("mask_token_id", least=0),
        markov_rank=fields.integer("markov_rank"),
        markov_head_type=fields.markov_head(),
        confidence_head=bool(fields.get("enable_confidence_head", True)),
        confidence_with_markov=bool(fields.get("confidence_head_with_markov", True)),
        quantized=config.get("quantization_config") is not None,
    )


def _check_sizes(path: Path, facts: DrafterFacts, target: Target) -> None:
    """Hidden size and vocabulary are shared with the target; the mask token lies inside."""
    for name, ours, theirs in (
        ("hidden_size", facts.hidden_size, target.hidden_size),
        ("vocab_size", facts.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise DSparkError(
                f"drafter {path}: {name} is {ours}, but the target {target.path} has {theirs}; "
                "use a drafter trained for this target"
            )
    if facts.mask_token_id >= target.vocab_size:
        raise DSparkError(
            f"drafter {path}: mask_token_id {facts.mask_token_id} lies outside the target's "
            f"vocabulary of {target.vocab_size}; use a drafter trained for this target"
        )


def _check_layers(path: Path, facts: DrafterFacts, target: Target) -> None:
    """The target layers the drafter reads exist, and the target is as deep as it was trained on."""
    if facts.num_target_layers not in (None, target.num_layers):
        raise DSparkError(
            f"drafter {path}: num_target_layers is {facts.num_target_layers}, but the target "
            f"{target.path} has {target.num_layers} layers; use a drafter trained for this target"
        )
    outside = [i for i in facts.target_layer_ids if not 0 <= i < target.num_layers]
    if outside:
        raise DSparkError(
            f"drafter {path}: target_layer_ids {brief(outside)} lie outside the target's layers 0.."
            f"{target.num_layers - 1}; use a drafter trained for this target"
        )
    last = target.num_layers - 1
    if last in facts.target_layer_ids and target.architecture in LAST_LAYER_UNREADABLE:
        raise DSparkError(
            f"drafter {path} reads the output of the target's last layer ({last}), which SGLang "
            f"0.5.23 does not hand out for {target.architecture}; use a drafter trained on layers "
            f"0..{last - 1}"
        )


def _check_gamma(
    path: Path, trained: int, block_size: int | None, draft_tokens: int | None
) -> None:
    """The draft is no longer than the trained block, and the two ways to ask for it agree.

    SGLang takes another gamma from the block size alone, and then needs draft_tokens to be
    gamma + 1 (speculative_hook.py).
    """
    gamma = trained if block_size is None else block_size
    if not 1 <= gamma <= trained:
        raise DSparkError(
            f"drafter {path} was trained for blocks of {trained} tokens, but gamma {gamma} was "
            f"asked for; set --speculative-dspark-block-size (gamma) to 1..{trained}, or leave it "
            "out"
        )
    if draft_tokens not in (None, gamma + 1):
        raise DSparkError(
            f"drafter {path} drafts blocks of {gamma} tokens, for which "
            f"--speculative-num-draft-tokens must be {gamma + 1}, not {draft_tokens}; leave it "
            f"out, and for a shorter draft set --speculative-dspark-block-size to 1..{trained}"
        )


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape over all safetensors files of a directory, from their headers.

    Names are normalised: no `model.` prefix. Raises `DSparkError` when there is no file, or one is
    truncated or corrupt, or an index names a file that is missing.
    """
    files = sorted(path.glob("*.safetensors"))
    missing = sorted(_indexed_files(path) - {file.name for file in files})
    if missing or not files:
        raise DSparkError(
            f"drafter {path} has no {brief(missing[0] if missing else 'safetensors file')}; fetch "
            "or export it again, or in a checkout without weights run tools/gpu/slim --undo"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a mapping)
                    bare = name.removeprefix("model.")
                    shapes[_ALIASES.get(bare, bare)] = tuple(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError, *FAULTS) as error:
            raise DSparkError(
                f"drafter {path}: {brief(file.name, 60)} is truncated or corrupt "
                f"({fault(error)}); fetch or export the drafter again"
            ) from error
    return shapes


def _indexed_files(path: Path) -> set[str]:
    """File names that a shard index names; empty when there is none."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return {str(name) for name in load_json(index)["weight_map"].values()}
    except (OSError, *FAULTS) as error:
        raise DSparkError(
            f"drafter {path}: {index.name} cannot be read; fetch or export the drafter again"
        ) from error


def check_weights(
    path: Path,
    expected: Iterable[tuple[str, tuple[int, ...]]],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Every expected tensor is there with its shape. Raises `DSparkError` naming the first fault.

    Of a quantised drafter only the names' layers and the heads' tables are known.
    """
    for name, shape in expected:
        found = shapes.get(name)
        if found is None:
            hint = (
                "use a drafter with trained confidence weights, or set enable_confidence_head to "
                "false in its config.json"
                if name.startswith("confidence_head.")
                else "fetch or export the drafter again"
            )
            raise DSparkError(f"drafter {path} lacks the weight {name} {list(shape)}; {hint}")
        if found != shape:
            raise DSparkError(
                f"drafter {path}: the weight {name} has shape {list(found)}, but config.json "
                f"implies {list(shape)}; fetch or export the drafter again"
            )


def expected_shapes(facts: DrafterFacts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors a dense drafter must have, heads first."""
    d, rank, vocab = facts.hidden_size, facts.markov_rank, facts.vocab_size
    yield "markov_head.markov_w1.weight", (vocab, rank)
    if facts.confidence_head:
        width = d + (rank if facts.confidence_with_markov else 0)
        yield "confidence_head.proj.weight", (1, width)
        yield "confidence_head.proj.bias", (1,)
    yield "hidden_norm.weight", (d,)
    yield "norm.weight", (d,)
    if facts.quantized:
        return
    yield "markov_head.markov_w2.weight", (vocab, rank)
    if facts.markov_head_type == "gated":
        yield "markov_head.gate_proj.weight", (rank, d + rank)
    if facts.markov_head_type == "rnn":
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + d)
    yield "fc.weight", (d, len(facts.target_layer_ids) * d)
    for layer in range(facts.num_layers):
        yield from _layer_shapes(facts, f"layers.{layer}.")


def _layer_shapes(facts: DrafterFacts, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one Qwen3-style draft layer."""
    d, inner = facts.hidden_size, facts.intermediate_size
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    yield f"{prefix}input_layernorm.weight", (d,)
    yield f"{prefix}post_attention_layernorm.weight", (d,)
    yield f"{prefix}self_attn.q_proj.weight", (q, d)
    yield f"{prefix}self_attn.k_proj.weight", (kv, d)
    yield f"{prefix}self_attn.v_proj.weight", (kv, d)
    yield f"{prefix}self_attn.o_proj.weight", (d, q)
    yield f"{prefix}self_attn.q_norm.weight", (facts.head_dim,)
    yield f"{prefix}self_attn.k_norm.weight", (facts.head_dim,)
    yield f"{prefix}mlp.gate_proj.weight", (inner, d)
    yield f"{prefix}mlp.up_proj.weight", (inner, d)
    yield f"{prefix}mlp.down_proj.weight", (d, inner)
