"""The report of a run: one page that works offline, its figures and its tables."""

from pathlib import Path

from nestfed.report import figures, page, tables
from nestfed.report.record import Record


def write_report(record: Record, folder: Path) -> Path:
    """Write report.html, figures/ (PNG and SVG) and tables/ (CSV, Markdown and LaTeX) into a folder; returns the page's
    path.
    """
    folder = Path(folder)
    figures.write_all(record, folder / "figures")
    tables.write_all(record, folder / "tables")
    path = folder / "report.html"
    path.write_text(page.render(record), encoding="utf-8", newline="\n")
    return path
