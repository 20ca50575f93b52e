"""Write docs/results-gpu.md from the result files measured on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_SHOWN = (1, 16, 64, 256)  # requests
_NAMED = "vocabulary 151,936, gamma 7"
_NAMES = {
    "markov": "sequential head",
    "accept_greedy": "greedy acceptance",
    "accept": "sampled acceptance",
    "none": "without cuts",
    "window_attention": "window attention",
    "pass_rows": "rows of a pass",
}
_ARMS = {
    "plain": "plain",
    "mtp1": "MTP-1",
    "upstream-dspark-static": "SGLang's DSPARK",
    "dspark": "ours",
}
_FORMATS = ("bf16 x bf16", "fp8 x fp8", "bf16 x mxfp4", "bf16 x nvfp4")
_RESULTS = Path(__file__).resolve().parents[2] / "results"

HEAD = """\
<!-- written by `make docs-reference`; change tools/docs/gpu_results.py -->
# On a GPU, measured

For reviewers. After this page you know what servers and kernels did on an H200, what differs from
a real deployment, and what is still slow.

"""
SERVERS = """\
## Servers

What differs from a deployment, before any figure: the target has Qwen3-4B's shape, bfloat16, and
made-up weights whose next token follows a table, and drafters know that table and err as often as
set, so the accepted length is set, not found. All arms use SGLang's Triton attention, because
FlashAttention 3 did not fit into what could be sent. Prompts have 128 tokens, answers 64 to 192,
three a user. Each cell is one round, the second of two, so there is no interval. The rounds differ,
as the host's speed was uneven: greedily at 8 users ours over plain was {first:.2f} in the first,
{second:.2f} in the second. At 128 users the client was late by 6 to 8 ms for ours and SGLang's
DSPARK; a sweep would call these cells void and repeat them.
SGLang's own DSPARK verifies every draft; its drafter and ours are the same. MTP-1 proposes one
draft, its accepted length set to 1.8.

Greedy tokens/s with every token right ({right} of {total} in all arms), sampled ones below:

"""
STEPS = """
**What a decode step takes** in the scheduled server (medians, ms), and what its start had measured
with the device alone:

| rows of the pass, up to | steps | at the start | predicted before the step | measured |
|---|---|---|---|---|
"""
FINDINGS = """
What these figures say:

- **Ours is faster than plain decoding in all eight cells**, greedily (both rounds)
  {both} times at 1, 8, 32 and 128 users, and faster than SGLang's own DSPARK
  in four of six: that one is 4% faster at one user and 13% at 8 with T = 1.
- A step is bound by the host below some 32 users: with one user the device needs 4.7 ms a step, and
  the profiler saw it idle for half of the time.
- The window kernel of this package took the attention of 64 requests from 7.6 ms a step (commit
  9169918, SGLang's kernel) to 0.9.
- With top-k and top-p a client sees steps that are 7 ms longer than greedy ones at 8 users and 5
  at 32: acceptance on lists of the kept tokens was 290 calls of torch, each of some 17 us of the
  host. It is some fifteen calls now, which have not run on a GPU ([which](gpu.md)). Temperature
  alone cost 4 ms at 8 users and nothing at 32; the uneven host is the likelier reason.
- Drafts, acceptance and the cache are right: a second target of Qwen3-0.6B's shape, whose layers
  matter, gave {equal} of {requests} greedy answers as plain decoding gave them, and the others
  parted at near ties of bfloat16 logits (margins up to {margin:.3g}).

The first run on that card, commit 9169918, had lost to plain decoding from 32 users on (0.72 to
0.74 of it). Since then: the window kernel, fewer launches a step, graphs for prefills, and answers
of 64 to 192 tokens in place of 96 each, which had flattered plain decoding.
"""
EXPERTS = """
## Expert layers

One layer of DeepSeek-V4-Flash's shape, uniform routing, in a graph (commit {commit},
[{name}](../results/{name})); compared with float64 first. The card moves {bandwidth:.1f} TB/s by a
kernel and multiplies {bf16:.0f} TFLOP/s in bfloat16 and {fp8:.0f} in FP8 ({machine}):

| rows and weights | tokens | us | TB/s | of what the card reaches | torch's grouped product, us |
|---|---|---|---|---|---|
"""
EXPERTS_REST = """
FP8 is 1.4 to 1.7 times as fast as bfloat16, MXFP4 1.3 to 1.9 times and NVFP4 1.2 to 1.8. FP4 takes
the time of FP8 from 8 tokens on and 10 to 15% more at one: it reads half of FP8's bytes, at half of
the speed, as it is still bound by converting codes (prediction at 1, 8, 64, 512 tokens: 55 to 75,
230 to 300, 950 to 1,200, 1,300 to 1,650 us). So from 8 tokens on FP4 saves memory at no cost in
time. SGLang's fused layer and DeepGEMM were not there to compare with.
"""
OPERATORS = """
## Operators of the step

| operator in `kernels/` | content, one launch each but for two |
|---|---|
| `markov_sample.py` | the sequential head's gamma steps, greedy or sampled; a cooperative launch, \
as its programs wait for each other between positions |
| `admission.py` | confidence logits to ragged windows: calibration, survival, the K largest |
| `accept_greedy.py` | in a greedy pass's graph: the target's choices, kept drafts, lengths |
| `accept_sampled.py` | the same for sampled requests, with cuts and seeds, token by token |
| `accept_block.py` | the same by block, in two launches |
| `accept_listed.py` | both where requests have cuts, on lists of the likeliest tokens, in \
three launches; newer than these runs |
| `pass_rows.py` | the rows of a ragged pass and the windows of its graph's slots |
| `penalise.py` | penalties of all rows of the windows, in place; newer than these runs |
| `certainty.py` | confidence of drafts without a confidence head, from their logits; newer than \
these runs |
| `commit_write.py` | norms and rotates the keys of all draft layers, writes keys and values |
| `window_attention.py` | attends from ragged verify windows to cached contexts; in two launches \
where contexts are split |

Each runs in Triton's interpreter in the tests and is compiled for sm_80, sm_90 and sm_100. The
accept operators allocate no tensor of probabilities. `markov_sample.py` has SGLang's noise, logits
and drafts up to rounding; a vanilla head in the draft's graph keeps SGLang's steps, whose sampled
ones were faster there. A commit projects the packed rows of a
pass, for all draft layers in one product, at the end of its graph.

`python -m sglang_dspark.benchmarks.operators` (one of them: `.admission`, `.markov`, `.greedy`,
`.accept`, `.commit`, `.pass_rows`, `.penalise`, `.certainty`, `.window_attention`) times them in
captured graphs next to SGLang's and torch's.

"""
REST = """
Times are medians of CUDA events. In the first table, outside of graphs they include the host's
launches, greedy logits are bfloat16, where a server's are float32, and the commit is 25ce16b.
Slower than SGLang's or torch's are our sampled acceptance on whole rows, the commit up to 64
requests with the host's launches, and in a graph the sampled head and, at 64 requests, the greedy
one. Since these runs a server judges cuts on lists, and on whole rows only what is left
([which](gpu.md)), and the graph of a verify pass accepts on packed rows and commits, without
launches of the host. Neither was timed on a GPU. The newest run was cut off before the sequential
head and sampled acceptance. Not measured: SGLang's acceptance with top-p, which needs FlashInfer.
"""


def results_page() -> str:
    """Return docs/results-gpu.md."""
    return HEAD + servers() + experts() + OPERATORS + measured() + REST


def servers() -> str:
    """Write the results of served targets: tokens/s by arm and load, step times, equal answers."""
    found = _read("first")
    rows = found["metrics"]["rows"]
    cells = [row for row in rows if "server" in row and "users" in row and row["repeat"]]
    greedy = [row for row in cells if row["sampling"] == "greedy"]
    right, total = (sum(row["right"][each] for row in greedy) for each in (0, 1))
    tiers = [row for row in rows if "tier" in row]
    attended = [row for row in rows if "attending" in row]
    about = (
        f"`{found['command']}`, commit {found['commit']}, {found['device']}, {found['date'][:10]}, "
        f"{found['seconds']:.0f} s; [results/gpu_first_h200.json](../results/gpu_first_h200.json)."
    )
    findings = FINDINGS.format(
        equal=sum(row["equal"] for row in attended),
        requests=sum(row["requests"] for row in attended),
        margin=max(row["largest_margin"] for row in attended),
        both=", ".join(f"{row['ratio']:.2f}" for row in found["metrics"]["ratios"] if _shown(row)),
    )
    rounds = [_over_plain(rows, repeat) for repeat in (0, 1)]
    table = SERVERS.format(
        right=f"{right:,}", total=f"{total:,}", first=rounds[0], second=rounds[1]
    )
    table += "\n".join(_speeds(cells))
    steps = STEPS + "\n".join(map(_tier, tiers))
    return f"{table}\n\n{about}\n{steps}\n{findings}"


def _shown(ratio: Mapping[str, Any]) -> bool:
    return bool(ratio["over"] == "plain" and ratio["sampling"] == "greedy")


def _over_plain(rows: Sequence[Mapping[str, Any]], repeat: int, users: int = 8) -> float:
    """Return the greedy speed of our server over plain decoding's in one round."""
    speeds = {
        row["server"]: row["whole_tokens_per_s"]
        for row in rows
        if "server" in row
        and (row.get("users"), row.get("sampling"), row.get("repeat")) == (users, "greedy", repeat)
    }
    return float(speeds["dspark"] / speeds["plain"])


def _speeds(cells: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a table with a line for each load and kind of sampling, a column for each arm."""
    yield f"| users | sampling | {' | '.join(_ARMS.values())} | ours over plain | tau |"
    yield "|---" * (4 + len(_ARMS)) + "|"
    loads = dict.fromkeys((row["sampling"], row["users"]) for row in cells)
    for sampling, users in loads:
        of = {
            row["server"]: row
            for row in cells
            if (row["sampling"], row["users"]) == (sampling, users)
        }
        speeds = {arm: of[arm]["whole_tokens_per_s"] if arm in of else None for arm in _ARMS}
        shown = ["" if speed is None else f"{speed:,.0f}" for speed in speeds.values()]
        ratio = f"{speeds['dspark'] / speeds['plain']:.2f}"
        tau = f"{of['dspark']['tau']:.2f}"
        yield f"| {users} | {sampling} | {' | '.join(shown)} | {ratio} | {tau} |"


def _tier(row: Mapping[str, Any]) -> str:
    times = " | ".join(f"{row[each]:.1f}" for each in ("startup_ms", "corrected_ms", "measured_ms"))
    return f"| {row['tier']} | {row['steps']} | {times} |"


def experts() -> str:
    """Write the times of expert layers by format."""
    found = _read("experts")
    reached = found["metrics"]["ceilings"]
    head = EXPERTS.format(
        commit=found["commit"],
        name="gpu_experts_h200.json",
        bandwidth=reached["bandwidth"] / 1e12,
        bf16=reached["bf16"] / 1e12,
        fp8=reached["fp8"] / 1e12,
        machine=found["device"],
    )
    layers = [
        row
        for row in found["metrics"]["rows"]
        if row["op"] == "experts layer" and row["peer"] == "torch grouped_mm"
    ]
    lines = []
    for row in sorted(layers, key=lambda row: (_FORMATS.index(row["format"]), row["shape"][1])):
        peer = "" if row["peer_us"] is None else f"{row['peer_us']:.0f}"
        lines.append(
            f"| {row['format']} | {row['shape'][1]} | {row['ours_us']:.0f} | "
            f"{row['gb_per_s'] / 1e3:.2f} | {row['fraction_of_ceiling']:.2f} | {peer} |"
        )
    return head + "\n".join(lines) + "\n" + EXPERTS_REST


def measured() -> str:
    """Write the comparisons with references, and operator times next to SGLang's and torch's."""
    parity, again = _read("parity"), _read("operators")
    found, now = parity["metrics"], again["metrics"]
    compared = [
        f"{found['admission']['batches']} batches admitted and {found['greedy']['requests']} "
        "requests accepted greedily, bit for bit",
        f"{found['commit']['rows']} rows packed and {found['commit_write']['rows']} written",
        f"{len(found['products'])} grouped products within {max(found['products'].values()):.0e} "
        "of float64",
        f"{now['markov']['drafts']} drafts and "
        f"{now['accept']['requests'] + now['accept_block']['requests']} sampled outcomes, of "
        f"commit {again['commit']}",
    ]
    lines = [
        f"Compiled kernels compared with their references (commit {parity['commit']},\n"
        "[results/gpu_parity_h200.json](../results/gpu_parity_h200.json)), without a difference:",
        "",
        *(f"- {each}" for each in compared),
        "",
        *_of(("markov", "admission", "greedy", "commit")),
    ]
    return "\n".join(lines) + "\n" + in_graphs()


def in_graphs() -> str:
    """Write a table for each published file of the kit's stage `operators`, one a device."""
    parts = []
    for file in sorted(_RESULTS.glob("gpu_operators_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        about = (
            f"\nIn captured graphs on an {found['device']}, float32 logits, the cache flushed "
            f"(commit {found['commit']}, [{file.name}](../results/{file.name})); us, in brackets "
            "eagerly, host launches included:\n\n"
        )
        parts.append(about + "\n".join(_in_graphs(found["metrics"]["rows"])) + "\n")
    return "".join(parts)


def _in_graphs(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line for each operator and implementation, a column for each number of requests."""
    sizes = sorted({row["shape"][0] for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        line = lines.setdefault((_about(row), row["implementation"]), {})
        line[row["shape"][0]] = _time(row)
    yield _header(["operator", "implementation", *map(_requests, sizes)])
    for names, times in lines.items():
        yield _line([*names, *(times.get(size, "") for size in sizes)])
    for reason in dict.fromkeys(row["reason"] for row in rows if row["us"] is None):
        yield f"\nnone: {reason}"


def _about(row: Mapping[str, Any]) -> str:
    words = [_NAMES.get(row["op"], row["op"]), _NAMES.get(row["case"], row["case"])]
    if row["op"] == "window_attention":
        words.append("{1} rows a window, {2} of context".format(*row["shape"]))
    return ", ".join(word for word in words if word)


def _time(row: Mapping[str, Any]) -> str:
    if row["us"] is None:
        return "none"
    return f"{row['us']:.0f}" + (f" ({row['eager_us']:.0f})" if "eager_us" in row else "")


def _of(names: Sequence[str]) -> Iterable[str]:
    """Yield a line for each operator of these files: our / SGLang's us by number of requests."""
    yield _header([f"ours / SGLang's, us, {_NAMED}", *map(_requests, _SHOWN), "file"])
    for name in names:
        lines: dict[str, dict[int, str]] = {}
        for row in _read(name)["metrics"]["rows"]:
            requests, gamma = row["shape"][:2]
            if gamma == 7 and str(row["peer"]).startswith("SGLang"):
                words = [row["op"], *(row[key] for key in ("way", "cut") if key in row)]
                about = ", ".join(_NAMES.get(word, word) for word in words)
                about += ", in a graph" if row.get("graph") else ""
                theirs = "-" if row["peer_us"] is None else f"{row['peer_us']:.0f}"
                lines.setdefault(about, {})[requests] = f"{row['ours_us']:.0f} / {theirs}"
        link = f"[{name}](../results/gpu_{name}_h200.json)"
        for about, times in lines.items():
            yield _line([about, *(times.get(size, "") for size in _SHOWN), link])


def _requests(size: int) -> str:
    return f"{size} request{'s' if size > 1 else ''}"


def _header(cells: Sequence[str]) -> str:
    return _line(cells) + "\n" + "|---" * len(cells) + "|"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"gpu_{name}_h200.json").read_text(encoding="utf-8"))
