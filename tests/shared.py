"""What some tests need and a user's machine may lack: such a test is skipped there and says why, and fails in CI."""

import os
from pathlib import Path
from typing import NoReturn

import pytest


def missing(message: str) -> NoReturn:
    """Skip the test; continuous integration has everything, so there it fails."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def shared_data() -> Path:
    """`../shared/data`, the official data files, which a user's clone does not have."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        missing(f"the official data files are not at {folder}: nothing to compare with")
    return folder
