"""One server over two machines: where one ends, so does the other, with a line and no long wait."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.parallel.machines import two_machines
from tests.parallel.test_nodes import pytestmark as as_there
from tests.parallel.test_nodes import start

pytestmark = as_there

END_S = 30.0  # in which a node follows the other


@pytest.mark.parametrize("ended", [1, 0], ids=["the second", "the first"])
def test_a_node_that_is_killed_ends_the_other(
    pair: tiny_models.TinyPair, by_confidence: Path, tmp_path: Path, ended: int
) -> None:
    with two_machines() as machines:
        nodes = start(machines, pair, by_confidence, tmp_path)
        nodes.answers(4)
        nodes.processes[ended].kill()
        began = time.monotonic()
        nodes.processes[1 - ended].wait(END_S)
        print(f"node {1 - ended} ended {time.monotonic() - began:.1f} s after node {ended}")
        deadline = began + END_S
        while machines[1 - ended].processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert machines[1 - ended].processes() == []
        assert re.search(r"Connection (closed|reset) by peer", nodes.log(1 - ended))


def test_sigterm_ends_both(pair: tiny_models.TinyPair, by_confidence: Path, tmp_path: Path) -> None:
    """Sent to the first node, which notifies the second."""
    with two_machines() as machines:
        nodes = start(machines, pair, by_confidence, tmp_path)
        nodes.processes[0].send_signal(signal.SIGTERM)
        for process in nodes.processes:
            process.wait(END_S)
