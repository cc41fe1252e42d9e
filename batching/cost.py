"""How long a batch takes on a device: `seconds = overhead + seconds per token x padded tokens`."""

from __future__ import annotations

from dataclasses import dataclass

#: Share of its weight that a measured batch keeps with each one that follows: the last hundred or so tell.
KEPT = 0.98
#: Weight, in batches, of what is assumed before anything was measured.
PRIOR_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class CostModel:
    """The time of a batch as a straight line over its padded tokens."""

    #: Seconds that any batch takes, however small.
    overhead_s: float
    #: Seconds for each padded token more.
    token_s: float

    def seconds(self, padded_tokens: float) -> float:
        return self.overhead_s + self.token_s * padded_tokens

    def scaled(self, factor: float) -> CostModel:
        return CostModel(self.overhead_s * factor, self.token_s * factor)

    @property
    def overhead_tokens(self) -> float:
        """How many padded tokens take as long as a batch's overhead: what one more batch costs."""
        return self.overhead_s / self.token_s


#: A guess for a device that nothing is known of.
PRIOR = CostModel(overhead_s=0.005, token_s=0.00005)
#: Nothing is measured to be shorter, seconds: a clock may not tell the ends of a batch apart.
LEAST_S = 1e-6
#: A token that takes no time at all would make every batch free.
LEAST_TOKEN_S = 1e-9


class CostFit:
    """Fits the line to the batches measured lately: least squares, with weights that fall with age and with duration.

    Weighted by 1 / seconds, since the errors of a measurement grow with what is measured.
    """

    def __init__(self, prior: CostModel = PRIOR) -> None:
        self.model = prior
        self._sums = [0.0] * 5
        self._measured = False

    def add(self, padded_tokens: int, seconds: float) -> None:
        """A batch of so many padded tokens took so long."""
        seconds = max(LEAST_S, seconds)
        if not self._measured:
            # Until sizes differ nothing tells one part from the other: they keep their ratio.
            self._measured = True
            self._assume(self.model.scaled(seconds / self.model.seconds(padded_tokens)))
        self._sums = [KEPT * value for value in self._sums]
        self._add(padded_tokens, seconds, 1.0)
        self.model = self._solved()

    def _assume(self, model: CostModel) -> None:
        for tokens in (0, 1000):
            self._add(tokens, model.seconds(tokens), PRIOR_WEIGHT)

    def _add(self, tokens: float, seconds: float, weight: float) -> None:
        weight /= seconds
        for index, value in enumerate((1.0, tokens, tokens * tokens, seconds, tokens * seconds)):
            self._sums[index] += weight * value

    def _solved(self) -> CostModel:
        ones, x, xx, y, xy = self._sums
        spread = ones * xx - x * x
        if spread <= 1e-9 * ones * xx:
            # All batches were of one size, which does not tell one part from the other: they keep their ratio.
            scale = y / ones / self.model.seconds(x / ones)
            return CostModel(self.model.overhead_s * scale, max(LEAST_TOKEN_S, self.model.token_s * scale))
        slope = (ones * xy - x * y) / spread
        overhead = (y - slope * x) / ones
        if overhead < 0:
            return CostModel(0.0, max(LEAST_TOKEN_S, xy / xx))
        if slope < LEAST_TOKEN_S:
            return CostModel(y / ones, LEAST_TOKEN_S)
        return CostModel(overhead, slope)
