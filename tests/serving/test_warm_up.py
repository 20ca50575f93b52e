"""The server's own warm-up: its requests, what ends it, and that nothing is learned from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fastapi import HTTPException

pytest.importorskip("sglang")

from sglang_dspark.serving import upstream, warm_up
from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.step import plan as planning
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine_protocol import StepRequests, VerifyAll
from sglang_dspark.step.state import StepState
from tests.step.engine_scenario import Scenario

OWN, USERS = SimpleNamespace(rid="dspark-warm-up-0-1"), SimpleNamespace(rid="a")
ROWS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 8, 16]),
     (48, [1, 2, 3, 4, 8, 16, 32, 48])],
)  # fmt: skip
def test_batches_have_every_size_that_kernels_tell_apart(most: int, sizes: list[int]) -> None:
    assert warm_up.batch_sizes(most) == sizes


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("most", "vocabulary"), [(1, 49152), (48, 49152), (1024, 151936)])
def test_requests_differ_and_have_all_kinds_of_sampling(
    monkeypatch: pytest.MonkeyPatch, most: int, vocabulary: int, installed: bool
) -> None:
    """Without FlashInfer SGLang's own verify step cannot cut."""
    monkeypatch.setattr(warm_up, "find_spec", lambda name: object() if installed else None)
    *first, again, largest = list(warm_up.bodies(most, vocabulary))
    everything = [*first, again, largest]
    ids = [rid for body in everything for rid in body["rid"]]
    assert len(set(ids)) == len(ids)
    assert warm_up.is_made_up([SimpleNamespace(rid=rid) for rid in ids])
    for body in everything:
        prompts = body["input_ids"]
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
        assert {len(prompt) for prompt in prompts} == {warm_up.PROMPT_TOKENS}
        assert 0 <= min(map(min, prompts)) <= max(map(max, prompts)) < vocabulary
        assert len(body["sampling_params"]) == len(prompts) == len(body["rid"])
    assert [len(body["rid"]) for body in first] == warm_up.batch_sizes(most)
    assert (again["input_ids"], largest["input_ids"]) == (
        first[0]["input_ids"], first[-1]["input_ids"],
    )  # fmt: skip
    kinds = {each["temperature"]: "top_k" in each for b in first for each in b["sampling_params"]}
    everywhere = {0.0: False, 1.0: False} | ({0.6: True} if installed else {})
    assert kinds == (everywhere if most > 1 else {0.0: False})


def test_prompts_fit_a_small_vocabulary() -> None:
    assert all(max(body["input_ids"][0]) < 64 for body in warm_up.bodies(4, 64))
    assert all(max(body["input_ids"][0]) < 64 for body in warm_up.staggered(1, 64))


@pytest.mark.parametrize("mode", ["auto", "static"])
def test_without_flashinfer_sglangs_own_step_gets_one_kind_a_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """It renormalises by top-k where a greedy request, of top-k 1, is beside a sampled one."""
    (tmp_path / "dspark.yaml").write_text(f"schedule: {{mode: {mode}}}\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "dspark.yaml"))
    monkeypatch.setattr(warm_up, "find_spec", lambda name: None)
    kinds = [
        {each["temperature"] for each in body["sampling_params"]} for body in warm_up.bodies(4, 512)
    ]
    assert set().union(*kinds) == {0.0, 1.0}
    assert (max(map(len, kinds)) == 1) == (mode == "static")


@pytest.mark.parametrize("ranks", [1, 8])
def test_staggered_requests_are_no_others_and_of_odd_lengths(ranks: int) -> None:
    """A list of cache slots that begins at an odd place has another alignment for Triton."""
    batches = list(warm_up.staggered(ranks, 151936))
    prompts = [prompt for body in batches for prompt in body["input_ids"]]
    firsts = {prompt[0] for prompt in prompts}
    batched = [p for body in warm_up.bodies(512, 151936) for p in body["input_ids"]]
    assert len(firsts) == len(prompts) == 5 * ranks
    assert firsts.isdisjoint(prompt[0] for prompt in batched)  # no prefix is cached
    lengths = [{len(prompt) for prompt in body["input_ids"]} for body in batches]
    assert lengths == [{17}, {33}, {1}, {18}, {21}]
    ids = [rid for body in batches for rid in body["rid"]]
    assert len(set(ids)) == len(ids) == len(prompts)
    assert warm_up.is_made_up([SimpleNamespace(rid=rid) for rid in ids])
    for body in batches:
        assert body["stream"]  # outputs before the last one
        longest = 2 * warm_up.ANSWER_TOKENS
        assert {each["max_new_tokens"] for each in body["sampling_params"]} == {longest}
        assert len(body["sampling_params"]) == ranks


def test_each_staggered_request_starts_with_the_first_output_of_the_one_before() -> None:
    events: list[str] = []

    class Slow(Manager):
        async def generate_request(self, asked: Any, request: None) -> Any:
            number = asked.rid[0].split("-")[-2]
            events.append(f"{number} asked")
            for part in ("first", "last"):
                for _ in range(5):
                    await asyncio.sleep(0)
                events.append(f"{number} {part}")
                yield {"meta_info": {"finish_reason": None}}

    asyncio.run(warm_up._answer_staggered(Slow(), 1, 512))
    for number in range(4):
        first, last, asked = (
            events.index(name)
            for name in (f"{number} first", f"{number} last", f"{number + 1} asked")
        )
        assert first < asked < last


def test_only_batches_of_its_own_are_made_up() -> None:
    assert warm_up.is_made_up([OWN, OWN])
    assert not warm_up.is_made_up([OWN, USERS])
    assert not warm_up.is_made_up([USERS])


class Manager:
    """Answers requests as `TokenizerManager` does, or refuses them with an error."""

    def __init__(self, refuses: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self.refuses = refuses
        self.model_config = SimpleNamespace(vocab_size=512)

    def sizes(self) -> list[int]:
        """Requests of each batch."""
        return [len(each.rid) for each in self.asked]

    async def generate_request(self, asked: Any, request: None) -> Any:
        self.asked.append(asked)
        if self.refuses is not None:
            raise self.refuses
        yield {}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """The server's settings as SGLang publishes them."""
    found = {
        "get_serving": SimpleNamespace(skip_server_warmup=False),
        "get_parallel": SimpleNamespace(num_dp_ranks=2),
        "get_schedule": SimpleNamespace(max_running_requests=4, max_queued_requests=None),
    }
    for name, value in found.items():
        path, there = upstream.PLACES[name]
        monkeypatch.setattr(f"{path}.{there}", lambda value=value: value)
    return found


@pytest.mark.usefixtures("settings")
def test_every_batch_is_answered_on_each_replica(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    manager = Manager()
    asyncio.run(warm_up.answer_made_up("null", manager))
    assert manager.sizes() == [1, 2, 3, 4, 8, 1, 8, *[2] * 5]  # two replicas
    assert [len(each.input_ids[0]) for each in manager.asked[7:]] == [17, 33, 1, 18, 21]
    assert all(max(map(max, each.input_ids)) < 512 for each in manager.asked)
    assert "batches of 1 to 4 made-up requests" in caplog.text


def test_no_warm_up_where_it_is_skipped_or_a_server_is_one_half(
    settings: dict[str, SimpleNamespace],
) -> None:
    manager = Manager()
    asyncio.run(warm_up.answer_made_up("prefill", manager))
    settings["get_serving"].skip_server_warmup = True
    asyncio.run(warm_up.answer_made_up("null", manager))
    assert manager.asked == []


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("length", [17, 1, 21])
@pytest.mark.parametrize("aborted", [True, False])
def test_a_refused_staggered_request_ends_the_warm_up(
    caplog: pytest.LogCaptureFixture, length: int, aborted: bool
) -> None:
    """The next one waits for its first output, which never comes; none goes on afterwards.

    Upstream reports an abort of a streamed request as its output.
    """
    going = []

    class Picky(Manager):
        async def generate_request(self, asked: Any, request: None) -> Any:
            if len(asked.input_ids[0]) == length:
                if not aborted:
                    raise ValueError("the queue is full")
                reason = {"type": "abort", "message": "the queue is full"}
                yield {"meta_info": {"finish_reason": reason}}
                return
            yield {}
            if len(asked.rid[0].split("staggered")) > 1:
                going.append(asked.rid)
                await asyncio.sleep(60)

    async def start() -> int:
        await asyncio.wait_for(warm_up.answer_made_up("null", Picky()), timeout=20)
        return len(asyncio.all_tasks())

    assert asyncio.run(start()) == 1  # its own
    assert going
    assert "a made-up request failed (the queue is full)" in caplog.text


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "error", [ValueError("longer than the context"), HTTPException(503, "the queue is full")]
)
def test_a_refused_request_ends_the_warm_up_and_not_the_start(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    manager = Manager(error)
    asyncio.run(warm_up.answer_made_up("null", manager))
    assert len(manager.asked) == 1
    assert "compiled while serving" in caplog.text
    assert str(error) in caplog.text


def test_a_batch_fits_into_the_queue(settings: dict[str, SimpleNamespace]) -> None:
    """Upstream refuses what does not fit, with status 503."""
    settings["get_schedule"].max_queued_requests = 2
    settings["get_parallel"].num_dp_ranks = 1
    manager = Manager()
    asyncio.run(warm_up.answer_made_up("null", manager))
    assert manager.sizes() == [1, 2, 1, 2, *[1] * 5]


def state(world: Scenario, end: Any) -> StepState:
    pool = SimpleNamespace(req_generation=world.generation)
    worker = SimpleNamespace(gamma=3, model_runner=SimpleNamespace(req_to_token_pool=pool))
    return StepState(worker, world.engine, mock.Mock(), end_warm_up=end)


def test_the_first_users_request_ends_the_warm_up_once() -> None:
    end = mock.Mock()
    of = state(Scenario(), end)
    of.prefills(SimpleNamespace(reqs=[OWN]))
    end.assert_not_called()
    of.prefills(SimpleNamespace(reqs=[OWN, USERS]))
    of.prefills(SimpleNamespace(reqs=[USERS]))
    end.assert_called_once_with()


def test_nothing_is_learned_from_made_up_requests() -> None:
    """The same steps of a user's change what is known."""
    known = []
    for end in (mock.Mock(), None):
        world = Scenario()
        of = state(world, end)
        with mock.patch.object(world.calibration, "observe") as observed:
            for _ in range(8):
                batch = SimpleNamespace(
                    req_pool_indices_cpu=ROWS, seq_lens_cpu=torch.tensor([10, 10]),
                    reqs=[SimpleNamespace(custom_logit_processor=None)] * 2,
                )  # fmt: skip
                step = planning.take_plan(of, batch)
                logits = torch.full((2, step.plan.budget.depth), 2.0)
                drafted = logits if step.plan.speculates else None
                lengths = world.engine.admit(step, drafted)
                result: Any = SimpleNamespace(
                    num_correct_drafts_per_req_cpu=np.minimum(lengths, 1).tolist(),
                    cap_lens=torch.tensor(lengths + 1),
                )
                with mock.patch.object(world.engine, "processed") as handed_out:
                    planning.learn(of, batch, planning.tag(result, step))
                world.now += 0.02
        known.append((observed.call_count, handed_out.call_count))
    assert known[0] == (0, 0)
    assert known[1][0] > 0
    assert known[1][1] == 1


def test_a_static_server_does_not_judge_its_drafter_by_made_up_requests() -> None:
    fit = mock.Mock(spec=DrafterFit)
    engine = VerifyAll(3, fit)
    generation, lengths = torch.zeros(4), torch.tensor([10, 10])
    own, users = (engine.begin(StepRequests(ROWS, generation, lengths)) for _ in range(2))
    own.made_up = True
    for step in (own, users):
        engine.landed(step, np.array([3, 3]), np.array([0, 0]))
    fit.observe.assert_called_once()
    assert fit.observe.call_args.args[0] is users.rows
