"""What a step costs here, learned while the engine runs: the queue's order, the size of chunks and the tiers decide by it.

    seconds of a step  =  base  +  per prompt token · prompt tokens  +  per sequence · generating sequences

Arithmetic alone: no clock, no requests, no pages.
"""

import math
from typing import NamedTuple

# The units in which the three coefficients are of about one size: prompt tokens of a chunk, sequences of a batch.
PROMPT_UNIT = 256.0
SEQUENCE_UNIT = 16.0
# Of a step's seconds: the noise of one measurement, the drift from one step to the next, and how unsure one can become at all.
NOISE = 0.1
DRIFT = 0.01
DOUBT = 1.0
# Prompt tokens of a step that says what they cost; smaller ones cost mostly their overhead.
LARGE = 64
# A measurement further off than this many standard deviations counts as if it were only so far off.
MOST_DEVIATIONS = 3.0
# Nothing is known about chunks more than this many times as large as the largest that was seen.
EXTRAPOLATION = 2

Vector = tuple[float, float, float]


class Coefficients(NamedTuple):
    """Seconds: of any step, of each token of a prompt in it, of each sequence that generates in it."""

    base: float
    per_prompt_token: float
    per_sequence: float


class Pace:
    """Seconds of a step, as a function of what is in it.

    pace.observe(512, 4, seconds=0.120)     # after every step
    pace.seconds(256, 4)                    # 0.071: what such a step will take
    pace.chunk(4, within=0.050)             # 148: prompt tokens that a step of 50 ms has room for beside 4 sequences

    seconds_per_token  what reading one token of a prompt costs where many are read at once, overhead included; 0 until measured

    The coefficients are tracked by a Kalman filter: each step corrects them by as much as it can tell them apart, and they may
    drift. What the recent steps say nothing about (a batch that never changes, say) stays as it was.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.largest_chunk = 0  # prompt tokens of one step, the most ever seen
        self._state = [0.0, 0.0, 0.0]  # the coefficients, in the units above
        self._covariance: list[list[float]] | None = None

    def observe(self, num_prompt_tokens: int, num_generating: int, seconds: float) -> None:
        """A step that computed so much took `seconds`. Steps without time, or of nothing, say nothing."""
        if num_prompt_tokens + num_generating == 0 or not 0.0 < seconds < math.inf:
            return
        self.largest_chunk = max(self.largest_chunk, num_prompt_tokens)
        self._correct(_features(num_prompt_tokens, num_generating), seconds)
        if num_prompt_tokens >= LARGE:
            sample = max(0.0, seconds - num_generating * self.coefficients.per_sequence) / num_prompt_tokens
            self.seconds_per_token += (sample - self.seconds_per_token) * (0.2 if self.seconds_per_token else 1.0)

    @property
    def coefficients(self) -> Coefficients:
        """As far as they are known; all 0 at the start."""
        base, prompt, sequence = self._state
        return Coefficients(base, prompt / PROMPT_UNIT, sequence / SEQUENCE_UNIT)

    def seconds(self, num_prompt_tokens: int, num_generating: int) -> float:
        """What such a step is expected to take; 0 until measured."""
        return _dot(self._state, _features(num_prompt_tokens, num_generating))

    def chunk(self, num_generating: int, within: float) -> int:
        """Prompt tokens that a step has room for if it is to take at most `within` seconds; 0 if there is none.

        At most twice as many as were ever seen in a step: how the cost goes on beyond that is not known yet.
        """
        most = EXTRAPOLATION * self.largest_chunk
        room = within - self.seconds(0, num_generating)
        per_token = self.coefficients.per_prompt_token
        if room <= 0.0:
            return 0
        return most if per_token * most <= room else int(room / per_token)

    def _correct(self, x: Vector, seconds: float) -> None:
        """One step of the filter: compare with what was expected, and share the difference out by how unsure each part is."""
        scale = seconds * seconds
        if self._covariance is None:
            self._covariance = [[DOUBT * scale * (i == j) for j in range(3)] for i in range(3)]
        covariance = self._covariance
        reach = [_dot(row, x) for row in covariance]
        variance = _dot(reach, x) + NOISE * NOISE * scale
        most = MOST_DEVIATIONS * math.sqrt(variance)
        error = max(-most, min(most, seconds - _dot(self._state, x)))
        for i in range(3):
            # None of the three can cost less than nothing.
            self._state[i] = max(0.0, self._state[i] + reach[i] / variance * error)
            for j in range(3):
                covariance[i][j] -= reach[i] * reach[j] / variance
            if covariance[i][i] < DOUBT * scale:
                covariance[i][i] += DRIFT * DRIFT * scale


def _features(num_prompt_tokens: int, num_generating: int) -> Vector:
    return 1.0, num_prompt_tokens / PROMPT_UNIT, num_generating / SEQUENCE_UNIT


def _dot(a: list[float], b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
