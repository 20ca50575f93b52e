"""What share of the tokens that steps emit reach somebody: those behind an answer's end do not.

A step that speculates may emit tokens after the one that ends an answer, and where results are
read one step late (the overlap loop) an ended request takes part in one more step. With short
answers that is worth a few percent to plain decoding: its steps lose one token where they lose any,
and an end by length is seen in time. The guard compares tokens/s, so both ways are weighed by what
of them is delivered. Only finished steps are counted.
"""

from __future__ import annotations

MEMORY = 4000.0  # tokens after which a loss has faded to 1/e
PRIOR = 250.0  # tokens that having lost nothing counts for at first


class Delivered:
    """Faded counts of tokens emitted and lost, apart for steps that speculated and that did not."""

    def __init__(self) -> None:
        self._emitted = {True: 0.0, False: 0.0}
        self._lost = {True: 0.0, False: 0.0}

    def emitted(self, speculated: bool, tokens: int) -> None:
        """A finished step emitted so many tokens, lost ones included."""
        keep = 1.0 - min(tokens / MEMORY, 1.0)
        self._emitted[speculated] = keep * self._emitted[speculated] + tokens
        self._lost[speculated] *= keep

    def lost(self, speculated: bool, tokens: int) -> None:
        """So many tokens of such a step lay behind the end of their answers."""
        self._lost[speculated] += tokens

    def share(self, speculated: bool) -> float:
        """Delivered tokens over emitted ones, in (0, 1]."""
        lost = min(self._lost[speculated], self._emitted[speculated])
        return 1.0 - lost / (self._emitted[speculated] + PRIOR)
