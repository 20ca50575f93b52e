"""Time sampled acceptance on a CUDA device: `python -m sglang_dspark.benchmarks.accept`.

`accept_sampled` (`ours, token rule`) and `accept_block` (`ours, block rule`) on float32 logits, and
`accept_listed` where requests have cuts (`ours on lists`; without a top-k one of the other two
follows, for incomplete lists), next to three peers. `AcceptSampling`
and `BlockwiseRejection` are SGLang's (sglang/kernels/ops/speculative/dspark/); the former applies
cuts one after the other and normalises in between, so its distribution is not always ours; the
latter supports no cuts. `torch.topk` of all rows is a library's selection of the lists. Every
draft is verified. Rows are those of `timing.timed`, with memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import torch
from torch import Tensor

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_listed import LISTS, accept_listed_triton
from sglang_dspark.kernels.accept_sampled import Outcome, accept_triton
from sglang_dspark.kernels.accept_windows import Windows

REQUESTS = (1, 16, 64, 256)
GAMMA, VOCAB = 7, 151_936
# Standard deviation of the logits: at T 1 a tenth of the mass on one token and nine tenths on 500.
# A deviation of 1 would spread it over most of the vocabulary, unlike any model.
SPREAD = 4.0


@dataclass(frozen=True)
class Cut:
    """Sampling settings of all requests of a step; None: no such cut."""

    name: str
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


CUTS = (
    Cut("top-k 20, top-p 0.95, T 0.6", 0.6, 20, 0.95),  # Qwen3's generation_config
    Cut("none"),
    Cut("top-k 50", top_k=50),
    Cut("top-p 0.9", top_p=0.9),
)


def candidates(
    requests: Sequence[int] = REQUESTS, device: str = "cuda", vocab: int = VOCAB
) -> Iterator[Candidate]:
    """Yield every implementation of every step; tensors of a step are shared until the next one."""
    for count in requests:
        plain = windows(count, GAMMA, vocab, device)
        arrivals = torch.zeros(count, dtype=torch.int32, device=device)
        for cut in CUTS:
            given = cut_by(plain, cut)
            ways: dict[str, partial[Call]] = {
                "ours, token rule": partial(_ours, accept_triton, given, arrivals),
                "ours, block rule": partial(_ours, accept_block_triton, given, arrivals),
                "SGLang AcceptSampling": partial(accept_sampling, given),
                **_peers_of(cut, given),
            }
            for name, make in ways.items():
                shape = (count, GAMMA, vocab)
                yield Candidate("accept", shape, cut.name, name, make, eager=True, memory=True)


def _peers_of(cut: Cut, given: Windows) -> dict[str, partial[Call]]:
    """Prepare the peers that support this kind of cut."""
    if cut.top_k is None and cut.top_p is None:
        return {"SGLang BlockwiseRejection": partial(blockwise_rejection, given)}
    lists = {
        f"ours on lists, {rule} rule": partial(_on_lists, given, cut.top_k, rule)
        for rule in ("token", "block")
    }
    listed = cut.top_k or min(LISTS[-1], given.logits.shape[1])
    return lists | {"torch.topk": partial(topk, given.logits, listed)}


def windows(requests: int, gamma: int, vocab: int, device: str) -> Windows:
    """Make a step at T 1 on the device: 1.2 GB of logits for 256 requests of 152k tokens.

    A draft's logits are the target's with noise, so that about half of the drafts are accepted.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (requests, gamma + 1, vocab)
    logits = torch.randn(shape, generator=generator, device=device).mul_(SPREAD)
    near = torch.randn((requests, gamma, vocab), generator=generator, device=device)
    near.add_(logits[:, :gamma])
    drafts = torch.stack(  # a request at a time, as probabilities of all would be another 1.1 GB
        [torch.multinomial(each.softmax(-1), 1, generator=generator)[:, 0] for each in near]
    )

    def uniforms(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator, device=device, dtype=torch.float64)

    warm = torch.ones(requests, device=device)
    return Windows(
        drafts=drafts,
        lengths=torch.full((requests,), gamma, dtype=torch.int32, device=device),
        logits=logits.view(-1, vocab),
        temperatures=warm,
        accept_uniforms=uniforms(requests, gamma),
        bonus_uniforms=uniforms(requests),
        draft_logits=near,
        draft_temperatures=warm,
    )


def cut_by(given: Windows, cut: Cut) -> Windows:
    """Return the same step with a cut in every request; logits and drafts are shared."""
    like = given.temperatures
    settings = {
        "temperatures": torch.full_like(like, cut.temperature),
        "top_k": None if cut.top_k is None else torch.full_like(like, cut.top_k).int(),
        "top_p": None if cut.top_p is None else torch.full_like(like, cut.top_p),
    }
    return Windows(**{**vars(given), **settings})


def _ours(operator: object, given: Windows, arrivals: Tensor) -> Call:
    return lambda: operator(given, arrivals).bonus  # type: ignore[operator]


def _on_lists(given: Windows, top_k: int | None, rule: str) -> Call:
    rows = given.logits.shape[0]
    operator = accept_triton if rule == "token" else accept_block_triton
    arrivals = torch.zeros(len(given.drafts), dtype=torch.int32, device=given.drafts.device)

    def call() -> Tensor:
        found = accept_listed_triton(given, most=top_k, rows=rows, rule=rule)
        if top_k is None:
            rest = replace(given, skipped=found.complete)
            operator(rest, arrivals, into=Outcome(found.accepted, found.bonus))
        return found.bonus

    return call


def topk(logits: Tensor, k: int) -> Call:
    """Select k tokens of every row."""
    return lambda: torch.topk(logits, k, dim=-1)


def accept_sampling(given: Windows) -> Call:
    """Prepare SGLang's operator with its draft probabilities, as its verify step calls it."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_accept")
    requests, gamma = given.drafts.shape
    draft, temperatures = _drafted(given)
    info = SimpleNamespace(
        temperatures=given.temperatures[:, None],
        top_ks=given.top_k,
        top_ps=given.top_p,
        need_top_k_sampling=given.top_k is not None,
        need_top_p_sampling=given.top_p is not None,
    )
    window = _window(given)
    top_k = None if given.top_k is None else int(given.top_k.max())
    limits = SimpleNamespace(max_top_k=top_k, uniform_top_k_value=top_k)
    cutoff = given.lengths + 1

    def call() -> Tensor:
        probs = module.SoftmaxTemp.execute(
            logits=draft.view(requests * gamma, -1),
            temperatures=temperatures[:, None],
            rows_per_request=gamma,
        )
        bonus: Tensor = module.AcceptSampling.execute(
            candidates=window,
            target_logits=given.logits,
            draft_probs=probs.view(requests, gamma, -1),
            sampling_info=info,
            draft_input=limits,
            gamma=gamma,
            verify_num_draft_tokens=gamma + 1,
            cutoff_verify_lens=cutoff,
        )[1]
        return bonus

    return call


def blockwise_rejection(given: Windows) -> Call:
    """Prepare SGLang's vocabulary-split rule. Raises ValueError for a step with cuts."""
    if given.top_k is not None or given.top_p is not None:
        raise ValueError("supports no cuts")
    module = import_module("sglang.kernels.ops.speculative.dspark.blockwise_rejection")
    draft, temperatures = _drafted(given)
    noise = module.make_rejection_noise(0, given.logits.device)
    window, cutoff = _window(given), given.lengths + 1

    def call() -> Tensor:
        bonus: Tensor = module.BlockwiseRejection.execute(
            candidates=window,
            target_logits=given.logits,
            draft_logits=draft,
            target_temperatures=given.temperatures,
            draft_temperatures=temperatures,
            noise=noise,
            cutoff_verify_lens=cutoff,
        )[1]
        return bonus

    return call


def _drafted(given: Windows) -> tuple[Tensor, Tensor]:
    if given.draft_logits is None or given.draft_temperatures is None:
        raise ValueError("needs the logits that drafts were drawn from")
    return given.draft_logits, given.draft_temperatures


def _window(given: Windows) -> Tensor:
    """Return [R, gamma + 1]: anchor, which no rule reads, and drafts."""
    return torch.cat([torch.zeros_like(given.drafts[:, :1]), given.drafts], dim=1)


if __name__ == "__main__":
    print_rows(candidates)
