"""Generated requests to a live server: answered or refused with a 4xx that says why, never an error
of the server's own; it lives, and others are answered as before, in the same batch too. Some are
sent a second time at once by a client that leaves at any moment.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz.explore import Family
from tests.fuzz.requests import PATHS, Sent, bodies, raw
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

ANSWER_S = 60.0  # beside a busy neighbour; milliseconds are usual
SETTLE_S = 2.0  # until a process that ends has written why
BEFORE = 3  # requests that a finding shows besides its own
EVERY = 10  # cases between two looks at how others fare
LEFT = 4  # cases between two whose second client leaves
PATIENCE_S = (0.003, 0.01, 0.03, 0.1, 0.3)  # of such clients
CANARY = {
    "input_ids": [40, 41, 42, 43],
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 24},
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception)\b")
OWN_FAULT = re.compile(r'"(?:code|status_code)": ?5\d\d|InternalServerError')


class Live:
    """A server that is sent one request after the other."""

    def __init__(self, served: Served):
        self.served, self.sent = served, 0
        self.latest: deque[Sent] = deque(maxlen=BEFORE)
        served.pool.use(served)
        self.api: dict[str, Any] = served.request("GET", "/openapi.json").json()
        self.others = ThreadPoolExecutor(3)
        self.before = self._canary()

    def __call__(self, sent: Sent) -> bool:
        """Return True for an answer, False for a refusal. Raises AssertionError otherwise."""
        self.sent += 1
        beside = self.others.submit(self._canary) if self.sent % EVERY == 0 else None
        if self.sent % LEFT == 0:
            self.others.submit(self._leave, sent, PATIENCE_S[self.sent // LEFT % len(PATIENCE_S)])
        try:
            answered = self._answered(sent)
            if beside is not None:
                assert beside.result() == self.before, "another request is answered otherwise"
        except httpx.HTTPError as error:
            story = self._story()
            self._revive()
            raise AssertionError(f"{type(error).__name__} instead of an answer: {story}") from None
        finally:
            self.latest.append(sent)
        assert self.served.process.alive(), "the server ended"
        return answered

    def _post(self, sent: Sent, patience_s: float) -> httpx.Response:
        headers = {"content-type": sent.content_type.encode()} if sent.content_type else {}
        return self.served.http.request(
            "POST",
            sent.path,
            content=sent.body,
            headers={**headers, "connection": "close"},  # the server drops one that is idle
            timeout=patience_s,
        )

    def _leave(self, sent: Sent, patience_s: float) -> None:
        """Ask, and be gone before the answer."""
        with suppress(httpx.HTTPError):  # the server's end, if it comes, meets the other client too
            self._post(sent, patience_s)

    def _answered(self, sent: Sent) -> bool:
        answer = self._post(sent, ANSWER_S)
        text, status = answer.text, answer.status_code
        assert status < 500, f"status {status} of {sent.path}, {_kind(text)}: {text[:300]}"
        if status != 200:
            assert 400 <= status < 500, f"status {status} of {sent.path}"
            assert len(text.strip()) > 2, f"status {status} of {sent.path} without a word"
            return False
        if not text.startswith("data:"):
            answer.json()
            return True
        fault = OWN_FAULT.search(text)
        assert not fault, f"a stream of {sent.path} with {_kind(text)}: {text[:300]}"
        assert text.rstrip().endswith("data: [DONE]"), f"a stream of {sent.path} without an end"
        return '"error"' not in text

    def _canary(self) -> list[int]:
        answer = self.served.http.post(
            "/generate",
            json=CANARY,
            headers={"connection": "close"},
            timeout=ANSWER_S,
        )
        assert answer.status_code == 200, f"another request gets {answer.status_code}"
        return list(answer.json()["output_ids"])

    def _story(self) -> str:
        """Return the log's last error and the requests before; one of them may have caused it."""
        time.sleep(SETTLE_S)
        said = [line for line in self.served.log.splitlines() if RAISED.match(line)]
        return f"{said[-1] if said else 'nothing raised'}; before: {list(self.latest)}"

    def _revive(self) -> None:
        """Start the server again where it has ended or hangs."""
        try:
            if self.served.process.alive() and self._canary() == self.before:
                return
        except (httpx.HTTPError, AssertionError):
            pass
        self.served.process.stop()
        self.served.process.start().wait_ready(900.0)


def _kind(text: str) -> str:
    """Return a message without the parts that differ between requests."""
    return re.sub(r"[^A-Za-z_ ]+", " ", text)[:120].strip()


def families(live: Live) -> Iterator[Family]:
    """Requests in order or odd, and raw ones, of each interface."""
    for path in PATHS:
        yield Family(f"{path}", "requests", bodies(live.api, path), live, 3.0, shrinks=False)
        yield Family(f"{path}, raw", "requests", raw(path), live, 1.0, shrinks=False)


def _started(name: str, config: str) -> Callable[[Path], Any]:
    @contextmanager
    def start(folder: Path) -> Iterator[Live]:
        place = folder / name
        pool = ServerPool(place)
        try:
            pair = tiny_models.build(place / "pair", noise=0.7)
            (pair.target / "chat_template.jinja").write_text(TEMPLATE)
            settings = place / "dspark.yaml"
            settings.write_text(config)
            flags = ("--max-running-requests", "32", "--dspark-config", str(settings))
            yield Live(pool.start(name, pair.target, *DSPARK_FLAGS, str(pair.drafter), *flags))
        finally:
            pool.stop_all()

    return start


SERVERS = (
    _started("fixed", "schedule: {mode: static}\n"),
    _started("scheduled", "schedule: {mode: auto, profile_seconds: 2}\n"),
)
