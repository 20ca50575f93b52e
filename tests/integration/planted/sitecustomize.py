"""Python runs this at its start where PYTHONPATH names the folder: every process of a server.

DSPARK_PLANTED_ROWS=N: of every N windows that a server verifies greedily, one yields a wrong token.
"""

import os

if os.environ.get("DSPARK_PLANTED_ROWS"):
    from sglang_dspark import plugin

    _install = plugin._install

    def _planted() -> None:
        _install()
        from sglang_dspark.serving.cpu import accept

        rows, seen, right = int(os.environ["DSPARK_PLANTED_ROWS"]), 0, accept.accept_greedy

        def wrong(window, lens, starts, logits):  # type: ignore[no-untyped-def]
            nonlocal seen
            accepted, bonus = right(window, lens, starts, logits)
            seen += len(bonus)
            if seen >= rows:
                seen -= rows
                bonus = bonus.clone()
                bonus[0] = (bonus[0] + 1) % logits.shape[1]
            return accepted, bonus

        accept.accept_greedy = wrong

    plugin._install = _planted
