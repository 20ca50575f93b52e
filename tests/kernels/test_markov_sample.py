"""Test the Triton draft steps: the drafts of the drafter's own heads, and their distribution.

Parity is position by position, given the drafts in front. A draft may differ from the reference's
where their keys are nearer than rounding is precise; those are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_dspark.benchmarks.markov_shapes import batch, batches, compared, parity_rows
from sglang_dspark.drafter.confidence import ConfidenceHead
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.heads import HEADS, allowed_vocabulary, restrict_vocabulary
from sglang_dspark.kernels import markov_sample
from sglang_dspark.kernels.markov_blocks import Blocks, Judge, Mixing, Noise, mixing_of
from sglang_dspark.kernels.markov_reference import markov_torch, philox
from sglang_dspark.kernels.markov_sample import LARGE_BYTES, Drafts, Launch, markov_triton
from tests.kernels.processes import EVERY, ROOT, output_of

ALARM = 1e-4
ONE = torch.ones(1)
FEW, MANY = 12, 800  # odd batches of parity, beside a dozen large ones


def asked(*arguments: str) -> dict:
    """The report of the interpreter's process; the arguments say which."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_markov", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_drafts_as_the_reference(count: int) -> None:
    report = asked("parity", str(count))
    assert report["wrong"] == []
    assert report["blocks"] >= 2000
    assert min(report["split"], report["sampled"]) > 500
    assert report["undecided"] < report["drafts"] / 200


def test_drafts_known_by_hand() -> None:
    assert asked("known")["wrong"] == []


def test_drafts_follow_the_kept_distribution() -> None:
    found = asked("distribution")
    assert set(found) == {"vanilla", "gated"}
    assert min(min(each.values()) for each in found.values()) > ALARM, found


@EVERY
def test_kernel_compiles_without_a_device(every: tuple[str, ...]) -> None:
    report = json.loads(output_of("tests.kernels.compiled_markov", *every))
    assert {name.split(":")[0] for name in report} == (
        {"80", "89", "90", "100"} if every else {"90"}
    )
    for name, each in report.items():
        # A program meets the others between the phases, waits there, and arrives at the end.
        assert each["arrivals"] == 3, name
        assert each["maxima"] >= 1, name
        assert each["together"] is True, name
        assert each["shared"] <= (99 * 1024 if name.startswith("89") else LARGE_BYTES), name
        # Registers hold it all, but for some words of many requests' tiles.
        many = name.endswith((": all", "64 requests"))
        assert each["stack"] <= (512 if many else 0), name


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("reduced", [False, True])
def test_the_reference_is_the_drafters_own_head(kind: str, reduced: bool) -> None:
    """Its loop over the head's layers, in float32, with the confidence."""
    torch.manual_seed(sum(map(ord, kind)))
    c = config(kind)
    head, confidence_head = HEADS[kind](c), ConfidenceHead(c)
    kept = torch.arange(c.vocab_size)
    if reduced:
        restrict_vocabulary(head, torch.arange(1, c.vocab_size, 3))
        found = allowed_vocabulary(head)
        assert found is not None
        kept = found
    h, base = torch.randn(5, c.gamma, c.hidden_size), torch.randn(5, c.gamma, len(kept))
    anchors = torch.randint(c.vocab_size, (5,))
    with torch.no_grad():
        given = Blocks(
            base=base,
            anchors=anchors,
            w1=head.markov_w1.weight,
            w2=head.markov_w2.weight[kept],
            draft_ids=kept if reduced else None,
            mixing=mixing_of(head, h),
            judge=Judge(h, confidence_head.proj.weight[0], confidence_head.proj.bias),
        )
        found = markov_torch(given)
        previous, state, embedded = anchors, head.start(5), []
        for k in range(c.gamma):
            embedded.append(head.embed(previous))
            latent, state = head.latent(embedded[-1], h[:, k], state)
            logits = base[:, k] + head.bias(latent)[:, kept]
            torch.testing.assert_close(found.logits[:, k], logits, atol=1e-5, rtol=1e-5)
            previous = kept[logits.argmax(-1)]
            assert torch.equal(found.tokens[:, k], previous)
        expected = confidence_head(h, torch.stack(embedded, 1))
    assert found.confidence is not None
    torch.testing.assert_close(found.confidence.float(), expected, atol=1e-5, rtol=1e-5)


def config(kind: str) -> DrafterConfig:
    """A small drafter with such a head."""
    return DrafterConfig(
        hidden_size=24,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=53,
        gamma=5,
        target_layer_ids=(0,),
        num_target_layers=1,
        mask_token_id=0,
        markov_rank=7,
        markov_head_type=kind,
    )


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, [0] * 4, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, [2**32 - 1] * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_draws_the_published_words(key: int, counter: list[int], words: str) -> None:
    """Random123's known answers of philox4x32-10."""
    found = philox(key, *(torch.tensor([each]) for each in counter))
    assert " ".join(f"{int(word):08x}" for word in found) == words


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_drafts_as_the_reference() -> None:
    report = parity_rows(MANY)
    assert report["wrong"] == []
    for given in batches(40, 1, "cuda"):  # the same in a launch for each phase
        apart = markov_triton(given.blocks, how=Launch(split=True))
        assert compared(given, apart).wrong == ()


def test_benchmark_says_what_it_needs() -> None:
    printed = output_of("sglang_dspark.benchmarks.markov")
    if torch.cuda.is_available():
        assert json.loads(printed.splitlines()[0])["op"] == "markov"
    else:
        assert "no CUDA device" in printed


def test_mistakes_are_named() -> None:
    given = batch(torch.Generator().manual_seed(0), 3, 2, 5, turn=1).blocks
    assert given.temperatures is not None
    assert given.logits is not None

    def refused(message: str, how: Launch | None = None, **changes: object) -> None:
        with pytest.raises(ValueError, match=message):
            markov_triton(replace(given, **changes), how=how or Launch())

    refused("base must be", base=given.base[0])
    refused(r"anchors must be \[3\] int64", anchors=given.anchors[1:])
    refused("anchors must be .* int64", anchors=given.anchors.int())
    refused(r"w2 must be \[5, 3\]", w2=given.w2[1:])
    refused("w2 must be .* float32", w2=given.w2.double())
    refused("w1 must be contiguous", w1=given.w1.T.contiguous().T)
    refused("logits must be .* float32", logits=given.logits.half())
    refused("temperatures must be", temperatures=torch.ones(2))
    refused("come together", noise=None)
    refused("key must be", noise=Noise(-1, torch.zeros(1, dtype=torch.int64)))
    refused("noise.offset must be", noise=Noise(1, torch.zeros(1)))
    refused("mixing.weight must be", mixing=Mixing(torch.zeros(3, 2, 3), torch.zeros(4, 4)))
    refused("judge.bias must be", judge=Judge(torch.zeros(3, 2, 9), torch.zeros(9), torch.ones(2)))
    refused("5 columns of logits, 4 tokens", w1=given.w1[:4])
    refused("draft_ids must be", draft_ids=torch.arange(4))
    refused("judge.weight must be", judge=Judge(torch.zeros(3, 2, 9), torch.zeros(8), ONE))
    refused("judge.features must be", judge=Judge(torch.zeros(2, 2, 9), torch.zeros(9), ONE))
    refused("base must be contiguous", base=given.base.mT.contiguous().mT)
    refused("wait for each other", how=Launch(programs=2))
    for scratch in (torch.zeros(6, dtype=torch.int64), torch.zeros(7)):
        with pytest.raises(ValueError, match=r"scratch must be \[7\]"):
            markov_triton(given, scratch)


def test_programs_that_wait_are_launched_together() -> None:
    """A cooperative launch, only on a GPU: at most one program a multiprocessor, all or none."""
    given = batch(torch.Generator().manual_seed(0), 3, 2, 700, turn=1).blocks
    gpu = SimpleNamespace(multi_processor_count=4)
    with (
        mock.patch.object(markov_sample, "_markov_kernel", mock.MagicMock()) as kernel,
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        device = torch.device("cuda", 77)
        assert [markov_sample._programs(device, tiles) for tiles in (3, 4, 9)] == [3, 4, 4]
        found = Drafts(torch.empty(3, 2, dtype=torch.int64), None)
        for how, programs in ((Launch(), 4), (Launch(split=True), 4), (Launch(), 1)):
            markov_sample._launch(given, torch.zeros(7), found, how, programs)
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list]
    launches = kernel.__getitem__.return_value.call_args_list
    assert given.mixing is not None  # two phases a step
    assert grids == [(4,)] * 5 + [(1,)]
    spans = [call.args[-2:] for call in launches]
    assert spans == [(0, 4), (0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    together = [call.kwargs.get("launch_cooperative_grid", False) for call in launches]
    assert together == [True] + [False] * 5


def test_an_empty_batch_drafts_nothing() -> None:
    given = Blocks(
        base=torch.zeros(0, 3, 5),
        anchors=torch.zeros(0, dtype=torch.int64),
        w1=torch.zeros(5, 2),
        w2=torch.zeros(5, 2),
    )
    assert markov_triton(given).tokens.shape == (0, 3)
