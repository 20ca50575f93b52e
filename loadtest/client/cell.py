"""One cell of a sweep, ready to be sent: rendered prompts, schedule, sampling; a JSON file.

The load generator reads this file. The file and the records suffice to recompute a cell's figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import MOST_RECORDED, load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import PATHS, Api, Prompt, Sampling, request_body
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule

MOST_USERS = 2000  # requests of an open loop in flight; a further one would be late


@dataclass(frozen=True)
class CellPrompt:
    """One prompt. content: text or token ids for completions and `/generate`, messages for chat;
    extra: fields of its request, added to the cell's; ends: how the client ends the request early,
    after `ends_after` tokens, "" for never. An aborted request must have a `rid` in `extra`."""

    id: str
    domain: str
    content: Prompt
    extra: Mapping[str, Any] = field(default_factory=dict)
    ends: Literal["", "abort", "leave"] = ""
    ends_after: int = 1


@dataclass(frozen=True)
class CellPlan:
    """Requests of one cell. silence_s: longest wait for the next byte; limit_s: end of the cell;
    model: as in `request_body`."""

    api: Api
    prompts: tuple[CellPrompt, ...]
    schedule: Schedule
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    silence_s: float = 120.0
    limit_s: float = 1800.0
    model: str = ""

    def __post_init__(self) -> None:
        if self.api not in PATHS:
            raise DSparkError(f"no interface {self.api!r}; choose one of {', '.join(PATHS)}")
        if not self.schedule.arrivals:
            raise DSparkError("the cell has no request to send")
        places = range(len(self.prompts))
        if not all(arrival.prompt in places for arrival in self.schedule.arrivals):
            raise DSparkError("the schedule names prompts that the cell does not have")
        if not all(isinstance(prompt.content, str | Sequence) for prompt in self.prompts):
            raise DSparkError("a prompt of the cell is neither text nor a list")
        extras = (self.extra, *(prompt.extra for prompt in self.prompts))
        if not all(isinstance(extra, Mapping) for extra in extras):
            raise DSparkError("extra fields of the cell or of a prompt are no mapping")
        if self.silence_s <= 0 or self.limit_s <= 0:
            raise DSparkError("silence_s and limit_s must be above 0")

    @property
    def users(self) -> int:
        """Count locust users: the closed loop's, else one per request, at most `MOST_USERS`.

        A user sends its next request when its last one is done, so that no request has to wait.
        """
        return self.schedule.users or min(len(self.schedule.arrivals), MOST_USERS)

    @property
    def repeats(self) -> int:
        """Count the requests whose whole prompt the cell has sent before."""
        used = {arrival.prompt for arrival in self.schedule.arrivals}
        contents = {json.dumps(self.prompts[prompt].content) for prompt in used}
        return len(self.schedule.arrivals) - len(contents)

    def body(self, arrival: Arrival) -> bytes:
        """Build the JSON body of one request."""
        sampling = Sampling(
            arrival.max_new_tokens, self.temperature, self.ignore_eos, dict(self.extra)
        )
        prompt = self.prompts[arrival.prompt]
        body = request_body(self.api, prompt.content, sampling, self.model)
        return json.dumps({**body, **prompt.extra}).encode()

    def save(self, path: Path) -> None:
        """Write the plan atomically. Raises DSparkError if `path` cannot be written."""
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(self._row()) + "\n", encoding="utf-8")
        except OSError as error:
            raise DSparkError(f"cannot write the cell to {path}: {error.strerror}") from error

    def _row(self) -> dict[str, Any]:
        """Return the fields without copying prompts, which may hold millions of token ids."""
        prompts = [vars(prompt) for prompt in self.prompts]
        return {**vars(self), "prompts": prompts, "schedule": asdict(self.schedule)}

    @classmethod
    def load(cls, path: Path) -> CellPlan:
        """Read a plan that `save` wrote. Raises DSparkError for any other file."""
        with reading(path, "cell plan", "sweep again"):
            row = load_json(path, finite=False, most=MOST_RECORDED)
            arrivals = tuple(Arrival(**each) for each in row["schedule"]["arrivals"])
            row["schedule"] = Schedule(arrivals, row["schedule"]["users"])
            row["prompts"] = tuple(CellPrompt(**each) for each in row["prompts"])
            return cls(**row)
