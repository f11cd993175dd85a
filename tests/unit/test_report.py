"""Reports: one page that needs nothing else, tables that say the same everywhere, plots that are pictures."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import bench_samples
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console

from kvtier.lab import plots, report
from kvtier.lab.results import BenchResult


class _Tags(HTMLParser):
    """Collects tags and their attributes, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(result: BenchResult) -> tuple[str, _Tags]:
    text = report.page(result, {"ttft": b"\x89PNG"})
    parsed = _Tags()
    parsed.feed(text)
    assert not parsed.open
    return text, parsed


def test_page_needs_no_other_file() -> None:
    _, parsed = _page(bench_samples.result())
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parsed.tags}
    sources = [attrs[key] for _, attrs in parsed.tags for key in ("src", "href") if key in attrs]
    assert sources
    assert all(source is not None and source.startswith("data:image/png;base64,") for source in sources)


def test_page_escapes_what_it_is_told() -> None:
    text, _ = _page(bench_samples.result())
    assert "Some &lt;CPU&gt;" in text
    assert "A note with &lt;angle brackets&gt;." in text


def test_page_marks_outputs_that_differ() -> None:
    result = bench_samples.result()
    wrong = result.contexts[2].model_copy(update={"outputs_match": False})
    text, _ = _page(result.model_copy(update={"contexts": [wrong]}))
    assert re.search(r'<tr class="bad">.*?DIFFER', text)


def test_terminal_and_page_show_the_same_cells() -> None:
    result = bench_samples.result()
    console = Console(width=200, file=io.StringIO(), record=True)
    report.print_tables(result, console)
    shown, text = console.export_text(), report.page(result, {})
    for table in report.tables(result):
        assert table.title in shown
        assert f"<h2>{table.title}</h2>" in text
        for cell in {cell for row in table.rows for cell in row}:
            assert cell in shown
            assert f"<td>{cell}</td>" in text


def test_modelled_recompute_is_called_so_and_not_compared() -> None:
    (table, *_) = report.tables(bench_samples.result(geometry=True))
    named = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    assert [name for name in named["found in"] if name.startswith("recompute")] == ["recompute (modelled)"] * 3
    assert set(named["to recompute"]) == {"–"}
    assert "odelled" in table.caption


def test_plots_are_png_for_what_there_is() -> None:
    drawn = plots.draw(bench_samples.result())
    assert sorted(drawn) == ["load", "ttft"]
    assert all(png.startswith(b"\x89PNG\r\n\x1a\n") for png in drawn.values())
    assert sorted(plots.draw(bench_samples.result(geometry=True))) == ["ttft"]


def test_draws_a_single_context_and_a_single_user() -> None:
    result = bench_samples.result().model_copy(
        update={"contexts": bench_samples.context_rows((1024,)), "load": bench_samples.load_rows((1,))}
    )
    assert sorted(plots.draw(result)) == ["load", "ttft"]


def test_what_differs_by_noise_does_not_look_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plots, "_png", lambda plot, result: figures.append(plot(result)) or b"")
    result = bench_samples.result()
    near = [row.model_copy(update={"ttft_ms": row.ttft_ms.model_copy(update={"p50": 3010.0})}) for row in result.load]
    near[-1] = near[-1].model_copy(update={"ttft_ms": near[-1].ttft_ms.model_copy(update={"p50": 3032.0})})
    plots.draw(result.model_copy(update={"load": near}))
    low, high = figures[-1].axes[0].get_ylim()
    assert low < 2000 < 5000 < high


def test_a_plot_says_of_how_many_runs_its_medians_are() -> None:
    rows = bench_samples.context_rows((1024,))
    assert plots._samples([row.model_copy(update={"n": 3}) for row in rows]).startswith("median of 3")
    assert plots._samples([rows[0].model_copy(update={"n": n}) for n in (2, 5)]).startswith("median of 2 to 5")


@pytest.mark.parametrize(
    ("tokens", "words"), [(512, "512"), (2048, "2k"), (131072, "128k"), (1536, "1.5k"), (1040, "1040")]
)
def test_tokens_in_words(tokens: int, words: str) -> None:
    assert plots.tokens_in_words(tokens) == words


def test_writes_all_files_and_nothing_else(tmp_path: Path) -> None:
    written = report.write(bench_samples.result(), tmp_path / "new" / "out")
    names = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert names == sorted(path.name for path in written) == ["load.png", "report.html", "result.json", "ttft.png"]
