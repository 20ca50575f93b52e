"""Falls back of a server that something befell: taken, counted, told."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "sglang_dspark/step/engine.py"
ONLINE = "sglang_dspark/schedule/online.py"
PROFILE = "sglang_dspark/serving/profile.py"
FALLBACKS = "tests/serving/test_fallbacks.py"
PROFILED = "tests/serving/test_profile.py"
RECORD, RECORDED = "tests/faults/__main__.py", "tests/faults/test_record.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="faults", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "an infinite confidence is believed",
        ONLINE,
        "            if not np.isfinite(logits[r, k]):\n                out[",
        "            if np.isnan(logits[r, k]):\n                out[",
        FALLBACKS,
    ),
    _mutant(
        "an infinite confidence teaches",
        ONLINE,
        "            if not np.isfinite(logits[r, k]):\n                continue",
        "            if np.isnan(logits[r, k]):\n                continue",
        "tests/schedule/test_online.py",
    ),
    _mutant(
        "an infinite confidence is believed on a device",
        ENGINE,
        "np.where(np.isfinite(logits), values, ",
        "np.where(~np.isnan(logits), values, ",
        FALLBACKS,
    ),
    _mutant(
        "results that never come are awaited for ever",
        ENGINE,
        "if not followed and len(self._steps) <= MOST_AWAITED:",
        "if not followed:",
        FALLBACKS,
    ),
    _mutant(
        "a result is late as soon as another step has begun",
        ENGINE,
        "if overtaken >= PIPELINE:",
        "if overtaken >= 1:",
        FALLBACKS,
    ),
    _mutant(
        "a late result is no fault",
        ENGINE,
        "if overtaken >= PIPELINE:",
        "if overtaken > PIPELINE:",
        FALLBACKS,
    ),
    _mutant(
        "a clock that runs backwards ends the server",
        ENGINE,
        "if seconds is None or (seconds > 0 and math.isfinite(seconds)):",
        "if seconds is None or math.isfinite(seconds):",
        FALLBACKS,
    ),
    _mutant(
        "a fallback is logged each time",
        ENGINE,
        "        if fallback not in self._logged:\n",
        "        if fallback:\n",
        FALLBACKS,
    ),
    _mutant(
        "a fallback is counted once",
        ENGINE,
        "        self.metrics.count_fallback(fallback)\n        if fallback not in self._logged:\n",
        "        if fallback not in self._logged:\n"
        "            self.metrics.count_fallback(fallback)\n",
        FALLBACKS,
    ),
    _mutant(
        "refused step times are not counted",
        PROFILE,
        "        return (Fallback.TIMES_REFUSED,)\n",
        "        return ()\n",
        PROFILED,
    ),
    _mutant(
        "step times that cannot be kept are not counted",
        PROFILE,
        "(*wrong, Fallback.TIMES_NOT_KEPT)",
        "wrong",
        PROFILED,
    ),
    _mutant(
        "a refused sts.json is not counted",
        "sglang_dspark/step/build.py",
        '"sts.json not used", (Fallback.STS_REFUSED,)',
        '"sts.json not used", ()',
        "tests/step/test_engine_build.py",
    ),
    _mutant(
        "results on their way are given up",
        ENGINE,
        "if not followed and len(self._steps) <= MOST_AWAITED:",
        "if not followed and len(self._steps) <= 0:",
        FALLBACKS,
    ),
    _mutant(
        "a result that is given up is not counted",
        ENGINE,
        "                self._log_fallback(\n                    Fallback.RESULT_LOST",
        "                str(\n                    Fallback.RESULT_LOST",
        FALLBACKS,
    ),
    _mutant(
        "a step that took for ever is learned",
        ENGINE,
        "(seconds > 0 and math.isfinite(seconds))",
        "not seconds <= 0",
        FALLBACKS,
    ),
    _mutant(
        "an infinite confidence is not told",
        ENGINE,
        "        if not np.isfinite(logits).all():\n",
        "        if np.isnan(logits).any():\n",
        FALLBACKS,
    ),
    _mutant(
        "a record of faults mixes commits",
        RECORD,
        ' if earlier["commit"] == commit() else []',
        "",
        RECORDED,
    ),
    _mutant(
        "a fault that ran again has two lines",
        RECORD,
        'if each["test"] not in ran]',
        "if ran]",
        RECORDED,
    ),
    _mutant(
        "a scheduler that refuses its drafter leaves the server with a traceback",
        "sglang_dspark/serving/startup.py",
        "    return parent in _started_by or ",
        "    return ",
        "tests/serving/test_startup.py",
    ),
)
