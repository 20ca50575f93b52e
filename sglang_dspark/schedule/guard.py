"""Speculate only while it pays in measured tokens/s: never slower than plain decoding.

A predicted gain can be a real loss. For each load (requests, to the nearest power of two) the guard
keeps how many tokens came out, against how many the plan had promised for the seconds spent, apart
for steps that speculated and steps that did not. Their quotients correct the coming step's
prediction:

    gain = (q_spec theta_spec) / (q_plain theta_plain)

The predicted part is averaged over the recent steps that drafted, as one step of few requests says
little. Without drafts there are no confidences; the caller then predicts from the prior, and that
mean follows what changes in these predictions (requests, step times).

As quotients they carry over between batches of different sizes. Speculation stops when the gain
is below 1 + min_gain - HYSTERESIS and resumes above 1 + min_gain; where even the first promise
is a clear loss it never starts. Without speculating nothing is learned of it, so a stopped load
probes a few steps after a pause. The other way round, plain steps are probed now and then while the
gain is small enough to matter. Probes are rationed: each one that changes nothing doubles the time
to the next, and the worse the other way looks, the longer that time is from the beginning, so that
probing costs about `probe_cost` of the tokens.

When an answer ends, a step or two run with an empty slot. They count as the load around them: the
next load below or above decides from its `visit_steps`-th step on, and until then nothing is
measured. Each change of mode costs a step's context, and so short a visit measures nothing.

Everything here is about finished steps; the decision is made before drafting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum


class Mode(Enum):
    """Present mode of a load."""

    SPECULATE = "speculate"
    PLAIN = "plain"
    PROBE_SPECULATE = "probe_speculate"  # for a few steps, coming from PLAIN
    PROBE_PLAIN = "probe_plain"  # for a few steps, coming from SPECULATE
    OFF = "off"  # no load drafts: acceptance is below schedule.min_acceptance; not the guard's

    @property
    def speculates(self) -> bool:
        """Return whether steps in this mode draft."""
        return self in (Mode.SPECULATE, Mode.PROBE_SPECULATE)


# Not knobs: what a server runs with, and nothing has asked to be otherwise.
HYSTERESIS = 0.02  # of tokens/s, between stopping and resuming: gains near the margin do not flap
PRIOR = 8.0  # steps that the promise itself counts for beside measured ones that speculated
PRIOR_REQUESTS = 24.0  # outcomes of single requests it counts for at least: one alone says little
PLAIN_PRIOR = 1.0  # the same of plain steps: what they give is no chance, so few outweigh it
SETTLE = 2  # unmeasured steps of a new phase: the pipeline still holds steps of the old one
OUTLOOK = 32  # steps that predictions are averaged over
OUTLOOK_REQUESTS = 128  # predictions of single requests, at least: one answer is not the load
CARRIED = 8  # steps that predictions from before a pause count for after it
LEAST_TIMED = 3  # timed steps that a probe waits for, up to four times its length
LONGEST_PAUSE = 1024  # steps; a load is asked again, however often it has lost


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """A policy; `SERVING_GUARD` is the one that serves.

    min_gain: part of plain tokens/s that speculating must add to be resumed.
    doubt: standard errors of experience that must speak against speculation before it stops.
    untried_loss: a load that loses more than this part of plain tokens/s stops at once, untried.
    probe_cost: part of the tokens that probes of the way not taken may cost.
    probe_start_cost: steps' worth that beginning a probe of speculation costs for each request.
    memory: steps after which a measurement has faded to 1/e.
    probe: steps of a probe.
    first_pause: least steps of a pause before speculation is probed.
    plain_every: steps of speculation before plain decoding is first probed.
    plain_probe_below: gain from which on plain decoding is not probed.
    visit_steps: step of the next load from which it decides; one further off does at once.
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


# A planned step of a plain phase stands for several of a server, so its pauses count few. Plain
# decoding is tried early: by an unchecked promise about plain steps, 16 users were served at
# 0.93 of plain decoding's speed while the guard estimated 1.07. A gain must be 6%: at 8 users
# the guard's gain was 1.055 where clients got 1.01 (SE 0.02), drafts and none in turns. A probe
# first writes the context that has waited: a whole step's time at 32 users.
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
    """Steps that the promise counts for at a load, of about 2 ** load requests."""
    return max(PRIOR, PRIOR_REQUESTS / 2**load)


def outlook_at(load: int) -> int:
    """Steps that predictions are averaged over at such a load."""
    return max(OUTLOOK, OUTLOOK_REQUESTS >> load)


def load_of(requests: int) -> int:
    """The load that R >= 1 requests make: log2 R, to the nearest whole number (3 to 5 make 2).

    So a power of two of users, from four on, and one less are the same load.
    """
    below = requests.bit_length() - 1
    return below + (requests**2 >= 2 ** (2 * below + 1))


@dataclass(frozen=True)
class Realised:
    """Faded tokens that came out, and tokens promised for the time that passed, in steps' worth."""

    delivered: float = 0.0
    promised: float = 0.0
    squares: float = 0.0  # of the steps' ratios

    def after(self, ratio: float, memory: float) -> Realised:
        """With one step that delivered `ratio` of its promise."""
        keep = 1 - 1 / memory
        return Realised(
            self.delivered * keep + ratio,
            self.promised * keep + 1.0,
            self.squares * keep + ratio**2,
        )

    def faded(self, steps: float) -> Realised:
        """The same, worth no more than so many steps."""
        keep = min(1.0, steps / self.promised) if self.promised else 1.0
        return Realised(self.delivered * keep, self.promised * keep, self.squares * keep)

    def quotient(self, prior: float) -> float:
        """Delivered over promised; 1 without evidence, which counts as `prior` steps."""
        return (self.delivered + prior) / (self.promised + prior)

    def error(self, prior: float) -> float:
        """Standard error of the quotient."""
        if self.promised < 2:
            return 0.0  # the promise alone speaks
        variance = max(self.squares / self.promised - (self.delivered / self.promised) ** 2, 0.0)
        return math.sqrt(variance * self.promised) / (self.promised + prior)


@dataclass(frozen=True)
class LoadState:
    """The guard's memory of one load."""

    load: int  # `load_of` the requests
    mode: Mode = Mode.SPECULATE
    age: int = 0  # steps in this mode
    measured: int = 0  # of them, those that were timed
    pause: int = 0  # present length of a pause; 0 before the first
    trust: int = 0  # present time between probes of plain decoding; 0 before the first
    speculating: Realised = field(default_factory=Realised)
    plain: Realised = field(default_factory=Realised)

    predicted: float = 0.0  # mean log of theta_spec / theta_plain over recent steps that drafted
    predictions: int = 0  # how many steps that mean stands for
    unseeing: float | None = None  # the last such log in a phase without drafts, from the prior

    def gain(self, config: GuardConfig, doubt: float = 0.0) -> float:
        """Tokens/s of speculating over plain, as predicted and then corrected by experience.

        doubt: standard errors of experience by which speculation is favoured.
        """
        prior = prior_at(self.load)
        favoured = self.speculating.quotient(prior) + doubt * self.speculating.error(prior)
        return math.exp(self.predicted) * favoured / self.plain.quotient(PLAIN_PRIOR)

    def expecting(self, theta_spec: float, theta_plain: float) -> LoadState:
        """With one more prediction, tokens/s of the best speculating and of the plain step.

        In a phase without drafts they must come from the prior: the confidences before it are one
        sample, and repeating it would not make it more.
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
        """At the first step of another mode. A pause makes earlier predictions count for less."""
        pause = self.pause if pause is None else pause
        fresh = replace(self, mode=mode, age=1, measured=0, pause=pause, unseeing=None)
        if self.mode is not Mode.PLAIN:
            return fresh
        return replace(fresh, predictions=min(self.predictions, CARRIED))

    def tried(self, config: GuardConfig) -> bool:
        """Return whether this mode had its steps, enough of them timed between prefills."""
        enough = self.measured >= LEAST_TIMED or self.age > 4 * config.probe
        return self.age > config.probe and enough


def advance(
    state: LoadState, theta_spec: float, theta_plain: float, config: GuardConfig
) -> LoadState:
    """The state that the coming step runs in; its mode is the decision.

    theta_spec, theta_plain: predicted tokens/s of the best speculating and of the plain step; in a
    mode without drafts the former by the prior.
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
    """Return whether speculating is a loss beyond the doubt in its favour."""
    return state.gain(config, config.doubt) < 1 + config.min_gain - HYSTERESIS


def _paused(state: LoadState, config: GuardConfig) -> LoadState:
    """In plain decoding, for twice as long as the last time or as the probe to come is worth."""
    lost = config.probe * (1 - state.gain(config)) + config.probe_start_cost * 2**state.load
    due = lost / config.probe_cost
    pause = min(max(config.first_pause, 2 * state.pause, int(due)), LONGEST_PAUSE)
    return replace(state.entering(Mode.PLAIN, pause), trust=0)


def _trusted(state: LoadState, config: GuardConfig) -> LoadState:
    """Speculating again, after plain decoding was found no better."""
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
    """With a finished step: tokens emitted, seconds it took, tokens/s it was predicted to give.

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
    """speculate: whether the step drafts. settled: whether it is to be measured."""

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
        """Forget what was measured: target or drafter have new weights."""
        self._loads: dict[int, LoadState] = {}
        self._present: int | None = None  # the load that decides
        self._away = 0  # steps of other loads since one of it
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
        """A step of R requests goes by the last decision: one more of its mode."""
        state = self.state(requests)
        self._loads[state.load] = replace(state, age=state.age + 1)

    def observe(
        self, requests: int, *, speculated: bool, tokens: float, seconds: float, theta: float
    ) -> None:
        """A finished, settled step without prefill; theta is what its plan predicted."""
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
        """The memory that a coming step of R requests is decided by."""
        return self._load(self._deciding(load_of(requests)))

    def _deciding(self, load: int) -> int:
        """The load that decides a coming step of `load`: itself, or the one it interrupts."""
        near = self._present is not None and abs(load - self._present) <= 1
        if self._present is None or not near or self._away + 1 >= self.config.visit_steps:
            return load
        return self._present

    def _load(self, load: int) -> LoadState:
        """The memory of a load; a new one begins with a neighbour's.

        What was measured at half or twice the load says more than nothing, and less than a measured
        step of its own: it counts as many steps as the promise does.
        """
        if load in self._loads:
            return self._loads[load]
        near = self._loads.get(load - 1) or self._loads.get(load + 1) or LoadState(load)
        return LoadState(
            load,
            speculating=near.speculating.faded(prior_at(load)),
            plain=near.plain.faded(PLAIN_PRIOR),
        )
