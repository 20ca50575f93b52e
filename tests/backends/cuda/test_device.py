"""GraphDevice: lengths of the host's planner, tiers of the captured graphs, copies that stay."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt import runtime_context
from sglang.srt.speculative.dspark_components import dspark_verify
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockProposer,
    DraftBlockResult,
    DraftProposal,
)
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_dspark.backends.cuda import device as cuda_device
from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.accept_plain import (
    plain_tokens,
    samples_anchors,
    samples_as_plain,
)
from sglang_dspark.backends.cuda.compact_pass import CompactPass
from sglang_dspark.backends.cuda.device import GraphDevice, to_host
from sglang_dspark.schedule.budget import Budget
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.step.engine import confidence_by
from sglang_dspark.step.engine_protocol import Step
from sglang_dspark.step.rules import Cuts, Rules
from sglang_dspark.step.verify import VerifyInput, VerifyOutput, admitted_drafts, layout_of
from sglang_dspark.verify.acceptance import Acceptance
from tests.rehearsal.on_cpu import PlantedClock
from tests.step.engine_scenario import GAMMA, Scenario
from tests.step.windows import indptr_of

TIERS, SLOTS = [4, 8, 16, 32], 8


def device(*, graphs: bool = True, epilogue: bool = True, head: bool = True) -> GraphDevice:
    """Of a worker whose decode runner captured `TIERS`; head: whether its drafter has one."""
    runner = SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=TIERS, max_bs=SLOTS)
    worker = SimpleNamespace(
        device="cpu",
        draft_model=SimpleNamespace(confidence_head=object() if head else None),
        model_runner=SimpleNamespace(decode_cuda_graph_runner=runner if graphs else None),
        _kv_injector=SimpleNamespace(),
        _verify_executor=SimpleNamespace(verify_epilogue=SimpleNamespace() if epilogue else None),
    )
    return GraphDevice(worker, PlantedClock())


def step_of(rng: np.random.Generator, requests: int, **changed: Any) -> Step:
    """A planned step of random limits, K and calibration."""
    limits = rng.integers(0, GAMMA + 1, requests)
    budget = Budget(int(rng.integers(1, requests * GAMMA + 2)), GAMMA, 1.0, 0.01)
    fields = {"floors": None, "weights": None} | changed
    plan = Plan(
        0, requests, 0, budget, limits, mode=Mode.SPECULATE, settled=True, known=0, gain=1.0,
        **fields,
    )  # fmt: skip
    shape = (requests, GAMMA)
    lines = rng.uniform(0.5, 2.0, shape), rng.normal(0, 1, shape)
    rows = np.arange(requests)
    return Step(plan, rows, rows, calibrated_by=lines)


LISTED, UNCUT, TOP_P, BOTH = Cuts(True, True, most=20), Cuts(), Cuts(top_p=True), Cuts(True, True)
MIN_P = Cuts(min_p=True)


@pytest.mark.parametrize(
    ("cuts", "own_rule", "drafted", "way"),
    [
        (None, False, True, "upstream"),
        (None, False, False, "upstream"),
        (LISTED, True, True, "_by_our_rule"),
        (LISTED, True, False, "_by_our_rule"),
        (UNCUT, False, True, "upstream"),
        (UNCUT, True, True, "_by_our_rule"),
        (UNCUT, False, False, "_plain"),
        (TOP_P, False, True, "upstream"),
        (TOP_P, False, False, "_plain"),
        (
            MIN_P,
            False,
            False,
            "_by_our_rule",
        ),  # neither plain decoding's nor SGLang's reads one row
        (BOTH, True, True, "_by_our_rule"),
        (BOTH, True, False, "_by_our_rule"),
    ],
)
def test_a_step_is_accepted_by_the_fastest_lossless_way(
    cuts: Cuts | None, own_rule: bool, drafted: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_context, "get_exec", lambda: backend("flashinfer"))
    asked = pass_of(Rules(cuts=cuts, own_rule=own_rule), drafted=drafted)
    asked = replace(asked, layout=layout_of(indptr_of([0, 2]), 8))
    chosen, infos = device(), []
    for name in ("_by_our_rule", "_plain"):
        monkeypatch.setattr(chosen, name, lambda *_, _name=name, **__: _name)
    monkeypatch.setattr(chosen, "_windows", lambda *_: ())
    monkeypatch.setattr(chosen, "_finalized", lambda asked, outcome: outcome)
    chosen._executor.accept_and_finalize = lambda **given: (
        infos.append(given["sampling_info"]) or ("upstream")
    )
    assert chosen.accept(asked, VerifyOutput(SimpleNamespace(next_token_logits=None), None)) == way
    for info in infos:  # without the flags of the greedy requests beside them
        assert info.need_top_k_sampling == (cuts is None or cuts.top_k)
        assert info.need_top_p_sampling == (cuts is None or cuts.top_p)
    assert asked.batch.sampling_info.need_top_k_sampling, "the batch's own flags stay"


def backend(name: str) -> Any:
    return SimpleNamespace(kernel=SimpleNamespace(sampling_backend=name))


def pass_of(rules: Rules, *, drafted: bool) -> VerifyInput:
    """Of two requests."""
    info = SimpleNamespace(
        sampling_seed=None,
        sampling_mask_batch_indices=None,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
    )
    return VerifyInput(
        batch=SimpleNamespace(sampling_info=info, seq_lens=torch.tensor([3, 9])),
        draft_input=None,
        window=None,
        proposal=SimpleNamespace(draft_block=SimpleNamespace(draft_tokens=None)),
        layout=None,
        ids=torch.zeros(2, GAMMA + 1, dtype=torch.int64),
        drafted=drafted,
        foldable=False,
        rules=rules,
    )


def test_a_draft_is_sglangs_proposal_for_the_whole_batch() -> None:
    chosen, info = device(), object()
    proposer = create_autospec(DraftBlockProposer, instance=True)
    proposer.propose.return_value = "drafts"
    batch = SimpleNamespace(
        spec_info="of before", seq_lens=torch.tensor([3, 9]), sampling_info=info
    )
    model = object()
    chosen._worker._proposer = proposer
    chosen._worker._draft_context = contextlib.nullcontext
    chosen._worker._observers = SimpleNamespace(segment=lambda kind: contextlib.nullcontext())
    chosen._worker.target_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    assert chosen.draft(batch, "window", GAMMA, None) == "drafts"
    proposer.propose.assert_called_once_with(
        batch=batch,
        draft_input="of before",
        verify_window="window",
        bs=2,
        device="cpu",
        target_model=model,
        sampling_info=info,
    )


def test_our_outcome_is_finalized_by_upstreams_function(monkeypatch: pytest.MonkeyPatch) -> None:
    finalize = create_autospec(dspark_verify.build_accept_outs, return_value="outs")
    monkeypatch.setattr(dspark_verify, "build_accept_outs", finalize)
    chosen, asked = device(), pass_of(Rules(), drafted=True)
    chosen._worker.gamma, chosen._worker.verify_num_draft_tokens = GAMMA, GAMMA + 1
    chosen._executor._tp_sync = "ranks"
    accepted, bonus = torch.tensor([2, 0]), torch.tensor([7, 8])
    assert chosen._finalized(asked, Acceptance(accepted, bonus)) == "outs"
    given = finalize.call_args.kwargs
    assert given["correct_len"] is accepted
    assert given["bonus"] is bonus
    assert (given["cap_trim_lens"].tolist(), given["cap_trim_lens"].dtype) == ([0, 0], torch.int64)
    assert given["prefix_lens"] is asked.batch.seq_lens
    assert given["draft_tokens"] is asked.proposal.draft_block.draft_tokens
    assert (given["gamma"], given["verify_num_draft_tokens"]) == (GAMMA, GAMMA + 1)
    assert given["tp_sync"] == "ranks"
    assert given["sync_site"] is SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE


@pytest.mark.parametrize(
    ("changed", "cuts", "seeds", "plainly"),
    [
        ({}, UNCUT, None, True),
        ({}, Cuts(top_k=True, most=2000), None, True),
        ({}, BOTH, None, False),
        ({}, Cuts(min_p=True), None, False),
        ({}, UNCUT, object(), False),
        ({"sampling_seed": object()}, UNCUT, None, False),
        ({"sampling_mask_batch_indices": object()}, UNCUT, None, False),
        ({"backend": "ascend"}, UNCUT, None, False),
    ],
)
def test_plain_decodings_sampler_draws_where_it_has_our_distribution(
    changed: dict[str, Any], cuts: Cuts, seeds: Any, plainly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"backend": "pytorch", "sampling_seed": None, "sampling_mask_batch_indices": None}
    said |= changed
    monkeypatch.setattr(runtime_context, "get_exec", lambda: backend(said.pop("backend")))
    rules = Rules(seeds=seeds, cuts=cuts)
    assert samples_as_plain(SimpleNamespace(**said), rules) == plainly


class Engine:
    """Knows the calibration of the one step that it is asked about."""

    def calibrate(self, step: Step) -> Any:
        return step.calibrated_by


ENGINE: Any = Engine()


@pytest.mark.parametrize("seed", range(40))
def test_windows_are_those_of_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 9))
    weights = rng.uniform(0.5, 4, requests).astype(np.float32) if seed % 2 else None
    step = step_of(rng, requests, weights=weights)
    if seed % 3 == 0:
        floors = np.minimum(step.plan.limits, seed % 2)
        step = replace(step, plan=replace(step.plan, floors=floors))
    logits = torch.from_numpy(rng.normal(0, 2, (requests, GAMMA)).astype(np.float32))
    logits[0, 0] = float("nan") if seed % 5 == 0 else logits[0, 0]
    indptr = device().admit(ENGINE, step, logits)
    assert step.arriving is not None
    assert torch.equal(step.arriving.nan_to_num(), logits.nan_to_num())
    assert indptr[-1] == requests + admitted_drafts(step.plan)
    assert step.calibrated_by is not None
    confidence = confidence_by(logits.numpy(), *step.calibrated_by)
    host = Scenario().planner.admit(step.plan, confidence)
    assert torch.equal(indptr, indptr_of(host.tolist()))


def test_nothing_drafted_is_nothing_admitted() -> None:
    step = step_of(np.random.default_rng(0), 3)
    assert device().admit(ENGINE, step, None).tolist() == [0, 1, 2, 3]
    assert step.arriving is None


@pytest.mark.parametrize(
    ("requests", "drafts", "tokens"),
    [(1, 0, 4), (1, 3, 4), (2, 3, 8), (8, 8, 16), (8, 24, 32), (8, 25, 33), (9, 0, 9)],
)
def test_a_pass_is_padded_to_the_tier_that_holds_it(
    requests: int, drafts: int, tokens: int
) -> None:
    """Beyond the last tier, or with more requests than a graph has slots, it runs as it is."""
    assert device().pass_tokens(requests, drafts) == tokens
    assert device(graphs=False).pass_tokens(requests, drafts) == requests + drafts
    fits = requests <= SLOTS and requests + drafts <= TIERS[-1]
    assert device().accepts_in_graph(requests, drafts) == fits
    assert not device(epilogue=False).accepts_in_graph(requests, drafts)


def test_what_goes_to_the_host_outlives_the_graphs_tensor() -> None:
    static = torch.arange(6.0)
    copy = to_host(static[:4])
    static.zero_()
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_layout_is_upstreams_of_the_same_windows() -> None:
    found = layout_of(indptr_of([0, 2, 1]), 8)
    lens = torch.tensor([1, 3, 2], dtype=torch.int32)
    theirs = RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=8)
    for field in ("verify_lens", "extend_start_loc", "qo_indptr_device"):
        mine, other = getattr(found, field), getattr(theirs, field)
        assert torch.equal(mine, other)
        assert mine.dtype == other.dtype
    assert found.graph_num_tokens == 8


def test_without_graphs_there_are_no_tiers_and_no_slots() -> None:
    assert (tuple(device(graphs=False).tiers), device(graphs=False).slots) == ((), 0)
    assert (tuple(device().tiers), device().slots) == (tuple(TIERS), SLOTS)


def committed(
    chosen: GraphDevice, *, latent: bool, rules: Rules | None = None, **done: Any
) -> tuple[list[Any], list[Any]]:
    """Rows written by ours and arguments of upstream's commit, of a pass with these results.

    Every pass stores the states of recurrent layers.
    """
    theirs = inspect.signature(TargetVerifyExecutor.commit_hidden)
    states = create_autospec(DSparkWorkerV2._commit_target_mamba_states_after_verify)
    chosen._worker._commit_target_mamba_states_after_verify = partial(states, None)
    written: list[Any] = []
    called: list[Any] = []
    chosen.committer = SimpleNamespace(is_latent=latent, write=written.append)  # type: ignore[assignment]
    chosen._executor.commit_hidden = lambda **given: called.append(theirs.bind(None, **given))
    ids = torch.arange(2 * (GAMMA + 1)) + 50  # cache slots of whole windows
    plan = SimpleNamespace(ids=ids)
    chosen._worker._kv_injector.ids_for = lambda plan, cols: torch.where(
        cols < 0, 0, plan.ids[cols.clamp(min=0)]
    )
    asked = replace(
        pass_of(rules or Rules(), drafted=True),
        layout=layout_of(indptr_of([0, 1]), 4),
        window=SimpleNamespace(kv_loc_plan=plan),
    )
    places = torch.tensor([0, GAMMA + 1, GAMMA + 2, -1])
    rows = SimpleNamespace(places=places, positions=torch.tensor([3, 9, 10, 0]))
    hidden = torch.arange(8.0).view(4, 2)
    lens = torch.ones(2, dtype=torch.int32)
    accepted = SimpleNamespace(commit_lens=lens, new_seq_lens=lens + 9, out_tokens=None)
    chosen.commit(asked, VerifyOutput("outputs", hidden, rows=rows, **done), accepted)
    states.assert_called_once_with(
        None,
        batch=asked.batch,
        seq_lens_pre_verify=asked.batch.seq_lens,
        seq_lens_post_verify=accepted.new_seq_lens,
        commit_lens=lens,
    )
    return written, [each.arguments for each in called]


def test_rows_of_an_eager_pass_are_committed_packed() -> None:
    """A row that fills a tier has slot 0."""
    written, called = committed(device(), latent=False)
    ((hidden, positions, slots),) = written
    assert called == []
    assert hidden.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert positions.tolist() == [3, 9, 10, 0]
    assert slots.tolist() == [50, 50 + GAMMA + 1, 50 + GAMMA + 2, 0]


@pytest.mark.parametrize("commits", [True, False])
def test_a_graph_that_commits_leaves_nothing_to_commit(commits: bool) -> None:
    chosen = device()
    tail = SimpleNamespace(commits=commits)
    chosen._executor.verify_epilogue.__dict__[graph_epilogue._TAIL] = tail
    counted: list[tuple[Any, ...]] = []
    penalties: Any = SimpleNamespace(count=lambda *given: counted.append(given))
    rules = Rules(penalties=penalties)
    assert len(committed(chosen, latent=False, rules=rules, in_graph=True)[0]) == (not commits)
    assert len(counted) == 1, "tokens are counted, also where a graph commits"
    assert len(committed(chosen, latent=False, in_graph=False)[0]) == 1


@pytest.mark.parametrize("folded", [True, False])
def test_a_latent_cache_is_committed_by_upstream_over_whole_windows(folded: bool) -> None:
    """Upstream's epilogue has committed already if its graph accepted."""
    written, called = committed(device(), latent=True, in_graph=True, folded=folded)
    assert written == []
    assert len(called) == (not folded)
    for each in called:
        windows = each["hidden_strided"].view(2, GAMMA + 1, 2)
        assert windows[0, :2].tolist() == [[0, 1], [0, 0]]
        assert windows[1, :3].tolist() == [[2, 3], [4, 5], [0, 0]]
        assert (each["commit_lens"].tolist(), each["bs"], each["run_compact"]) == ([1, 1], 2, True)
        assert each["logits_output"] == "outputs"


@pytest.mark.parametrize(("cuts", "simple"), [(UNCUT, True), (TOP_P, False)])
def test_plain_decodings_sampler_sorts_only_what_a_request_cuts(cuts: Cuts, simple: bool) -> None:
    """The second request is greedy, whose top-k of 1 is no cut; the first rows are read."""
    drawn: list[tuple[Tensor, bool]] = []

    def sample(probs: Tensor, info: Any, at: Tensor, simply: bool) -> tuple[Tensor, None]:
        drawn.append((probs, simply))
        return torch.tensor([2, 2], dtype=torch.int32), None

    logits = torch.tensor([[0.0, 1.0, 2.0], [9.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    info = SimpleNamespace(
        temperatures=torch.tensor([[2.0], [1.0]]),
        top_ks=torch.tensor([1 << 30, 1]),
        is_any_greedy=True,
    )
    batch = SimpleNamespace(sampling_info=info, seq_lens=torch.tensor([3, 9]))
    sampler = SimpleNamespace(_sample_from_probs=sample)
    tokens = plain_tokens(sampler, logits, 2, batch, Rules(cuts=cuts))
    ((probs, simply),) = drawn
    assert simply == simple
    assert torch.equal(probs, torch.softmax(logits[[0, 2]] / info.temperatures, -1))
    assert tokens.tolist() == [2, 0]
    assert plain_tokens(sampler, logits[[0, 2]], 1, batch, Rules(cuts=cuts)).tolist() == [2, 0]
    assert torch.equal(drawn[1][0], probs), "a row a request, as in steps that sample anchors"


@pytest.mark.parametrize(
    ("rules", "drafted", "batch", "anchors"),
    [
        (Rules(cuts=UNCUT), False, {}, True),
        (Rules(cuts=TOP_P), False, {}, True),
        (Rules(cuts=UNCUT), True, {}, False),
        (Rules(), False, {}, False),
        (Rules(cuts=LISTED), False, {}, False),
        (Rules(cuts=MIN_P), False, {}, False),
        (Rules(cuts=UNCUT, penalties=object()), False, {}, False),  # type: ignore[arg-type]
        (Rules(cuts=UNCUT), False, {"has_grammar": True}, False),
        (Rules(cuts=UNCUT), False, {"return_logprob": True}, False),
    ],
)
def test_only_steps_that_sample_as_plain_decoding_read_anchors_alone(
    rules: Rules, drafted: bool, batch: dict[str, bool], anchors: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runtime_context, "get_exec", lambda: backend("flashinfer"))
    asked = pass_of(rules, drafted=drafted)
    asked.batch.__dict__.update({"has_grammar": False, "return_logprob": False, **batch})
    assert samples_anchors(asked) is anchors


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize(
    ("foldable", "replayed", "folded"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_pass_is_folded_where_a_graph_that_accepts_was_replayed(
    foldable: bool, replayed: bool, folded: bool, penalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang adjusts logits itself, unless penalties come first."""
    called: list[dict[str, Any]] = []
    applied: list[str] = []
    outputs = SimpleNamespace(next_token_logits=torch.zeros(2 * (GAMMA + 1), 4))
    rows: Any = object()
    done = CompactPass(replayed, outputs, torch.ones(2, 3), rows)

    def compact_pass(worker: Any, asked: Any, slots: int, sampling_info: Any, **more: Any) -> Any:
        called.append({"asked": asked, "slots": slots, "sampling_info": sampling_info, **more})
        return done

    chosen = device(epilogue=False)
    monkeypatch.setattr(cuda_device, "compact_pass", compact_pass)
    chosen._worker._observers = SimpleNamespace(segment=lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cuda_device, "adjust", lambda *_: applied.append("adjusted"))
    penalties: Any = SimpleNamespace(apply=lambda *_: applied.append("penalised"))
    asked = pass_of(Rules(penalties=penalties if penalised else None), drafted=True)
    asked = replace(asked, foldable=foldable)
    verified = chosen.run(asked)
    (given,) = called
    assert (given["asked"], given["slots"]) == (asked, chosen.slots)
    assert given["sampling_info"] is (None if penalised else asked.batch.sampling_info)
    assert applied == (["penalised", "adjusted"] if penalised else [])
    assert (verified.in_graph, verified.folded) == (replayed, folded)
    assert (verified.outputs, verified.hidden, verified.rows) == (outputs, done.hidden, rows)


def test_upstreams_rule_is_given_the_whole_step() -> None:
    theirs = inspect.signature(TargetVerifyExecutor.accept_and_finalize)
    chosen = device()
    chosen._executor.accept_and_finalize = lambda **given: theirs.bind(None, **given).arguments
    asked = replace(pass_of(Rules(), drafted=True), layout=object(), draft_input=object())
    outputs = SimpleNamespace(next_token_logits=object())
    given = chosen.accept(asked, VerifyOutput(outputs, None, True, True))
    assert {name: value for name, value in given.items() if name != "self"} == {
        "folded_accept": True,
        "bs": 2,
        "verify_ids_2d": asked.ids,
        "target_logits": outputs.next_token_logits,
        "draft_block": asked.proposal.draft_block,
        "sampling_info": asked.batch.sampling_info,
        "draft_input": asked.draft_input,
        "layout": asked.layout,
        "prefix_lens": asked.batch.seq_lens,
        "draft_tokens": asked.proposal.draft_block.draft_tokens,
    }


def test_our_rule_is_given_the_step_its_cuts_and_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    outcome = Acceptance(torch.zeros(2), torch.zeros(2))

    def ours(*step: Any, **options: Any) -> Acceptance:
        given.append((step, options))
        return outcome

    chosen = device()
    monkeypatch.setattr(chosen, "_by_our_rule", ours)
    monkeypatch.setattr(chosen, "_finalized", lambda asked, outcome: outcome)
    asked = replace(
        pass_of(Rules(cuts=LISTED), drafted=True), layout=layout_of(indptr_of([0, 2]), 8)
    )
    outputs = SimpleNamespace(next_token_logits=object())
    assert chosen.accept(asked, VerifyOutput(outputs, None)) is outcome
    ((step, options),) = given
    assert options == {"cuts": LISTED, "rows": 8}
    assert step[0] is asked.ids
    assert step[1].tolist() == [1, 3]
    assert step[2] is outputs.next_token_logits
    assert step[3:] == (
        asked.proposal.draft_block, asked.batch.sampling_info, asked.batch.seq_lens, None,
    )  # fmt: skip


def test_confidence_is_estimated_from_the_logits_that_were_drafted_from() -> None:
    """At the requests' temperatures, of greedy ones at 1; a head's confidence is left alone."""
    logits = torch.randn(3, GAMMA, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    block = DraftBlockResult(
        draft_tokens=torch.zeros(3, GAMMA, dtype=torch.int64),
        corrected_logits=logits,
        greedy_mask=torch.tensor([False, True, False]),
        temperatures=torch.tensor([0.5, 0.01, 1.0]),
        greedy_draft=False,
    )
    proposal = DraftProposal(draft_block_ids=block.draft_tokens, draft_block=block, folded=True)
    assert device().with_confidence(proposal) is proposal
    found = device(head=False).with_confidence(proposal)
    scale = torch.tensor([0.5, 1.0, 1.0])[:, None, None]
    expected = torch.softmax(logits.float() / scale, -1).amax(-1)
    torch.testing.assert_close(found.confidence_raw.sigmoid(), expected)
    assert found.folded
    assert found.draft_block is block
    assert found.confidence is None


@pytest.mark.parametrize("runs", [True, False])
def test_operators_are_launched_where_triton_runs(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are compared with torch in tests/kernels."""
    launched: list[str] = []

    def launch(name: str) -> Any:
        return lambda *_: launched.append(name) or torch.zeros(2, GAMMA)

    monkeypatch.setattr(cuda_device, "runs_on", lambda _: runs)
    monkeypatch.setattr(cuda_device, "certainty_triton", launch("certainty"))
    block = DraftBlockResult(
        draft_tokens=torch.zeros(2, GAMMA, dtype=torch.int64),
        corrected_logits=torch.zeros(2, GAMMA, 5),
        greedy_mask=torch.tensor([True, False]),
        temperatures=torch.ones(2),
        greedy_draft=False,
    )
    proposal = create_autospec(DraftProposal, instance=True)
    monkeypatch.setattr(
        cuda_device.msgspec.structs, "replace", lambda _, confidence_raw: confidence_raw
    )
    proposal.draft_block = block
    found = device(head=False).with_confidence(proposal)
    assert found.shape == (2, GAMMA)
    assert launched == ["certainty"] * runs
    used: list[Any] = []
    penalties: Any = SimpleNamespace(apply=lambda *given: used.append(given[-1]))
    device().penalise(penalties, torch.zeros(2, 5), torch.zeros(1, 2), torch.zeros(1))
    assert used == [cuda_device.penalise_triton if runs else None]
