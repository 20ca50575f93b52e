"""Define the locust users: `--plan` runs one cell and ends; without it they serve locust's UI.

    locust -f loadtest/client/locustfile.py --host http://127.0.0.1:30000

opens locust's own UI; users then send the evaluation prompts, seeded, until stopped. `--headless`,
`--processes` and `--master/--worker` work as usual. Records are written when the test stops, one
file per process; each worker sends every n-th request of the one schedule.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from sglang_dspark.loadtest.client.bodies import PATHS, Api
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.live import LiveCell
from sglang_dspark.loadtest.client.mixes import cell_prompts, load_mix
from sglang_dspark.loadtest.client.records_file import SUFFIX, write_records
from sglang_dspark.loadtest.client.schedule import ClosedLoop, Lengths, make_schedule
from sglang_dspark.loadtest.client.user import StreamingUser

__all__ = ["StreamingUser"]

_DONE = "dspark_share_done"
_MANY = 100_000  # requests of a test that the UI ends


def _arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("sglang-dspark")
    group.add_argument("--plan", default="", help="cell to run, as the sweep writes it")
    group.add_argument("--records", default="", help="folder for the exact records of each request")
    group.add_argument("--api", choices=list(PATHS), default="chat", help="without --plan")
    group.add_argument("--mix", default="math,code,chat", help="prompts, without --plan")
    group.add_argument("--answer-tokens", type=int, default=128, help="without --plan")
    group.add_argument("--seed", type=int, default=0, help="of prompts and order, without --plan")


def _listen(environment: Environment, **_: Any) -> None:
    """End the test, on the master, when the last worker has reported its share as done."""
    runner = environment.runner
    if not isinstance(runner, MasterRunner):
        return
    done: set[str] = set()

    def share_done(environment: Environment, msg: Any, **_: Any) -> None:
        done.add(msg.node_id)
        if len(done) == runner.worker_count:
            gevent.spawn(runner.quit)

    runner.register_message(_DONE, share_done)


def _start(environment: Environment, **_: Any) -> None:
    runner, options = environment.runner, environment.parsed_options
    if isinstance(runner, MasterRunner) or runner is None or options is None:
        return
    plan = CellPlan.load(Path(options.plan)) if options.plan else _endless(options)

    def finish() -> None:
        if isinstance(runner, WorkerRunner):
            runner.send_message(_DONE)
        elif options.plan:
            gevent.spawn(runner.quit)  # not from within a user: it would end the user mid-request

    worker = runner.worker_index if isinstance(runner, WorkerRunner) else 0
    StreamingUser.network_timeout = plan.silence_s
    StreamingUser.connection_timeout = plan.silence_s
    StreamingUser.cell = LiveCell(plan, worker, _workers(environment), finish)


def _begin(**_: Any) -> None:
    cell = getattr(StreamingUser, "cell", None)
    if cell is not None:  # the master has none
        cell.begin()


def _write(environment: Environment, **_: Any) -> None:
    cell, options = getattr(StreamingUser, "cell", None), environment.parsed_options
    if cell is None or options is None or not options.records:
        return
    header, records = cell.result()
    if not options.plan:  # the supply is endless: unsent requests are no failures
        records = [record for record in records if record.outcome != "unsent"]
    folder = Path(options.records)
    write_records(folder / f"records-{header.worker}{SUFFIX}", header, records)


def _workers(environment: Environment) -> int:
    """Count load-generating processes. A worker reads `--expect-workers` or `--processes`."""
    options = environment.parsed_options
    if not isinstance(environment.runner, WorkerRunner) or options is None:
        return 1
    count = options.processes if (options.processes or 0) > 0 else options.expect_workers
    return os.cpu_count() or 1 if options.processes == -1 else max(1, count)


def _endless(options: Any) -> CellPlan:
    mix = load_mix(options.mix)
    lengths = Lengths(low=options.answer_tokens, high=options.answer_tokens)
    schedule = make_schedule(ClosedLoop(users=1, requests=_MANY), mix.groups, lengths, options.seed)
    api = cast(Api, options.api)
    return CellPlan(api, cell_prompts(mix, api), schedule, ignore_eos=False)


events.init_command_line_parser.add_listener(_arguments)
events.init.add_listener(_listen)
events.test_start.add_listener(_start)
events.spawning_complete.add_listener(_begin)
events.test_stop.add_listener(_write)
