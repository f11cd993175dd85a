"""How long something takes, learnt from how long it took: a few non-negative coefficients, robust and forgetting."""

from __future__ import annotations

import math
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Fit"]

_CLIP = math.log(1.5)  # of the log of actual over predicted, from where an observation is a surprise
_YOUNG = 8  # observations up to which each one is solved for; from then on one in so many
_KEPT = 0.25  # observations that what was known counts as, when the level has changed: its shape, until others tell


class _Seen(NamedTuple):
    features: tuple[float, ...]
    seconds: float
    residual: float
    """Log of actual over predicted."""


class Fit:
    """``seconds ≈ Σ coefficient · feature``, for one to three features, all of them zero or more.

    Least squares of the *relative* error with exponential forgetting over about ``memory`` observations: the normal
    equations are decayed sums (recursive least squares, e.g. Haykin, Adaptive Filter Theory, ch. 10). Robust twofold:

    - a surprise, more than 1.5 × away from what was predicted, counts as 1.5 × away (the pseudo-observations of Huber's
      M-estimator, 1964), so that one stalled I/O changes little;
    - the median of the last ``window`` residuals (Tukey's running median, 1977) says whether the level itself has
      changed: of three, one surprise cannot move it, two do. Then what was known is rescaled at once and counts little
      from there on, and the surprises that agreed count as they were: what has become slower may be one coefficient
      alone, such as the rate of a drive whose fixed cost is what it was.

    ``ridge`` says, for each feature, how reluctantly it is used where the observations cannot tell the features apart.
    Coefficients that come out negative are dropped, the most negative first. A call takes some microseconds.
    """

    def __init__(self, ridge: Sequence[float], memory: float = 32.0, window: int = 3) -> None:
        if not 1 <= len(ridge) <= 3 or memory < 1 or window % 2 != 1:
            raise ValueError(
                f"ridge: {len(ridge)} features, memory: {memory}, window: {window}; "
                "accepted: 1 to 3 features, 1 or more, an odd number"
            )
        self._window = window
        self._size = len(ridge)
        self._ridge = tuple(ridge)
        self._decay = 1.0 - 1.0 / memory
        self._squares = [[0.0] * self._size for _ in ridge]  # decayed Σ weight · feature · feature
        self._products = [0.0] * self._size  # decayed Σ weight · feature · seconds
        self._weight = 0.0  # decayed number of observations in them
        self._recent: list[_Seen] = []  # the last ones
        self.coefficients: tuple[float, ...] | None = None
        """Seconds per unit of each feature; None before the first observation."""
        self.observations = 0

    def predict(self, features: Sequence[float]) -> float | None:
        """Seconds; None while nothing is known."""
        if self.coefficients is None:
            return None
        seconds: float = sum(map(mul, self.coefficients, features))
        return seconds

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """It took ``seconds``. What is not a positive, finite time of something is ignored."""
        if not (0.0 < seconds < math.inf) or not any(x > 0 for x in features):
            return
        expected = self.predict(features)
        if expected:
            self._recent = self._recent[1 - self._window :] if self._window > 1 else []
            self._recent.append(_Seen(tuple(features), seconds, math.log(seconds / expected)))
            if self._level_changed():
                expected = self.predict(features) or seconds
            surprise = math.log(seconds / expected)
            seconds = expected * math.exp(min(max(surprise, -_CLIP), _CLIP))
        self._add(features, seconds, (expected or seconds) ** -2)
        self.observations += 1
        if self.observations < _YOUNG or self.observations % _YOUNG == 0:
            self._solve()

    def seed(self, coefficients: Sequence[float], weight: float = 3.0) -> None:
        """Begin anew with known coefficients, to count as ``weight`` observations."""
        if len(coefficients) != self._size or not all(0 <= c < math.inf for c in coefficients):
            raise ValueError(f"coefficients: {list(coefficients)}; accepted: {self._size} of them, zero or more")
        self._squares = [[0.0] * self._size for _ in coefficients]
        self._products = [0.0] * self._size
        for i, c in enumerate(coefficients):
            if c > 0:
                self._squares[i][i] += weight / c**2
                self._products[i] += weight / c
        self._weight = weight
        self._recent = [_Seen((0.0,) * self._size, 1.0, 0.0)] * (self._window - 1)
        self._solve()

    def _level_changed(self) -> bool:
        """Whether the last observations agree that it takes longer, or shorter, than was believed; that is so then."""
        if len(self._recent) < self._window:
            return False
        level = sorted(seen.residual for seen in self._recent)[self._window // 2]
        if abs(level) <= _CLIP:
            return False
        agree = [seen for seen in self._recent if seen.residual * level > 0 and abs(seen.residual) > _CLIP]
        self._rescale(math.exp(level), agree)
        for seen in agree:
            if seen is not self._recent[-1]:  # the newest is added by who asks
                self._add(seen.features, seen.seconds, seen.seconds**-2)
        self._solve()
        self._recent = [seen._replace(residual=self._residual(seen)) for seen in self._recent]
        return True

    def _residual(self, seen: _Seen) -> float:
        expected = self.predict(seen.features)
        return math.log(seen.seconds / expected) if expected else 0.0

    def _rescale(self, factor: float, surprises: Sequence[_Seen]) -> None:
        """What made up most of the surprises took ``factor`` times as long, the rest in proportion to its share in
        them; weights are those of relative errors still."""
        shares = [0.0] * self._size
        for seen in surprises:
            parts = list(map(mul, self.coefficients or (), seen.features))
            whole = sum(parts)
            for i, part in enumerate(parts):
                shares[i] += part / whole if whole > 0 else 0.0
        most = max(shares) or 1.0
        factors = [1.0 + (factor - 1.0) * share / most for share in shares]
        kept = min(1.0, _KEPT / self._weight)
        self._weight *= kept
        for i, row in enumerate(self._squares):
            for j in range(self._size):
                row[j] *= kept / (factors[i] * factors[j])
        self._products = [p * kept / f for p, f in zip(self._products, factors, strict=True)]

    def _add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        self._weight = self._weight * self._decay + 1.0
        for i, x in enumerate(features):
            row = self._squares[i]
            for j, y in enumerate(features):
                row[j] = row[j] * self._decay + weight * x * y
            self._products[i] = self._products[i] * self._decay + weight * x * seconds

    def _solve(self) -> None:
        used = [i for i in range(self._size) if self._squares[i][i] > 0]
        while used:
            found = self._solve_for(used)
            worst = min(range(len(used)), key=found.__getitem__)
            if found[worst] >= 0:
                whole = [0.0] * self._size
                for i, value in zip(used, found, strict=True):
                    whole[i] = value
                self.coefficients = tuple(whole)
                return
            del used[worst]

    def _solve_for(self, used: list[int]) -> list[float]:
        """Gaussian elimination of the normal equations in these features, each scaled to a diagonal of one."""
        scale = [self._squares[i][i] ** -0.5 for i in used]
        n = len(used)
        rows = [
            [
                self._squares[i][j] * scale[a] * scale[b] + (self._ridge[i] if a == b else 0.0)
                for b, j in enumerate(used)
            ]
            + [self._products[i] * scale[a]]
            for a, i in enumerate(used)
        ]
        for column in range(n):  # positive definite by the ridge: no pivoting needed
            for below in range(column + 1, n):
                factor = rows[below][column] / rows[column][column]
                for k in range(column, n + 1):
                    rows[below][k] -= factor * rows[column][k]
        values = [0.0] * n
        for row in reversed(range(n)):
            rest = sum(rows[row][k] * values[k] for k in range(row + 1, n))
            values[row] = (rows[row][n] - rest) / rows[row][row]
        return [value * s for value, s in zip(values, scale, strict=True)]
