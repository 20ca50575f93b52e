"""An SGLang with seventeen planted changes: `dspark doctor` names each, and no server starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # two minutes: what is changed is compiled anew
ROOT = Path(__file__).resolve().parents[2]
DSPARK = "srt/speculative/dspark_components"
FOUND = {  # the change -> what the doctor says of it
    "a renamed function": "SGLang has no sglang.srt.speculative.dspark_components.dspark_draft."
    "make_next_draft_input any more (used by step/decode.py)",
    "a moved class": "SGLang has no sglang.srt.speculative.spec_sampling_mask."
    "SpeculativeSamplingMaskCapture any more (used by step/verify.py)",
    "a removed module": "SGLang has no module sglang.srt.mem_cache.allocation_sizing any more "
    "(used by patches/upstream_fixes/kv_pool_limit.py)",
    "a renamed constant": "SGLang has no sglang.srt.speculative.spec_utils.SIMULATE_ACC_LEN any "
    "more (used by patches/cpu/mtp.py)",
    "a renamed class": "SGLang has no sglang.srt.models.dspark.DSparkConfidenceHead any more "
    "(used by backends/cpu/draft.py)",
    "a renamed private attribute": "dspark_worker_v2.DSparkWorkerV2 has no _prepare_inputs_once "
    "any more (used by step/build.py)",
    "a renamed method": "dspark_worker_v2.DSparkWorkerV2 has no _block_accept_lens any more "
    "(used by step/decode.py)",
    "an attribute set by a module": "sglang.srt.arg_groups.cuda_graph_hook has no "
    "_cuda_graph_config_locked any more (used by patches/cuda/argument_defaults.py)",
    "another signature": "seam empty-stops: sglang.srt.sampling.sampling_params.SamplingParams."
    "normalize should be (self, tokenizer) but is (self, tokenizer, strict=False)",
    "another signature of an overridden method": "seam step-worker: sglang.srt.speculative."
    "dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_prefill should be "
    "(self, batch, on_publish, pp_proxy_tensors=None) but is (self, batch, on_publish, "
    "pp_proxy_tensors=None, chunk=None)",
    "a method made asynchronous": "seam pool-end: sglang.srt.managers.scheduler.Scheduler."
    "init_req_max_new_tokens should be (self, req) but is async (self, req)",
    "another signature that only a GPU has": "on a GPU: seam cuda-default-attention: sglang.srt."
    "arg_groups.model_override_base.get_default_attn_backend should be (server_args, "
    "use_mla_backend, model_config) but is (server_args, use_mla_backend, model_config, *, "
    "draft=False)",
    "a renamed argument": "dspark_planner.alloc_verify_window has no argument block_pos_offsets "
    "any more (used by serving/profile_passes.py, step/verify.py)",
    "a renamed field": "ragged_verify.RaggedVerifyLayout has no argument total_verify_tokens any "
    "more (used by backends/cpu/ragged_layout.py, backends/cuda/compact_pass.py)",
    "a renamed member": "kv_loc_plan.IdSpaceKind has no FULL any more (used by "
    "backends/cpu/layers/direct_forward.py)",
    "a renamed public attribute": "model_runner.ModelRunner has no hisparse_coordinator any more "
    "(used by backends/cpu/layers/direct_forward.py)",
    "another body": "body changed: read sglang.srt.models.llama.LlamaMLP.forward again, which "
    "backends/cpu/csrc/layers.cpp re-implements",
}
RENAMED = {
    "make_next_draft_input": "make_following_input",
    "SIMULATE_ACC_LEN": "SIMULATED_LEN",
    "DSparkConfidenceHead": "ConfidenceHead",
    "_block_accept_lens": "_lens_of_blocks",
    "_cuda_graph_config_locked": "_locked_graph_config",
    "allocation_sizing": "sizing_of_allocations",
    r"spec_sampling_mask import": "mask_capture import",
    "block_pos_offsets": "offsets_of_places",
    "total_verify_tokens": "verified_tokens",
    "IdSpaceKind.FULL": "IdSpaceKind.WHOLE",
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, its files linked but for those that were changed."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    top = tmp_path_factory.mktemp("upgraded")
    package = top / "sglang"
    shutil.copytree(spec.submodule_search_locations[0], package, copy_function=os.symlink)
    pattern = re.compile("|".join(rf"\b{name}\b" for name in RENAMED))
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if pattern.search(text):
            write(file, pattern.sub(lambda found: RENAMED[found.group()], text))
    sizing = package / "srt/mem_cache/allocation_sizing.py"
    sizing.rename(sizing.with_name("sizing_of_allocations.py"))
    mask = package / "srt/speculative/spec_sampling_mask.py"
    mask.rename(mask.with_name("mask_capture.py"))
    mask.write_text('"""Moved to mask_capture.py."""\n')
    plant(package / DSPARK / "dspark_worker_v2.py", "_prepare_inputs_once", "_prepares_once")
    plant(
        package / DSPARK / "dspark_worker_v2.py",
        "pp_proxy_tensors: Optional[PPProxyTensors] = None,\n    ) -> GenerationBatchResult:\n"
        "        if batch.forward_mode.is_idle():",
        "pp_proxy_tensors=None, chunk=None):\n        if batch.forward_mode.is_idle():",
    )
    plant(
        package / "srt/sampling/sampling_params.py",
        "def normalize(self, tokenizer)",
        "def normalize(self, tokenizer, strict=False)",
    )
    plant(
        package / "srt/managers/scheduler.py",
        "def init_req_max_new_tokens(",
        "async def init_req_max_new_tokens(",
    )
    plant(package / "srt/mem_cache/kv_loc_plan.py", "    FULL = enum", "    WHOLE = enum")
    plant(
        package / "srt/model_executor/model_runner.py",
        "self.hisparse_coordinator",
        "self.sparse_coordinator",
    )
    plant(
        package / "srt/arg_groups/model_override_base.py",
        "use_mla_backend: bool, model_config):",
        "use_mla_backend: bool, model_config, *, draft=False):",
    )
    plant(
        package / "srt/models/llama.py",
        "gate_up, _ = self.gate_up_proj(x)",
        "gate_up, _ = self.gate_up_proj(x * 1)",
    )
    return top


def write(file: Path, text: str) -> None:
    """Put a file in the place of a link."""
    file.unlink()
    file.write_text(text, encoding="utf-8")


def plant(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file.name} has no {old!r}: plant another change"
    write(file, text.replace(old, new))


def run(changed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(changed), str(ROOT)))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_doctor_names_each_change(changed: Path) -> None:
    done = run(changed, "-m", "sglang_dspark.cli.main", "doctor")
    said = {
        change: [line for line in done.stdout.splitlines() if text in line]
        for change, text in FOUND.items()
    }
    assert {change: len(lines) for change, lines in said.items()} == dict.fromkeys(FOUND, 1)
    assert done.returncode == 1
    notes = {"another body", "another signature that only a GPU has"}
    assert all(said[change][0].startswith("note: ") for change in notes)
    others = [lines[0] for change, lines in said.items() if change not in notes]
    assert all(line.startswith("problem: ") and "install sglang==" in line for line in others)


def test_a_server_does_not_start_on_it(changed: Path) -> None:
    """Before any patch is in place, in every process."""
    start = "from sglang.srt.plugins import load_plugins; load_plugins()"
    done = run(changed, "-c", start)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sglang-dspark: SGLang has no ")
    assert "names: run `dspark doctor`); install sglang==" in last
