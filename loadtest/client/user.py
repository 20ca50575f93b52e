"""A locust user that reads streamed answers token by token.

Every request has its own connection (`Connection: close`): the server may have closed a kept one in
a pause of the schedule, and a POST cannot be sent again. Locust's own table shows whole requests;
the exact times are in the records.
"""

from __future__ import annotations

from typing import ClassVar

from gevent.socket import timeout as socket_timeout
from locust import FastHttpUser, constant, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.exception import StopUser

from sglang_dspark.loadtest.client.bodies import PATHS
from sglang_dspark.loadtest.client.live import LiveCell, Pending
from sglang_dspark.loadtest.client.records import INTENDED, Outcome
from sglang_dspark.loadtest.client.stream import (
    AnswerReader,
    MalformedEventError,
    ReportedError,
    refusal,
)

_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",  # a compressed stream would arrive in larger pieces
    "Connection": "close",
}
_TIMEOUTS = (TimeoutError, socket_timeout)


class StreamingUser(FastHttpUser):
    """Sends one request after another from the cell that the process runs."""

    cell: ClassVar[LiveCell]  # set before users are created
    wait_time = constant(0)

    @task
    def work(self) -> None:
        """Send all requests of this user, then stop the user."""
        for pending in self.cell.requests():
            self._send(pending)
        raise StopUser

    def _send(self, pending: Pending) -> None:
        plan = self.cell.plan
        with self.client.post(
            PATHS[plan.api],
            data=plan.body(pending.arrival),  # type: ignore[arg-type]  # bytes go as they are
            headers=_HEADERS,
            name=plan.api,
            stream=True,
            catch_response=True,
        ) as response:
            outcome, error = self._outcome(response, pending)
            record = self.cell.keep(pending, outcome, error)
            begin = record.due
            response.request_meta["response_time"] = 1e3 * (self.cell.now() - begin)
            response.request_meta["response_length"] = record.total_tokens
            if record.ok or outcome in INTENDED:
                response.success()
            else:
                response.failure(f"{outcome}: {error}")

    def _outcome(self, response: ResponseContextManager, pending: Pending) -> tuple[Outcome, str]:
        """Read the answer to its end; return its outcome and, unless "ok", the reason."""
        failure = getattr(response, "error", None)
        pending.status = response.status_code
        if pending.status == 0:
            return ("timeout" if isinstance(failure, _TIMEOUTS) else "connection"), _said(failure)
        try:
            if pending.status != 200:
                return "http", refusal(response.text or "")
            return self._read(response, pending)
        except _TIMEOUTS:
            return "timeout", f"nothing for {self.network_timeout:g} s"
        except FAILURE_EXCEPTIONS as error:
            return "cut", _said(error)
        except ReportedError as error:
            return ("aborted", "") if pending.aborted else ("error", str(error))
        except MalformedEventError as error:
            return "malformed", str(error)

    def _read(self, response: ResponseContextManager, pending: Pending) -> tuple[Outcome, str]:
        reader, sent = AnswerReader(self.cell.plan.api, pending.answer), pending.sent or 0.0
        while line := response.stream.readline(b"\n"):
            if reader.feed(bytes(line), self.cell.now() - sent):
                return _verdict(pending)
            if self._breaks_off(response, pending):
                return "left", ""
        return "cut", "the stream ended without [DONE]"

    def _breaks_off(self, response: ResponseContextManager, pending: Pending) -> bool:
        """End the request early if its plan says so; return whether the connection is closed."""
        prompt = self.cell.plan.prompts[pending.arrival.prompt]
        if not prompt.ends or pending.aborted or pending.answer.tokens < prompt.ends_after:
            return False
        if prompt.ends == "leave":
            response.stream.release()  # closes the connection, as no other request may use it
            return True
        pending.aborted = True
        self.client.post("/abort_request", json={"rid": prompt.extra["rid"]}, name="abort")
        return False


def _verdict(pending: Pending) -> tuple[Outcome, str]:
    outcome, reason = pending.answer.close()
    # Other servers end the stream of an aborted request without a finish reason.
    if pending.aborted and pending.answer.finish_reason in ("abort", ""):
        return "aborted", ""
    return outcome, reason


def _said(error: object) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
