"""Every command and every snippet of the README runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nestfed as nestfed_package

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


def nestfed(*arguments, cwd=ROOT):
    program = Path(sys.executable).with_name("nestfed")
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ)


def test_commands_are_the_known_ones():
    """The first two install and demonstrate (below); .ci/run installs and runs the third, this very test among it."""
    assert COMMANDS == ['pip install -e ".[dev]"', "nestfed demo", "python -m pytest -n auto"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert '-e ".[dev]"' in ci and "grep -m 1 '^python -m pytest' README.md" in ci


def test_demo_shows_the_wrong_point_and_the_right_one(tmp_path):
    done = nestfed("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("demo/demo.png")
    for name in ("demo.png", "demo.svg", "curves.csv", "table.csv"):
        assert (tmp_path / "demo" / name).stat().st_size > 200
    rows = [line.split(",") for line in (tmp_path / "demo" / "table.csv").read_text().splitlines()[1:]]
    errors = {(problem, method): float(error) for problem, method, _, _, error in rows}
    assert errors["composition", "FedAvg"] > 1 and errors["bilevel", "FedAvg"] > 1.3
    right = [error for (_, method), error in errors.items() if method != "FedAvg"]
    assert len(right) == 4 and max(right) < 0.01


SWEEP = re.search(r"`(nestfed\.sweep\(.*?rounds=50\))`", README, re.S)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bnestfed\.[a-z_.]+[a-z]", README))))
def test_every_name_of_the_readme_exists_after_import(name):
    found = nestfed_package
    for part in name.split(".")[1:]:
        found = getattr(found, part)


@pytest.mark.parametrize(
    "snippet", [f"{SNIPPETS[0]}\n{SWEEP.group(1)}", SNIPPETS[1]], ids=["own data and sweep", "own algorithm"]
)
def test_snippet_runs(snippet, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_list_shows_algorithms_and_settings():
    assert "fedbioacc" in nestfed("list").stdout
    assert "first_batch_multiplier" in nestfed("list", "fedbioacc").stdout


def test_bad_input_is_one_line_and_an_exit_code():
    done = nestfed("list", "fedbioac")
    assert done.returncode == 1
    assert done.stderr.startswith("nestfed: there is no algorithm 'fedbioac'; did you mean 'fedbioacc'?")
    assert "Traceback" not in done.stderr
    unknown = nestfed("fly")
    assert unknown.returncode == 2 and "Traceback" not in unknown.stderr
