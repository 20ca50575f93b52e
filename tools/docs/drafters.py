"""Write the tables of docs/results-drafters.md from the JSON files of results/.

`python -m tools.docs.drafters` rewrites the text between the page's marks, so that page and files
cannot differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import load_json, load_yaml, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.traffic import SETTLING, VARIANTS, WINDOWS
from tools.docs.sweep import rewritten, wrapped

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results-drafters.md"
RESULTS = ROOT / "results"
RECIPES = ROOT / "configs" / "train" / "paper"
DOMAINS = ("math", "code", "chat", "macro")
ALIKE = {
    "dspark": "DSpark, 3 layers",
    "dspark-2-layers": "DSpark, 2 layers",
    "eagle3": "Eagle3, 1 layer",
    "dflash": "DFlash, 3 layers",
    "dflash-5-layers": "DFlash, 5 layers",
    "mtp5": "MTP-5, 1 layer chained",
    "mtp1": "the same, one draft",
}
PAPER = {"dspark": "DSpark, 5 layers", "dflash": "DFlash, 5 layers", "eagle3": "Eagle3, 1 layer"}
SHIPPED = "dspark-averaged"
POSITIONS = ("dspark", "eagle3", "dflash", "mtp5")
# By result file: the base recipe, and the change that each other training makes to it.
ABLATIONS = {
    "drafters_ablation": (
        "nothing: 3 layers, Markov head of rank 128, gamma 5; 5,120 answers",
        {
            "no-head": "no sequential head",
            "gated": "gated head",
            "rnn": "RNN head",
            "cross-entropy": "cross entropy in place of L_tv",
            "no-confidence": "no confidence head",
            "layers-1": "1 layer",
            "layers-5": "5 layers",
        },
    ),
    "drafters_ablation_more": (
        "nothing, trained again: 3,584 answers",
        {
            "rank-64": "rank 64",
            "rank-256": "rank 256",
            "layers-2": "2 layers",
            "layers-4": "4 layers",
            "gamma-4": "gamma 4",
            "gamma-7": "gamma 7",
            "gamma-8": "gamma 8",
            "gamma-16": "gamma 16",
            "no-head-gamma-16": "gamma 16, no sequential head",
            "seed-1": "another seed",
        },
    ),
}
# Recipes must agree in these fields before their drafters are compared.
_SCHEDULE = ("steps", "sequences_per_step", "anchors_per_sequence", "learning_rate")
_DRAFTER = ("gamma", "target_layer_ids", "draft_vocab", "init_from_target")
STAGES = {
    "before": "as predicted",
    "after": "the paper's temperatures",
    "shifted": "with a shift a position",
    "followed": "with each request's own shift",
}
TABLES = {
    "drafters_traffic": "shipped",
    "drafters_traffic_from_math": "fitted on math",
    "drafters_traffic_untold": "none",
}


def paper() -> list[str]:
    """Tabulate the drafters of the paper's recipes, sampled at T=1 as in the paper."""
    of = {"T=1": _metrics("drafters_paper_sampled")}
    return [
        *wrapped(trained_alike(RECIPES)),
        "",
        "| tau (95% over trainings) | math | code | chat | macro |",
        "|---|---|---|---|---|",
        *(
            f"| {name}, {about} | {' | '.join(_trained(metrics['tau'][label]))} |"
            for about, metrics in of.items()
            for label, name in PAPER.items()
        ),
        "",
        *_trained_ratios(of),
        "",
        *_sources("drafters_paper_sampled"),
    ]


def alike() -> list[str]:
    """Tabulate the drafters trained with one loss."""
    sampled, greedy = _metrics("drafters_tau_sampled"), _metrics("drafters_tau")
    return [
        *_taus({"T=1": sampled, "T=0": greedy}, ALIKE),
        "",
        *_ratios({"T=1": sampled, "T=0": greedy}, ALIKE),
        "",
        *_sources("drafters_tau_sampled", "drafters_tau"),
    ]


def ablations() -> list[str]:
    """Tabulate the effect on tau of one change to the shipped recipe, by group of trainings."""
    rows, files = ["| changed | T=1 | T=0 |", "|---|---|---|"], []
    for file, (nothing, changes) in ABLATIONS.items():
        both = (f"{file}_sampled", file)
        of = [_metrics(each) for each in both]
        base = [f"tau {metrics['tau']['base']['macro']:.3f}" for metrics in of]
        rows.append(f"| **{nothing}** | {' | '.join(base)} |")
        for label, name in changes.items():
            ratios = [_less(metrics["ratio"][f"base/{label}"]["macro"]) for metrics in of]
            rows.append(f"| {name} | {' | '.join(ratios)} |")
        files += both
    return [*rows, "", *_sources(*files)]


def overhead() -> list[str]:
    """Tabulate the sequential loop's share of a round by block length and context."""
    rows, contexts = [], []
    for row in _metrics("drafters_overhead")["drafters"]:
        contexts = [f"{each['context']:,}" for each in row["direct"]]
        walls = [each["wall"] for each in row["direct"]]
        shares = [
            f"{wall['share']:.1%} ({wall['share_low']:.1%} to {wall['share_high']:.1%})"
            for wall in walls
        ]
        loops = f"{1e3 * walls[0]['loop_s']:.1f} of {1e3 * walls[0]['round_s']:.0f} ms"
        rows.append(f"| {row['gamma']} | {' | '.join(shares)} | {loops} |")
    head = f"| gamma | {' | '.join(contexts)} tokens of context | at {contexts[0]} |"
    return [head, "|---" * (2 + len(contexts)) + "|", *rows, "", *_sources("drafters_overhead")]


def positions() -> list[str]:
    """Tabulate the acceptance rate of draft k given that all drafts before it were accepted."""
    curves = _metrics("drafters_positions")["curves"]
    of = {ALIKE[each]: curves[each] for each in POSITIONS}
    of["shipped: DSpark, 3 layers"] = _metrics("drafters_shipped_positions")["curves"][SHIPPED]
    rows = [
        f"| {name} | "
        + " | ".join(f"{position['value']:.3f}" for position in curve["overall"])
        + " |"
        for name, curve in of.items()
    ]
    head = ["| accepted given drafts 1 to k-1, T=0 | k=1 | 2 | 3 | 4 | 5 |", "|---" * 6 + "|"]
    return [*head, *rows, "", *_sources("drafters_positions", "drafters_shipped_positions")]


def shipped() -> list[str]:
    """Tabulate tau and calibration of the shipped drafter."""
    head = ["| tau | math | code | chat | macro |", "|---|---|---|---|---|"]
    files = {
        "192 evaluation prompts, T=0": "drafters_shipped",
        "the same, T=1": "drafters_shipped_sampled",
        "GSM8K, MBPP, IFEval, 64 prompts each, T=0": "drafters_benchmarks",
    }
    taus = [_tau_row(name, _metrics(file), SHIPPED) for name, file in files.items()]
    groups = {
        "T=0": _metrics("drafters_reliability")["groups"],
        "T=1": _metrics("drafters_reliability_sampled")["groups"],
    }
    errors = [
        f"| {name} | "
        + " | ".join(
            # Without differences between requests there is no stage of per-request shifts.
            f"{100 * group['overall'].get(stage, group['overall']['shifted'])['ece']['value']:.1f}%"
            for group in groups.values()
        )
        + " |"
        for stage, name in STAGES.items()
    ]
    return [
        *head,
        *taus,
        "",
        "| ECE of survival, all domains | T=0 | T=1 |",
        "|---|---|---|",
        *errors,
        "",
        *_sources(*files.values(), "drafters_reliability", "drafters_reliability_sampled"),
    ]


def traffic() -> list[str]:
    """Tabulate calibration error as requests change from math to chat, by source of the table."""
    rows = []
    for file, fitted in TABLES.items():
        metrics = _metrics(file)
        for variant, name in VARIANTS.items():
            windows = metrics["windows"][variant]
            errors = " | ".join(f"{100 * windows[each]['ece']:.1f}%" for each in WINDOWS)
            rows.append(
                f"| {fitted}, {name} | {errors} | {_percent(windows['after']['over_fixed'])} |"
            )
    return [
        f"| table, use | ECE: math | chat, {SETTLING} steps | chat, later | tokens/s, later |",
        "|---|---|---|---|---|",
        *rows,
        "",
        *_sources(*TABLES),
    ]


def trained_alike(recipes: Path) -> str:
    """Describe the common training of the recipes' drafters in one sentence.

    Raises DSparkError if two recipes differ in data, steps, blocks a step or features, because
    their figures would not compare methods alone.
    """
    found = {name: load_yaml(recipes / f"{name}.yaml") for name in PAPER}
    facts = {
        name: {
            "data": raw["data"],
            **{key: raw["schedule"][key] for key in _SCHEDULE},
            **{key: raw["drafter"][key] for key in _DRAFTER},
        }
        for name, raw in found.items()
    }
    first, *others = facts.items()
    for name, other in others:
        if different := [key for key, value in other.items() if value != first[1][key]]:
            raise DSparkError(
                f"configs/train/paper/{name}.yaml differs from {first[0]}.yaml in "
                f"{', '.join(different)}: they were not trained alike"
            )
    each = first[1]
    blocks = each["sequences_per_step"] * each["anchors_per_sequence"]
    return (
        f"All three by the recipes in `configs/train/paper/`: the same answers, "
        f"{each['steps']:,} steps of {blocks} blocks of {each['gamma']}, random weights, the same "
        f"features and learning rate."
    )


def _taus(of: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Iterable[str]:
    yield "| tau | math | code | chat | macro |"
    yield "|---|---|---|---|---|"
    for about, metrics in of.items():
        for label, name in names.items():
            yield _tau_row(f"{name}, {about}", metrics, label)


def _tau_row(name: str, metrics: Mapping[str, Any], label: str) -> str:
    cells = []
    for domain in DOMAINS:
        low, high = metrics["interval"][label][domain]
        cells.append(f"{metrics['tau'][label][domain]:.3f} ({low:.2f}-{high:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


def _trained(tau: Mapping[str, Any]) -> Iterable[str]:
    for domain in DOMAINS:
        found = tau[domain]["by_trainings"]
        yield f"{found['value']:.3f} ({found['low']:.2f}-{found['high']:.2f})"


def _trained_ratios(of: Mapping[str, Any]) -> Iterable[str]:
    """Yield ratios of DSpark's tau to each rival's: every training, the mean's two intervals."""
    yield "| DSpark over | each training | mean, 95% over trainings | 95% over prompts |"
    yield "|---|---|---|---|"
    for about, metrics in of.items():
        for label, name in list(PAPER.items())[1:]:
            found = metrics["ratio"][f"dspark/{label}"]["macro"]
            each = ", ".join(f"{100 * (ratio - 1):+.1f}%" for ratio in found["each"])
            over = [_percent(found[key]) for key in ("by_trainings", "by_prompts")]
            yield f"| {name}, {about} | {each} | {over[0]} | {over[1]} |"


def _ratios(of: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Iterable[str]:
    """Yield ratios of the first drafter's tau to each other one's, paired by prompt."""
    first = next(iter(names))
    yield f"| {names[first].split(',')[0]} over | " + " | ".join(of) + " |"
    yield "|---" * (1 + len(of)) + "|"
    for label, name in names.items():
        if label == first:
            continue
        cells = [_percent(metrics["ratio"][f"{first}/{label}"]["macro"]) for metrics in of.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def _percent(ratio: Mapping[str, float]) -> str:
    mid, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
    return f"{mid:+.1f}% ({low:+.1f} to {high:+.1f})"


def _less(ratio: Mapping[str, float]) -> str:
    """Format the inverse of a ratio: the second drafter over the first."""
    turned = {"value": "value", "low": "high", "high": "low"}
    return _percent({key: 1 / ratio[other] for key, other in turned.items()})


def _sources(*names: str) -> list[str]:
    each = dict.fromkeys(names)
    links = [
        f"[{name}.json](../results/{name}.json) (commit {_document(name)['commit'][:7]})"
        for name in each
    ]
    return wrapped("Files: " + ", ".join(links) + ".")


def _document(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    with reading(path, "result of `dspark eval`", "its `command` in the history makes it"):
        return load_json(path)


def _metrics(name: str) -> Any:
    return _document(name)["metrics"]


BLOCKS: Mapping[str, Callable[[], Sequence[str]]] = {
    "paper": paper,
    "alike": alike,
    "ablations": ablations,
    "overhead": overhead,
    "positions": positions,
    "shipped": shipped,
    "traffic": traffic,
}


def page(text: str) -> str:
    """Return the page with all generated blocks rewritten."""
    for name, make in BLOCKS.items():
        marks = (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
        text = rewritten(text, "\n".join(make()), marks)
    return text


if __name__ == "__main__":
    try:
        replace_text(PAGE, page(PAGE.read_text()), PAGE.name)
    except DSparkError as error:
        sys.exit(f"drafters: {error}")
