"""Speculate only while it pays in measured tokens/s: never slower than plain decoding.

A predicted gain can be a real loss. For each load (requests, to the nearest power of two) the guard
compares the tokens emitted with the tokens that the plans predicted for the seconds spent,
separately for steps that speculated and steps that did not. Their quotients q correct the coming
step's prediction:

    gain = (q_spec theta_spec) / (q_plain theta_plain)

The predicted part is averaged over the recent steps that drafted, because one step of few requests
is noisy. Without drafts there are no confidences: the caller then predicts from the prior, and the
mean moves by the changes of these predictions (requests, step times).

Quotients carry over between batches of different sizes. Speculation stops when the gain, plus
`doubt` standard errors, is below 1 + min_gain - HYSTERESIS. It resumes after a probe with a gain
above 1 + min_gain, or without a probe above 1 + min_gain + HYSTERESIS. A loss of more than
`untried_loss` stops it at once, before any probe. A stopped load measures no speculation, so it
probes a few steps after a pause. Plain steps are probed while the gain is below
`plain_probe_below`. Each probe that changes nothing doubles the time to the next. That time also
grows with the predicted loss of a probe, so that probing costs about `probe_cost` of the tokens.

When an answer ends, a step or two run with an empty slot. They count as the surrounding load: the
next load below or above decides from its `visit_steps`-th step on, and until then nothing is
measured. A change of mode costs a step's context, and so short a visit has no measured steps.

The guard uses finished steps only and decides before drafting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum


class Mode(Enum):
    """Current mode of a load."""

    SPECULATE = "speculate"
    PLAIN = "plain"
    PROBE_SPECULATE = "probe_speculate"  # for a few steps, coming from PLAIN
    PROBE_PLAIN = "probe_plain"  # for a few steps, coming from SPECULATE
    OFF = "off"  # no load drafts; set outside the guard, below schedule.min_acceptance

    @property
    def speculates(self) -> bool:
        """Return whether steps in this mode draft."""
        return self in (Mode.SPECULATE, Mode.PROBE_SPECULATE)


# Constants, not settings: no server has needed other values.
HYSTERESIS = 0.02  # of tokens/s, between stopping and resuming: gains near the margin do not flap
PRIOR = 8.0  # weight of the prediction, in measured steps that speculated
PRIOR_REQUESTS = 24.0  # its least weight, in outcomes of single requests: one alone is noisy
PLAIN_PRIOR = 1.0  # weight in plain steps: their yield is not random, so few outweigh it
SETTLE = 2  # unmeasured steps of a new phase: the pipeline still holds steps of the old one
OUTLOOK = 32  # steps that predictions are averaged over
OUTLOOK_REQUESTS = 128  # predictions of single requests, at least: one answer is not the load
CARRIED = 8  # weight after a pause of the predictions from before it, in steps
LEAST_TIMED = 3  # timed steps that a probe waits for, up to four times its length
LONGEST_PAUSE = 1024  # steps; a load is probed again, however often it has lost


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Parameters of the guard; servers use `SERVING_GUARD`.

    min_gain: part of plain tokens/s that speculating must add to be resumed.
    doubt: standard errors that are added in favour of speculation before it stops.
    untried_loss: a load that loses more than this part of plain tokens/s stops at once, untried.
    probe_cost: part of the tokens that probes of the other mode may cost.
    probe_start_cost: cost of starting a probe of speculation, in steps for each request.
    memory: steps after which a measurement has faded to 1/e.
    probe: steps of a probe.
    first_pause: least steps of a pause before speculation is probed.
    plain_every: steps of speculation before plain decoding is first probed.
    plain_probe_below: gain from which on plain decoding is not probed.
    visit_steps: step of a neighbouring load from which it decides; other loads decide at once.
    """

    min_gain: float
    doubt: float
    untried_loss: float
    probe_cost: float
    probe_start_cost: float
    memory: float
    probe: int
    first_pause: int
    plain_every: int
    plain_probe_below: float
    visit_steps: int

    def __post_init__(self) -> None:
        if min(self.min_gain, self.doubt, self.probe_start_cost) < 0:
            raise ValueError(f"min_gain, doubt and probe_start_cost must be at least 0: {self}")
        if not 0 < self.untried_loss < 1 or not 0 < self.probe_cost < 1:
            raise ValueError(f"untried_loss and probe_cost must lie in (0, 1): {self}")
        if self.probe <= SETTLE:
            raise ValueError(f"a probe of {self.probe} steps must outlast the {SETTLE} unmeasured")
        if not 1 <= self.first_pause <= LONGEST_PAUSE:
            raise ValueError(f"first_pause must lie in 1 to {LONGEST_PAUSE}: {self}")
        if min(self.memory, self.plain_every, self.visit_steps) < 1:
            raise ValueError(f"memory, plain_every and visit_steps must be at least 1: {self}")


# One planned step of a plain phase stands for several of a server, so pauses are short. Plain
# decoding is probed early: with an unmeasured prediction of plain steps, 16 users were served at
# 0.93 of plain decoding's speed while the guard estimated 1.07. A gain must be 6%: at 8 users
# the guard's gain was 1.055 where clients measured 1.01 (SE 0.02), alternating both modes. A probe
# first writes the pending drafter context: a whole step's time at 32 users.
SERVING_GUARD = GuardConfig(
    min_gain=0.06,
    doubt=1.0,
    untried_loss=0.07,
    probe_cost=0.01,
    probe_start_cost=0.03,
    memory=128.0,
    probe=8,
    first_pause=8,
    plain_every=16,
    plain_probe_below=1.25,
    visit_steps=4,
)


def prior_at(load: int) -> float:
    """Return the weight of the prediction, in steps, at a load of about 2 ** load requests."""
    return max(PRIOR, PRIOR_REQUESTS / 2**load)


def outlook_at(load: int) -> int:
    """Return the number of steps that predictions are averaged over at such a load."""
    return max(OUTLOOK, OUTLOOK_REQUESTS >> load)


def load_of(requests: int) -> int:
    """Return the load of R >= 1 requests: log2 R, to the nearest whole number (3 to 5 make 2).

    A power of two of users, from four on, and one user less are the same load.
    """
    below = requests.bit_length() - 1
    return below + (requests**2 >= 2 ** (2 * below + 1))


@dataclass(frozen=True)
class Realised:
    """Faded sums of emitted and of predicted tokens, in units of a step's prediction."""

    delivered: float = 0.0
    promised: float = 0.0
    squares: float = 0.0  # of the steps' ratios

    def after(self, ratio: float, memory: float) -> Realised:
        """Return the sums with one more step, which emitted `ratio` of its prediction."""
        keep = 1 - 1 / memory
        return Realised(
            self.delivered * keep + ratio,
            self.promised * keep + 1.0,
            self.squares * keep + ratio**2,
        )

    def faded(self, steps: float) -> Realised:
        """Return the sums, scaled to the weight of at most `steps` steps."""
        keep = min(1.0, steps / self.promised) if self.promised else 1.0
        return Realised(self.delivered * keep, self.promised * keep, self.squares * keep)

    def quotient(self, prior: float) -> float:
        """Return delivered over promised, with `prior` steps of quotient 1 added."""
        return (self.delivered + prior) / (self.promised + prior)

    def error(self, prior: float) -> float:
        """Return the standard error of the quotient."""
        if self.promised < 2:
            return 0.0  # too few steps for a variance
        variance = max(self.squares / self.promised - (self.delivered / self.promised) ** 2, 0.0)
        return math.sqrt(variance * self.promised) / (self.promised + prior)


@dataclass(frozen=True)
class LoadState:
    """The guard's memory of one load."""

    load: int  # `load_of` the requests
    mode: Mode = Mode.SPECULATE
    age: int = 0  # steps in this mode
    measured: int = 0  # of them, those that were timed
    pause: int = 0  # current length of a pause; 0 before the first
    trust: int = 0  # current time between probes of plain decoding; 0 before the first
    speculating: Realised = field(default_factory=Realised)
    plain: Realised = field(default_factory=Realised)

    predicted: float = 0.0  # mean log of theta_spec / theta_plain over recent steps that drafted
    predictions: int = 0  # number of steps in that mean
    unseeing: float | None = None  # the last such log in a phase without drafts, from the prior

    def gain(self, config: GuardConfig, doubt: float = 0.0) -> float:
        """Return tokens/s of speculating over plain: the prediction, corrected by measurements.

        doubt: standard errors of the measurements by which speculation is favoured.
        """
        prior = prior_at(self.load)
        favoured = self.speculating.quotient(prior) + doubt * self.speculating.error(prior)
        return math.exp(self.predicted) * favoured / self.plain.quotient(PLAIN_PRIOR)

    def expecting(self, theta_spec: float, theta_plain: float) -> LoadState:
        """Return the state after one more prediction of tokens/s, best speculating and plain.

        In a phase without drafts both must come from the prior: the confidences from before it are
        one sample, and repeating a sample adds no evidence.
        """
        log_gain = math.log(theta_spec / theta_plain)
        if not self.mode.speculates:
            before = log_gain if self.unseeing is None else self.unseeing
            moved = self.predicted + log_gain - before
            return replace(self, predicted=moved, unseeing=log_gain)
        count = min(self.predictions + 1, outlook_at(self.load))
        change = (log_gain - self.predicted) / count
        return replace(self, predicted=self.predicted + change, predictions=count)

    def entering(self, mode: Mode, pause: int | None = None) -> LoadState:
        """Return the state at the first step of `mode`; after PLAIN predictions weigh less."""
        pause = self.pause if pause is None else pause
        fresh = replace(self, mode=mode, age=1, measured=0, pause=pause, unseeing=None)
        if self.mode is not Mode.PLAIN:
            return fresh
        return replace(fresh, predictions=min(self.predictions, CARRIED))

    def tried(self, config: GuardConfig) -> bool:
        """Return whether this mode has had its steps, with enough of them timed."""
        enough = self.measured >= LEAST_TIMED or self.age > 4 * config.probe
        return self.age > config.probe and enough


def advance(
    state: LoadState, theta_spec: float, theta_plain: float, config: GuardConfig
) -> LoadState:
    """Return the state of the coming step; its mode is the decision.

    theta_spec, theta_plain: predicted tokens/s of the best speculating and of the plain step. In a
    mode without drafts, theta_spec is predicted from the prior.
    """
    state = state.expecting(theta_spec, theta_plain)
    state = replace(state, age=state.age + 1)
    gain, tried = state.gain(config), state.tried(config)
    if state.mode is Mode.SPECULATE:
        hopeless = state.gain(config, config.doubt) < 1 - config.untried_loss
        if hopeless or (tried and _loses(state, config)):
            return _paused(state, config)
        if state.age > max(config.plain_every, state.trust):
            if gain >= config.plain_probe_below:
                return state.entering(state.mode)
            return state.entering(Mode.PROBE_PLAIN)
    elif state.mode is Mode.PROBE_PLAIN and tried:
        return _paused(state, config) if _loses(state, config) else _trusted(state, config)
    elif state.mode is Mode.PLAIN:
        if tried and gain > 1 + config.min_gain + HYSTERESIS:
            return state.entering(Mode.SPECULATE)
        if state.age > state.pause:
            return state.entering(Mode.PROBE_SPECULATE)
    elif state.mode is Mode.PROBE_SPECULATE and tried:
        if gain > 1 + config.min_gain:
            return state.entering(Mode.SPECULATE, pause=0)
        return _paused(state, config)
    return state


def _loses(state: LoadState, config: GuardConfig) -> bool:
    """Return whether speculating loses even with `doubt` standard errors in its favour."""
    return state.gain(config, config.doubt) < 1 + config.min_gain - HYSTERESIS


def _paused(state: LoadState, config: GuardConfig) -> LoadState:
    """Return the state in plain decoding, for twice the last pause or for the next probe's cost."""
    lost = config.probe * (1 - state.gain(config)) + config.probe_start_cost * 2**state.load
    due = lost / config.probe_cost
    pause = min(max(config.first_pause, 2 * state.pause, int(due)), LONGEST_PAUSE)
    return replace(state.entering(Mode.PLAIN, pause), trust=0)


def _trusted(state: LoadState, config: GuardConfig) -> LoadState:
    """Return the state that speculates again, after a probe found plain decoding no better."""
    due = config.probe * (1 - 1 / max(state.gain(config), 1.0)) / config.probe_cost
    longer = max(2 * max(state.trust, config.plain_every), int(due))
    again = state.entering(Mode.SPECULATE, pause=0)
    return replace(again, trust=min(longer, LONGEST_PAUSE))


def observed(
    state: LoadState,
    *,
    speculated: bool,
    tokens: float,
    seconds: float,
    theta: float,
    memory: float,
) -> LoadState:
    """Return the state after a finished step: tokens emitted, seconds, predicted tokens/s theta.

    Raises ValueError unless seconds and theta are positive.
    """
    if seconds <= 0 or theta <= 0:
        raise ValueError(f"a step of {seconds} s promised {theta} tokens/s")
    ratio = min(tokens / (seconds * theta), 4.0)  # one clock glitch must not outweigh the memory
    state = replace(state, measured=state.measured + (speculated is state.mode.speculates))
    if speculated:
        return replace(state, speculating=state.speculating.after(ratio, memory))
    return replace(state, plain=state.plain.after(ratio, memory))


@dataclass(frozen=True)
class Verdict:
    """A decision. speculate: whether the step drafts. settled: whether the guard measures it."""

    speculate: bool
    settled: bool
    mode: Mode
    gain: float


class Guard:
    """The states of all loads."""

    def __init__(self, config: GuardConfig = SERVING_GUARD) -> None:
        self.config = config
        self.fallbacks = 0
        self.recoveries = 0
        self.renew()

    def renew(self) -> None:
        """Forget all measurements, because target or drafter have new weights."""
        self._loads: dict[int, LoadState] = {}
        self._present: int | None = None  # the load that decides
        self._away = 0  # steps of other loads since its last one
        self._last: Mode | None = None
        self._since_switch = 0

    def decide(self, requests: int, theta_spec: float, theta_plain: float) -> Verdict:
        """Decide whether the coming step of R requests speculates; call once a step."""
        load = load_of(requests)
        deciding = self._deciding(load)
        before = self._load(deciding)
        if deciding != load:
            self._away += 1
            return Verdict(before.mode.speculates, False, before.mode, before.gain(self.config))
        self._present, self._away = load, 0
        after = advance(before, theta_spec, theta_plain, self.config)
        self._loads[load] = after
        self.fallbacks += before.mode.speculates and after.mode is Mode.PLAIN
        self.recoveries += not before.mode.speculates and after.mode is Mode.SPECULATE
        switched = self._last is None or self._last.speculates is not after.mode.speculates
        self._since_switch = 0 if switched else self._since_switch + 1
        self._last = after.mode
        settled = self._since_switch >= SETTLE
        return Verdict(after.mode.speculates, settled, after.mode, after.gain(self.config))

    def kept(self, requests: int) -> None:
        """Count one more step of R requests in the mode of the last decision."""
        state = self.state(requests)
        self._loads[state.load] = replace(state, age=state.age + 1)

    def observe(
        self, requests: int, *, speculated: bool, tokens: float, seconds: float, theta: float
    ) -> None:
        """Learn from a finished, settled step without prefill; theta is its plan's prediction."""
        load = load_of(requests)
        self._loads[load] = observed(
            self._load(load),
            speculated=speculated,
            tokens=tokens,
            seconds=seconds,
            theta=theta,
            memory=self.config.memory,
        )

    def state(self, requests: int) -> LoadState:
        """Return the state that decides a coming step of R requests."""
        return self._load(self._deciding(load_of(requests)))

    def _deciding(self, load: int) -> int:
        """Return the load that decides a step of `load`: itself, or the one it interrupts."""
        near = self._present is not None and abs(load - self._present) <= 1
        if self._present is None or not near or self._away + 1 >= self.config.visit_steps:
            return load
        return self._present

    def _load(self, load: int) -> LoadState:
        """Return the memory of a load; a new load starts with a neighbour's.

        A measurement at half or twice the load is weaker evidence than a measured step of the load
        itself, so a neighbour's memory weighs as many steps as the prediction.
        """
        if load in self._loads:
            return self._loads[load]
        near = self._loads.get(load - 1) or self._loads.get(load + 1) or LoadState(load)
        return LoadState(
            load,
            speculating=near.speculating.faded(prior_at(load)),
            plain=near.plain.faded(PLAIN_PRIOR),
        )
