"""Answer prompts on a CPU in several processes of one compute thread each.

The threads of one process wait for each other after each of the hundreds of products in a step.
With other work on the machine one thread is always late: two threads made 20 answers a minute, two
processes 140. The processes are forks, so they share the target's weights.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from safetensors.torch import load, save

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.prompts import Prompt
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import Response

_TENSORS = ("tokens", "features", "hidden", "log_partition")
# Starts a generator of `rows` rows in the process that calls it.
Start = Callable[[int], ResponseGenerator]


def processes_for(device: torch.device, threads: int) -> int:
    """Return the number of processes for `threads` compute threads; 1: no extra process.

    One process drives a GPU, and only Linux forks safely after torch was imported.
    """
    return threads if device.type == "cpu" and sys.platform == "linux" else 1


def answer_in_processes(
    start: Start,
    prompts: Sequence[Prompt],
    more: Callable[[], bool],
    rows: int,
    processes: int,
    tick: Callable[[int], None],
) -> Iterator[Response]:
    """Yield the answers to `prompts` in the order in which they end.

    start: makes a process's generator. more: whether another prompt may begin. rows: requests in
    flight, of all processes together. tick(n): called with the tokens made since its last call.
    Raises DSparkError if a process ends early, after the answers until then were yielded.
    """
    context = multiprocessing.get_context("fork")
    following = context.Value("q", 0)
    running = []
    readers: list[Connection] = []
    share = -(-rows // processes)
    try:
        for _ in range(processes):
            reader, writer = context.Pipe(duplex=False)
            arguments = (start, prompts, more, share, following, writer)
            running.append(context.Process(target=_answer, args=arguments, daemon=True))
            running[-1].start()
            writer.close()  # so that the reader sees the end of the process
            readers.append(reader)
        yield from _received(readers, tick)
    finally:
        for process in running:
            process.terminate()
            process.join()


def _received(readers: list[Connection], tick: Callable[[int], None]) -> Iterator[Response]:
    left = list(readers)
    while left:
        for reader in wait(left):
            assert isinstance(reader, Connection)
            try:
                made, packed = reader.recv()
            except EOFError:
                raise DSparkError(
                    "a process of `dspark train data` ended early (its error is above, or the "
                    "system stopped it for lack of memory); start again to go on, with fewer "
                    "data.threads or data.rows"
                ) from None
            tick(made)
            if packed is None:
                left.remove(reader)
            else:
                yield _unpacked(*packed)


def _answer(
    start: Start,
    prompts: Sequence[Prompt],
    more: Callable[[], bool],
    rows: int,
    following: Any,
    writer: Connection,
) -> None:
    """Answer prompts in one process until all prompts are taken."""
    torch.set_num_threads(1)
    made = 0

    def tick(n: int) -> None:
        nonlocal made
        made += n

    try:
        for response in start(rows).run(_taken(prompts, more, following), tick):
            writer.send((made, _packed(response)))
            made = 0
        writer.send((made, None))
    except (KeyboardInterrupt, BrokenPipeError):  # the first process reports it
        pass


def _taken(prompts: Sequence[Prompt], more: Callable[[], bool], following: Any) -> Iterator[Prompt]:
    """Yield prompts that no process has taken, until all are taken or `more` is false."""
    while more():
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(prompts):
            return
        yield prompts[number]


def _packed(response: Response) -> tuple[dict[str, Any], bytes]:
    """Split a response into plain fields and its tensors as bytes.

    Torch would send each tensor through a separate file.
    """
    values = {each.name: getattr(response, each.name) for each in fields(response)}
    return values, save({name: values.pop(name).contiguous() for name in _TENSORS})


def _unpacked(values: dict[str, Any], tensors: bytes) -> Response:
    return Response(**values | load(tensors))
