"""Never a tax: speculate only while it pays in measured tokens per second.

A predicted gain can be a real loss. For each load (requests, by powers of two) the guard keeps how
many tokens came out, against how many the plan had promised for the seconds spent, apart for steps
that speculated and steps that did not. Their quotients correct the coming step's prediction:

    gain = (q_spec theta_spec) / (q_plain theta_plain)

The predicted part is averaged over the recent steps of the present phase, as one step of few
requests says little.

Being quotients they carry over between batches of unlike size. Speculation stops when the gain
falls below 1 + min_gain - hysteresis and resumes above 1 + min_gain. Without speculating nothing
is learned of it, so a stopped load probes a few steps after a pause; each probe that fails doubles
the pause. The other way round, plain steps are probed now and then while the gain is small enough
to matter.

Everything here is about finished steps; the decision is made before drafting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum


class Mode(Enum):
    """What a load does at present."""

    SPECULATE = "speculate"
    PLAIN = "plain"
    PROBE_SPECULATE = "probe_speculate"  # for a few steps, coming from PLAIN
    PROBE_PLAIN = "probe_plain"  # for a few steps, coming from SPECULATE

    @property
    def speculates(self) -> bool:
        """Whether steps in this mode draft."""
        return self in (Mode.SPECULATE, Mode.PROBE_SPECULATE)


@dataclass(frozen=True)
class GuardConfig:
    """min_gain, hysteresis: dimensionless, of tokens/s. doubt: standard errors of experience
    that must speak against speculation before it stops. The rest counts steps.

    memory: steps after which a measurement has faded to 1/e. prior: steps that the promise itself
    counts for beside measured ones. settle: steps of a new phase that are not measured, while the
    pipeline still holds steps of the old one. outlook: steps that predictions are averaged over.
    close: above this gain plain steps are not probed.
    """

    min_gain: float = 0.02
    hysteresis: float = 0.02
    doubt: float = 1.0
    memory: float = 128.0
    prior: float = 8.0
    settle: int = 2
    outlook: int = 32
    probe: int = 8
    first_pause: int = 32
    longest_pause: int = 4096
    plain_every: int = 1024
    close: float = 1.5

    def __post_init__(self) -> None:
        if min(self.min_gain, self.hysteresis, self.doubt) < 0:
            raise ValueError(f"min_gain, hysteresis, doubt must be at least 0: {self}")
        if not 0 <= self.settle < self.probe:
            raise ValueError(f"a probe of {self.probe} steps must outlast settle {self.settle}")
        if not 1 <= self.first_pause <= self.longest_pause or self.plain_every < 1:
            raise ValueError(f"pauses must be at least 1 and ordered: {self}")
        if min(self.memory, self.outlook) < 1 or self.prior <= 0:
            raise ValueError(f"memory, outlook must be at least 1 and prior above 0: {self}")


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

    mode: Mode = Mode.SPECULATE
    age: int = 0  # steps in this mode
    pause: int = 0  # present length of a pause; 0 before the first
    speculating: Realised = field(default_factory=Realised)
    plain: Realised = field(default_factory=Realised)

    predicted: float = 0.0  # mean log of theta_spec / theta_plain over recent steps
    predictions: int = 0  # how many steps that mean stands for

    def gain(self, config: GuardConfig, doubt: float = 0.0) -> float:
        """Tokens/s of speculating over plain, as predicted and then corrected by experience.

        doubt: standard errors of experience by which speculation is favoured.
        """
        favoured = self.speculating.quotient(config.prior)
        favoured += doubt * self.speculating.error(config.prior)
        return math.exp(self.predicted) * favoured / self.plain.quotient(config.prior)

    def expecting(self, theta_spec: float, theta_plain: float, config: GuardConfig) -> LoadState:
        """With one more prediction, tokens/s of the best speculating and of the plain step."""
        count = min(self.predictions + 1, config.outlook)
        change = (math.log(theta_spec / theta_plain) - self.predicted) / count
        return replace(self, predicted=self.predicted + change, predictions=count)

    def entering(self, mode: Mode, pause: int | None = None) -> LoadState:
        """At the first step of another mode. Predictions go on unless drafting starts or stops."""
        fresh = self if mode.speculates is self.mode.speculates else replace(self, predictions=0)
        return replace(fresh, mode=mode, age=1, pause=self.pause if pause is None else pause)


def advance(
    state: LoadState, theta_spec: float, theta_plain: float, config: GuardConfig
) -> LoadState:
    """The state that the coming step runs in; its mode is the decision.

    theta_spec, theta_plain: predicted tokens/s of the best speculating and of the plain step.
    """
    state = state.expecting(theta_spec, theta_plain, config)
    state = replace(state, age=state.age + 1)
    gain, tried = state.gain(config), state.age > config.probe
    if state.mode is Mode.SPECULATE:
        likely = state.gain(config, config.doubt)
        if tried and likely < 1 + config.min_gain - config.hysteresis:
            return _paused(state, config)
        if state.age > config.plain_every:
            return state.entering(Mode.PROBE_PLAIN if gain < config.close else state.mode, pause=0)
    elif state.mode is Mode.PROBE_PLAIN and tried:
        return state.entering(Mode.SPECULATE)
    elif state.mode is Mode.PLAIN:
        if tried and gain > 1 + config.min_gain + config.hysteresis:
            return state.entering(Mode.SPECULATE)
        if state.age > state.pause:
            return state.entering(Mode.PROBE_SPECULATE)
    elif state.mode is Mode.PROBE_SPECULATE and tried:
        if gain > 1 + config.min_gain:
            return state.entering(Mode.SPECULATE, pause=0)
        return _paused(state, config)
    return state


def _paused(state: LoadState, config: GuardConfig) -> LoadState:
    pause = min(max(config.first_pause, 2 * state.pause), config.longest_pause)
    return state.entering(Mode.PLAIN, pause)


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

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self._loads: dict[int, LoadState] = {}
        self._last: Mode | None = None
        self._since_switch = 0
        self.fallbacks = 0
        self.recoveries = 0

    def decide(self, requests: int, theta_spec: float, theta_plain: float) -> Verdict:
        """Whether the coming step of R requests speculates; call once a step."""
        before = self.state(requests)
        after = advance(before, theta_spec, theta_plain, self.config)
        self._loads[requests.bit_length()] = after
        self.fallbacks += before.mode.speculates and after.mode is Mode.PLAIN
        self.recoveries += not before.mode.speculates and after.mode is Mode.SPECULATE
        switched = self._last is None or self._last.speculates is not after.mode.speculates
        self._since_switch = 0 if switched else self._since_switch + 1
        self._last = after.mode
        settled = self._since_switch >= self.config.settle
        return Verdict(after.mode.speculates, settled, after.mode, after.gain(self.config))

    def observe(
        self, requests: int, *, speculated: bool, tokens: float, seconds: float, theta: float
    ) -> None:
        """A finished, settled step without prefill; theta is what its plan predicted."""
        self._loads[requests.bit_length()] = observed(
            self.state(requests),
            speculated=speculated,
            tokens=tokens,
            seconds=seconds,
            theta=theta,
            memory=self.config.memory,
        )

    def state(self, requests: int) -> LoadState:
        """The memory of the load that R requests belong to."""
        return self._loads.get(requests.bit_length(), LoadState())
