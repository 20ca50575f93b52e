"""docs/gpu.md: what is scheduled on a GPU and what is not, from the rules that decide it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_dspark.serving.cuda.features import FEATURES, GPUS, SCHEDULED

_SHOWN = (1, 16, 64, 256)  # requests
_NAMES = {
    "markov": "sequential head",
    "accept_greedy": "greedy acceptance",
    "accept": "sampled acceptance",
    "none": "without cuts",
}
_RESULTS = Path(__file__).resolve().parents[2] / "results"

HEAD = """\
<!-- written by `make docs-reference`; change sglang_dspark/serving/cuda/features.py -->
# On a GPU

On an NVIDIA GPU `--speculative-algorithm DSPARK` schedules by confidence as on a CPU, by the same
planner, guard and calibration. SGLang's own worker, attention backends and graphs do the work, and
its accept rules where they keep plain decoding's distribution; which drafts are made and verified
is ours. Step times are measured at the first start, a captured graph at a time. **All kernels were
compiled and compared on an H200, the step's timed too** ([below](#measured-on-an-h200)); **no
server has run on a GPU yet.** Servers are rehearsed on a CPU (`tests/rehearsal`), where everything
but the device itself is what a GPU would run.

`schedule: {mode: static}` in the `--dspark-config` file verifies every draft instead, `mode: off`
leaves SGLang's own choice, and `DSPARK_DISABLE=1` takes the whole package out.

## Scheduled by default, by GPU

Where no `--attention-backend` is named, nor one of its prefill, decode and draft variants:

| GPU | attention backend | scheduled by default |
|---|---|---|
"""
DEFAULTS = """\
| another GPU | flashinfer, by SGLang | no: every draft is verified |

SGLang's default stays, too, in a mode other than `auto`, for targets with latent attention (MLA),
where a row of the next table verifies every draft anyway, with an FP8 cache (E4M3) before sm_89,
and on sm_100 with a page size or a cache that trtllm_mha does not read. One line of the log says
which backend was declared. trtllm_mha sets the page size to 64. The drafter has the target's
backend. None of the four has served on a GPU yet.

## What is scheduled

| with | what happens |
|---|---|
"""
SAMPLING = """
Such a server says so in one line of its log (`every draft is verified: ...`) and serves; it is no
error. What is found only after the models are loaded is said the same way.

## Sampling

| a scheduled request with | what happens |
|---|---|
"""
RULES = {
    "top-k of at most 1,024 in every sampled request of the batch, with or without top-p, min-p "
    "and seeds": (
        "`torch.topk` on the verified rows, then our accept rule on lists of the kept tokens, by "
        "block or token by token (`verify.rule`); with and without drafts"
    ),
    "temperature alone": (
        "SGLang's block-wise rejection, drafts one by one; our rule by block if the configuration "
        "file says `verify: {rule: block}`. Without drafts plain decoding's sampler"
    ),
    "top-p alone, or a larger top-k alone, or top-k in a part of the batch": (
        "SGLang's rule, which needs FlashInfer; our Triton rule where FlashInfer is not installed. "
        "Without drafts plain decoding's sampler"
    ),
    "min-p, a seed, or top-k and top-p in one batch, where a top-k is missing or above 1,024": (
        "our Triton rule, by block or token by token (`verify.rule`)"
    ),
    "temperature 0": "SGLang's rule inside the graph; beside sampled requests behind it",
    "`frequency_penalty`, `presence_penalty`, `repetition_penalty`, `min_new_tokens`": (
        "each verified row has its own, drafts in front of it counted; greedy steps of such a "
        "batch accept outside the graph"
    ),
    "`seed`": (
        "first token, drafts and accept rule follow it; its batch drafts by seed behind the "
        "draft's graph"
    ),
    "grammars, logit bias": "SGLang's masks and biases",
    "custom logit processors": (
        "the request gets no drafts, since a processor that reads the answer sees the anchor's in "
        "every row of a window; under the overlap loop it may see it without the last token, as "
        "in plain decoding. With `DisallowedTokensLogitsProcessor`, which does not, it has drafts"
    ),
}
OPERATORS = """
A step whose requests ask for none of this costs what it did. Ours reads nothing back from the
device; where SGLang waits for it, the table above says so.
A batch takes the first line that fits all its sampled requests; greedy ones beside them do not
matter. Every line has plain decoding's distribution; where equal probabilities straddle a cut, ours
keep the lowest tokens and FlashInfer keeps all.

The lists of kept tokens take 200 MiB and 64 bytes for each of the R (gamma + 1) (k + 1) entries
that are judged. Our Triton rule makes no tensor of probabilities: two launches where windows are
judged as a whole (`kernels/accept_block.py`), one where drafts are judged one by one
(`kernels/accept_sampled.py`). What it refuses is accepted in torch by the same rule, which one line
of the log says.

Accept kernels of all these settings are compiled at the start, FlashInfer's included. A Triton
kernel that is compiled later counts in `sglang:dspark_kernel_compilations_total`. The lists, the
choice of SGLang's rejection and sampler, and the compilation at the start have never run on a GPU.

## Operators of the step

| operator in `kernels/` | what it does, but for `accept_block.py` in one launch |
|---|---|
| `markov_sample.py` | the sequential head's gamma steps, greedy or sampled |
| `admission.py` | confidence logits to ragged windows: calibration, survival, the K largest |
| `accept_greedy.py` | in a greedy pass's graph: the target's choices, drafts kept, lengths |
| `accept_sampled.py` | the same of sampled requests, with cuts and seeds, one by one |
| `accept_block.py` | the same, windows judged as a whole; in two launches |
| `commit_rows.py` | packs the rows of emitted tokens before they are projected |
| `commit_write.py` | norms and rotates the keys of all draft layers, writes keys and values |

Each runs in Triton's interpreter in the tests and is compiled for sm_80, sm_90 and sm_100.
`python -m sglang_dspark.benchmarks.operators` (one of them: `.admission`, `.markov`, `.greedy`,
`.accept`, `.commit`) times them in captured graphs next to SGLang's and torch's. That timing was
never run on a GPU; the times of the first table below are of an earlier one.

A scheduled server's drafts are one Triton launch a block (`kernels/markov_sample.py`): SGLang's
noise, logits and drafts, but where rounding decides. Its programs wait for each other between the
positions; the launch is a cooperative one. In the draft's graph a vanilla head keeps SGLang's
steps, whose sampled ones were quicker there. Heads of other types than vanilla, gated and rnn,
vocabularies split over ranks, and ranks that agree on each draft keep SGLang's steps too, which one
line of the log says.

A step's commit packs emitted rows, projects these alone, for all draft layers in one product, and
writes keys and values by one launch (`kernels/commit_write.py`), to caches of float32, bfloat16,
float16 or FP8 (E4M3), for dense drafters and those with experts. A rotation, norm, cache or
projection of another kind keeps SGLang's calls, which one line of the log says. Prefills are
SGLang's.

Where every draft is verified custom logit processors that read the answer are refused with status
400, and all else is SGLang's: penalties and seeds have no effect, and min-p, or top-k beside top-p,
is another distribution than plain decoding's. Plain decoding on a GPU ignores seeds without
`--enable-deterministic-inference`; with min-p its FlashInfer sampler normalises between top-k and
top-p for the whole batch, and under the overlap loop its penalties lag a token behind. Neither is
copied.

Penalties take 4 bytes times the vocabulary a request for counts of its output, allocated at start
for all slots up to 256 MiB (29 MB for 48 requests of 151,936 tokens; the log says how much), and at
most 151 MB of temporaries, however many requests have some. Without that memory requests are
penalised one by one, which the log says once. Decode graphs, and the buffers sized by them, are for
the requests that run: SGLang's 48 unless `--max-running-requests` or `--cuda-graph-max-bs-decode`
names another number.

With `--tp-size` above 1 drafts and greedy acceptance are SGLang's steps, not our kernels, and the
first rank broadcasts the plan, each draft and each outcome (`SGLANG_SPEC_TP_SYNC`, by default
`all`); this is unmeasured.

## Equality with plain decoding

Greedy answers are plain decoding's token for token up to near ties of logits: a verify pass has
other product shapes than a plain step, so sums of bfloat16 products round differently, and the
larger of two nearly equal logits can change. Plain decoding at another batch size differs alike.
Sampled answers have plain decoding's distribution within the same rounding.

## Measured on an H200

"""
REST = """
Times are medians of CUDA events. In the first table the host's launches are in those outside of
graphs, and greedy logits are bfloat16 where a server's are float32. Not measured there: SGLang's
acceptance with top-p, which needs FlashInfer, and its `BlockwiseRejection`. `accept_sampled.py`
and `accept_block.py` have been changed since to let each lane keep its own sums, `markov_sample.py`
to larger tiles, neither compared nor timed there again (results/gpu_markov_tiles_h200.json has the
tiles). Times are of commit 25ce16b, those of sampled acceptance of efb8cb6. What is slower than
SGLang's is next to be fixed: sampled acceptance (without cuts up to 64 requests), the commit up to
64 requests, the sampled head in a graph.

The bandwidth of 2.7 TB/s in [device](../results/gpu_device_h200.json) is that of the copy engine,
which a captured `copy_` runs on. It is no ceiling of a kernel: a plain copy on such a card moves
4.3 TB/s. No published figure is a share of it, as expert layers, whose rows have
`fraction_of_ceiling`, were not timed there. A kernel measures it now (`benchmarks/bandwidth.py`).

## What no rehearsal reaches

Whether a graph may be captured as it stands, races between streams, memory of graph pools, speed
of whole steps, and whether leaving a draft out pays: only a server on a GPU shows these.
"""


def gpu_page() -> str:
    """The whole page."""
    gpus = [
        f"| {gpu.models} | {gpu.backend}, by {'this package' if gpu.ours else 'SGLang'} | yes |"
        for gpu in GPUS
    ]
    rows = [f"| {name} | {said} |" for name, said in SCHEDULED]
    rows += [f"| {each.name} | every draft is verified: {each.why} |" for each in FEATURES]
    rules = [f"| {asked} | {answer} |" for asked, answer in RULES.items()]
    page = HEAD + "\n".join(gpus) + "\n" + DEFAULTS + "\n".join(rows) + "\n"
    page += SAMPLING + "\n".join(rules) + "\n"
    return page + OPERATORS + measured() + REST


def measured() -> str:
    """What was compared, and a table of times beside SGLang's; from the files of results/."""
    parity = _read("parity")
    found = parity["metrics"]
    sampled = found["accept"]["requests"] + found["accept_block"]["requests"]
    compared = [
        f"{found['admission']['batches']} batches admitted and {found['greedy']['requests']} "
        "requests accepted greedily, bit for bit",
        f"{found['markov']['drafts']} drafts and {sampled} sampled outcomes",
        f"{found['commit']['rows']} rows packed and {found['commit_write']['rows']} written",
        f"{len(found['products'])} grouped products within {max(found['products'].values()):.0e} "
        "of float64",
    ]
    lines = [
        f"Compiled kernels beside their references (commit {parity['commit']}, "
        f"[results/gpu_parity_h200.json](../results/gpu_parity_h200.json)): {'; '.join(compared)}. "
        "No difference.",
        "",
        "| operator (vocabulary 151,936; gamma 7) | requests | ours, us | SGLang's, us | file |",
        "|---|---|---|---|---|",
        *(
            line
            for name in ("markov", "admission", "greedy", "accept", "commit")
            for line in _of(name)
        ),
    ]
    return "\n".join(lines) + "\n" + in_graphs()


def in_graphs() -> str:
    """Write a table of each published file of the kit's stage `operators`, one a device."""
    parts = []
    for file in sorted(_RESULTS.glob("gpu_operators_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        lines = [
            "",
            f"In captured graphs on an {found['device']}, float32 logits, the cache flushed "
            f"(commit {found['commit']}, [{file.name}](../results/{file.name})); eagerly, host "
            "launches included, where a server launches outside of graphs:",
            "",
            "| operator | requests | implementation | us | eagerly, us |",
            "|---|---|---|---|---|",
            *(_in_graph(row) for row in found["metrics"]["rows"]),
        ]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _in_graph(row: dict[str, Any]) -> str:
    words = [_NAMES.get(row["op"], row["op"]), _NAMES.get(row["case"], row["case"])]
    about = ", ".join(word for word in words if word)
    us = f"{row['us']:.0f}" if row["us"] is not None else f"none: {row['reason']}"
    eager = f"{row['eager_us']:.0f}" if "eager_us" in row else ""
    return f"| {about} | {row['shape'][0]} | {row['implementation']} | {us} | {eager} |"


def _of(name: str) -> Iterable[str]:
    link = f"[{name}](../results/gpu_{name}_h200.json)"
    for row in _read(name)["metrics"]["rows"]:
        requests, gamma = row["shape"][:2]
        if gamma != 7 or requests not in _SHOWN or not str(row["peer"]).startswith("SGLang"):
            continue
        words = [row["op"], *(row[key] for key in ("way", "cut") if key in row)]
        about = ", ".join(_NAMES.get(word, word) for word in words)
        about += ", in a graph" if row.get("graph") else ""
        theirs = "" if row["peer_us"] is None else f"{row['peer_us']:.0f}"
        ours = f"{row['ours_us']:.0f}"
        if "block_us" in row:
            ours += f" (by block {row['block_us']:.0f})"
        yield f"| {about} | {requests} | {ours} | {theirs} | {link} |"


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"gpu_{name}_h200.json").read_text(encoding="utf-8"))
