"""Every command and every snippet of the README, and of the pages it grew out of, runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAMES = ("start", "own-data", "command-line", "track", "tutorials/bank")
PAGES = [(ROOT / "docs" / f"{name}.md").read_text() for name in NAMES]
OWN_PROBLEM = (ROOT / "docs" / "own-problem.md").read_text()


def commands_of(page):
    return [line for block in re.findall(r"```bash\n(.*?)```", page, re.S) for line in block.splitlines()]


def snippets_of(page):
    return re.findall(r"```python\n(.*?)```", page, re.S)


COMMANDS = list(dict.fromkeys(command for page in (README, *PAGES) for command in commands_of(page)))


SEPARATE = {'pip install -e ".[dev]"', "nestfed demo", "python -m pytest -n auto", "nestfed reproduce fairness --quick"}


def run(command, cwd, **environment):
    program, *words = shlex.split(command)
    assert program == "nestfed"
    done = subprocess.run(
        [Path(sys.executable).with_name("nestfed"), *words], cwd=cwd, capture_output=True, text=True, timeout=900,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_commands_that_run_elsewhere_are_these():
    """.ci/run installs and runs the tests, this very one among them; demonstration and reproduction are below."""
    assert set(COMMANDS) >= SEPARATE
    ci = (ROOT / ".ci" / "run").read_text()
    assert '-e ".[dev]"' in ci and "grep -m 1 '^python -m pytest' README.md" in ci


# What one command leaves in a folder another one reads: those of a page go together.
TOGETHER = [[command for command in commands_of(page) if " runs/" in command] for page in PAGES]
TOGETHER = [commands for commands in TOGETHER if commands]
ALONE = [[command] for command in COMMANDS if command not in SEPARATE and not any(command in t for t in TOGETHER)]
AS_A_PROCESS = ALONE[0][0]
PRINTS_A_PAGE = {"run", "compare", "report"}


@pytest.mark.parametrize("commands", [*TOGETHER, *ALONE], ids=lambda commands: commands[-1])
def test_other_commands_run_as_they_stand_there(commands, tmp_path, call):
    random = np.random.default_rng(0)
    sex, region = random.choice(["f", "m"], 300), random.choice(["north", "south", "east"], 300)
    age = random.integers(18, 80, 300)
    income = np.where(age + 10 * (sex == "m") + 20 * random.normal(size=300) > 55, "high", "low")
    table = pd.DataFrame({"age": age, "sex": sex, "region": region, "income": income})
    table.to_csv(tmp_path / "my.csv", index=False)
    (tmp_path / "sites").mkdir()
    (tmp_path / "branches").mkdir()
    for name, rows in table.groupby("region"):
        rows.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
        branch = rows.assign(fraud=np.where(rows.age > 60, "yes", "no"))  # beside the tutorial, which makes its own
        branch.to_csv(tmp_path / "branches" / f"{name}.csv", index=False)
    for command in commands:
        _, verb, *words = shlex.split(command)
        if command == AS_A_PROCESS:
            code, printed, problem = 0, run(command, tmp_path), ""
        else:
            code, printed, problem = call(verb, *words)  # here, where what one has imported serves the next
        assert code == 0, f"{command}\n{problem}"
        if verb in PRINTS_A_PAGE and "--help" not in words:
            assert (tmp_path / printed.strip().splitlines()[-1]).name == "report.html"
            assert (tmp_path / printed.strip().splitlines()[-1]).exists()
        if verb == "sweep":
            assert (tmp_path / "runs" / "sweep-fairness-fedbio" / "best.toml").exists()


def test_demo_shows_a_fairer_model(tmp_path):
    shown = run("nestfed demo", tmp_path, XLA_FLAGS="")  # as a user has it: more work than compiling
    assert "FedBiOAcc" in shown and shown.strip().endswith("runs/demo/report.html")
    final = pd.read_parquet(tmp_path / "runs" / "demo" / "final.parquet").groupby("method").mean(numeric_only=True)
    assert final.test_eqopp["fedbio"] < final.test_eqopp["fedavg"]
    assert (final.test_accuracy > 0.8).all()


def test_reproduction_writes_its_page(tmp_path):
    page = tmp_path / run("nestfed reproduce fairness --quick", tmp_path).strip()
    text = page.read_text()
    assert page.name == "README.md" and text.count("Compared:") == 8 and "{{" not in text
    linked = re.findall(r"\]\((.*?)\)", text)
    assert len(linked) == 7 and all((page.parent / path).exists() for path in linked)
    table = pd.read_csv(page.parent / "tables" / "table1.csv")
    assert len(table) == 2 * 7 * 3 and table.ours.notna().all() and (table.seeds == 2).all()
    trained = {path: path.stat().st_mtime_ns for path in (page.parent / "cells").rglob("*")}
    assert len([path for path in trained if path.suffix == ".parquet" and path.parent.name == "cells"]) == 5
    (page.parent / "tables" / "table1.csv").unlink()
    run("nestfed reproduce fairness --quick --resume", tmp_path)  # nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in (page.parent / "cells").rglob("*")} == trained
    pd.testing.assert_frame_equal(pd.read_csv(page.parent / "tables" / "table1.csv"), table)


SWEEP = re.search(r"`(nestfed\.sweep\(.*?rounds=50\))`", OWN_PROBLEM, re.S)
(OWN_ALGORITHM,), (NAMED_TASK,), (A_PROBLEM,) = map(snippets_of, (README, PAGES[1], OWN_PROBLEM))


@pytest.mark.parametrize(
    "snippet", [NAMED_TASK, f"{A_PROBLEM}\n{SWEEP.group(1)}", OWN_ALGORITHM],
    ids=["named task", "own problem and sweep", "own algorithm"],
)  # fmt: skip
def test_snippet_runs(snippet, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
