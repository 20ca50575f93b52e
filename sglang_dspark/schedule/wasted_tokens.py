"""Measure the share of emitted tokens that are delivered: tokens after an answer's end are not.

A step that speculates may emit tokens after the one that ends an answer. With overlap, where
results are read one step late, an ended request runs in one more step. With short answers this
favours plain decoding by a few percent: its steps lose at most one token, and an end by length is
detected in time. The guard compares tokens/s, so each mode is weighted by its delivered share. Only
finished steps are counted.
"""

from __future__ import annotations

MEMORY = 4000.0  # tokens after which a loss has faded to 1/e
PRIOR = 250.0  # initial weight of a loss of 0, in tokens


class Delivered:
    """Faded counts of tokens emitted and lost, separately for speculating and plain steps."""

    def __init__(self) -> None:
        self._emitted = {True: 0.0, False: 0.0}
        self._lost = {True: 0.0, False: 0.0}

    def emitted(self, speculated: bool, tokens: int) -> None:
        """Count tokens that a finished step emitted, lost ones included."""
        keep = 1.0 - min(tokens / MEMORY, 1.0)
        self._emitted[speculated] = keep * self._emitted[speculated] + tokens
        self._lost[speculated] *= keep

    def lost(self, speculated: bool, tokens: int) -> None:
        """Count tokens of a finished step that came after the end of their answers."""
        self._lost[speculated] += tokens

    def share(self, speculated: bool) -> float:
        """Return delivered tokens over emitted ones, in (0, 1]."""
        lost = min(self._lost[speculated], self._emitted[speculated])
        return 1.0 - lost / (self._emitted[speculated] + PRIOR)
