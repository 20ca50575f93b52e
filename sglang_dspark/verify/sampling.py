"""The distribution that plain decoding samples from: temperature, top-k, top-p, min-p.

Order as in SGLang's samplers (sglang/srt/layers/sampler.py): softmax of logits / temperature,
then top-k and top-p jointly (both cut the same sorted softmax, without renormalising between
them), then min-p relative to the largest probability, then one normalisation. Rejection sampling
is lossless only towards the distribution given here, so every verify row goes through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A top-p cut rarely keeps more candidates than this; sorting fewer is many times faster.
_FIRST_TRY = 1024


@dataclass(frozen=True)
class BatchSampling:
    """Sampling settings of R requests.

    temperature: [R] float >= 0; 0 means greedy. top_k: [R] int64 >= 1; V or more keeps all.
    top_p: [R] float in (0, 1]; min_p: [R] float in [0, 1].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def __post_init__(self) -> None:
        shape = self.temperature.shape
        if len(shape) != 1 or any(t.shape != shape for t in (self.top_k, self.top_p, self.min_p)):
            raise ValueError("temperature, top_k, top_p and min_p must all be [R]")
        if not bool((self.temperature >= 0).all()):
            raise ValueError(f"temperature must be >= 0: {self.temperature.tolist()}")
        if not bool((self.top_k >= 1).all()):
            raise ValueError(f"top_k must be >= 1: {self.top_k.tolist()}")
        if not bool(((self.top_p > 0) & (self.top_p <= 1)).all()):
            raise ValueError(f"top_p must lie in (0, 1]: {self.top_p.tolist()}")
        if not bool(((self.min_p >= 0) & (self.min_p <= 1)).all()):
            raise ValueError(f"min_p must lie in [0, 1]: {self.min_p.tolist()}")

    @classmethod
    def uniform(
        cls,
        rows: int,
        temperature: float = 0.0,
        top_k: int = 1 << 30,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> BatchSampling:
        """The same settings for every one of `rows` requests."""
        return cls(
            temperature=torch.full((rows,), temperature, dtype=torch.float32),
            top_k=torch.full((rows,), top_k, dtype=torch.int64),
            top_p=torch.full((rows,), top_p, dtype=torch.float32),
            min_p=torch.full((rows,), min_p, dtype=torch.float32),
        )

    @property
    def all_greedy(self) -> bool:
        """True when no request needs random numbers."""
        return bool((self.temperature == 0).all())


def target_distribution(logits: Tensor, sampling: BatchSampling) -> Tensor:
    """Probabilities that plain decoding would sample each position from.

    logits: [R, q, V] of any float type. Returns [R, q, V] float32, rows summing to 1; a request
    at temperature 0 gets one-hot rows at its argmax. Where equal probabilities straddle a top-k
    or top-p cut, the lowest token ids stay. Raises ValueError if the row counts differ.
    """
    rows, width, vocab = logits.shape
    if sampling.temperature.shape[0] != rows:
        raise ValueError(f"{rows} rows of logits, {sampling.temperature.shape[0]} of settings")
    greedy = sampling.temperature == 0  # [R]
    scale = torch.where(greedy, torch.ones_like(sampling.temperature), sampling.temperature)
    probs = torch.softmax(logits.float() / scale[:, None, None].float(), dim=-1)
    if greedy.any():
        choice = logits[greedy].argmax(dim=-1, keepdim=True)  # [G, q, 1]
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(2, choice, 1.0)
    cut = ~greedy & ((sampling.top_k < vocab) | (sampling.top_p < 1) | (sampling.min_p > 0))
    if cut.any():
        flat = probs[cut].reshape(-1, vocab)
        top_k, top_p, min_p = (
            setting[cut].repeat_interleave(width)
            for setting in (sampling.top_k, sampling.top_p, sampling.min_p)
        )
        probs[cut] = _truncate(flat, top_k, top_p, min_p).reshape(-1, width, vocab)
    return probs


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Cut and renormalise; probs [N, V], settings [N]. Returns [N, V] float32."""
    ordered = _leading_values(probs, top_k, top_p, min_p)  # [N, W] descending
    before = ordered.cumsum(dim=1) - ordered  # mass ahead of each candidate
    rank = torch.arange(ordered.shape[1], device=probs.device)
    keep = (rank[None, :] < top_k[:, None]) & (before <= top_p[:, None])
    keep &= ordered >= (ordered[:, 0] * min_p)[:, None]
    count = keep.sum(dim=1, keepdim=True)  # [N, 1]; the kept set is a prefix of the order
    smallest = ordered.gather(1, count - 1)  # [N, 1]
    above = probs > smallest
    equal = probs == smallest
    room = count - above.sum(dim=1, keepdim=True)
    kept = probs * (above | (equal & (equal.cumsum(dim=1) <= room)))
    return kept / kept.sum(dim=1, keepdim=True)


def _leading_values(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The largest probabilities of each row, enough that everything behind them is cut.

    probs: [N, V]; returns [N, W] descending. W is as small as the settings allow: a row needs
    top_k values, or as many as reach the mass top_p, or all that min_p leaves.
    """
    vocab = probs.shape[1]
    by_k = top_k < vocab
    width = min(vocab, max(_FIRST_TRY, int(top_k[by_k].max()) if by_k.any() else 1))
    ordered = torch.topk(probs, width, dim=1).values
    by_min_p = ordered[:, -1] < ordered[:, 0] * min_p
    enough = by_k | by_min_p | (ordered.sum(dim=1) > top_p)
    if width == vocab or bool(enough.all()):
        return ordered
    return probs.sort(dim=1, descending=True).values
