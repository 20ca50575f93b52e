"""A row of logits that is no distribution gets a token all the same, and a line in the log.

Every token is masked where a grammar and `min_new_tokens` leave none between them; a model may
overflow. Softmax makes such a row NaN, and drawing from it raises in the scheduler, which ends the
server for everyone. Greedy decoding takes token 0 of a row that is masked whole, so does this: a
grammar then refuses it, and ends that request alone (`grammar_ends.py`).
"""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor

logger = logging.getLogger(__name__)


def settle_lost(probs: Tensor) -> Tensor:
    """probs [N, V], changed in place: rows of NaN become token 0 for certain."""
    lost = probs[:, 0].isnan()  # a row is NaN as a whole or nowhere: it was divided by its sum
    if bool(lost.any()):
        _warn()
        probs[lost] = 0.0
        probs[lost, 0] = 1.0
    return probs


@cache
def _warn() -> None:
    """Once: a model that overflows would do so in every step."""
    logger.error(
        "sglang-dspark: logits of a request are no distribution (NaN, or every token is masked); "
        "token 0 is taken, here and wherever it happens again"
    )
