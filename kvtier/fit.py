"""How long something takes, learnt from how long it took: a few non-negative coefficients, robust and forgetting.

``Fit(ridge, memory=32.0, window=3, kinds=False)``: ``seconds ≈ Σ coefficient · feature``, for one to three features,
all of them zero or more. Native (csrc/costs/fit.hpp), since it learns from every load while the engine's thread waits.

Least squares of the *relative* error. What is known of the time that an observation's features take together counts as
``memory`` observations at most; what is known beside that is kept (restricted exponential forgetting: Kulhavý,
Automatica 23, 1987). So nothing is forgotten of large ones while only small ones come: were all forgotten alike, soon
no observation would tell what is fixed and what grows. Robust twofold:

- an observation weighs by the larger of what was predicted and what it took, so that one stalled I/O, however long,
  changes next to nothing (the redescending weights of robust regression, e.g. Hampel et al., Robust Statistics, 1986);
- the median of the last ``window`` residuals (Tukey's running median, 1977) says whether the level itself has changed,
  by more than 1.5 ×: of three, one surprise cannot move it, two do. Then what was known is rescaled at once and what it
  says of the surprises counts little from there on, and those that agreed count as they were: what has become slower
  may be one coefficient alone, such as the rate of a drive whose fixed cost is what it was.

``kinds``: what is observed is of several kinds, each made up of another feature for the most part, and of one the
others tell little. So each has a window of its own; and what is unlike anything seen, and explained by other
coefficients together with all that is known, is no surprise but news.

``ridge`` says, for each feature, how reluctantly it is used where the observations cannot tell the features apart.
Coefficients that come out negative are dropped, the most negative first. The first eight observations are solved for
each, then one in eight.
"""

from kvtier._core import Fit

__all__ = ["Fit"]
