"""Sequential Temperature Scaling: its fit, its file, and how a server goes on from it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ONLINE = "sglang_dspark/schedule/online.py"
FITTED = "sglang_dspark/schedule/calibration.py"
SHIFT = "sglang_dspark/schedule/request_shift.py"
ATTACH = "sglang_dspark/step/build.py"
LOADED = ("tests/step/test_engine_build.py",)
ONLINE_TESTS = ("tests/schedule/test_online.py",)
FIT_TESTS = "tests/schedule/test_calibration.py"

MUTANTS = (
    Mutant(
        name="temperatures multiplied at load",
        area="calibration",
        file=ONLINE,
        old="self._u = np.clip(1.0 / temperature, U_LOW, U_HIGH)",
        new="self._u = np.clip(temperature, U_LOW, U_HIGH)",
        tests=LOADED,
    ),
    Mutant(
        name="shifts not divided by the temperature",
        area="calibration",
        file=ONLINE,
        old="self._v = np.clip(shift / temperature, -V_LIMIT, V_LIMIT)",
        new="self._v = np.clip(shift, -V_LIMIT, V_LIMIT)",
        tests=LOADED,
    ),
    Mutant(
        name="regimes swapped at load",
        area="calibration",
        file=ATTACH,
        old="for temperature in (0.0, 1.0)]",
        new="for temperature in (1.0, 0.0)]",
        tests=LOADED,
    ),
    Mutant(
        name="plain temperatures loaded with nothing else",
        area="calibration",
        file=ATTACH,
        old="sts.table(temperature).followed",
        new="sts.table(temperature).plain",
        tests=LOADED,
    ),
    Mutant(
        name="another drafter's table taken",
        area="calibration",
        file=ATTACH,
        old="read_sts(path, drafter_sha256=_weights_sha256(folder), gamma=gamma)",
        new="read_sts(path, gamma=gamma)",
        tests=LOADED,
    ),
    Mutant(
        name="regimes of the file swapped",
        area="calibration",
        file="sglang_dspark/schedule/sts_file.py",
        old="return GREEDY if temperature == 0 else SAMPLED",
        new="return SAMPLED if temperature == 0 else GREEDY",
        tests=LOADED,
    ),
    Mutant(
        name="a positive logit lowers the confidence",
        area="calibration",
        file=ONLINE,
        old="out[r, k] = np.float32(1.0 / (1.0 + np.exp(-(u[g, k] * x + v[g, k] + own))))",
        new="out[r, k] = np.float32(1.0 / (1.0 + np.exp(u[g, k] * x + v[g, k] + own)))",
        tests=LOADED,
    ),
    Mutant(
        name="outcomes learned one draft too far",
        area="calibration",
        file=ONLINE,
        old="error = (1.0 if accepted[r] > k else 0.0) - c",
        new="error = (1.0 if accepted[r] >= k else 0.0) - c",
        tests=ONLINE_TESTS,
    ),
    Mutant(
        name="drafts that were not reached count as rejected",
        area="calibration",
        file=ONLINE,
        old="        for k in range(min(verified[r], accepted[r] + 1)):\n            if not",
        new="        for k in range(verified[r]):\n            if not",
        tests=ONLINE_TESTS,
    ),
    Mutant(
        name="a request's own shift inherited with the slot",
        area="calibration",
        file=SHIFT,
        old="shift[row] if owner[row] == generations[r] else 0.0",
        new="shift[row]",
        tests=("tests/schedule/test_request_shift.py::test_a_new_generation_starts_anew",),
    ),
    Mutant(
        name="a request's own shift never fades",
        area="calibration",
        file=SHIFT,
        old="shift[row] = keep * moved",
        new="shift[row] = moved",
        tests=("tests/schedule/test_request_shift.py::test_steps_without_a_verified_draft_forget",),
    ),
    Mutant(
        name="temperatures multiplied in the fit's own rule",
        area="calibration",
        file=FITTED,
        old="(logits.float() + shift) / temperatures.float()",
        new="(logits.float() + shift) * temperatures.float()",
        tests=(f"{FIT_TESTS}::test_calibration_holds_on_other_steps",),
    ),
    Mutant(
        name="censored drafts fitted as failures",
        area="calibration",
        file=FITTED,
        old="return self.verified >= k",
        new="return self.verified >= 0",
        tests=(f"{FIT_TESTS}::test_known_temperatures_are_recovered",),
    ),
    Mutant(
        name="shifts fitted to drafts that were not reached",
        area="calibration",
        file=FITTED,
        old="data.known(k) & data.survived(k - 1) for k",
        new="data.known(k) for k",
        tests=(f"{FIT_TESTS}::test_known_shifts_are_recovered",),
    ),
    Mutant(
        name="survival is the last confidence alone",
        area="calibration",
        file="sglang_dspark/schedule/survival.py",
        old="running = running * factors[..., k]",
        new="running = factors[..., k]",
        tests=(f"{FIT_TESTS}::test_survival_is_the_product_left_to_right",),
    ),
    Mutant(
        name="calibration errors of opposite bins cancel",
        area="calibration",
        file=FITTED,
        old="return float(np.abs(gap).sum() / len(values))",
        new="return float(abs(gap.sum()) / len(values))",
        tests=(f"{FIT_TESTS}::test_ece_by_hand",),
    ),
)
