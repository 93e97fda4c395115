"""Official files of public data sets: found on this machine, or downloaded.

`obtain` looks in the folder that the environment variable NESTFED_DATA names (official files, plain, gzipped, or in
the archive the host serves), then in the package, then in the cache folder, and at last downloads from the official
host into the cache folder. Nothing is used before it was checked, and nothing unchecked is kept.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import io
import os
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nestfed.core.settings import UserError, summarise_error

REMEDY = "Nothing was changed: replace or remove it, or set NESTFED_DATA to a folder with the official file."

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Official:
    """The files of a data set: their official names, where they are served, and their published checksums."""

    files: tuple[str, ...]  # a name may start with a folder, where sets of files have the same names
    # Of the one file, of a zip archive that holds the files, or, ending in "/", of a folder with each of them gzipped.
    address: str | None
    md5: dict[str, str] = dataclasses.field(default_factory=dict)  # of the files as they are read: not gzipped
    other_names: tuple[str, ...] = ()  # of the one file, as others distribute it
    origin: str = ""  # of files without an address: who makes them, and how


def obtain(
    name: str,
    official: Official,
    use: Callable[[dict[str, bytes], str], T],
    bundled: Callable[[], T] | None = None,
) -> T:
    """What `use` makes of the contents of the files, given with the place they come from, once their checksums are
    right; `use` refuses with a UserError what it cannot recognise."""

    def check(contents: dict[str, bytes], where: str) -> T:
        _check_sums(official, contents, where)
        return use(contents, where)

    named = os.environ.get("NESTFED_DATA")
    if named:
        if not Path(named).is_dir():
            raise UserError(f"NESTFED_DATA={named} is not a folder; name the folder with the data files, or unset it.")
        contents = _find(Path(named), official)
        if contents is not None:
            return check(contents, f"the folder {named} (NESTFED_DATA)")
    if bundled is not None:
        return bundled()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestfed"
    contents = _find(cache, official)
    if contents is not None:
        return check(contents, f"the cache folder {cache}")
    contents = _download(name, official)
    made = check(contents, str(official.address))
    with contextlib.suppress(OSError):  # a home that cannot be written to only costs a download the next time
        for file, content in contents.items():
            _write(cache / file, content)
    return made


def _check_sums(official: Official, contents: dict[str, bytes], where: str) -> None:
    for file, content in contents.items():
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != official.md5.get(file, found):
            raise UserError(
                f"{file} from {where} has the md5 sum {found}, the official file has {official.md5[file]}: it is "
                f"another version or damaged. {REMEDY}"
            )


def _find(folder: Path, official: Official) -> dict[str, bytes] | None:
    """The contents of the files by the names found, if the folder has all of them."""
    archive = folder / (official.address or "").rsplit("/", 1)[-1]
    zipped = archive.read_bytes() if archive.suffix == ".zip" and archive.is_file() else None
    contents = {}
    for file in official.files:
        for candidate in (file, *official.other_names):
            if (folder / candidate).is_file():
                contents[candidate] = (folder / candidate).read_bytes()
                break
            gzipped = folder / f"{candidate}.gz"
            if gzipped.is_file():
                contents[candidate] = _gunzip(gzipped.read_bytes(), str(gzipped))
                break
        else:
            content = _unzip(zipped, file, str(archive)) if zipped is not None else None
            if content is None:
                return None
            contents[file] = content
    return contents


def _gunzip(content: bytes, where: str) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        raise UserError(f"{where} is not a complete gzip file; get it again, or take it out of its folder.") from None


def _unzip(content: bytes, file: str, where: str) -> bytes | None:
    """A file of an archive, or of an archive in it."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.namelist():
                if member.rsplit("/", 1)[-1] == file:
                    return archive.read(member)
            for member in archive.namelist():
                if member.endswith(".zip"):
                    found = _unzip(archive.read(member), file, f"{where}/{member}")
                    if found is not None:
                        return found
    except (zipfile.BadZipFile, zlib.error):
        raise UserError(f"{where} is not a complete zip archive; get it again, or supply {file} itself.") from None
    return None


def _download(name: str, official: Official) -> dict[str, bytes]:
    address, files = official.address, official.files
    advice = f"put {' and '.join(files)} into a folder, and set the environment variable NESTFED_DATA to that folder"
    if address is None:
        origin = f" ({official.origin})" if official.origin else ""
        raise UserError(f"the data {name!r} are on no host{origin}, and not on this machine: {advice}.")
    advice = f"download it elsewhere, {advice}"
    if address.endswith("/"):
        places = {file: f"{address}{file.rsplit('/', 1)[-1]}.gz" for file in files}
        return {file: _gunzip(_get(name, place, advice), place) for file, place in places.items()}
    content = _get(name, address, advice)
    if not address.endswith(".zip"):
        return {files[0]: content}
    contents = {}
    for file in files:
        found = _unzip(content, file, address)
        if found is None:
            raise UserError(f"the archive {address} does not hold {file}: {advice}.")
        contents[file] = found
    return contents


def _get(name: str, address: str, advice: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "nestfed"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"the data {name!r} could not be fetched from {address} ({summarise_error(error)}): {advice}."
        ) from None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also when two runs write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
