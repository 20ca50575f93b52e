"""For processes that a test interrupts."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """Undo what the test run inherited, as `preexec_fn`: under nohup or as a shell's background
    job it ignores SIGHUP or SIGINT, and so would every child.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
