"""Read SGLang's batch for a plan, that is context lengths and requests that are greedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.step.engine_protocol import GREEDY, SAMPLED, StepRequests
from sglang_dspark.step.plan import admit, plan_ahead, regimes_of
from sglang_dspark.step.ranks import Ranks
from tests.step.engine_scenario import GAMMA, Scenario

PROMPTS, ANSWERS = (7, 20, 3), (4, 0, 9)  # tokens of each request
ALL = 1 << 30  # top_k of a request whose distribution is not cut


def batch(lens: Tensor | None, top_k: tuple[int, ...] = (1, 1, 1)) -> Any:
    reqs = [
        SimpleNamespace(
            origin_input_ids=[0] * prompt,
            output_ids=[0] * answer,
            sampling_params=SimpleNamespace(custom_params=None, top_k=each),
            custom_logit_processor=None,
            return_logprob=False,
        )
        for prompt, answer, each in zip(PROMPTS, ANSWERS, top_k, strict=True)
    ]
    return SimpleNamespace(
        reqs=reqs,
        seq_lens_cpu=lens,
        req_pool_indices_cpu=torch.tensor([5, 2, 7]),
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        is_extend_in_batch=False,
        spec_info=object(),
        batch_size=lambda: len(reqs),
        sampling_info=SimpleNamespace(is_all_greedy=all(each == 1 for each in top_k)),
    )


@pytest.mark.parametrize(
    ("lens", "context"), [(torch.tensor([10, 1, 30]), 41), (None, 7 + 4 + 20 + 3 + 9)]
)
def test_a_plan_counts_the_tokens_of_all_requests(lens: Tensor | None, context: int) -> None:
    """As the scheduler has them; without its count prompts and answers."""
    world = Scenario()
    pool = SimpleNamespace(req_generation=world.generation)
    state: Any = SimpleNamespace(
        planned=None,
        engine=world.engine,
        ranks=Ranks(),
        end_warm_up=None,
        worker=SimpleNamespace(gamma=GAMMA, model_runner=SimpleNamespace(req_to_token_pool=pool)),
    )
    plan_ahead(state, batch(lens))
    assert state.planned.plan.context == context
    assert state.planned.rows.tolist() == [5, 2, 7]


@pytest.mark.parametrize("top_k", [(1, ALL, 5), (ALL, 2, 1), (ALL, ALL, ALL)])
def test_each_request_is_greedy_by_its_own_top_k(top_k: tuple[int, ...]) -> None:
    found = regimes_of(batch(None, top_k))
    assert found is not None
    assert found.tolist() == [GREEDY if each == 1 else SAMPLED for each in top_k]
    assert regimes_of(batch(None)) is None


def test_a_device_admits_by_the_regimes_of_the_requests() -> None:
    world, seen = Scenario(), []
    rows, lens = torch.tensor([5, 2, 7]), torch.tensor([10, 1, 30])
    step = world.engine.begin(StepRequests(rows, world.generation, lens))

    def admits(engine: Any, step: Any, logits: Any) -> Tensor:
        seen.append(step.regimes.tolist())
        return torch.arange(4, dtype=torch.int32)

    state: Any = SimpleNamespace(
        ranks=Ranks(), engine=world.engine, device=SimpleNamespace(admit=admits)
    )
    assert admit(state, step, batch(None, (1, ALL, 5)), None).tolist() == [0, 1, 2, 3]
    assert seen == [[GREEDY, SAMPLED, SAMPLED]]
