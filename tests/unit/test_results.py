"""Rows of a benchmark result: percentiles that are known, JSON that comes back as it was, foreign JSON refused."""

import json
import stat
from pathlib import Path

import bench_samples
import pytest

from kvtier.lab.results import SCHEMA, BenchResult, BytesMoved, Spread, TokensByTier


def test_percentile_is_null_where_the_sample_is_too_small() -> None:
    def spread(n: int) -> Spread:
        return Spread.of(i / 1000 for i in range(n))

    assert spread(9) == Spread(mean=4.0, p50=4.0)
    assert spread(99).p99 is None
    assert spread(99).p95 == pytest.approx(93.1)
    assert spread(101).p99 == pytest.approx(99.0)
    assert Spread.of([]) == Spread()


def test_json_comes_back_as_it_was() -> None:
    result = bench_samples.result()
    assert BenchResult.from_json(result.to_json()) == result


def test_json_has_the_documented_fields() -> None:
    content = json.loads(bench_samples.result().to_json())
    assert content["schema"] == SCHEMA == "kvtier.bench/1"
    assert content["device"] == "host memory"
    assert {"date", "machine", "model", "config", "io"} <= content.keys()
    row = content["contexts"][2]
    named = "context tier n ttft_ms tpot_ms tokens_by_tier bytes_moved device_bytes outputs_match"
    assert set(named.split()) <= row.keys()
    assert list(row["ttft_ms"]) == list(row["tpot_ms"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert list(row["tokens_by_tier"]) == ["device", "host", "disk", "remote", "computed"]
    assert row["ttft_ms"]["p99"] is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"contexts": [{"context": 1}]}, "contexts.0"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_refuses_foreign_json_in_one_line(change: dict[str, object], named: str) -> None:
    content = json.loads(bench_samples.result().to_json()) | change
    with pytest.raises(ValueError, match=named) as caught:
        BenchResult.from_json(json.dumps(content))
    assert "\n" not in str(caught.value)
    assert SCHEMA in str(caught.value)


def test_refuses_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="Invalid JSON"):
        BenchResult.from_json("{")


def test_infinite_times_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Spread(mean=float("inf"))


def test_file_is_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    result = bench_samples.result(geometry=True)
    result.save(tmp_path / "result.json")
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert BenchResult.load_file(tmp_path / "result.json") == result


def test_counts_add_up() -> None:
    total = TokensByTier.total([{"host": 16, "computed": 1}, {"host": 32, "device": 16, "computed": 2}])
    assert total == TokensByTier(device=16, host=48, computed=3)
    moved = BytesMoved(host_to_device=30, disk_to_host=7).since(BytesMoved(host_to_device=10))
    assert moved == BytesMoved(host_to_device=20, disk_to_host=7)
    assert BytesMoved.mean([moved, BytesMoved()]) == BytesMoved(host_to_device=10, disk_to_host=4)
