"""What some tests need and a user's machine may lack: such a test is skipped there and says why.

`.ci/run` installs a browser and sets NESTFED_REQUIRE_BROWSER; where the data files lie beside the repository it sets
NESTFED_REQUIRE_DATA. A test that misses what is said to be there fails.
"""

import os
from pathlib import Path
from typing import NoReturn

import pytest


def missing(what: str, message: str) -> NoReturn:
    """Skip the test, or fail where the data ("DATA") or the browser ("BROWSER") are said to be there."""
    if os.environ.get(f"NESTFED_REQUIRE_{what}"):
        pytest.fail(message)
    pytest.skip(message)


def shared_data() -> Path:
    """`../shared/data`, the official data files, which a user's clone does not have."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        missing("DATA", f"the official data files are not at {folder}: nothing to compare with")
    return folder
