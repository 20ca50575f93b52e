"""Write docs/gpu.md from the rules by which a GPU server schedules."""

from __future__ import annotations

from sglang_dspark.backends.cuda.features import FEATURES, GPUS, SCHEDULED

HEAD = """\
<!-- written by `make docs-reference`; change sglang_dspark/backends/cuda/features.py -->
# On a GPU

For readers who want to serve on an NVIDIA GPU. After this page you know which servers and requests
are scheduled by confidence, what the others get, and what has not been shown yet.

**Servers have run on one GPU, an H200, with Triton attention, made-up weights and a set accepted
length**: 1 to 128 users were served 1.1 to 2.2 times as fast as by plain decoding. Every greedy
token of a target that follows a table was right. Of one whose layers matter 43 of 64 answers were
plain decoding's; the others parted at near ties ([figures](results-gpu.md)). No other card,
attention backend or real checkpoint has been tried. Servers are rehearsed on a CPU besides
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
trtllm_mha sets the page size to 64. The drafter uses the target's backend. Triton alone has served
on a GPU, an H200 where it was chosen by name.

With triton, this package's kernel attends from verify windows and from blocks of the drafter. It
reads a context once for all query heads of a KV head, where SGLang's kernel reads it once a query
head, and splits long contexts where requests are few. Prefills stay SGLang's. So do heads wider
than 256 and layers that scale scores by position or add a term to them, which is logged in one
line. `verify: {window_kernel: false}` leaves all passes to SGLang's kernel, which took 1.7 to 12
times as long on the H200.

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
rules keep the lowest token ids and FlashInfer keeps all. Temperature alone has been served on a
GPU; the other lines have not, nor have our launches for lists (top-k 20 with top-p 0.95 was served
there by an earlier rule in torch).

| a scheduled request with | result |
|---|---|
"""
RULES = {
    "top-k of at most 2,048 in every sampled request of the batch, with or without top-p, min-p "
    "and seeds": (
        "our Triton rule on lists of the likeliest tokens, by block or token by token "
        "(`verify.rule`); with and without drafts. Requests with a seed: on whole rows"
    ),
    "temperature alone": (
        "SGLang's block-wise rejection, token by token; our block rule with `verify: {rule: "
        "block}`. Without drafts plain decoding's sampler"
    ),
    "top-p alone, or a larger top-k alone, or top-k in a part of the batch": (
        "SGLang's rule, which needs FlashInfer; otherwise our Triton rule. Without drafts plain "
        "decoding's sampler"
    ),
    "min-p, a seed, or top-k and top-p in one batch, where a top-k is missing or above 2,048": (
        "our Triton rule on lists of the 2,048 likeliest tokens; on whole rows for requests whose "
        "kept tokens are more than that in some row, or that have no cut or a seed"
    ),
    "temperature 0": (
        "our rule inside the graph, SGLang's for tensor-parallel ranks; SGLang's outside it if the "
        "batch samples too"
    ),
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
where SGLang waits for it. Accept kernels are compiled at the start, FlashInfer's included. Before
the server is ready it answers made-up requests in batches of 1, 2, 3, 4, 8, ... up to
`--max-running-requests`, so that SGLang's own kernels compile then too; nothing is learned from
them, and `--skip-server-warmup` leaves them out (rehearsed; never run on a GPU). A Triton kernel
compiled later counts in `sglang:dspark_kernel_compilations_total`. What our Triton rule does not
support is accepted in torch by the same rule, and logged once.

If every draft is verified, custom logit processors that read the answer get status 400, and the
rest is SGLang's: penalties and seeds have no effect; min-p, and top-k with top-p, sample from
another distribution than plain decoding. Plain decoding on a GPU ignores seeds without
`--enable-deterministic-inference`. With min-p its FlashInfer sampler normalises between top-k and
top-p for the whole batch, and with overlap scheduling its penalties are one token late. We copy
neither.

## Memory and graphs

| what | size |
|---|---|
| a reduced draft vocabulary of n tokens | copies of n rows of the LM head and of W2: \
n (d + r) numbers, 172 MiB for 32,000 tokens of a target of width 2,560 in bfloat16 |
| lists of kept tokens | of a verified row 1 KiB, 8 KiB or 32 KiB for a top-k up to 32, up to 256, \
or larger and none |
| penalties: counts of output tokens | 4 bytes times the vocabulary for each request, allocated \
at the start for all slots up to 256 MiB (29 MB for 48 requests of 151,936 tokens) |

Decode graphs and their buffers are sized for the running requests: SGLang's 48, unless
`--max-running-requests` or `--cuda-graph-max-bs-decode` is given. On fewer than four GPUs of less
than 60 GB SGLang captures 8 to 48 requests at most, unless the latter is given.

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


def gpu_page() -> str:
    """Return docs/gpu.md."""
    gpus = [
        f"| {gpu.models} | {gpu.backend}, by {'this package' if gpu.ours else 'SGLang'} | yes |"
        for gpu in GPUS
    ]
    rows = [f"| {name} | {said} |" for name, said in SCHEDULED]
    rows += [f"| {each.name} | every draft is verified: {each.why} |" for each in FEATURES]
    rules = [f"| {setting} | {result} |" for setting, result in RULES.items()]
    page = HEAD + "\n".join(gpus) + "\n" + DEFAULTS + "\n".join(rows) + "\n"
    return page + SAMPLING + "\n".join(rules) + "\n" + NOTES
