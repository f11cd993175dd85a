"""The command line: one clear line and exit code 2 for bad input, 130 when interrupted, figures as they are."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvtier
from kvtier.cli import app, bench, doctor, main
from kvtier.cli.tables import number
from kvtier.config import CacheConfig
from kvtier.geometry import KVGeometry
from kvtier.lab.figures import Figure

ROOT = Path(__file__).resolve().parents[2]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["benhc"], "No such command 'benhc'"),
        (["bench", "disk", "--pairs", "0"], "--pairs"),
        (["bench", "disk", "--pears", "1"], "No such option"),
        (["bench", "disk", "--path", "/absent"], "'--path': dir '/absent' does not exist"),
        (["doctor", "--set", "host.sise=1"], "did you mean host.size?"),
        (["doctor", "--set", "host.size=0"], "host.size: '0': expected a size above zero"),
        (["doctor", "--set", "host.size=-1"], "host.size: '-1': expected a size"),
        (["doctor", "--set", "host.size=64 GB of ram"], "host.size: '64 GB of ram': expected a size"),
        (["doctor", "--set", "host.size"], "expected KEY=VALUE"),
        (["doctor", "--config", "/absent.toml"], "'/absent.toml': No such file"),
        (["calibrate", "--out", "/absent/speeds.json"], "out: '/absent' is no directory"),
        (["calibrate", "--out", "/"], "out: '/' is a directory; expected a file"),
        (["calibrate-copies", "--out", "/absent/paths.json"], "out: '/absent' is no directory"),
        (["bench", "prefetch", "--out", "/dev/null/out"], "out: '/dev/null' is a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1
    assert err.startswith("kvtier: ")


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (ValueError("tokens: 3; expected 4"), 2, "kvtier: tokens: 3; expected 4"),
        (OSError(28, "No space left on device", "/mnt/x"), 1, "kvtier: /mnt/x: No space left on device"),
        (KeyboardInterrupt(), 130, "kvtier: interrupted"),
        (ModuleNotFoundError("x", name="torch"), 2, "kvtier: torch is not installed; this command needs"),
    ],
)
def test_faults_of_a_command_end_as_one_line(
    fault: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(room: str, **options: object) -> Iterator[Figure]:
        raise fault

    monkeypatch.setattr(bench, "_measure", fail)
    assert main.main(["bench", "copy"]) == code
    assert capsys.readouterr().err.strip().startswith(line)


def test_a_fault_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(room: str, **options: object) -> Iterator[Figure]:
        raise ZeroDivisionError

    monkeypatch.setattr(bench, "_measure", fail)
    with pytest.raises(ZeroDivisionError):
        main.main(["bench", "copy"])


def test_interrupted_from_the_keyboard_exits_130() -> None:
    code = (
        "import signal, sys, time\nfrom kvtier.cli import bench, main\n"
        # Started from a script's background this process would ignore it, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(room, **options):\n    print('started', flush=True)\n    time.sleep(60)\n    yield\n"
        "bench._measure = slow\nsys.exit(main.main(['bench', 'copy', '--json']))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "started\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert "kvtier: interrupted" in process.stderr.read()


def _two(room: str, **options: object) -> Iterator[Figure]:
    yield Figure("first", 9.5, "GB/s", 10.0, "memcpy", 0.95)
    yield Figure("second", 0.12, "ms")


def test_figures_as_lines_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_measure", _two)
    assert main.main(["bench", "copy", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "name": "first",
        "value": 9.5,
        "unit": "GB/s",
        "limit": 10.0,
        "limit_is": "memcpy",
        "ratio": 0.95,
    }
    assert second["ratio"] is None


def test_figures_as_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_measure", _two)
    assert main.main(["bench", "copy"]) == 0
    out = capsys.readouterr().out
    for words in ("first", "second", "0.95", "memcpy"):
        assert words in out


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 0.01234, 9.876, 123456.0)] == ["", "0.0123", "9.88", "123,456"]


def test_doctor_says_what_would_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json", "--set", "host.size=1MiB", "--geometry", "smollm2-135m"]) == 0
    found = {line["what"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {"native engine", "processor", "memory", "huge pages", "disk", "torch", "NVIDIA driver"} <= set(found)
    assert "1MiB fits" in found["memory"]["found"]


def test_doctor_has_a_line_for_each_tier(tmp_path: Path) -> None:
    config = CacheConfig.load_from(environ={}, **{"disk.path": tmp_path, "disk.size": "1GiB", "host.size": "512MiB"})
    geometry = KVGeometry.named("llama-3-8b", block_size=16)
    model = "llama-3-8b"
    host, disk = doctor._host_tier(config, geometry, model), doctor._disk_tier(config, geometry, model)
    found = "512 MiB, 256 pages of 2 MiB, 4,096 tokens of llama-3-8b; write: at_once"
    assert host == doctor.Finding("host tier", found)
    assert disk.found.startswith("1022 MiB, 511 pages of 2 MiB, 8,176 tokens of llama-3-8b; write: at_once")
    small = CacheConfig.load_from(environ={}, **{"host.size": "1MiB"})
    assert doctor._host_tier(small, geometry, model).verdict == "bad"


def test_doctor_probes_a_disk_by_using_it(tmp_path: Path) -> None:
    finding = doctor._disk(CacheConfig.load_from(environ={}, **{"disk.path": tmp_path, "disk.size": "1MiB"}))
    assert finding.verdict in ("good", "note", "bad")  # a temporary directory may be in memory, which is refused
    assert str(tmp_path) in finding.found + finding.advice
    assert not list(tmp_path.iterdir())


def test_doctor_names_a_disk_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json", "--path", "/absent"]) == 2
    found = {line["what"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert "/absent" in found["disk"]["advice"]
    assert "disk tier" not in found


def test_doctor_promises_no_tier_on_a_disk_that_it_refuses(tmp_path: Path) -> None:
    config = CacheConfig.load_from(environ={}, **{"disk.path": tmp_path, "disk.size": "1000TiB", "host.size": "1MiB"})
    geometry = KVGeometry.named("llama-3-8b", block_size=16)
    found = {finding.what: finding for finding in doctor.examine(config, geometry, "llama-3-8b")}
    assert found["disk"].verdict == "bad"
    assert "disk tier" not in found


def test_doctor_counts_what_a_store_has_set_aside_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    config = CacheConfig.load_from(environ={}, **{"disk.path": tmp_path, "disk.size": "2MiB"})
    if "does not fit" not in doctor._disk(config).advice:
        pytest.skip("a temporary directory in memory is refused for that")
    (tmp_path / "slab").write_bytes(b"x" * (2 << 20))
    assert "does not fit" not in doctor._disk(config).advice


def test_doctor_refuses_memory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--set", "host.size=4096TiB"]) == 2
    assert "bad" in capsys.readouterr().out


def test_every_command_explains_itself() -> None:
    names = [command.name for command in (*app.app.registered_commands, *bench.app.registered_commands)]
    assert names == [
        "doctor", "calibrate", "calibrate-copies", "ttft", "prefetch", "catalog", "copy", "disk", "overlap",
        "overhead",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("room", "options"), [("catalog", ["pairs"]), ("copy", ["pairs"]), ("disk", ["pairs", "path"])]
)
def test_the_measured_rooms_take_what_the_command_line_gives(
    monkeypatch: pytest.MonkeyPatch, room: str, options: list[str]
) -> None:
    given: dict[str, object] = {}
    real = bench._measure

    def measure(name: str, **chosen: object) -> Iterator[Figure]:
        given.update(chosen)
        return real(name, **chosen)  # makes the iterator, as the command does, and measures nothing

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(bench, "print_figures", lambda *_: None)
    assert main.main(["bench", room]) == 0
    assert sorted(given) == options
