"""The command line: parse, call, print; no logic."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestfed.core import UserError

app = typer.Typer(
    add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, help=__import__("nestfed").__doc__
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the numbers.")] = Path("demo"),
    quiet: Annotated[bool, typer.Option(help="Print the path of the figure only.")] = False,
) -> None:
    """See plain averaging settle at the wrong point, and nested methods at the right one."""
    from nestfed import demo as demonstration

    curves = demonstration.run(progress=False if quiet else None)
    paths = demonstration.save(curves, out)
    console = Console()
    if not quiet:
        shown = Table(title="Two problems with known answers")
        for column in (frame := demonstration.table(curves)).columns:
            shown.add_column(column)
        for row in frame.itertuples(index=False):
            shown.add_row(row[0], row[1], f"{row[2]:.4f}", f"{row[3]:.4f}", f"{row[4]:.1e}")
        console.print(shown)
    typer.echo(str(paths["demo.png"]))


@app.command("list")
def list_algorithms(
    name: Annotated[str | None, typer.Argument(help="One algorithm, to see its settings.")] = None,
) -> None:
    """Show the algorithms, or the settings of one."""
    from nestfed.algorithms import ALGORITHMS, find

    if name is None:
        shown = Table("name", "problems", "what it does")
        for key, cls in ALGORITHMS.items():
            scope = "" if cls.scope is None else f", {cls.scope} lower level"
            shown.add_row(key, cls.family + scope, (cls.__doc__ or "").strip().splitlines()[0])
    else:
        shown = Table("setting", "default", "meaning")
        for field in dataclasses.fields(find(name)):
            default = "required" if field.default is dataclasses.MISSING else str(field.default)
            shown.add_row(field.name, default, field.metadata.get("description", ""))
    Console().print(shown)


def main() -> None:
    """Bad input is one line on standard error and exit code 1, never a traceback."""
    try:
        app()
    except UserError as error:
        print(f"nestfed: {error}", file=sys.stderr)
        raise SystemExit(1) from None
