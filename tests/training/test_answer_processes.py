import os
import signal

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training import answer_processes
from sglang_dspark.training.answer_processes import processes_for
from sglang_dspark.training.collect import answer, plan_answers
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import StoreReader


def _store(cfg, path, threads, minutes=1e9):
    data = cfg.data.model_copy(update={"store": path, "threads": threads})
    cfg = cfg.model_copy(update={"data": data})
    target = TargetModel.load(data.target, cfg.drafter.target_layer_ids)
    plan = plan_answers(cfg, target.config, lambda reason: None)
    shown = []
    made = answer(plan, data, target, minutes, lambda done, total: shown.append((done, total)))
    return made, shown


def _answers(path):
    reader = StoreReader(path)
    return {row["id"]: reader[i] for i, row in enumerate(reader.rows)}


def test_processes_make_the_answers_of_one(config, tmp_path):
    alone, _ = _store(config, tmp_path / "one", 1)
    made, shown = _store(config, tmp_path / "three", 3)
    first, second = _answers(tmp_path / "one"), _answers(tmp_path / "three")
    assert first.keys() == second.keys()
    for name, response in first.items():
        other = second[name]
        assert torch.equal(other.tokens, response.tokens)
        assert (other.domain, other.temperature, other.prompt_len, other.turns) == (
            response.domain,
            response.temperature,
            response.prompt_len,
            response.turns,
        )
        # States depend on which requests share a product, by rounding.
        torch.testing.assert_close(other.features, response.features, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            other.log_partition, response.log_partition, rtol=1e-3, atol=1e-3
        )
    assert made == alone
    assert shown == [(i, len(first)) for i in range(1, len(first) + 1)]


def test_each_process_has_its_share_of_rows_and_one_thread(config, tmp_path, monkeypatch):
    ran = ResponseGenerator.run

    def run(self, prompts, tick):
        line = f"{os.getpid()} {self.rows} {torch.get_num_threads()}\n"
        with (tmp_path / "ran").open("a") as file:
            file.write(line)
        return ran(self, prompts, tick)

    monkeypatch.setattr(ResponseGenerator, "run", run)
    _store(config, tmp_path / "store", 2)
    lines = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len({process for process, _, _ in lines} - {str(os.getpid())}) == 2
    assert {(rows, threads) for _, rows, threads in lines} == {
        (str(-(-config.data.rows // 2)), "1")
    }


def test_a_killed_process_is_one_line_and_a_later_run_goes_on(config, tmp_path, monkeypatch):
    taken = answer_processes._taken

    def until_killed(prompts, more, following):
        for number, prompt in enumerate(taken(prompts, more, following)):
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield prompt

    path = tmp_path / "store"
    config = config.model_copy(update={"data": config.data.model_copy(update={"rows": 2})})
    with monkeypatch.context() as patched:
        patched.setattr(answer_processes, "_taken", until_killed)
        with pytest.raises(DSparkError, match=r"ended early.*start again to go on"):
            _store(config, path, 2)
    kept = set(_answers(path))
    assert kept
    _, shown = _store(config, path, 2)
    assert len(shown) == len(_answers(path)) - len(kept)


def test_no_prompt_begins_after_the_time_is_up(config, tmp_path):
    made, shown = _store(config, tmp_path / "store", 2, minutes=0)
    assert (made, shown) == (0, [])


def test_a_gpu_has_one_process():
    assert processes_for(torch.device("cuda"), 4) == 1
    assert processes_for(torch.device("cpu"), 4) == 4
