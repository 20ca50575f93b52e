"""Kept step times, calibrations and configurations that must not be believed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COSTS = "sglang_dspark/schedule/cost_table.py"
FILES = "sglang_dspark/common/files.py"
FUZZ = "tests/serving/test_broken_files.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="kept files", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "step times of another machine are taken",
        COSTS,
        "    if different:\n",
        "    if False:\n",
        "tests/schedule/test_costs.py",
    ),
    _mutant(
        "a table's depth need not be its key's",
        COSTS,
        "        if self.key.gamma != self.gamma:\n",
        "        if False:\n",
        "tests/schedule/test_costs.py",
    ),
    _mutant(
        "a pass may take any time",
        COSTS,
        "            number(seconds, LEAST_SECONDS, MOST_SECONDS)\n",
        "            number(seconds, 0.0, 1e300)\n",
        "tests/schedule/test_costs.py",
    ),
    _mutant(
        "a fault of a kept table ends the start",
        "sglang_dspark/serving/profile.py",
        "    except DSparkError as error:\n        log(str(error))\n        return (",
        "    except ZeroDivisionError as error:\n        log(str(error))\n        return (",
        FUZZ,
    ),
    _mutant(
        "numbers that overflow are infinite",
        FILES,
        "    if math.isinf(value):\n",
        "    if False:\n",
        "tests/test_broken_inputs.py",
        FUZZ,
    ),
    _mutant(
        "JSON may lie as deep as it likes",
        FILES,
        "    _require_depth(value)\n    return value\n\n\ndef load_yaml",
        "    return value\n\n\ndef load_yaml",
        "tests/test_broken_inputs.py",
        FUZZ,
    ),
    _mutant(
        "a fault found behind the reading names no file",
        FILES,
        '        raise DSparkError(f"{path}: {error}") from None\n',
        "        raise\n",
        "tests/common/test_reading.py",
    ),
    _mutant(
        "a cell's prompt may be anything",
        "loadtest/client/cell.py",
        "if not all(isinstance(prompt.content, str | Sequence) for prompt in self.prompts):",
        "if False:",
        "tests/common/test_reading.py",
    ),
    _mutant(
        "a damaged shard raises an error of its library",
        "sglang_dspark/training/store.py",
        "    except (SafetensorError, RuntimeError) as error:  # RuntimeError",
        "    except ZeroDivisionError as error:  # RuntimeError",
        "tests/training/test_store_faults.py",
    ),
    _mutant(
        "memory is taken for what config.json claims",
        "sglang_dspark/drafter/checkpoint.py",
        'with reading_config(path), torch.device("meta"):',
        "with reading_config(path):",
        "tests/drafter/test_fields.py",
    ),
    _mutant(
        "NaN in a drafter's weight is read",
        "sglang_dspark/drafter/weight_files.py",
        "        if not is_finite(load_tensors({name: stored[name]})[name]):",
        "        if False:",
        "tests/drafter/test_one_reader.py",
    ),
    _mutant(
        "a stale file next to shards is read",
        "sglang_dspark/drafter/weight_files.py",
        "        return [there[name] for name in sorted(indexed)]",
        "        return list(there.values())",
        "tests/drafter/test_one_reader.py",
    ),
    _mutant(
        "another head's weights are ignored",
        "sglang_dspark/drafter/weight_files.py",
        'if unread and "rotary_emb." not in name:',
        "if False:",
        "tests/drafter/test_one_reader.py",
    ),
    _mutant(
        "a drafter is converted without a server's checks",
        "sglang_dspark/serving/checkpoint.py",
        "    require_served(files, target)\n    layers",
        "    layers",
        "tests/drafter/test_one_reader.py",
    ),
    _mutant(
        "a window of Transformers' config is lost",
        "sglang_dspark/drafter/families.py",
        '    "use_sliding_window": (False,),',
        '    "use_sliding_window": (False, True),',
        "tests/drafter/test_one_reader.py",
    ),
    _mutant(
        "a drafter may be of any size",
        "sglang_dspark/drafter/fields.py",
        "integer(value, 0, MOST_LAYERS if of_layers else MOST_SIZE)",
        "integer(value, 0, 1 << 200)",
        "tests/drafter/test_fields.py",
    ),
    _mutant(
        "requests are not decoded before they are sent to the scheduler",
        "patches/upstream_fixes/request_limits.py",
        "        upstream.msgpack_decode(packed)\n",
        "",
        "tests/patches/test_request_limits.py",
    ),
)
