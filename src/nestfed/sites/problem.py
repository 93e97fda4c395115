"""What a site makes of the settings of a run and its own rows: the one place that knows tables and schemas."""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestfed.core.settings import UserError
from nestfed.sites.masks import LIST_FILE, read_mask
from nestfed.sites.worker import Worker
from nestfed.workbench.request import Request
from nestfed.workbench.site_setup import SiteSetup
from nestfed.workbench.stages import Trace


def make_worker(folder: Path, data: Path) -> Worker:
    """The worker of the site whose rows these are."""

    def prepare(settings: Mapping[str, Any], schema: str | None, number: int, sites: int, seed: int):
        return SiteSetup(settings, keep_schema(schema, folder), data, site=number, sites=sites, seed=seed)

    find_mask = functools.partial(read_mask, folder) if (folder / LIST_FILE).exists() else None
    return Worker(prepare, folder, find_mask, find_uploads)


def keep_schema(schema: str | None, folder: Path) -> Path:
    """The agreed schema as a file: its text came with the letter."""
    if schema is None:
        raise UserError("a run of sites needs a schema that all have agreed on; give schema (--schema).")
    path = folder / "schema.toml"
    if not path.exists() or path.read_text(encoding="utf-8") != schema:
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(schema)
        Path(file.name).replace(path)
    return path


def find_uploads(settings: Mapping[str, Any], stage: int) -> Any:
    """What happens to uploads on their way, as `nestfed run` would have it."""
    request = Request.of({**settings, "data": settings.get("data", ".")})
    if request.privacy is None:
        return ()
    return request.budget.options(1, request.scenario, Trace(request.methods[0], 0, {})).uploads
