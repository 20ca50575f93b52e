"""Python runs this at its start where PYTHONPATH names the folder: every process of a server.

DSPARK_PLANTED_ROWS=N: of every N windows that a server verifies greedily, one yields a wrong token.
DSPARK_PLANTED_EXECUTOR=1: what drafts, verifies, accepts and commits in SGLang's step raises.
DSPARK_PLANTED_COSTS=1: on a clock that passes of the models alone move, drafts are cheap.
"""

import os

if os.environ.get("DSPARK_PLANTED_ROWS"):
    from sglang_dspark import plugin

    _install = plugin._install

    def _planted() -> None:
        _install()
        from sglang_dspark.backends.cpu import accept

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

if os.environ.get("DSPARK_PLANTED_COSTS"):
    from sglang_dspark import plugin

    _installed = plugin._install

    def _costs() -> None:
        _installed()
        from sglang_dspark.backends.cpu import attach
        from sglang_dspark.backends.cpu.attach import Passes
        from sglang_dspark.backends.cpu.device import HostDevice
        from sglang_dspark.step import verify

        now, run, draft, drafting = 0.0, verify.verify, HostDevice.draft, 2e-3

        def verifying(rows):  # type: ignore[no-untyped-def]
            return 2e-2 + 5e-4 * rows

        def verified(device, asked, grammar):  # type: ignore[no-untyped-def]
            nonlocal now
            done = run(device, asked, grammar)
            now += verifying(len(done.outputs.next_token_logits))
            return done

        def proposed(*asked):  # type: ignore[no-untyped-def]
            nonlocal now
            now += drafting
            return draft(*asked)

        verify.verify, HostDevice.draft = verified, proposed
        attach._seconds = lambda: lambda: now
        Passes.verify_seconds = lambda self, drafts, context: verifying(len(drafts) + sum(drafts))
        Passes.draft_seconds = lambda self, requests, depth, context: drafting

    plugin._install = _costs

if os.environ.get("DSPARK_PLANTED_EXECUTOR"):
    from sglang_dspark import plugin

    _put_in = plugin._install

    def _broken() -> None:
        _put_in()
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockProposer
        from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

        def raises(*_, **__):  # type: ignore[no-untyped-def]
            raise RuntimeError("SGLang's own step was called")

        executor = "run_compact run_non_compact _run_ragged _forward_prepared_verify"
        executor += " accept_and_finalize commit_hidden"
        for owner, names in (
            (DraftBlockProposer, "propose _run_forward"),
            (TargetVerifyExecutor, executor),
        ):
            for name in names.split():
                setattr(owner, name, raises)

    plugin._install = _broken
