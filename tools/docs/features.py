"""Write docs/gpu.md and docs/results-gpu.md, from the rules that decide and from results/."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_dspark.backends.cuda.features import FEATURES, GPUS, SCHEDULED

_SHOWN = (1, 16, 64, 256)  # requests
_NAMES = {
    "markov": "sequential head",
    "accept_greedy": "greedy acceptance",
    "accept": "sampled acceptance",
    "none": "without cuts",
}
_RESULTS = Path(__file__).resolve().parents[2] / "results"

HEAD = """\
<!-- written by `make docs-reference`; change sglang_dspark/backends/cuda/features.py -->
# On a GPU

For readers who want to serve on an NVIDIA GPU. After this page you know which servers and requests
are scheduled by confidence, what the others get, and what has not been shown yet.

**No server has run on a GPU yet.** All kernels were compiled and compared on an H200, and those of
the step were timed there ([results](results-gpu.md)). Servers are rehearsed on a CPU
(`tests/rehearsal`): everything but the device itself is what a GPU would run.

`--speculative-algorithm DSPARK` schedules by confidence as on a CPU. SGLang's worker, attention
backends and graphs run, and SGLang's accept rules where they keep plain decoding's distribution.
Step times are measured at the first start, one captured graph at a time. In the `--dspark-config`
file `schedule: {mode: static}` verifies every draft and `mode: off` leaves the choice to SGLang.
`DSPARK_DISABLE=1` turns the package off.

## Scheduled by default, by GPU

If no `--attention-backend` is given, nor one of its prefill, decode and draft variants:

| GPU | attention backend | scheduled by default |
|---|---|---|
"""
DEFAULTS = """\
| another GPU | flashinfer, by SGLang | no: every draft is verified |

SGLang's default also stays in a mode other than `auto`; for targets with latent attention (MLA),
where every draft is verified anyway; with an FP8 cache (E4M3) before sm_89; and on sm_100 with a
page size or a cache that trtllm_mha does not read. The log says which backend was chosen.
trtllm_mha sets the page size to 64. The drafter uses the target's backend. None of the four has
served on a GPU yet.

With triton, this package's kernel attends from verify windows and from blocks of the drafter. It
reads a context once for all query heads of a KV head, where SGLang's kernel reads it once a query
head, and splits long contexts where requests are few. Prefills stay SGLang's. So do heads wider
than 256 and layers that scale scores by position or add a term to them, which is logged in one
line. `verify: {window_kernel: false}` leaves all passes to SGLang's kernel. Ours has never run on a
GPU.

## What is scheduled

| with | result |
|---|---|
"""
SAMPLING = """
A server that verifies every draft logs the reason in one line (`every draft is verified: ...`) and
serves. Reasons found only after the models are loaded are logged the same way.

## Sampling

A batch uses the first line that covers all its sampled requests; greedy requests do not matter.
Every line samples from plain decoding's distribution. If equal probabilities are at a cut, our
rules keep the lowest token ids and FlashInfer keeps all. The lists of kept tokens, the choice of
SGLang's rejection and sampler, and the compilation at the start have never run on a GPU.

| a scheduled request with | result |
|---|---|
"""
RULES = {
    "top-k of at most 1,024 in every sampled request of the batch, with or without top-p, min-p "
    "and seeds": (
        "`torch.topk` on the verified rows, then our accept rule on lists of the kept tokens, by "
        "block or token by token (`verify.rule`); with and without drafts"
    ),
    "temperature alone": (
        "SGLang's block-wise rejection, token by token; our block rule with `verify: {rule: "
        "block}`. Without drafts plain decoding's sampler"
    ),
    "top-p alone, or a larger top-k alone, or top-k in a part of the batch": (
        "SGLang's rule, which needs FlashInfer; otherwise our Triton rule. Without drafts plain "
        "decoding's sampler"
    ),
    "min-p, a seed, or top-k and top-p in one batch, where a top-k is missing or above 1,024": (
        "our Triton rule, by block or token by token (`verify.rule`)"
    ),
    "temperature 0": "SGLang's rule inside the graph; outside it if the batch samples too",
    "`frequency_penalty`, `presence_penalty`, `repetition_penalty`, `min_new_tokens`": (
        "each verified row has its own penalties and counts the drafts before it; greedy steps of "
        "such a batch accept outside the graph"
    ),
    "`seed`": (
        "first token, drafts and accept rule follow the seed; the batch drafts outside the draft's "
        "graph"
    ),
    "grammars, logit bias": "SGLang's masks and biases",
    "custom logit processors": (
        "the request gets no drafts, because a processor that reads the answer sees the same in "
        "every row of a window; with overlap scheduling it may see it without the last token, as "
        "in plain decoding. With `DisallowedTokensLogitsProcessor` it has drafts"
    ),
}
NOTES = """
These features cost nothing when unused. Our rules read nothing back from the device; the tables say
where SGLang waits for it. Accept kernels are compiled at the start, FlashInfer's included. A Triton
kernel compiled later counts in `sglang:dspark_kernel_compilations_total`. What our Triton rule does
not support is accepted in torch by the same rule, and logged once.

If every draft is verified, custom logit processors that read the answer get status 400, and the
rest is SGLang's: penalties and seeds have no effect; min-p, and top-k with top-p, sample from
another distribution than plain decoding. Plain decoding on a GPU ignores seeds without
`--enable-deterministic-inference`. With min-p its FlashInfer sampler normalises between top-k and
top-p for the whole batch, and with overlap scheduling its penalties are one token late. We copy
neither.

## Memory and graphs

| what | size |
|---|---|
| lists of kept tokens (top-k) | 200 MiB and 64 bytes for each of R (gamma + 1) (k + 1) entries |
| penalties: counts of output tokens | 4 bytes times the vocabulary for each request, allocated \
at the start for all slots up to 256 MiB (29 MB for 48 requests of 151,936 tokens) |
| penalties: temporaries | at most 151 MB, for any number of requests with penalties |

Without the memory for counts, requests are penalised one by one, which is logged once. Decode
graphs and their buffers are sized for the running requests: SGLang's 48, unless
`--max-running-requests` or `--cuda-graph-max-bs-decode` is given.

A scheduled server samples the drafts of a block in one launch. A vanilla head in the draft's graph,
and head types other than vanilla, gated and rnn, keep SGLang's steps; so do split vocabularies and
ranks that agree on each draft. The commit writes to caches of float32, bfloat16, float16 or FP8
(E4M3); a rotation, norm, cache or projection of another kind keeps SGLang's calls. Each of these is
logged in one line. Prefills are SGLang's.

With `--tp-size` above 1 drafts and greedy acceptance are SGLang's steps. The first rank broadcasts
the plan, each draft and each outcome (`SGLANG_SPEC_TP_SYNC`, by default `all`); this is unmeasured.

## Equality with plain decoding

Greedy answers equal plain decoding's token for token, up to near ties of logits. A verify pass has
other product shapes than a plain step, so sums of bfloat16 products round differently, and the
larger of two nearly equal logits can change. Plain decoding at another batch size differs in the
same way. Sampled answers have plain decoding's distribution within the same rounding.

## Not shown by rehearsals

Graph capture, races between streams, memory of graph pools, speed of whole steps, and whether
skipping a draft pays: only a server on a GPU shows these.
"""
RESULTS_HEAD = """\
<!-- written by `make docs-reference`; change tools/docs/features.py -->
# Kernels on a GPU, measured

For reviewers. After this page you know what was compared and timed on an H200, and what changed
since.

## Operators of the step

| operator in `kernels/` | content, one launch each but for two |
|---|---|
| `markov_sample.py` | the sequential head's gamma steps, greedy or sampled; a cooperative launch, \
as its programs wait for each other between positions |
| `admission.py` | confidence logits to ragged windows: calibration, survival, the K largest |
| `accept_greedy.py` | in a greedy pass's graph: the target's choices, kept drafts, lengths |
| `accept_sampled.py` | the same for sampled requests, with cuts and seeds, token by token |
| `accept_block.py` | the same by block, in two launches |
| `commit_rows.py` | packs the rows of emitted tokens before their projection |
| `commit_write.py` | norms and rotates the keys of all draft layers, writes keys and values |
| `window_attention.py` | attends from ragged verify windows to cached contexts; in two launches \
where contexts are split |

Each runs in Triton's interpreter in the tests and is compiled for sm_80, sm_90 and sm_100. The
accept operators allocate no tensor of probabilities. `markov_sample.py` has SGLang's noise, logits
and drafts up to rounding; a vanilla head in the draft's graph keeps SGLang's steps, whose sampled
ones were faster there. A commit projects emitted rows only, for all draft layers in one product.

`python -m sglang_dspark.benchmarks.operators` (one of them: `.admission`, `.markov`, `.greedy`,
`.accept`, `.commit`, `.window_attention`) times them in captured graphs next to SGLang's and
torch's. It has never run on a GPU; the table below comes from an earlier benchmark.

## Measured on an H200

"""
RESULTS_REST = """
Times are medians of CUDA events. Outside of graphs they include the host's launches. Greedy logits
are bfloat16, where a server's are float32. Times are of commit 25ce16b, those of sampled acceptance
of efb8cb6. Not measured: SGLang's acceptance with top-p, which needs FlashInfer, and its
`BlockwiseRejection`.

`window_attention.py` is newer than these runs. Three operators changed since and were neither
compared nor timed there again: `accept_sampled.py` and `accept_block.py` (each lane keeps its own
sums) and `markov_sample.py` (larger tiles, in results/gpu_markov_tiles_h200.json). Slower than
SGLang's are sampled acceptance (without cuts up to 64 requests), the commit up to 64 requests, and
the sampled head in a graph.

The bandwidth of 2.7 TB/s in [device](../results/gpu_device_h200.json) is that of the copy engine,
which runs a captured `copy_`. It is no upper limit of a kernel: a plain copy on such a card moves
4.3 TB/s. No published figure is a share of it, because expert layers, whose rows have
`fraction_of_ceiling`, were not timed there. A kernel measures the bandwidth now
(`benchmarks/bandwidth.py`).
"""


def gpu_page() -> str:
    """Return docs/gpu.md: what is scheduled on a GPU, for users."""
    gpus = [
        f"| {gpu.models} | {gpu.backend}, by {'this package' if gpu.ours else 'SGLang'} | yes |"
        for gpu in GPUS
    ]
    rows = [f"| {name} | {said} |" for name, said in SCHEDULED]
    rows += [f"| {each.name} | every draft is verified: {each.why} |" for each in FEATURES]
    rules = [f"| {setting} | {result} |" for setting, result in RULES.items()]
    page = HEAD + "\n".join(gpus) + "\n" + DEFAULTS + "\n".join(rows) + "\n"
    return page + SAMPLING + "\n".join(rules) + "\n" + NOTES


def results_page() -> str:
    """Return docs/results-gpu.md: what was measured on a GPU, for reviewers."""
    return RESULTS_HEAD + measured() + RESULTS_REST


def measured() -> str:
    """Write what was compared, and times next to SGLang's, from the files of results/."""
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
        f"Compiled kernels compared with their references (commit {parity['commit']},\n"
        "[results/gpu_parity_h200.json](../results/gpu_parity_h200.json)), without a difference:",
        "",
        *(f"- {each}" for each in compared),
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
