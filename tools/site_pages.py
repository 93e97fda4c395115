"""Pages of the documentation site that are made from the repository: a hook of mkdocs.

    mkdocs serve        the site, at http://127.0.0.1:8000
    mkdocs build --strict

A page per algorithm file from its docstring, its settings, and what was measured of it (docs/measured/algorithms.json);
a gallery of the experiments with their pages and figures; the benchmarks and CONTRIBUTING. Links that lead to these
files in the repository lead to their pages on the site.
"""

import dataclasses
import importlib
import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page

from nestfed.algorithms import ALGORITHMS
from nestfed.core.algorithm import Algorithm
from nestfed.experiments import scoreboard

ROOT = Path(__file__).resolve().parent.parent
MEASURED = json.loads((ROOT / "docs" / "measured" / "algorithms.json").read_text())
# Where files of the repository are on the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "benchmarks.md", "README.md": "index.md"}
SECTION = re.compile(r"^(Why|Ref\.|Departures)(?=\s|$)", re.M)
CELL = lambda text: str(text).replace("|", "\\|").replace("\n", " ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    for path, page in PAGES.items():
        if not (ROOT / "docs" / page).exists():
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    made = [("algorithms/index.md", algorithm_index()), ("experiments/index.md", gallery())]
    made += [(f"algorithms/{module_name(module)}.md", algorithm_page(module)) for module in modules()]
    for name in experiments():
        made.append((f"experiments/{name}/index.md", (ROOT / "experiments" / name / "README.md").read_text()))
        for figure in sorted((ROOT / "experiments" / name / "figures").glob("*.png")):
            files.append(File.generated(config, f"experiments/{name}/figures/{figure.name}", abs_src_path=str(figure)))
    for place, text in made:
        files.append(File.generated(config, place, content=text))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Put the pages made here below their index."""
    for title, places in (
        ("Algorithms", [f"algorithms/{module_name(module)}.md" for module in modules()]),
        ("Experiments", [f"experiments/{name}/index.md" for name in experiments()]),
    ):
        index = next(page for page in nav.pages if page.file.src_uri == f"{title.lower()}/index.md")
        pages = [Page(None, files.src_uris[place], config) for place in places]
        section = Section(title, [index, *pages])
        nav.items[nav.items.index(index)] = section
        for child in section.children or []:
            child.parent = section
        nav.pages[nav.pages.index(index) + 1 : nav.pages.index(index) + 1] = pages
    for before, after in zip(nav.pages, nav.pages[1:], strict=False):
        before.next_page, after.previous_page = after, before
    assert not any(isinstance(item, Link) for item in nav.items), "a link of the navigation leads outside"
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    uri = page.file.src_uri
    here = next((path for path, made in PAGES.items() if made == uri and page.file.generated_by), None)
    if here is None and uri.startswith("experiments/") and uri != "experiments/index.md":
        here = uri.replace("index.md", "README.md")
    source = posixpath.dirname(here if here is not None else f"docs/{uri}")

    def follow(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(source, target))
        place = place_on_site(file)
        if place is None or place not in files.src_uris:  # a file of the repository that is no page: named, not linked
            return f"{match[1].lstrip('![')} (`{file}`)" if (ROOT / file).exists() else match[0]
        link = posixpath.relpath(place, posixpath.dirname(uri) or ".")
        return f"{match[1]}]({link}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?\[[^\]]*)\]\(([^)\s]+)\)", follow, markdown)


def place_on_site(file: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not."""
    if file in PAGES:
        return PAGES[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.startswith("experiments/"):
        return file.replace("README.md", "index.md")
    return None


# ------------------------------------------------------------------------------------------------- algorithms


def modules() -> list[ModuleType]:
    """The files of all registered algorithms, in the registry's order."""
    return list(dict.fromkeys(importlib.import_module(cls.__module__) for cls in ALGORITHMS.values()))


def module_name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def members(module: ModuleType) -> Iterator[tuple[str, type[Algorithm]]]:
    """The registered algorithms of a file."""
    return ((name, cls) for name, cls in ALGORITHMS.items() if cls.__module__ == module.__name__)


def algorithm_index() -> str:
    rows = [
        f"| [`{name}`]({module_name(importlib.import_module(cls.__module__))}.md#{name}) | {cls.__name__} "
        f"| {problems_of(cls)} | {CELL(first_line(cls))} |"
        for name, cls in ALGORITHMS.items()
    ]
    return "\n".join(
        [
            "# Algorithms",
            "",
            f"{len(ALGORITHMS)} methods in {len(modules())} files. A page has what the file says of itself (problem, "
            "update, why, reference, departures from the paper), the settings, the cost of a round read off the traced "
            "program, and where the method ends up on a problem whose solution is known. "
            "[Which method for my problem](../which-method.md) compares them on data.",
            "",
            "| name | class | problems | what it does |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def problems_of(cls: type[Algorithm]) -> str:
    return cls.family if cls.scope is None else f"{cls.family}, {cls.scope}"


def first_line(cls: type[Algorithm]) -> str:
    return inspect.getdoc(cls).partition("\n\n")[0]  # pyright: ignore[reportOptionalMemberAccess]


def algorithm_page(module: ModuleType) -> str:
    """A file's docstring: its update as it stands there, what is prose as prose; then every algorithm of the file."""
    doc = inspect.getdoc(module) or ""
    title, _, rest = doc.partition("\n")
    found = list(SECTION.finditer(rest))
    names = [match[1] for match in found]
    assert sorted(names) == ["Departures", "Ref.", "Why"], f"{module.__name__} has the sections {names}"
    ends = [match.start() for match in found[1:]] + [len(rest)]
    prose = {match[1]: rest[match.end() : end] for match, end in zip(found, ends, strict=True)}
    flat = lambda text: " ".join(text.split())
    departures = [flat(item) for item in re.split(r"^  \* ", prose["Departures"], flags=re.M)]
    lead, departures = departures[0], departures[1:]
    source = f"src/nestfed/algorithms/{module_name(module)}.py"
    head, colon, tail = title.rstrip(".").partition(":")
    parts = [
        "---\nhide: [toc]\n---",  # the update stands on wide lines
        f"# {head}",
        f"*{tail.strip()[:1].upper()}{tail.strip()[1:]}.*" if colon else "",
        f"```text\n{rest[: found[0].start()].strip()}\n```",
        f"**Why.** {escape(flat(prose['Why']))}",
        f"**Reference.** {link_references(escape(flat(prose['Ref.'])))}",
        "## Departures from the paper",
        escape(lead),
        "\n".join(f"- {escape(item)}" for item in departures),
        *(algorithm_section(name, cls) for name, cls in members(module)),
        f"The whole method is `{source}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def algorithm_section(name: str, cls: type[Algorithm]) -> str:
    """Settings, cost and measured limit of one algorithm."""
    settings = [
        f"| `{field.name}` | {'needed' if field.default is dataclasses.MISSING else f'`{CELL(repr(field.default))}`'} "
        f"| {CELL(escape(field.metadata.get('description', '')))} |"
        for field in dataclasses.fields(cls)
    ]
    measured = MEASURED["algorithms"][name]
    return "\n".join(
        [
            f"## {cls.__name__} {{ #{name} }}",
            "",
            f"`nestfed.make({name!r}, ...)`: {escape(first_line(cls))} For problems: {problems_of(cls)}.",
            "",
            "| setting | default | meaning |",
            "| --- | --- | --- |",
            *settings,
            "",
            *cost_lines(measured["cost"]),
            "",
            *limit_lines(measured["limit"]),
            "",
        ]
    )


def cost_lines(cost: dict) -> list[str]:
    """What a round costs one client."""
    oracles = ", ".join(f"{number} {kind}" for kind, number in cost["oracles"].items()) or "none"
    sizes = " and ".join(str(size) for size in cost["sizes"])
    return [
        "| cost of a round, one client | exchanges | numbers up | numbers down | oracle calls | rows drawn |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
        f"| `{settings_of(cost['settings'])}`, variables of {sizes} numbers, batches of {cost['batch']} "
        f"| {cost['exchanges']} | {cost['up']} | {cost['down']} | {oracles} | {cost['samples']} |",
    ]


def limit_lines(limit: dict) -> list[str]:
    """Where it ended up on a problem with a known solution."""
    rows = [
        f"| {key} | {numbers(value['expected'])} | {numbers(value['found'])} |"
        for key, value in limit["values"].items()
    ]
    other = (
        " It is another point than the solution of the weighted problem; the departures say why."
        if limit["other"]
        else ""
    )
    return [
        "Where it ends up: four clients with weights .1 to .4, two of them asked in a round, each failing with "
        f"probability .2; `{settings_of(limit['settings'])}`, "
        f"mean of the last half of {limit['rounds']:,} rounds.{other}",
        "",
        "| | its exact limit | found |",
        "| --- | --- | --- |",
        *rows,
    ]


def settings_of(settings: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "no settings"


def numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def escape(text: str) -> str:
    """Text of a docstring as Markdown: names with underscores and products stay what they are, outside of code."""
    pieces = text.split("`")
    return "`".join(re.sub(r"([*_<>\[\]|])", r"\\\1", piece) if i % 2 == 0 else piece for i, piece in enumerate(pieces))


def link_references(text: str) -> str:
    """arXiv numbers, DOIs and addresses as links."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    text = re.sub(r"(?<![/\w])doi:(10\.[^\s,;]+[^\s,;.])", r"[doi:\1](https://doi.org/\1)", text)
    return re.sub(r"(?<!/)\b(openreview\.net/forum\?id=\w+)", r"[\1](https://\1)", text)


# ------------------------------------------------------------------------------------------------- experiments


def experiments() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "experiments").glob("*/README.md"))


def gallery() -> str:
    """A figure and the title of every experiment."""
    cards = []
    for name in experiments():
        page = (ROOT / "experiments" / name / "README.md").read_text()
        title = page.partition("\n")[0].removeprefix("# ")
        figures = re.findall(r"!\[[^\]]*\]\((figures/[^)]+\.png)\)", page)
        figures = [figure for figure in figures if "claims" not in figure]
        shown = f"[![{title}]({name}/{figures[0]})]({name}/index.md)\n\n" if figures else ""
        below = f"**[{title}]({name}/index.md)**\n\n`nestfed reproduce {name}`"
        cards.append(f'<div class="card" markdown>\n\n{shown}{below}\n\n</div>')
    return "\n\n".join(
        [
            "---\nhide: [toc]\n---",
            "# Experiments",
            "The papers' experiments, repeated: every claim with its differences and intervals, also where it does not "
            "hold here. The command below a figure repeats the trainings; with `--from-cells`, in a clone, it makes "
            "the page again from those that are kept.",
            '<div class="gallery" markdown>',
            *cards,
            "</div>",
            "# All claims",
            scoreboard.write_tables(ROOT / "experiments", "{}/index.md"),
        ]
    )
