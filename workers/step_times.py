"""How long a step of so many tokens takes, learned from the steps that were run."""

from __future__ import annotations

_WEIGHT = 0.05
"""Of the newest step: what is learned follows a change within some forty steps."""

_SPREAD_TOKENS = 8.0
"""Standard deviation of recent steps' sizes from which their times tell what one more token costs."""


class StepTimes:
    """seconds = fixed + tokens * each, by exponentially weighted least squares over recent steps.

    While all steps have one size, as when everybody decodes, the cost of a token stays as it was learned last.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0
        self._each: float | None = None

    def record(self, tokens: int, seconds: float) -> None:
        """Take in one step."""
        if not self._tokens:
            self._tokens, self._seconds = float(tokens), seconds
            return
        more, longer = tokens - self._tokens, seconds - self._seconds
        self._tokens += _WEIGHT * more
        self._seconds += _WEIGHT * longer
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * more * more)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * more * longer)
        if self._variance >= _SPREAD_TOKENS**2:
            self._each = max(self._covariance / self._variance, 1e-9)

    def tokens_within(self, seconds: float) -> int | None:
        """How many tokens a step may have to take about so long; None before the first step. May be 0.

        Before steps of different sizes were seen all of their time is laid to their tokens: the guess is too low, and
        the next step corrects it.
        """
        if not self._tokens:
            return None
        each = self._each if self._each is not None else self._seconds / self._tokens
        fixed = max(0.0, self._seconds - each * self._tokens)
        return max(0, int((seconds - fixed) / each))
