"""What all tests share: no configuration from outside, tests without a clock, a seed that is printed."""

import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, settings

from kvtier.namespace import Namespace

# On a shared machine a slow example is no fault, and a failing one has to be repeatable from the log alone.
settings.register_profile(
    "kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("kvtier")

_OURS = ("KVTIER_SEED", "KVTIER_TRACES", "KVTIER_TEST_")  # what tests are told, and no configuration
for _name in [name for name in os.environ if name.startswith("KVTIER_") and not name.startswith(_OURS)]:
    del os.environ[_name]


@pytest.fixture
def seed() -> int:
    """A seed for a random test; printed, so that KVTIER_SEED repeats a run."""
    value = int(os.environ.get("KVTIER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVTIER_SEED={value}")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, help="tell only the story of this seed; shrink it if it fails")
    parser.addoption("--sim-steps", type=int, default=1500, help="steps of that story (default: %(default)s)")
    parser.addoption("--sim-shrink", type=int, default=2000, help="most runs to shrink it (default: %(default)s)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if any(isinstance(value, set | frozenset) for value in given.values()):
            # Its name would differ from process to process, and two workers could not agree on what to run.
            raise pytest.UsageError(f"{item.nodeid}: parametrized by a set; give a sorted list or tuple")
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if item.get_closest_marker("gpu"):  # not its keywords: a folder of that name is one
                item.add_marker(skip)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """One that is complete and of no model in particular, with the layout of the test's ``geometry`` if it has one."""
    layout = request.getfixturevalue("geometry").layout_tag if "geometry" in request.fixturenames else "test"
    return Namespace(
        model="test", revision="1", dtype="bfloat16", layout=layout, attention="test", block_size=4, rope={}
    )
