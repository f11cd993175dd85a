"""docs/config.md lists every key with its default. To write it anew: python tests/unit/test_config_page.py"""

from __future__ import annotations

from pathlib import Path

from kvtier.config import CacheConfig, accepted, format_size, keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"

HEAD = """# What can be configured?

The same names everywhere: `CacheConfig(host={"size": "64GiB"})` in Python, `[host] size = "64GiB"` in the TOML file
that `CacheConfig.load(path)` or `KVTIER_CONFIG` names, `KVTIER_HOST__SIZE=64GiB` in the environment (two underscores
end a section), `--set host.size=64GiB` on the command line. `CacheConfig(...)` takes the defaults and what is given,
and looks nowhere else. `CacheConfig.load(path, ...)`, the command line and vLLM's connector look everywhere; later ones
win: defaults, file, environment, then what is given. Sizes are numbers of bytes or words such as `64GiB` and `500MB`.
An unknown key is refused, with the nearest one.

| key | default | accepted | |
| --- | --- | --- | --- |
"""

TAIL = """
## When is a page copied down?

| `write` | a page goes down | good for |
| --- | --- | --- |
| `at_once` | as soon as it is computed (host), or has reached the host (disk) | most hits, and restarts |
| `ahead` | when few slots of the tier are free or held below too, the coldest first | not writing what stays hot |
| `second_use` | when a request has used it again | a disk that must not be written much |
| `never` | never | a tier that only serves what is there |

Whatever the policy, stores run behind everything else, are put off when their lane is too far behind, and are dropped
when there is no room for them; both are counted. docs/latency.md says when stores back off.
"""


def _default(key: str) -> str:
    value: object = CacheConfig()
    for name in key.split("."):
        value = getattr(value, name)
    is_size = isinstance(value, int) and key.endswith(("size", "bytes_in_flight")) and key != "block_size"
    return "none" if value is None else format_size(value) if is_size else str(value).lower()


def page() -> str:
    rows = [
        f"| `{key}` | `{_default(key)}` | {accepted(info)} | {' '.join((info.description or '').split())} |"
        for key, info in keys().items()
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


def test_the_page_of_keys_is_the_codes() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
