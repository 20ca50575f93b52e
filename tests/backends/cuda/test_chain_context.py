"""A chain drafter's context on a GPU against the reference engine's: any prompts, chunks, pool
rows, cache slots, windows and outcomes; and the model around SGLang's layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda import chain_context, chain_model
from sglang_dspark.backends.cuda.chain_context import ChainContext
from sglang_dspark.backends.cuda.chain_model import Block, ChainModel
from sglang_dspark.families.chain.proposer import ChainProposer
from sglang_dspark.kernels.pass_rows import rows_torch
from tests.families.helpers import WIDTH, random_drafter

VOCAB, GAMMA, ROWS, LONGEST, SLOTS = 60, 4, 6, 48, 400
HELD = -7.0  # what the cache holds before it is written


class Pool:
    """A cache that stores what it is given."""

    def __init__(self) -> None:
        self.keys, self.values = (torch.full((SLOTS, 2, 16), HELD) for _ in range(2))

    def set_kv_buffer(self, layer: Any, at: Any, keys: Tensor, values: Tensor) -> None:
        assert layer == "radix attention"
        self.keys[at.loc], self.values[at.loc] = keys, values


class World:
    """A worker with a random drafter and shuffled slots, of which 0 belongs to no request."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.drafter: Any = random_drafter(kind, VOCAB).eval()
        self.drafter.attach(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))
        self.pool = Pool()
        attn = SimpleNamespace(attn=SimpleNamespace(attn="radix attention"))
        inner = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=attn)]))
        model = SimpleNamespace(
            state_width=self.drafter.state_width,
            keys_values=self.drafter.context_kv,
            inner=inner,
            config=self.drafter.config,
        )
        self.table = 1 + torch.randperm(SLOTS - 1)[: ROWS * LONGEST].view(ROWS, LONGEST).int()
        pools = SimpleNamespace(req_to_token=self.table)
        self.context = ChainContext(
            SimpleNamespace(
                draft_model=model,
                draft_model_runner=SimpleNamespace(token_to_kv_pool=self.pool),
                model_runner=SimpleNamespace(req_to_token_pool=pools, dtype=torch.float32),
            )
        )
        self.expected = ChainProposer(self.drafter, GAMMA).start(ROWS, LONGEST)
        self.states = torch.randn(ROWS, LONGEST, self.drafter.state_width)
        self.tokens = torch.randint(VOCAB, (ROWS, LONGEST))

    def prefill(self, rows: list[int], begins: list[int], ends: list[int], name: str = "") -> None:
        """Prefill positions begins[r] to ends[r] of each row, by requests named by row."""
        spans = [(r, torch.arange(b, e)) for r, b, e in zip(rows, begins, ends, strict=True)]
        batch = SimpleNamespace(
            input_ids=torch.cat([self.tokens[r, at] for r, at in spans]),
            extend_lens=[len(at) for _, at in spans],
            req_pool_indices=torch.tensor(rows),
            req_pool_indices_cpu=torch.tensor(rows),
            reqs=[SimpleNamespace(rid=f"{name} {r}") for r in rows],
        )
        self.context.begin_prefill(batch)
        self.context.prefill(
            torch.cat([self.states[r, at] for r, at in spans]),
            torch.cat([at for _, at in spans]),
            torch.cat([self.table[r, at] for r, at in spans]).long(),
        )

    def commit(self, rows: Tensor, lens: Tensor, drafts: Tensor, accepted: Tensor) -> None:
        """Verify drafts[r] tokens behind the anchors at lens[r], and accept so many of them."""
        indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
        indptr[1:] = (drafts + 1).cumsum(0)
        total = int(indptr[-1]) + 3  # rows without a request fill the graph
        ids = torch.randint(VOCAB, (len(rows), GAMMA + 1))
        hidden = torch.randn(total, self.drafter.state_width)
        for r, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            kept, begin = int(accepted[r]) + 1, int(indptr[r])
            self.tokens[row, length : length + kept] = ids[r, :kept]
            self.states[row, length : length + kept] = hidden[begin : begin + kept]
        packed = rows_torch(indptr, ids, lens, rows, self.table, total, len(rows))
        self.context.commit(packed, packed.slots, hidden, indptr, accepted + 1, rows)

    def check(self, rows: Tensor, lens: Tensor) -> None:
        """Entries of the text before the anchors are the reference's, and so are states."""
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            tokens, states = self.tokens[row, 1:length], self.states[row, : length - 1]
            at, slots = torch.arange(length - 1), self.table[row, : length - 1].long()
            with torch.no_grad():
                expected = self.drafter.context_kv(tokens, states, at)
            for found, wanted in zip((self.pool.keys, self.pool.values), expected, strict=True):
                torch.testing.assert_close(found[slots], wanted)
            assert torch.equal(self.context.waiting[row], self.states[row, length - 1])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_entries_of_prompts_and_steps_are_the_references(kind: str) -> None:
    world = World(kind)
    rows = torch.tensor([4, 0, 2])
    world.prefill([4, 0, 2], [0, 0, 0], [9, 1, 5])
    world.prefill([2], [5], [14])  # its second chunk
    lens = torch.tensor([9, 1, 14])
    world.check(rows, lens)
    for drafts, accepted in (([4, 0, 2], [4, 0, 0]), ([1, 4, 3], [0, 2, 3]), ([0, 0, 0], [0] * 3)):
        given, kept = torch.tensor(drafts), torch.tensor(accepted)
        world.commit(rows, lens, given, kept)
        lens = lens + kept + 1
        world.check(rows, lens)
    owned = world.table[rows].unique()
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, owned.long(), False)
    others[0] = False
    assert world.pool.keys[others].eq(HELD).all(), "slots of other requests"
    behind = world.table[2, int(lens[2]) - 1 :].long()
    assert world.pool.keys[behind].eq(HELD).all(), "a row that fills a graph was written"


def test_places_of_images_are_no_tokens() -> None:
    """SGLang gives them ids of a million and more; the embedding has no such rows."""
    world = World("eagle3")
    world.tokens[0, 2] = 1_000_000
    world.prefill([0], [0], [5])
    world.tokens[0, 2] = VOCAB - 1
    world.check(torch.tensor([0]), torch.tensor([5]))


def test_the_state_of_another_request_is_not_continued() -> None:
    """A pool row is used again, by a request with a prefix in the cache: its first entry is lost,
    not wrong."""
    world = World("mtp")
    world.prefill([3], [0], [6], "first")
    world.prefill([3], [6], [10], "second")
    slot = world.table[3, 5].long()
    assert world.pool.keys[slot].eq(HELD).all()
    world.prefill([1], [0], [6], "first")
    world.prefill([1], [4], [9], "first")  # after a retraction: positions of a state that is gone
    assert world.pool.keys[world.table[1, 7].long()].ne(HELD).any()
    torch.testing.assert_close(
        world.pool.keys[world.table[1, 3].long()],
        world.drafter.context_kv(world.tokens[1, 4:5], world.states[1, 3:4], torch.tensor([3]))[0][
            0
        ].detach(),
    )


def test_a_window_begins_one_position_before_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("mtp")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        chain_context.upstream, "alloc_verify_window", lambda **given: asked.append(given) or "w"
    )
    runner = SimpleNamespace(decode_cuda_graph_runner="graphs")
    proposer = SimpleNamespace(_draft_sampler="in the graph")
    world.context._worker = SimpleNamespace(
        verify_num_draft_tokens=GAMMA + 1,
        _block_pos_offsets=None,
        model_runner="target",
        device="cpu",
        draft_model_runner=runner,
        _proposer=proposer,
    )
    lens = torch.tensor([9, 1])
    for host in (None, lens.clone()):
        spec = SimpleNamespace(nxt_kv_lens_cpu="bound")
        batch = SimpleNamespace(seq_lens=lens, seq_lens_cpu=host, spec_info=spec)

        def proposed(*, batch: Any, verify_window: Any, **options: Any) -> Any:
            assert (verify_window, options["bs"]) == ("w", 2)
            return batch, runner.decode_cuda_graph_runner

        options: dict[str, Any] = {"bs": 2, "device": "cpu"}
        earlier, graphs = world.context.propose(proposed, batch=batch, verify_window=0, **options)
        assert earlier.seq_lens.tolist() == [8, 0]
        assert batch.seq_lens.tolist() == [9, 1]
        assert (earlier.seq_lens_cpu is None) == (host is None)
        assert host is None or earlier.seq_lens_cpu.tolist() == [8, 0]
        assert asked[-1]["batch"] is earlier
        assert asked[-1]["seq_lens_cpu"] is ("bound" if host is None else earlier.seq_lens_cpu)
        assert graphs == "graphs"
    proposer._draft_sampler = None  # steps outside of the graph need a pass outside of it
    assert world.context.propose(proposed, batch=batch, verify_window=0, **options)[1] is None
    assert runner.decode_cuda_graph_runner == "graphs"


def test_each_step_has_its_own_row_of_the_windows() -> None:
    block = Block(None, None, torch.tensor([3, 8]), GAMMA, torch.zeros(2, 1))
    for place in range(3):
        block.place = place
        new = tuple(torch.full((2, n), place + 1.0) + torch.tensor([[0.0], [10.0]]) for n in (4, 2))
        queries, keys = block.window(new)
        assert (queries.shape, keys.shape) == ((2 * GAMMA, 4), (2 * GAMMA, 2))
        expected = [1.0 + p if p <= place else 0.0 for p in range(GAMMA)]
        assert keys.view(2, GAMMA, 2)[0, :, 0].tolist() == expected
        assert keys.view(2, GAMMA, 2)[1, place, 1] == place + 11


class Inner(nn.Module):
    """The parts of SGLang's model that ours reads."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        layer = SimpleNamespace(self_attn=SimpleNamespace(attn=nn.Identity()))
        self.model = SimpleNamespace(fc=nn.Linear(2 * WIDTH, WIDTH), layers=[layer])
        self.lm_head = nn.Linear(WIDTH, 6, bias=False)
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded += [name for name, _ in weights]


def test_an_update_renews_copies_where_graphs_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the draft vocabulary, base logits and the rows of the target's LM head."""
    for name in ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"):
        monkeypatch.setattr(chain_model.upstream, name, Inner, raising=False)
    config = SimpleNamespace(architectures=["LlamaForCausalLMEagle"], hidden_size=WIDTH)
    config.vocab_size = 10
    model = ChainModel(config)
    assert (model.state_width, model.reads_features) == (WIDTH, False)
    first, second = (torch.tensor(ids) for ids in ([0, 3, 4], [1, 3, 9]))
    assert config.draft_vocab_size == 10
    ours, targets = ("fc.weight", first), ("model.embed_tokens.weight", first)
    model.load_weights([("d2t", first - torch.arange(3)), ("t2d", first), ours, targets])
    assert model.inner.loaded == ["fc.weight"]
    head = nn.Linear(WIDTH, 12, bias=False)  # padded
    model.attach_shared_modules(embed_tokens="embedding", lm_head=head)
    assert model.base is not None
    assert model.head_rows is not None
    assert model.draft_ids is not None
    assert torch.isfinite(model.base).nonzero().flatten().tolist() == [0, 3, 4]
    assert torch.equal(model.head_rows, head.weight[first])
    held = [each.data_ptr() for each in (model.base, model.head_rows, model.draft_ids)]
    with torch.no_grad():
        head.weight.add_(1.0)
    model.load_weights([("d2t", second - torch.arange(3))])
    model.attach_again()
    assert [each.data_ptr() for each in (model.base, model.head_rows, model.draft_ids)] == held
    assert torch.isfinite(model.base).nonzero().flatten().tolist() == [1, 3, 9]
    assert torch.equal(model.head_rows, head.weight[second])
    hidden = torch.randn(2, WIDTH)
    logits = model._logits(hidden)
    torch.testing.assert_close(logits[:, second], hidden @ head.weight[second].T)
    assert logits[:, [0, 2, 4]].eq(0).all(), "base excludes them"
