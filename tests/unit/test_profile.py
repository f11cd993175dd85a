"""What was measured once: kept in a file, checked when it is read, and what a cache begins with."""

import os
from pathlib import Path

import pytest

from kvtier import CacheConfig, ConfigError
from kvtier.catalog import Tier
from kvtier.cli.main import main
from kvtier.costmodel import CostModel
from kvtier.manager import CacheManager
from kvtier.offload import OffloadManager
from kvtier.profile import Profile
from tests.unit.test_load_policy import BLOCK, Geometry
from tests.unit.timed_plane import TimedPlane

PAGE = 1 << 20


def learnt() -> CostModel:
    costs = CostModel(PAGE)
    costs.seed_lane("stage", 1e-4, 2e9)
    costs.seed_lane("onboard", 1e-5, 8e9)
    costs.seed_prefill((1e-3, 2e-5, 1e-9), 256)
    return costs


def test_what_is_saved_is_what_a_cache_begins_with(tmp_path: Path, namespace) -> None:
    path = tmp_path / "profile.json"
    Profile.of(learnt(), date="2026-01-01", machine="a machine", model="a model").save(path)
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    plane = TimedPlane({Tier.DEVICE: 8, Tier.HOST: 8, Tier.DISK: 8})
    config = CacheConfig(block_size=BLOCK, profile=path)
    manager = CacheManager(config, Geometry(), namespace, None, plane=plane, clock=lambda: plane.now)
    assert manager.costs.lane_speed("stage")[1] == pytest.approx(2e9, rel=0.01)
    assert manager.costs.lane_speed("spill") is None
    assert manager.costs.recompute(512, 0) == pytest.approx(learnt().recompute(512, 0), rel=0.01)


def test_a_cache_below_an_engine_with_blocks_of_its_own_begins_with_it_too(tmp_path: Path, namespace) -> None:
    path = tmp_path / "profile.json"
    Profile.of(learnt(), date="2026-01-01", machine="a machine", model="a model").save(path)
    plane = TimedPlane({Tier.HOST: 8, Tier.DISK: 8})
    manager = OffloadManager(CacheConfig(block_size=BLOCK, profile=path), namespace, plane, clock=lambda: plane.now)
    assert manager.costs.lane_speed("stage")[1] == pytest.approx(2e9, rel=0.01)
    assert manager.costs.recompute(512, 0) == pytest.approx(learnt().recompute(512, 0), rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Invalid JSON"),
        ('{"version": "kvtier.profile/2", "date": "", "machine": "", "lanes": {}}', "version"),
        ('{"date": "", "machine": "", "lanes": {"ferry": {"fixed_s": 0, "bytes_per_s": 1}}}', "lanes.ferry"),
        (
            '{"date": "", "machine": "", "lanes": {"stage": {"fixed_s": 0, "bytes_per_s": 0}}}',
            "lanes.stage.bytes_per_s",
        ),
        (
            '{"date": "", "machine": "", "lanes": {"stage": {"fixed_s": 0, "bytes_per_s": 1e-300}}}',
            "lanes.stage.bytes_per_s",
        ),
        ("[" * 100_000, "Invalid JSON"),
        ('{"date": "", "machine": "", "lanes": {}, "more": 1}', "more"),
        (" " * (2 << 20), "2097152 bytes"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected a file of `kvtier calibrate`") as fault:
        Profile.load(path)
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)
    with pytest.raises(ConfigError, match="No such file"):
        Profile.load(tmp_path / "none")


def test_a_pipe_is_no_profile_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        Profile.load(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="profile: "):
        Profile.load(tmp_path)


def test_calibrating_measures_every_lane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "p.json"
    options = ["--geometry=smollm2-135m", "--rounds=2", f"--disk-path={tmp_path}", f"--out={out}"]
    assert main(["calibrate", *options]) == 0
    profile = Profile.load(out)
    assert set(profile.lanes) == {"offload", "onboard", "spill", "stage"}
    assert profile.prefill is None
    assert "stage    disk → host" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"], "the store went"


def test_calibrating_with_a_model_measures_its_prefill(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = tmp_path / "p.json"
    options = ["--geometry=smollm2-135m", "--rounds=1", f"--out={out}", "--model=random-tiny"]
    assert main(["calibrate", *options]) == 0
    profile = Profile.load(out)
    assert set(profile.lanes) == {"offload", "onboard"}
    assert profile.prefill is not None
    assert profile.prefill.pass_tokens == 64


def test_calibrating_refuses_what_is_no_model_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert main(["calibrate", f"--out={tmp_path / 'p.json'}", f"--model={tmp_path}"]) == 2
    assert "lanes" not in capsys.readouterr().err
