"""Several processes and machines: turns, shares, what is told apart, what is counted together."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARALLEL = "sglang_dspark/backends/cpu/rank_resources.py"
PROFILE = "sglang_dspark/serving/profile.py"
BUILD = "sglang_dspark/step/build.py"
TURNS = "tests/common/test_file_lock.py"
SHARES = "tests/backends/cpu/test_rank_resources.py"
MEASURING = "tests/serving/test_profile.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="parallel", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "a part that failed is as good as done",
        "sglang_dspark/backends/cpu/jit.py",
        "builder.store(word(1), ",
        "builder.store(word(0), ",
        "tests/backends/cpu/test_threads.py::test_a_part_that_fails_is_told",
    ),
    _mutant(
        "attention is shared out by the heads of one request",
        "sglang_dspark/backends/cpu/paged_attention.py",
        "_attend_items, items, given)",
        "_attend_items, k_cache.shape[1], given)",
        "tests/backends/cpu/test_attention.py::test_threads_do_not_change_the_result",
    ),
    _mutant(
        "a thread is woken for every short context",
        "sglang_dspark/backends/cpu/paged_attention.py",
        "work // _WORK_PER_THREAD, ",
        "",
        "tests/backends/cpu/test_attention.py::test_a_few_tokens_are_one_threads_work",
    ),
    _mutant(
        "two processes may take one turn",
        "sglang_dspark/common/file_lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{TURNS}::test_patience_ends",
        f"{MEASURING}::test_servers_that_start_together_measure_in_turn",
    ),
    _mutant(
        "a turn is waited for without end",
        "sglang_dspark/common/file_lock.py",
        "if time.monotonic() >= deadline:",
        "if time.monotonic() >= deadline + 60:",
        f"{TURNS}::test_patience_ends",
    ),
    _mutant(
        "replicas measure at the same time",
        PROFILE,
        "    with _alone(seconds, log):\n",
        "    with ExitStack():\n",
        f"{MEASURING}::test_of_replicas_that_start_together_one_measures",
    ),
    _mutant(
        "who waited measures again",
        PROFILE,
        "if isinstance(again, Profiled):",
        "if again is None:",
        f"{MEASURING}::test_of_replicas_that_start_together_one_measures",
    ),
    _mutant(
        "each setting has a turn of its own",
        PROFILE,
        '/ "costs" / LOCK\n',
        '/ "costs" / str(os.getpid())\n',
        f"{MEASURING}::test_servers_that_start_together_measure_in_turn",
    ),
    _mutant(
        "replicas are counted as one",
        BUILD,
        '        labels["dp_rank"] = parallel.dp_rank\n',
        "        pass\n",
        "tests/step/test_engine_build.py::test_replicas_are_told_apart",
    ),
    _mutant(
        "the gains of replicas are added up",
        "loadtest/sweep/counters.py",
        "    return float(sum(values)) / len(values) if values else None\n",
        "    return float(sum(values)) if values else None\n",
        "tests/loadtest/test_counters.py::test_a_gain_of_two_replicas_is_no_sum",
    ),
    _mutant(
        "each rank computes with all cores",
        "sglang_dspark/backends/cpu/threads.py",
        "return max(1, (cores - 1) // ranks)",
        "return max(1, cores - 1)",
        f"{SHARES}::test_ranks_share_it",
    ),
    _mutant(
        "each rank takes the whole memory",
        PARALLEL,
        "round(STATIC_MEMORY / together, 3)",
        "round(STATIC_MEMORY, 3)",
        f"{SHARES}::test_ranks_share_it",
    ),
    _mutant(
        "ranks of other machines share this one's cores",
        PARALLEL,
        "max(1, everywhere // server_args.nnodes)",
        "everywhere",
        f"{SHARES}::test_a_rank_of_a_machine_has_all_of_it",
    ),
    _mutant(
        "a user's choice of cores is replaced",
        PARALLEL,
        'if os.environ.get(name, "") in ("", _ours.get(name)):',
        "if True:",
        f"{SHARES}::test_what_the_user_set_stays",
    ),
    _mutant(
        "ranks of several machines meet on loopback",
        PARALLEL,
        "host = upstream.NetworkAddress.parse(rendezvous).host",
        "upstream.NetworkAddress.parse(rendezvous)",
        f"{SHARES}::test_ranks_of_several_meet_where_the_meeting_point_is",
    ),
)
