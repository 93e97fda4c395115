"""The documentation site is built from the repository without a warning, with a page for every algorithm."""

import json
import runpy
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


def gains(folder, task):
    return runpy.run_path(str(ROOT / "tools" / "site_gains.py"))["measured"](folder, task, ["fairness"])


def test_gains_and_losses_are_read_off_the_results(tmp_path):
    assert gains(tmp_path, "fairness") == ""  # nothing is said of what nobody measured
    values = {"fedavg": ([0.10, 0.12, 0.14], [0.9] * 3), "fedbio": ([0.05, 0.06, 0.07], [0.8, 0.9, 0.97])}
    final = [
        {"method": method, "seed": seed, "test_eqopp": gap, "test_accuracy": accuracy}
        for method, columns in values.items()
        for seed, (gap, accuracy) in enumerate(zip(*columns, strict=True))
    ]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    content = {"runs": {"bank": {"command": "nestfed run fairness --data bank", "final": final}}}
    (tmp_path / "benchmarks" / "results" / "tables-fairness.json").write_text(json.dumps(content))
    (tmp_path / "experiments" / "fairness" / "tables").mkdir(parents=True)
    (tmp_path / "experiments" / "fairness" / "tables" / "claims.csv").write_text(
        "claim,compared,case,difference,low,high,p,seeds\n1,gap minus FedAvg's,Adult,-0.01,-0.02,0.005,0.1,5\n"
    )
    text = gains(tmp_path, "fairness").replace("\N{NO-BREAK SPACE}", " ")
    # Differences -.05, -.06, -.07: the mean and 4.303 times .01 / sqrt(3); of the accuracy no interval is clear.
    (row,) = [line for line in text.splitlines() if line.startswith("| bank | FedBiO |")]
    assert "| 0.1200 | −0.0600 [−0.0848, −0.0352] **gain** |" in row and row.endswith("no clear difference |")
    assert "nestfed run fairness --data bank" in text and "3 seeds" in text
    assert "    | gap minus FedAvg's | Adult | −0.0100 [−0.0200, 0.0050] | 5 |" in text
