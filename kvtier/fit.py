"""How long something takes, learnt from how long it took: a few non-negative coefficients, robust and forgetting.

``Fit(ridge, memory=32.0, window=3)``: ``seconds ≈ Σ coefficient · feature``, for one to three features, all of them
zero or more. Native (csrc/costs/fit.hpp), since it learns from every load while the engine's thread waits.

Least squares of the *relative* error with exponential forgetting over about ``memory`` observations: the normal
equations are decayed sums (recursive least squares, e.g. Haykin, Adaptive Filter Theory, ch. 10). Robust twofold:

- a surprise, more than 1.5 × away from what was predicted, counts as 1.5 × away (the pseudo-observations of Huber's
  M-estimator, 1964), so that one stalled I/O changes little;
- the median of the last ``window`` residuals (Tukey's running median, 1977) says whether the level itself has changed:
  of three, one surprise cannot move it, two do. Then what was known is rescaled at once and counts little from there
  on, and the surprises that agreed count as they were: what has become slower may be one coefficient alone, such as the
  rate of a drive whose fixed cost is what it was.

``ridge`` says, for each feature, how reluctantly it is used where the observations cannot tell the features apart.
Coefficients that come out negative are dropped, the most negative first. The first eight observations are solved for
each, then one in eight.
"""

from kvtier._core import Fit

__all__ = ["Fit"]
