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
        "sglang_dspark/serving/schedule/profile.py",
        "    except DSparkError as error:\n        tell(str(error))\n    return None\n",
        "    except ZeroDivisionError as error:\n        tell(str(error))\n    return None\n",
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
)
