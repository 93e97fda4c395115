"""Strictness for all tests: float64, no silent rank promotion, and a compilation cache shared by the workers."""

import ctypes
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

# Compilation dominates these tests: half of it is optimisation that tiny shapes do not need, a third of the rest is a
# way to fuse operations, and splitting a small program into parts takes longer than it gains (measured). XLA stops at a
# flag that it does not know: those behind the first are of this version.
flags = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    flags += ["--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"]  # fewer passes: a quarter less again
os.environ.setdefault("XLA_FLAGS", " ".join(flags))
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # programs need not say which lines made them
# In the environment, so that the commands that tests start share the cache too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis  # noqa: E402, F401
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Hypothesis asks the collector about other packages' generators when it is imported, and what is frozen it cannot see.
gc.freeze()
gc.set_threshold(50_000, 20, 100)  # tracing makes many small objects, and few of them are garbage


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Compiled programs pile up over hundreds of tests, to 10 GB and more: dropped where the workers, one per core,
    would soon fill half of the memory."""
    yield
    pages = Path("/proc/self/statm")  # Linux only
    if pages.exists() and int(pages.read_text().split()[1]) > os.sysconf("SC_PHYS_PAGES") / (2 * (os.cpu_count() or 1)):
        jax.clear_caches()
        # Given back, or this worker would seem full for good and every module would compile the same again.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)  # glibc only


@pytest.fixture(autouse=True, scope="session")
def untuned():
    """Runs choose no settings unless they are asked to: tuning compiles programs of its own, and most tests are about
    other things."""
    from nestfed.workbench import tuning  # heavy

    tuning.MOST_SECONDS = 0.0


@pytest.fixture
def nothing_left_running(monkeypatch, tmp_path):
    """No process that a test started, or one of these did, is there at its end."""
    monkeypatch.setenv("NESTFED_TEST_MARK", str(tmp_path))
    yield
    mark = f"NESTFED_TEST_MARK={tmp_path}".encode()
    left = []
    for process in Path("/proc").glob("[0-9]*"):  # Linux only
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                left.append((process / "cmdline").read_text())
        except OSError:  # it has just ended, or is another user's
            continue
    assert not left


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn, which takes seconds per report: for tests of other things."""
    from nestfed.report import figures  # heavy, and few tests want it

    def write(figure, folder, stem):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr(figures, "write", write)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """The command line in this process: (exit code, standard output, standard error)."""
    from nestfed import cli  # heavy, and few tests want it

    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["nestfed", *map(str, words)])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        else:
            code = 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


def pytest_collection_modifyitems(items):
    """The longest first: no worker waits for another's at the end."""
    items.sort(key=lambda item: "slow" not in item.keywords)


def pytest_make_parametrize_id(config, val, argname):
    """Content of files does not name tests: archives hold the time they were made at, and workers would disagree."""
    return argname if isinstance(val, bytes) else None
