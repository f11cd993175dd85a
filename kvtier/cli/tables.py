"""How answers look: figures as a table for people, or one JSON object a line for programs."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from kvtier.lab.figures import Figure


def print_figures(title: str, figures: Iterable[Figure], json: bool) -> None:
    """Prints figures as they come (`json`), or as one table at the end with what is being measured meanwhile."""
    if json:
        for figure in figures:
            print(figure.to_json(), flush=True)
        return
    console = Console()
    table = Table(title=title, title_justify="left")
    for name, justify in (("what", "left"), ("ours", "right"), ("unit", "left"), ("limit", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("ratio", justify="right")
    table.add_column("the limit is")
    with console.status(f"measuring {title}") as status:
        for figure in figures:
            table.add_row(*row(figure))
            status.update(f"measuring {title}: {figure.name} done")
    console.print(table)


def row(figure: Figure) -> tuple[str, str, str, str, str, str]:
    """The figure as the cells of one row."""
    return (
        figure.name,
        number(figure.value),
        figure.unit,
        number(figure.limit),
        number(figure.ratio),
        figure.limit_is or "",
    )


def number(value: float | None) -> str:
    """Three significant digits; nothing for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
