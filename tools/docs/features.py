"""docs/gpu.md: what is scheduled on a GPU and what is not, from the rules that decide it."""

from __future__ import annotations

from sglang_dspark.serving.cuda.features import FEATURES, SCHEDULED

HEAD = """\
<!-- written by `make docs-reference`; change sglang_dspark/serving/cuda/features.py -->
# On a GPU

On an NVIDIA GPU `--speculative-algorithm DSPARK` schedules by confidence as on a CPU, by the same
planner, guard and calibration. SGLang's own worker, attention backends, graphs and accept rules do
the work; which drafts are made and verified is ours. Step times are measured at the first start, a
captured graph at a time. **None of this has run on a GPU yet.** It is rehearsed in real servers on
a CPU (`tests/rehearsal`), where everything but the device itself is what a GPU would run.

`schedule: {mode: static}` in the `--dspark-config` file verifies every draft instead, `mode: off`
leaves SGLang's own choice, and `DSPARK_DISABLE=1` takes the whole package out.

## What is scheduled

| with | what happens |
|---|---|
"""
TAIL = """
Such a server says so in one line of its log (`every draft is verified: ...`) and serves; it is no
error. What is found only after the models are loaded is said the same way.

## What no rehearsal reaches

Whether a graph may be captured as it stands, races between streams, memory of graph pools,
bfloat16, speed, and whether leaving a draft out pays: only a GPU shows these.
"""


def gpu_page() -> str:
    """The whole page."""
    rows = [f"| {name} | {said} |" for name, said in SCHEDULED]
    rows += [f"| {each.name} | every draft is verified: {each.why} |" for each in FEATURES]
    return HEAD + "\n".join(rows) + "\n" + TAIL
