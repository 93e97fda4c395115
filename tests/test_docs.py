"""Pages of docs/ whose code must run from top to bottom and print what stands below it."""

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "cohorts.md",
    "compositional.md",
    "estimators.md",
    "own-model.md",
    "personal.md",
    "privacy.md",
    "start.md",
    "track.md",
    "tutorials/bank.md",
    "tutorials/consortium.md",
    "tutorials/researcher.md",
]
MARK = "--- end of block ---"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def blocks(page):
    """(code, what it prints or nothing) of every python block of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.S)
    assert len(found) == text.count("```python")
    return found


def assert_prints(printed, expected):
    """The same words, and numbers within one of their last digit: compilers differ in the order of sums."""
    words = lambda text: [part.split() for part in NUMBER.split(text)]
    assert words(printed) == words(expected)
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        unit = 10.0 ** -len(theirs.partition(".")[2])
        assert abs(float(ours) - float(theirs)) < 1.01 * unit, f"{printed}\nis not\n{expected}"


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_prints_what_stands_there(page, tmp_path):
    found = blocks(page)
    script = "".join(f"{code}\nprint({MARK!r})\n" for code, _ in found)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    assert len(printed) == len(found)
    for ours, (code, expected) in zip(printed, found, strict=True):
        assert bool(expected) == ("print(" in code)
        assert_prints(ours, expected)


TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
CODE = ("src", "tests", "benchmarks", "tools")
FILES = [path.as_posix() for folder in CODE for path in (ROOT / folder).rglob("*.py")]
ELSEWHERE = {"src/nestfed/algorithms/mine.py", "nestfed.toml"}  # files that a reader is to make, or a kit has


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_text_names_exists(path):
    """Files, and dotted names of the library, in pages and in docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"[`( ]((?:[a-z_]+/)*[a-z_0-9]+\.py)\b", text))
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in FILES)} - ELSEWHERE
    for name in set(re.findall(r"\bnestfed(?:\.[A-Za-z_]+)+", text)) - ELSEWHERE:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.add(name)
    assert not missing, f"{path.name} names {sorted(missing)}"


def made_for_the_site(path):
    """Pages that the site makes of the repository: nothing lies there before."""
    return path.is_relative_to(ROOT / "docs" / "algorithms") or path == ROOT / "docs" / "experiments" / "index.md"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!http)(.*?)\)", page.read_text(encoding="utf-8"))]
    places = [(page.parent / link).resolve() for link in links]
    assert not [place for place in places if not place.exists() and not made_for_the_site(place)]


def test_a_wrong_number_or_word_is_found():
    assert_prints("x 1.239\n", "x  1.24\n")
    with pytest.raises(AssertionError):
        assert_prints("x 1.26", "x 1.24")
    with pytest.raises(AssertionError):
        assert_prints("y 1.24", "x 1.24")
