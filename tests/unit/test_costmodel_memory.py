"""What the cost model keeps of what today's traffic does not show, and how soon it follows what has really changed."""

import math
import random

import pytest

from kvtier.costmodel import CostModel
from kvtier.fit import Fit
from tests.unit.test_costmodel import PAGE, STAGE, Drive

CHUNK = 2048
PREFILLS = {  # seconds a pass, a token, a token and token attended to
    "all three": (10e-3, 50e-6, 2e-9),
    "passes": (60e-3, 5e-6, 1e-10),
    "attention": (2e-3, 10e-6, 1e-8),
}


class Prefill:
    """Passes of a model whose times are off by ``noise``, lognormal; the cost model hears of each."""

    def __init__(self, costs: tuple[float, float, float], noise: float, seed: int) -> None:
        self.costs, self.noise, self.rng = costs, noise, random.Random(seed)
        self.model = CostModel(PAGE)

    def true(self, tokens: int, context: int = 0) -> float:
        """Seconds for a whole prompt, in chunks."""
        a_pass, token, pair = self.costs
        seconds = 0.0
        while tokens:
            now = min(tokens, CHUNK)
            seconds += a_pass + token * now + pair * now * (context + now / 2)
            tokens, context = tokens - now, context + now
        return seconds

    def off(self, tokens: int, context: int = 0) -> float:
        """By which factor the prediction is off, up or down."""
        predicted = self.model.recompute(tokens, context)
        assert predicted is not None
        return math.exp(abs(math.log(predicted / self.true(tokens, context))))

    def compute(self, tokens: int, context: int = 0) -> None:
        seconds = self.true(tokens, context) * self.rng.lognormvariate(0, self.noise)
        self.model.observe_prefill(tokens, context, seconds)

    def prompt(self, tokens: int) -> None:
        for context in range(0, tokens, CHUNK):
            self.compute(min(CHUNK, tokens - context), context)

    def tails(self, count: int) -> None:
        """So many requests of which all was found but their ends."""
        for _ in range(count):
            self.compute(self.rng.randint(1, 16), self.rng.choice((1024, 4096, 8192)))


@pytest.fixture(params=PREFILLS)
def costs(request: pytest.FixtureRequest) -> tuple[float, float, float]:
    return PREFILLS[request.param]


@pytest.mark.parametrize(("noise", "seen", "beyond"), [(0.0, 1.1, 1.1), (0.05, 1.1, 1.5), (0.2, 2.0, 2.5)])
@pytest.mark.parametrize("every", [0, 40])
def test_long_prompts_are_known_after_thousands_of_short_ends(
    costs: tuple[float, float, float], noise: float, seen: float, beyond: float, every: int, seed: int
) -> None:
    prefill = Prefill(costs, noise, seed)
    for _ in range(20):
        prefill.prompt(8192)
    for number in range(2000):
        prefill.tails(1)
        if every and number % every == 0:
            prefill.prompt(8192)
        if number % 100 == 20:
            for tokens, most in ((2048, seen), (8192, seen), (65536, beyond)):
                assert prefill.off(tokens) <= most, f"{tokens} tokens after {number} short ends, seed {seed}"


@pytest.mark.parametrize("change", [(3, 3, 3), (1 / 3, 1 / 3, 1 / 3), (4, 1, 1), (1, 4, 1), (1, 1, 4)])
@pytest.mark.parametrize(("noise", "within"), [(0.0, 16), (0.05, 16), (0.2, 24)])
@pytest.mark.parametrize("tails", [1, 25])
def test_what_has_really_changed_is_followed(
    costs: tuple[float, float, float], change: tuple[float, float, float], noise: float, within: int, tails: int
) -> None:
    prefill = Prefill(costs, noise, 1)
    for _ in range(20):
        prefill.prompt(8192)
        prefill.tails(8)
    prefill.tails(300)
    a_pass, token, pair = (factor * was for factor, was in zip(change, costs, strict=True))
    prefill.costs = (a_pass, token, pair)
    for _ in range(within):
        prefill.tails(tails)
        if prefill.off(CHUNK, 4096) < 1.5 and prefill.off(8, 4096) < 1.5:
            return
        prefill.compute(CHUNK, prefill.rng.randrange(0, 8192, CHUNK))
    raise AssertionError(f"not within {within} long passes: {prefill.model.describe()}")


def test_short_ends_are_known_after_thousands_of_long_prompts(costs: tuple[float, float, float], seed: int) -> None:
    prefill = Prefill(costs, 0.05, seed)
    prefill.prompt(8192)
    prefill.tails(100)
    for _ in range(500):
        prefill.prompt(8192)
    assert max(prefill.off(tokens, 4096) for tokens in (1, 8, 16)) <= 1.25


@pytest.mark.parametrize("blocks", [1, 256])
def test_a_lane_is_known_after_thousands_of_loads_of_one_size(blocks: int) -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 4e9, 3e-3)
    for _ in range(20):
        for size in (1, 8, 256):
            drive.end(drive.begin(size))
            drive.now += 1.0
    for _ in range(3000):
        drive.end(drive.begin(blocks))
        drive.now += 1.0
    for size in (1, 8, 256, 2048):
        assert model.load(STAGE, size, drive.now) == pytest.approx(3e-3 + size * PAGE / 4e9, rel=0.05)


@pytest.mark.parametrize("kinds", [False, True])
def test_a_fit_stays_a_fit_whatever_it_is_told(kinds: bool, seed: int) -> None:
    rng = random.Random(seed)
    fit = Fit((1e-3, 1e-6, 1e-4), kinds=kinds)
    for _ in range(3000):
        exponents = [rng.uniform(-6, 12) for _ in range(3)]
        features = [float(rng.random() < 0.8) * 10**exponent for exponent in exponents]
        if rng.random() < 0.5:
            features = [1.0, features[1], features[1] * features[2]]
        fit.observe(features, 10 ** rng.uniform(-9, 6))
        if fit.coefficients is not None:
            assert all(0 <= c < math.inf for c in fit.coefficients), f"seed {seed}"
            assert max(fit.coefficients) > 0, f"seed {seed}"
    for _ in range(200):  # and learns still
        fit.observe((1.0, 5.0, 5.0), 2.0)
    assert fit.predict((1.0, 5.0, 5.0)) == pytest.approx(2.0, rel=0.05), f"seed {seed}"
