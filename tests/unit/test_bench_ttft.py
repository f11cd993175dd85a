"""`kvtier bench ttft`: it refuses what it cannot measure, proves what it measures, and leaves nothing behind."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from kvtier.catalog import Tier
from kvtier.cli import bench_ttft
from kvtier.cli.main import main
from kvtier.lab import bench, settings, ttft
from kvtier.lab.geometry_bench import cost_of
from kvtier.lab.load import most
from kvtier.lab.machine import Filesystem
from kvtier.lab.results import BenchResult
from kvtier.lab.rig import ProofError, Rig, open_model, shape_of
from kvtier.lab.settings import BenchError, Conversation, Settings, Shape, settings_of

SHAPE = Shape("a model", 16, 8192, 8192, 2048)


def _tell(words: str, share: float) -> None:
    assert words
    assert 0.0 <= share <= 1.0


def _small(tmp_path: Path, **changes: object) -> Settings:
    given = {"model": "random-tiny", "contexts": (128, 256), "repeat": 2, "output_tokens": 3, "users": ()}
    return settings_of(**{**given, "out": tmp_path / "out", **changes})


def _left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*"))


# ---- options ---------------------------------------------------------------------------------------------------------


def test_reads_counts_ratios_and_tiers() -> None:
    assert settings.parse_counts("contexts", "2k, 512,8K,512") == (2048, 512, 8192)
    assert settings.parse_ratios("working-sets", "0.5,3,10") == (0.5, 3.0, 10.0)
    assert settings.parse_tiers("disk,recompute") == ("recompute", "disk")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--contexts", "2x"], "contexts: '2x'"),
        (["--contexts", "0"], "contexts: '0'"),
        (["--contexts", "-1"], "contexts: '-1'"),
        (["--contexts", "8"], "less than a block of 16"),
        (["--contexts", "100"], "100 is not whole blocks of 16 tokens; expected such as 96 or 112"),
        (["--contexts", "2k"], "random-llama allows 2048: expected at most 2016"),
        (["--tiers", "hots"], "did you mean host?"),
        (["--tiers", "remote"], "no remote tier yet"),
        (["--output-tokens", "0"], "output-tokens: 0; expected 1 to"),
        (["--repeat", "0"], "repeat: 0; expected 1 to"),
        (["--users", "4,x"], "users: 'x'"),
        (["--working-sets", "0"], "working-sets: '0'"),
        (["--device-size", "0"], "device-size: '0'"),
        (["--host-size", "64 GB of ram"], "host-size: '64 GB of ram'"),
        (["--disk-size", "-1"], "disk-size: '-1'"),
        (["--device-size", "64KiB"], "device-size: 64KiB holds 128 tokens, less than one sequence of 288"),
        (["--host-size", "64KiB"], "host-size: 64KiB cannot hold a prefix of 256 tokens, which host is to serve"),
        (["--disk-size", "600KiB"], "disk-size: 600KiB cannot hold a prefix of 256 tokens, which disk is to serve"),
        (["--host-size", "900TiB"], "are left of"),
        (["--disk-size", "900TiB"], "free; the run needs"),
        (["--disk-path", "/does/not/exist"], "disk-path: '/does/not/exist' does not exist"),
        (["--disk-path", "/proc/self/status"], "is not a directory"),
        (["--geometry", "llama-3-8c", "--model", "x"], "expected one of the two"),
        (["--model", "./no-such-folder"], "'./no-such-folder' is not a folder"),
        (["--set", "host.sice=1GiB"], "did you mean host.size?"),
        (["--set", "host.size"], "expected KEY=VALUE"),
        (["--contxts", "2k"], "--contxts"),
    ],
)
def test_refuses_bad_input_in_one_line_and_leaves_nothing(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in arguments or "--geometry" in arguments else ["--model", "random-tiny"]
    contexts = [] if "--contexts" in arguments else ["--contexts", "256"]
    out = ["--out", str(tmp_path / "out")]
    assert main(["bench", "ttft", "--users", "none", *model, *contexts, *out, *arguments]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvtier: ")]
    assert len(said) == 1
    assert named in said[0]
    assert _left(tmp_path) == []


def test_refuses_an_unknown_geometry_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttft", "--geometry", "llama-3-8c", "--out", str(tmp_path / "out")]) == 2
    assert "did you mean 'llama-3-8b'?" in capsys.readouterr().err
    assert _left(tmp_path) == []


def test_refuses_a_directory_in_memory_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _small(tmp_path, disk_path=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "filesystem", lambda _: Filesystem("tmpfs", "none", 1 << 40))
        with pytest.raises(BenchError, match="is tmpfs, which is memory"):
            chosen.fitted(SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(BenchError, match="is read-only"):
            chosen.fitted(SHAPE)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BenchError, match="is read-only"):
        _small(tmp_path)


def test_contexts_of_its_own_choice_are_those_that_fit(tmp_path: Path) -> None:
    fitted = _small(tmp_path, contexts=None).fitted(SHAPE)
    assert fitted.contexts == (512, 1024)


def test_a_tier_that_is_not_asked_for_needs_no_room(tmp_path: Path) -> None:
    fitted = _small(tmp_path, tiers=("device",), host_size=8192, disk_path=Path("/does/not/exist")).fitted(SHAPE)
    assert fitted.disk_bytes == 0


def test_quick_takes_what_is_given() -> None:
    assert settings_of(quick=True).repeat < settings_of().repeat
    assert settings_of(quick=True, repeat=7, contexts=None).repeat == 7


@pytest.mark.parametrize("true", range(12))
@pytest.mark.parametrize("start", [1, 3, 10])
def test_search_finds_the_largest_that_passes(true: int, start: int) -> None:
    tried: list[int] = []

    def passes(count: int) -> bool:
        tried.append(count)
        return count <= true

    assert most(passes, start, 10) == min(true, 10)
    assert len(tried) == len(set(tried)) <= 8
    assert all(1 <= count <= 10 for count in tried)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_every_row_is_proved_to_come_from_its_tier(tmp_path: Path) -> None:
    result = bench.run(_small(tmp_path), _tell)
    assert _left(tmp_path) == []
    assert [(row.context, row.tier) for row in result.contexts] == [
        (context, tier) for context in (128, 256) for tier in ("recompute", "device", "host", "disk")
    ]
    for row in result.contexts:
        found = row.tokens_by_tier.model_dump()
        assert found.pop("computed") == (row.context + 16 if row.tier == "recompute" else 16)
        assert {tier: n for tier, n in found.items() if n} == (
            {row.tier: row.context} if row.tier != "recompute" else {}
        )
        assert (row.n, row.kind, row.outputs_match) == (2, "measured", True)
        assert (row.ttft_ms.p50 or 0) > 0
        assert (row.tpot_ms.p50 or 0) > 0
        pages = row.context // 16 * 8192
        moved = row.bytes_moved
        assert moved.host_to_device == (pages if row.tier in ("host", "disk") else 0)
        assert moved.disk_to_host == (pages if row.tier == "disk" else 0)
        assert (row.floor_ms is not None) == (row.tier in ("host", "disk"))
        assert (row.ttft_to_recompute is None) == (row.tier == "recompute")
    assert result.device == "host memory"
    assert result.io.startswith(("direct", "buffered"))
    assert BenchResult.from_json(result.to_json()) == result.model_validate_json(result.to_json())


def test_a_prefix_from_elsewhere_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "empty_faster", lambda *_: None)
    with pytest.raises(ProofError, match="the prefix was served from"):
        bench.run(_small(tmp_path, contexts=(128,)), _tell)
    assert _left(tmp_path) == []


def test_wrong_bytes_are_seen_in_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = ttft.empty_faster

    def spoil(manager, device, tokens, source):
        honest(manager, device, tokens, source)
        if source == "host":
            for slot in range(manager.plane.host.slots):
                manager.plane.host.page(slot)[:] = 0x41

    monkeypatch.setattr(ttft, "empty_faster", spoil)
    small = ["--model", "random-tiny", "--contexts", "256", "--repeat", "1", "--output-tokens", "8", "--users", "none"]
    assert main(["bench", "ttft", *small, "--tiers", "host", "--out", str(tmp_path / "out")]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert [row.outputs_match for row in BenchResult.load_file(tmp_path / "out" / "result.json").contexts] == [False]


def test_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def interrupt(rig: Rig, *_: object) -> None:
        seen.extend(path.name for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(Rig, "serve", interrupt)
    small = ["--model", "random-tiny", "--contexts", "256", "--out", str(tmp_path / "out")]
    assert main(["bench", "ttft", *small]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [name[:14] for name in seen] == [".kvtier-bench-"]
    assert _left(tmp_path) == []


def test_load_pairs_off_and_on_and_finds_the_most_users(tmp_path: Path) -> None:
    chosen = _small(
        tmp_path, contexts=(128,), repeat=1, users=(1, 2), working_sets=(0.5, 3.0), pool_conversations=3, most_users=5,
        conversation=Conversation(48, 16, 2, 2),
    )  # fmt: skip
    result = bench.run(chosen, _tell)
    assert _left(tmp_path) == []
    rows = {(row.working_set, row.users, row.offload): row for row in result.load}
    assert set(rows) == {(w, u, o) for w in (0.5, 3.0) for u in (1, 2) for o in (False, True)}
    for (working_set, users, offload), row in rows.items():
        assert row.n == row.conversations * 2
        assert row.outputs_match is (True if offload else None)
        assert row.device_bytes == rows[0.5, 1, False].device_bytes
        assert row.requests_per_s > 0
        if working_set > 1:
            assert (row.recomputed_tokens == 0) is offload, (working_set, users, offload)
    assert rows[3.0, 1, True].tokens_by_tier.host > 0
    off, on = result.concurrency
    assert (off.offload, on.offload) == (False, True)
    assert off.max_concurrent_requests < on.max_concurrent_requests == 5
    assert on.at_least


def test_the_quick_setting_leaves_nothing_out_by_itself(tmp_path: Path) -> None:
    from kvtier.lab.load import LoadBench

    fitted = settings_of(quick=True, out=tmp_path / "out").fitted(replace(SHAPE, context_limit=8192))
    load = LoadBench(open_model("random-tiny", 0), fitted, _tell)
    assert [point.working_set for point in load.points()] == [0.5, 3.0, 10.0]
    assert load.notes == []
    assert fitted.contexts == fitted.settings.usual_contexts
    assert max(fitted.load_host_blocks, fitted.load_device_blocks) < 10 * fitted.load_device_blocks  # the disk serves


def test_what_the_time_has_no_room_for_is_left_out_and_noted(tmp_path: Path) -> None:
    chosen = _small(tmp_path, contexts=None, usual_contexts=(64, 1024), repeat=5, users=(1,), seconds=1e-6)
    result = bench.run(chosen, _tell)
    assert {(row.context, row.n) for row in result.contexts} == {(64, 1)}
    assert (result.load, result.concurrency) == ([], [])
    notes = " ".join(result.notes)
    assert "left out: 1024 tokens" in notes
    assert "3 of 3 points left out for lack of time" in notes
    assert notes.count("no search for the most requests") == 2


def test_more_users_than_conversations_are_left_out_and_noted(tmp_path: Path) -> None:
    from kvtier.lab.load import LoadBench

    fitted = _small(tmp_path, users=(1, 64), working_sets=(0.5,)).fitted(SHAPE)
    load = LoadBench(open_model("random-tiny", 0), fitted, _tell)
    assert [point.users for point in load.points()] == [1]
    assert "64 users" in load.notes[0]


def test_geometry_moves_its_bytes_and_models_recompute_apart(tmp_path: Path) -> None:
    chosen = settings_of(geometry="smollm2-135m", contexts=(128,), repeat=2, out=tmp_path / "out", flops=1e12)
    result = bench.run(chosen, _tell)
    assert _left(tmp_path) == []
    assert result.model.weights == "none"
    assert result.model.kv_bytes_per_token == 23_040
    recompute, *hits = result.contexts
    cost = cost_of("smollm2-135m")
    assert cost is not None
    assert (recompute.kind, recompute.n) == ("modelled", 0)
    assert recompute.ttft_ms.p50 == pytest.approx(1000 * cost.flops(128) / 1e12)
    assert [row.tier for row in hits] == ["device", "host", "disk"]
    for row in hits:
        assert (row.kind, row.outputs_match, row.ttft_to_recompute) == ("measured load", True, None)
        assert row.tokens_by_tier.model_dump()[row.tier] == 128
    assert any("modelled" in note for note in result.notes)


def test_cost_counts_the_weights_of_known_models() -> None:
    for name, billions in {"llama-3-8b": 6.98, "llama-3-70b": 68.5, "qwen3-8b": 6.95, "qwen3-32b": 31.2}.items():
        cost = cost_of(name)
        assert cost is not None
        assert cost.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert cost_of("unheard-of") is None


@pytest.mark.parametrize(
    ("called", "named"), [(".venv/bin/kvtier", ".venv/bin/kvtier"), ("/usr/lib/pytest/__main__.py", "kvtier")]
)
def test_what_it_says_to_call_next_can_be_called(called: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [called])
    assert bench_ttft._called() == named


def test_json_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "random-tiny", "--contexts", "128", "--repeat", "1", "--output-tokens", "2", "--users", "none"]
    out = tmp_path / "out"
    assert main(["bench", "ttft", *small, "--tiers", "recompute,host", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "result.json").read_text())
    assert [row["tier"] for row in printed["contexts"]] == ["recompute", "host"]
    assert _left(tmp_path) == ["out", "report.html", "result.json", "ttft.png"]


def test_evict_drops_one_tier_and_locate_tells_where_the_rest_is(tmp_path: Path) -> None:
    model = open_model("random-tiny", 0)
    fitted = _small(tmp_path, contexts=(64,)).fitted(shape_of(model, 16))
    with Rig(model, fitted.cache_config(), fitted.device_blocks, tmp_path, chunk_tokens=64) as rig:
        tokens = list(range(70))
        rig.serve(tokens, 2)
        rig.settle()
        manager = rig.manager
        assert manager.locate(tokens) == {"device": 64}
        assert len(manager.evict(Tier.DEVICE, tokens[:32])) == 2
        assert manager.locate(tokens) == {"device": 32, "host": 32}
        assert len(manager.evict(Tier.DEVICE, tokens)) == 2
        assert len(manager.evict(Tier.DEVICE, tokens)) == 0
        for tier in (Tier.HOST, Tier.DISK):
            assert len(manager.evict(tier, tokens)) == 4
        assert manager.locate(tokens) == {}
        manager.catalog.check()
    assert _left(tmp_path) == []
