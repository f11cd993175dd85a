"""`kvtier bench prefetch` at its smallest: every arm does what its name says, or the run ends."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.cli.main import main
from kvtier.lab import overlap
from kvtier.lab.prefetch_bench import PrefetchBench, PrefetchSettings, bootstrap_upper


def test_a_run_writes_rows_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    options = [
        "--prompts=2", "--prompt-tokens=128", "--token-us=20", "--gbps=0.2", "--reuse=0.5", "--lookahead=0,20",
    ]  # fmt: skip
    assert main(["bench", "prefetch", *options, "--disk-path", str(tmp_path), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "result.json").read_text())
    assert result["compute"] == "paced"
    assert [row["lookahead_ms"] for row in result["rows"]] == [0, 20]
    for row in result["rows"]:
        assert row["n"] == 2
        assert row["found_tokens"] == 64
        assert row["lane_gbps"] == 0.2
        assert row["measured_gbps"] <= 0.21
        assert {arm: spread["p50"] > 0 for arm, spread in row["ttft_ms"].items()} == dict.fromkeys(row["ttft_ms"], True)
        assert row["ratio_to_best"] <= row["ratio_to_best_upper"]
    assert result["rows"][0]["hidden"] is None is not result["rows"][1]["hidden"]
    assert (out / "prefetch.png").read_bytes().startswith(b"\x89PNG")
    assert oct((out / "result.json").stat().st_mode & 0o777) == "0o600"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".kvtier")], "the store went"


def test_the_overlap_is_measured_in_every_arm(tmp_path: Path) -> None:
    measured = {figure.name: figure for figure in overlap.figures(tmp_path, rounds=2, tokens=128)}
    whole, layers = (
        measured[f"first token, 128 tokens from host memory, {how}"] for how in ("as a whole", "layer by layer")
    )
    assert whole.value > 0 < layers.value
    assert {figure.unit for figure in measured.values()} == {"ms", "share"}
    assert len(measured) == 5
    assert not os.listdir(tmp_path), "the store went"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lookahead=x", "lookahead"),
        ("--reuse=1.5", "reuse: [1.5]; accepted"),
        ("--gbps=-1", "gbps: [-1.0]; accepted"),
    ],
)
def test_bad_options_are_named(option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefetch", option, "--disk-path", str(tmp_path)]) != 0
    assert said in capsys.readouterr().err


def test_the_bootstrap_bounds_the_median() -> None:
    values = [1.0] * 60 + [2.0] * 40
    assert bootstrap_upper(values, 0) in (1.0, 2.0)
    assert bootstrap_upper([1.0] * 100, 0) == 1.0
    assert bootstrap_upper(list(range(1, 102)), 0) > 51


def test_settings_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="prompts: 0"):
        PrefetchSettings(prompts=0)


def test_an_arm_without_a_hint_idles_as_long_as_the_last_one_that_was_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    settings = PrefetchSettings(prompts=1, prompt_tokens=64, token_us=1.0, reuses=(0.5,), disk_path=tmp_path)
    with PrefetchBench(settings) as bench:
        monkeypatch.setattr("kvtier.lab.prefetch_bench.time.sleep", slept.append)
        prompt = list(range(64))
        bench._serve("load", prompt, 0.02)
        waited = bench._waited
        assert waited > 0
        slept.clear()
        for arm in ("recompute", "device"):
            bench._serve(arm, prompt, 0.02)
        assert slept.count(waited) == 2
        slept.clear()
        bench._serve("device", prompt, 0.0)
        assert waited not in slept
