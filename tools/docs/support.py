"""Write docs/support.md: states of targets, drafters, devices and features, and fixed faults."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_dspark.patches import all_seams

_NUMBER = re.compile(r"^([\w.-]+/[\w.-]+)#(\d+)$")
PAGE = """<!-- written by `make docs-reference`; change tools/docs/support.py -->
# What works and what does not

For readers who decide whether to use this package. After this page you know how far your target,
drafter, device and features have been shown.

| state | meaning |
|---|---|
| served | a test starts real servers on a CPU and compares the answers with plain decoding's |
| ran | served on one H200, Triton attention, weights made there ([figures](results-gpu.md)) |
| rehearsed | a GPU's code ran on a CPU: all of it but the device |
| unscheduled | served, but every draft is verified; the log has the reason |
| refused | the start, or the request, ends with the reason in one line |
| untried | it has not been run and may work |

## Targets

| target | CPU | NVIDIA GPU |
|---|---|---|
| Llama (SmolLM2-135M-Instruct) | served | untried |
| Llama, small with random weights | served | rehearsed |
| Qwen3 | served with random weights | ran with the shapes of 4B and 0.6B |
| Qwen2 | served with random weights | rehearsed |
| Granite | served with random weights, by [hooks](serving.md#your-own-target) | rehearsed |
| Gemma 3, text alone | served with random weights, by hooks | untried |
| Ernie 4.5, GLM-4, OLMo 2, StableLM | untried; features are Transformers' | untried |
| Starcoder 2 | untried; features are Transformers' | untried |
| other classes of SGLang with `model.layers` | untried | untried |
| Gemma 1 and 2, Baichuan, others of two values a layer | refused by name: not compared | refused |
| Gemma 3 with images | refused: SGLang's features are incomplete | refused |
| latent attention (MLA) | refused | unscheduled |
| Qwen3.5, text alone (gated delta rule layers, GDN) | served with random weights | rehearsed |
| Qwen3-Next (GDN, experts) | refused | untried |
| other recurrent states (Mamba, KDA, Lightning) | refused | unscheduled |
| positions of three parts (mRoPE: Qwen2.5-VL, Qwen3-VL) | untried | untried |
| attention of its own (MiniMax-M3, Dots 3) | untried | unscheduled |
| no LM head in SGLang's class (Cohere) | refused | refused |
| DeepSeek-V4 with its own drafter | impossible: CUDA only | rehearsed ([in part](drafters.md)) |
| FP8 checkpoints | untried | untried |

## Drafters

| drafter | CPU | NVIDIA GPU |
|---|---|---|
| DSpark, dense, vanilla head | served | ran |
| DSpark, gated or RNN head | served | rehearsed |
| DSpark with experts, residual streams or a window | served | rehearsed |
| reduced vocabulary or window in Speculators' format | served after conversion | rehearsed |
| 1+N block in Speculators' format | served after conversion | rehearsed |
| rotation by YaRN | untried; read and converted | untried |
| DSpark without a confidence head | served | rehearsed |
| DFlash, converted | served | rehearsed |
| Eagle3 and MTP (EAGLE heads of one layer) with DSPARK | served | rehearsed |
| MTP, Eagle3 and DFlash as SGLang's own algorithms | served, unscheduled | ran: MTP, greedily |
| checkpoints published by others | untried; read by [format](drafters.md) | untried |

## Devices

| device | state |
|---|---|
| x86-64 CPU with AVX2 or AVX-512 | served |
| arm64 CPU | untried; the kernels build in their portable form |
| H200 (sm_90) | ran |
| A100, L4, RTX 4090, H100, B200, RTX 5090 | untried; kernels compile |
| AMD, Intel and Apple GPUs | untried; our GPU code is for NVIDIA |

## Features

| feature | CPU | NVIDIA GPU |
|---|---|---|
| greedy, temperature, top-k with top-p | served | ran |
| min-p, seeds, penalties, top-k or top-p alone | served | rehearsed |
| grammars, logit bias, stop strings, log probabilities | served | untried |
| prefix cache, chunked prefill, retraction | served | rehearsed |
| pages of several tokens (`--page-size`) | served | untried |
| overlap scheduling | served with `cpu.overlap` | ran |
| CUDA graphs of decode and draft | | ran |
| CUDA graphs of prefills | | rehearsed |
| tensor-parallel ranks | served | rehearsed |
| data-parallel replicas | served | untried |
| pipeline, data-parallel attention, disaggregation, two-batch overlap | untried | unscheduled |
| LoRA | refused; SGLang's needs a GPU | unscheduled |
| int8 and bfloat16 weights of ours | served, one rank | |
| custom logit processors | served, those requests without drafts | rehearsed |
| `return_hidden_states` | refused | untried |
| weight updates of a running server | served | untried |
| [six APIs](apis.md), tool calls, reasoning | served | untried |

On a GPU the exact conditions are in [On a GPU](gpu.md#what-is-scheduled).

## Faults of SGLang 0.5.23 that are fixed here

`upstream_fixes: false` leaves them as they are. Known limits that stay are in
[APIs](apis.md#known-limits-of-sglang-0523) and [troubleshooting](troubleshooting.md).

| fault | public thread |
|---|---|
"""


def support_page() -> str:
    """Return the page; its faults are those of the patches."""
    return PAGE + "\n".join(_fixes()) + "\n"


def _fixes() -> Iterator[str]:
    """Yield a row for each fault, which several patches may fix."""
    threads: dict[str, str] = {}
    own = {id(seam) for seam in all_seams(upstream_fixes=False)}
    for seam in all_seams():
        if seam.issue and seam.drop_when and id(seam) not in own:
            threads[seam.why] = seam.issue
    for why, issue in threads.items():
        yield f"| {why} | {', '.join(map(_link, issue.split(', ')))} |"


def _link(issue: str) -> str:
    """Link a thread; text that is no thread is unchanged."""
    if found := _NUMBER.match(issue):
        repository, number = found.groups()
        return f"[{issue}](https://github.com/{repository}/issues/{number})"
    return f"[thread]({issue})" if issue.startswith("http") else issue
