"""The documentation site is built from the repository without a warning, with a page for every algorithm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nestfed import ALGORITHMS

ROOT = Path(__file__).parent.parent
MEASURED = json.loads((ROOT / "docs" / "measured" / "algorithms.json").read_text())["algorithms"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_algorithm_and_experiment_has_its_place(site):
    index = (site / "algorithms" / "index.html").read_text()
    for name, cls in ALGORITHMS.items():
        file = cls.__module__.rpartition(".")[2]
        page = (site / "algorithms" / file / "index.html").read_text()
        assert f'id="{name}"' in page and f'href="{file}/#{name}"' in index
        assert "Departures from the paper" in page
    for path in (ROOT / "experiments").glob("*/README.md"):
        assert (site / "experiments" / path.parent.name / "index.html").exists()


def test_pages_show_what_a_docstring_says(site):
    page = (site / "algorithms" / "feddro" / "index.html").read_text()
    assert "y_k   = (1 - beta) (y - g_k(x_k; Z)) + g_k(x_k&#39;; Z)" in page or "(1 - beta) (y - g_k(x_k; Z))" in page
    assert 'href="https://arxiv.org/abs/2311.12652"' in page
    assert "how fast the estimate forgets" in page


def test_all_algorithms_are_measured():
    assert list(MEASURED) == list(ALGORITHMS)
