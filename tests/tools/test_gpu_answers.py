"""tools/gpu/run: a server of wrong tokens, or of another distribution, fails its stage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_dspark.loadtest.bench.paired import Plan
from tools.gpu.kit.sampled import KINDS, MIXED, deviation, sampled
from tools.gpu.kit.servers import right

pytestmark = pytest.mark.xdist_group("gpu-kit")


def test_a_share_that_speculation_changes_is_seen() -> None:
    assert deviation([2000, 4096], [2000, 4096]) == 0
    assert deviation([4096, 4096], [4096, 4096]) == 0
    assert deviation([2000, 4096], [2300, 4096]) > 6
    assert deviation([2000, 4096], [1700, 4096]) < -6


class Answering:
    """A server on a thread. A token follows the table in `share` of all draws, in all of greedy
    ones; `spoilt` changes what it answers to greedy requests."""

    def __init__(self, share: float, spoilt: Callable[[list[int]], list[int]] = list) -> None:
        draws, least = np.random.default_rng(int(1000 * share)), share

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                found = []
                for prompt, asked in zip(body["input_ids"], body["sampling_params"], strict=True):
                    greedy, ids = asked["temperature"] == 0, [prompt[-1]]
                    while len(ids) <= asked["max_new_tokens"]:
                        follows = greedy or draws.random() < least
                        ids.append(int(FOLLOWS[ids[-1]]) if follows else OTHER)
                    found.append({"output_ids": spoilt(ids[1:]) if greedy else ids[1:]})
                answer = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.spec = SimpleNamespace(url=f"http://127.0.0.1:{self._server.server_port}")

    def resume(self) -> None: ...

    def pause(self) -> None: ...


OTHER = 1  # no token is followed by it
FOLLOWS = np.concatenate([[2, 2], np.roll(np.arange(2, 50), 7)])
PLAN = Plan(tuple((number,) for number in range(2, 14)), (1,), 1, 24)


def judged(plain: Answering, drafting: Answering) -> bool:
    return sampled(plain, drafting, PLAN, FOLLOWS)  # type: ignore[arg-type]


def test_servers_of_one_distribution_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(Answering(0.5), Answering(0.501))
    rows = [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()]
    assert [row["sampled"] for row in rows] == [*KINDS, MIXED]
    assert rows[0]["plain"] == rows[0]["dspark"] == [4096, 4096]


def test_a_distribution_that_speculation_changes_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not judged(Answering(0.5), Answering(0.4))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(KINDS)  # greedy ones are right, all kinds at once are not
    assert re.fullmatch(r"sampled: top-k: -\d+\.\d standard errors from plain decoding", lines[1])


@pytest.mark.parametrize("spoilt", ["plain", "drafting", "both"])
def test_one_wrong_greedy_token_is_said(spoilt: str, capsys: pytest.CaptureFixture[str]) -> None:
    def other(ids: list[int]) -> list[int]:
        return [*ids[:-1], 10**9]  # a token that the table does not know

    servers = [
        Answering(0.5, other if spoilt in (name, "both") else list)
        for name in ("plain", "drafting")
    ]
    assert not judged(*servers)
    counts = [4032 if spoilt in (name, "both") else 4096 for name in ("plain", "drafting")]
    said = f"sampled: greedy: {counts[0]} and {counts[1]} of 4096 tokens are the table's"
    assert said in capsys.readouterr().err.splitlines()


def test_an_answer_that_is_too_short_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert not judged(Answering(0.5), Answering(0.5, lambda ids: ids[:1]))
    rows = [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["failed"] == "answered 64 tokens, not 64 times 64"
    assert "failed" not in rows[1]


def test_missing_tokens_are_wrong() -> None:
    def round_of(*answers: list[int]) -> Any:
        return SimpleNamespace(
            users=1, completions=[SimpleNamespace(ids=tuple(ids)) for ids in answers]
        )

    whole = []
    for (last,) in PLAN.prompts:
        ids = [int(last)]
        while len(ids) <= PLAN.max_new_tokens:
            ids.append(int(FOLLOWS[ids[-1]]))
        whole.append(ids[1:])
    assert right(round_of(*whole), PLAN, FOLLOWS) == {"right": [288, 288]}
    assert right(round_of(whole[0][:-1], *whole[1:]), PLAN, FOLLOWS) == {"right": [287, 288]}
    assert right(round_of(*[[]] * 12), PLAN, FOLLOWS) == {"right": [0, 288]}
    beyond = [*whole[0][:3], -1, 50, 10**9]  # ids that no table has
    assert right(round_of(beyond, *whole[1:]), PLAN, FOLLOWS) == {"right": [267, 288]}
