"""What a site makes of the settings of a run and its own rows: the one place of a worker that knows tables."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestfed.core.settings import UserError
from nestfed.sites.masks import SiteMask, read_mask
from nestfed.sites.worker import Worker
from nestfed.workbench.request import Request
from nestfed.workbench.site_setup import SiteSetup


def make_worker(folder: Path, data: Path, store: Path) -> Worker:
    """The worker of the site whose rows these are."""
    if not data.exists():
        raise UserError(f"there is no file {data}; give this site's rows with --data.")

    def prepare(settings: Mapping[str, Any], schema: str | None, number: int, sites: int, seed: int) -> SiteSetup:
        return SiteSetup(settings, write_schema(schema, folder), data, site=number, sites=sites, seed=seed)

    def find_mask(run: str, names: Sequence[str], number: int) -> SiteMask:
        return read_mask(folder, names[number], names, run)

    return Worker(prepare, folder, store, find_mask, find_uploads)


def write_schema(schema: str | None, folder: Path) -> Path:
    """The agreed schema as a file in this folder: its text came with a letter."""
    if schema is None:
        raise UserError("a run of sites needs a schema that all have agreed on; give it with --schema.")
    path = folder / "schema.toml"
    if not path.exists() or path.read_text(encoding="utf-8") != schema:
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(schema)
        Path(name).replace(path)
    return path


def find_uploads(settings: Mapping[str, Any], stage: int) -> Any:
    """What happens to this site's uploads on their way: what the settings of the run say."""
    request = Request.of(settings)
    return () if request.guarantee is None else request.guarantee
