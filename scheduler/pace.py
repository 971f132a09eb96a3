"""What a step costs here, learned while it runs: the queue's order, the size of chunks and the tiers go by it.

    seconds of a step  =  base  +  per prompt token · prompt tokens  +  per sequence · generating sequences
                       +  per context token · sum of the prompt tokens' positions

A token at position p looks at p tokens before it: that is why the end of a long prompt takes longer than its beginning.
Arithmetic alone: no clock, no requests, no pages.
"""

import math
from typing import NamedTuple

# The units in which the coefficients are of about one size: prompt tokens of a chunk, sequences of a batch, and such a
# chunk some thousand tokens into its prompt.
PROMPT_UNIT = 256.0
SEQUENCE_UNIT = 16.0
CONTEXT_UNIT = 4096.0 * PROMPT_UNIT
# Of a step's seconds, the noise of one measurement. Of a coefficient, its drift from one step to the next, and how
# unsure of it one can become at all; one that is smaller than a share of the step drifts as if it were as large.
NOISE = 0.1
DRIFT = 0.02
DOUBT = 1.0
LEAST_SHARE = 0.1
# Prompt tokens of a step that says what they cost; smaller ones cost mostly their overhead.
LARGE = 64
# A measurement further off than this many standard deviations counts as if it were only so far off.
MOST_DEVIATIONS = 3.0
# Nothing is known about chunks more than this many times as large as the largest that was seen.
EXTRAPOLATION = 2

Vector = tuple[float, float, float, float]


class Coefficients(NamedTuple):
    """Seconds: of any step, of each token of a prompt in it, of each sequence that generates in it, and of each token
    that a prompt's token has before it."""

    base: float
    per_prompt_token: float
    per_sequence: float
    per_context_token: float


def context_of(start: int, num_tokens: int) -> float:
    """The sum of the positions of a prompt's tokens [start, start + num_tokens): the tokens that they look at."""
    return num_tokens * (start + (num_tokens - 1) / 2)


class Pace:
    """Seconds of a step, as a function of what is in it.

    pace.observe(512, 4, seconds=0.120, context=context_of(0, 512))     # after every step
    pace.seconds(256, 4, context_of(1024, 256))     # 0.074: what such a step will take
    pace.chunk(4, within=0.050, start=1024)         # 141: prompt tokens for which such a step has 50 ms

    seconds_per_token  what reading one token of a prompt costs where many are read at once, overhead included; 0 until
                       measured

    The coefficients are tracked by a Kalman filter: each step corrects them by as much as it can tell them apart, and
    they may drift. What the recent steps say nothing about (a batch that never changes, say) stays as it was.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.largest_chunk = 0  # prompt tokens of one step, the most ever seen
        self._state = [0.0, 0.0, 0.0, 0.0]  # the coefficients, in the units above
        self._covariance = [[0.0] * 4 for _ in range(4)]
        self._largest = [0.0] * 4  # of each feature, what was seen

    def observe(self, num_prompt_tokens: int, num_generating: int, seconds: float, context: float = 0.0) -> None:
        """A step that computed so much took `seconds`. Steps without time, or of nothing, say nothing.

        context  the sum of the positions of the prompt tokens, here as below
        """
        if num_prompt_tokens + num_generating == 0 or not 0.0 < seconds < math.inf:
            return
        self.largest_chunk = max(self.largest_chunk, num_prompt_tokens)
        self._correct(_features(num_prompt_tokens, num_generating, context), seconds)
        if num_prompt_tokens >= LARGE:
            sample = max(0.0, seconds - num_generating * self.coefficients.per_sequence) / num_prompt_tokens
            self.seconds_per_token += (sample - self.seconds_per_token) * (0.2 if self.seconds_per_token else 1.0)

    @property
    def coefficients(self) -> Coefficients:
        """As far as they are known; all 0 at the start."""
        base, prompt, sequence, context = self._state
        return Coefficients(base, prompt / PROMPT_UNIT, sequence / SEQUENCE_UNIT, context / CONTEXT_UNIT)

    def seconds(
        self, num_prompt_tokens: int, num_generating: int, context: float = 0.0, *, num_steps: int = 1
    ) -> float:
        """What such a step is expected to take, or so many steps with all these prompt tokens in them; 0 until
        measured."""
        base, prompt, sequence, far = self.coefficients
        return num_steps * (base + sequence * num_generating) + prompt * num_prompt_tokens + far * context

    def chunk(self, num_generating: int, within: float, start: int = 0) -> int:
        """Prompt tokens that a step has room for if it is to take at most `within` seconds; 0 if there is none.

        start  position of the first of them

        At most twice as many as were ever seen in a step: how the cost goes on beyond that is not known yet.
        """
        most = EXTRAPOLATION * self.largest_chunk
        room = within - self.seconds(0, num_generating)
        if room <= 0.0:
            return 0
        if self.seconds(most, num_generating, context_of(start, most)) <= within:
            return most
        # room = per_token · n + far / 2 · n², solved for n in the way that bears far = 0.
        _, prompt, _, far = self.coefficients
        per_token = prompt + far * (start - 0.5)
        return int(2 * room / (per_token + math.sqrt(per_token * per_token + 2 * far * room)))

    def _correct(self, x: Vector, seconds: float) -> None:
        """One step of the filter: compare with what was expected, and share out the error by how unsure each is."""
        covariance, state = self._covariance, self._state
        for i, most in enumerate(self._largest):
            if x[i] > EXTRAPOLATION * most:
                # More of it than was ever seen: until now nobody could tell what it costs, but at most this whole step.
                self._largest[i] = x[i]
                covariance[i][i] = max(covariance[i][i], (DOUBT * seconds / max(1.0, x[i])) ** 2)
        reach = [_dot(row, x) for row in covariance]
        variance = _dot(reach, x) + (NOISE * seconds) ** 2
        most = MOST_DEVIATIONS * math.sqrt(variance)
        error = max(-most, min(most, seconds - _dot(state, x)))
        for i in range(4):
            # None of them can cost less than nothing.
            state[i] = max(0.0, state[i] + reach[i] / variance * error)
            for j in range(4):
                covariance[i][j] -= reach[i] * reach[j] / variance
            size = max(state[i], LEAST_SHARE * seconds)
            if covariance[i][i] < (DOUBT * size) ** 2:
                covariance[i][i] += (DRIFT * size) ** 2


def _features(num_prompt_tokens: int, num_generating: int, context: float) -> Vector:
    return 1.0, num_prompt_tokens / PROMPT_UNIT, num_generating / SEQUENCE_UNIT, context / CONTEXT_UNIT


def _dot(a: list[float], b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
