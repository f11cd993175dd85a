"""Configuration: one set of names everywhere, and one clear line for each fault."""

import pydoc
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvtier.config import (
    CacheConfig,
    ConfigError,
    DiskConfig,
    HostConfig,
    accepted,
    format_size,
    keys,
    parse_size,
    readable_size,
)


def load(path: Path | None = None, environ: dict[str, str] | None = None, **overrides: Any) -> CacheConfig:
    return CacheConfig.load_from(path, environ or {}, **overrides)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("1.5 TB", 1_500_000_000_000),
        ("500MB", 500_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("16B", 16),
    ],
)
def test_sizes_as_words(words: int | str, size: int) -> None:
    assert parse_size(words) == size
    assert load(**{"host.size": words}).host.size == size


@pytest.mark.parametrize("size", [1, 4096, 8 << 20, 64 << 30, 3 << 40])
def test_written_sizes_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    "words", ["0", 0, "-1", -1, "64 GB of ram", "GiB", "", "64G", "1e9", "0.5", True, None, 1.5, "inf", "٣GiB"]
)
def test_refuses_what_is_not_a_size(words: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{"host.size": words})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"host.size: {words!r}: expected a size")


def test_defaults_are_those_that_the_documentation_states() -> None:
    config = CacheConfig()
    assert config.block_size == 16
    assert config.host == HostConfig(size=4 << 30, policy="lru", write="at_once")
    assert config.disk == DiskConfig(path=None, size=16 << 30, policy="lru", write="at_once", io="auto", direct="auto")
    assert config.mover.verify
    assert not config.mover.verify_host
    assert config.load_timeout_seconds == 10.0


def test_overrides_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('block_size = 32\n[host]\nsize = "1GiB"\nwrite = "never"\n[disk]\npath = "/mnt/a"\n')
    environ = {"KVTIER_HOST__SIZE": "2GiB", "KVTIER_MOVER__VERIFY_HOST": "true", "UNRELATED": "x"}
    config = load(file, environ, **{"host.size": "3GiB", "disk": {"io": "threads"}})
    assert config.host == HostConfig(size=3 << 30, write="never")
    assert config.block_size == 32
    assert config.disk.path == Path("/mnt/a")
    assert config.disk.io == "threads"
    assert config.mover.verify_host
    assert load(file, environ).host.size == 2 << 30
    assert load(file).host.size == 1 << 30


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("block_size = 8")
    assert load(environ={"KVTIER_CONFIG": str(tmp_path / "a.toml")}).block_size == 8


def test_sections_can_be_given_as_objects() -> None:
    assert load(host=HostConfig(size=1 << 20)).host.size == 1 << 20
    assert load(environ={"KVTIER_HOST__WRITE": "never"}, host=HostConfig(size=1 << 20)).host.write == "never"


def test_no_disk_is_said_and_not_what_a_forgotten_variable_means() -> None:
    assert load(environ={"KVTIER_DISK__PATH": "none"}).disk.path is None
    for environ, key in (({"KVTIER_DISK__PATH": ""}, "disk.path"), ({"KVTIER_PROFILE": ""}, "profile")):
        with pytest.raises(ConfigError, match=rf"^{key}: '': expected a path, or none"):
            load(environ=environ)


def test_a_fault_says_where_the_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[host]\nsize = "nothing"\n')
    with pytest.raises(ConfigError, match=rf"^host\.size: 'nothing': expected .* \(in {file}\)$"):
        load(file)
    with pytest.raises(ConfigError, match=r"^foo: unknown key .* \(in the variable KVTIER_FOO\)$"):
        load(environ={"KVTIER_FOO": "1"})
    with pytest.raises(ConfigError, match=r"^host\.size: 'less': expected [^(]*$"):
        load(file, **{"host.size": "less"})


def test_variables_of_the_tests_configure_nothing() -> None:
    assert load(environ={"KVTIER_SEED": "5", "KVTIER_TRACES": "/tmp", "KVTIER_TEST_WHEEL": "1"}) == CacheConfig()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"host.sise": 1}, "host.sise: unknown key (value 1); did you mean host.size?"),
        ({"hosts": {"size": 1}}, "hosts: unknown key (value {'size': 1}); did you mean host?"),
        ({"size": 1}, "size: unknown key (value 1); did you mean "),
        ({"blocksize": 1}, "blocksize: unknown key (value 1); did you mean block_size?"),
        ({"zzz": 1}, "zzz: unknown key (value 1); known keys: block_size, host.size"),
        ({"host.write": "often"}, "host.write: 'often': expected 'never', 'second_use', 'ahead' or 'at_once'"),
        ({"host": 5}, "host: 5: expected a section with size, policy, write"),
        ({"block_size": 0}, "block_size: 0: expected greater than or equal to 1"),
        ({"block_size": "many"}, "block_size: 'many': expected a valid integer"),
        ({"mover.verify": "perhaps"}, "mover.verify: 'perhaps': expected a valid boolean"),
        ({"watermarks": {"low": 0.5, "high": 0.4}}, "watermarks: low 0.5 is not below high 0.4"),
        ({"lease_seconds": 0}, "lease_seconds: 0: expected greater than 0"),
        ({"lease_seconds": "nan"}, "lease_seconds: 'nan': expected"),
        ({"disk.path": 7}, "disk.path: 7: expected"),
    ],
)
def test_one_clear_line_names_key_value_and_what_is_accepted(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**overrides)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(line)


def test_unknown_variables_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"hots: unknown key .* did you mean host\?"):
        load(environ={"KVTIER_HOTS__SIZE": "1GiB"})


def test_a_line_for_each_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{"host.size": 0, "block_size": 0})
    assert len(str(caught.value).splitlines()) == 2


def test_python_construction_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match=r"^size: 0: expected a size above zero"):
        HostConfig(size=0)
    with pytest.raises(ConfigError, match="unknown key"):
        HostConfig(sise=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("content", "words"), [(b"a = ", "not TOML"), (b"\xff", "not TOML")])
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "bad.toml")


def test_a_file_that_is_absent() -> None:
    with pytest.raises(ConfigError, match=r"'/absent.toml': No such file"):
        load(Path("/absent.toml"))


def test_a_section_and_a_value_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a section"):
        load(environ={"KVTIER_HOST": "x", "KVTIER_HOST__SIZE": "1GiB"})


def test_configuration_cannot_change_under_a_running_cache() -> None:
    config = CacheConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.host.size = 1
    assert hash(config) == hash(CacheConfig())


def test_every_key_is_explained() -> None:
    assert all(info.description and accepted(info) for info in keys().values())
    assert accepted(keys()["mover.copy_threads"]) == "1 to 64"
    assert accepted(keys()["lease_seconds"]) == "above 0 to 86400"
    assert accepted(keys()["disk.io"]) == "auto, io_uring, threads"
    assert "mover.bytes_in_flight" in keys()


def test_sizes_for_people() -> None:
    sizes = (100, 4096, 3 << 20, (4 << 30) - 4096, 1000 << 30, 5 << 40)
    assert [readable_size(size) for size in sizes] == ["100 B", "4 KiB", "3 MiB", "4 GiB", "1000 GiB", "5 TiB"]


@pytest.mark.parametrize("section", [CacheConfig, HostConfig, DiskConfig], ids=lambda section: section.__name__)
def test_help_says_what_each_field_means(section: type[CacheConfig | HostConfig | DiskConfig]) -> None:
    text = pydoc.plain(pydoc.render_doc(section))
    for name, info in section.model_fields.items():
        assert name in text
        assert info.description is None or info.description.splitlines()[0] in text
    assert section is not HostConfig or "size = 4GiB" in text
