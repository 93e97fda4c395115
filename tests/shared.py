"""The folder of official data files beside the project, for tests that compare with it."""

import os
from pathlib import Path

import pytest


def shared_data() -> Path:
    """`../shared/data`; a clone without it skips the test and says why, continuous integration fails."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        message = f"the official data files are not at {folder}: nothing to compare with"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
