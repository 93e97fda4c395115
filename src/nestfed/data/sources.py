"""Public tables by name. `fetch` finds their files; nothing is used before its checksum (or, where none is published,
its counts) are right."""

import dataclasses
import importlib.resources
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest, summarise_error
from nestfed.data.fetch import REMEDY, Official, obtain
from nestfed.data.table import NEAREST, Table

UCI = "https://archive.ics.uci.edu/static/public"

ADULT_COLUMNS = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
).split()
GERMAN_COLUMNS = (
    "checking_status duration_months credit_history purpose credit_amount savings employment_since installment_rate "
    "personal_status_sex other_debtors residence_since property age other_installment_plans housing existing_credits "
    "job num_dependents telephone foreign_worker class"
).split()
DEFAULT_COLUMNS = (
    ["ID", "LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE", "PAY_0"]
    + [f"PAY_{month}" for month in range(2, 7)]
    + [f"BILL_AMT{month}" for month in range(1, 7)]
    + [f"PAY_AMT{month}" for month in range(1, 7)]
    + ["default payment next month"]
)
COMPAS_COLUMNS = (  # the file also holds names, dates of birth and case numbers: never read
    "sex age age_cat race juv_fel_count juv_misd_count juv_other_count priors_count days_b_screening_arrest "
    "c_days_from_compas c_charge_degree is_recid is_violent_recid decile_score score_text v_decile_score v_score_text "
    "two_year_recid"
).split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Official):
    """Where a table comes from, how its files are read, and the roles of its columns."""

    rows: int
    positives: int
    read: Callable[..., pd.DataFrame]  # from the bytes of the files
    roles: dict[str, Any]
    bundled: Callable[[], pd.DataFrame] | None = None


# ------------------------------------------------------------------------------------------------- reading


def read_adult(*parts: bytes) -> pd.DataFrame:
    """One or both of adult.data and adult.test; labels of the latter end with a full stop."""

    def read(content: bytes) -> pd.DataFrame:
        return pd.read_csv(
            io.BytesIO(content),
            header=None,
            names=ADULT_COLUMNS,
            skipinitialspace=True,
            comment="|",  # the first line of adult.test
            keep_default_na=False,
        )

    frames = [read(part) for part in parts]
    for frame in frames:
        frame["income"] = frame["income"].str.removesuffix(".")
    if len(frames) == 1:
        return frames[0]
    marked = [frame.assign(part=part) for frame, part in zip(frames, ("train", "test"), strict=True)]
    return pd.concat(marked, ignore_index=True)


def read_german(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content), sep=" ", header=None, names=GERMAN_COLUMNS, keep_default_na=False)


def read_default(content: bytes) -> pd.DataFrame:
    """The host's table names the columns X1 .. X23 and Y; the order is that of the spreadsheet."""
    frame = pd.read_csv(io.BytesIO(content))
    frame = frame.set_axis(DEFAULT_COLUMNS, axis=1)
    return frame.astype({"SEX": str, "EDUCATION": str, "MARRIAGE": str})  # codes, not quantities


def read_compas(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content), usecols=COMPAS_COLUMNS).reindex(columns=COMPAS_COLUMNS)


def read_bank(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content), sep=";", keep_default_na=False)


def read_communities(content: bytes, names: bytes) -> pd.DataFrame:
    columns = [line.split()[1] for line in names.decode("latin-1").splitlines() if line.startswith("@attribute")]
    frame = pd.read_csv(io.BytesIO(content), header=None, names=columns, na_values=["?"], encoding="latin-1")
    # The file has no column of groups, only percentages.
    high = frame["racepctblack"] > frame["racepctblack"].median()
    share = pd.Series(np.where(high, "above the median", "up to the median"), name="black_share")
    return pd.concat([frame, share], axis=1)


def read_hmda(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content))


def read_bundled(name: str) -> pd.DataFrame:
    content = (importlib.resources.files("nestfed.data") / "bundled" / f"{name}.csv.xz").read_bytes()
    return pd.read_csv(io.BytesIO(content), compression="xz", keep_default_na=False)


def read_bundled_adult_train() -> pd.DataFrame:
    return read_bundled("adult").query("part == 'train'").drop(columns="part")


ADULT_ORIGIN = "Becker and Kohavi (1996), Adult, UCI Machine Learning Repository, doi 10.24432/C5XW20, CC BY 4.0"
ADULT_MD5 = {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"}
ADULT_ROLES = {"label": "income", "positive": ">50K", "groups": ("race", "sex"), "origin": ADULT_ORIGIN}

SOURCES = {
    "adult": Source(
        rows=32561,
        positives=7841,
        files=("adult.data",),
        read=read_adult,
        address=f"{UCI}/2/adult.zip",
        roles=ADULT_ROLES,
        md5=ADULT_MD5,
        bundled=read_bundled_adult_train,
    ),
    "adult-all": Source(
        rows=48842,
        positives=11687,
        files=("adult.data", "adult.test"),
        read=read_adult,
        address=f"{UCI}/2/adult.zip",
        roles=ADULT_ROLES | {"drop": ("part",)},  # the host's own split
        md5=ADULT_MD5,
        bundled=lambda: read_bundled("adult"),
    ),
    "german": Source(
        rows=1000,
        positives=300,
        files=("german.data",),
        read=read_german,
        address=f"{UCI}/144/statlog+german+credit+data.zip",
        roles={
            "label": "class",
            "positive": 2,  # bad credit
            "groups": ("personal_status_sex", "foreign_worker"),
            "origin": "Hofmann (1994), Statlog (German Credit Data), UCI Machine Learning Repository, "
            "doi 10.24432/C5NC77, CC BY 4.0",
        },
        md5={"german.data": "6b94c2e35480e671545e52a808a8a549"},
        bundled=lambda: read_bundled("german"),
    ),
    "default-credit": Source(
        rows=30000,
        positives=6636,
        files=("default_credit_card_clients.csv",),
        read=read_default,
        address=f"{UCI}/350/data.csv",  # the archive holds an old spreadsheet that pandas alone cannot read
        roles={
            "label": "default payment next month",
            "positive": 1,
            "groups": ("SEX", "EDUCATION", "MARRIAGE"),
            "drop": ("ID",),
            "origin": "Yeh (2009), Default of Credit Card Clients, UCI Machine Learning Repository, "
            "doi 10.24432/C55S3H, CC BY 4.0",
        },
    ),
    "compas": Source(
        rows=7214,
        positives=3251,
        files=("compas-scores-two-years.csv",),
        read=read_compas,
        address="https://raw.githubusercontent.com/propublica/compas-analysis/master/compas-scores-two-years.csv",
        roles={
            "label": "two_year_recid",
            "positive": 1,
            "groups": ("race", "sex", "age_cat"),
            # Other outcomes, the scores under study, and days that only tell whether the record is sound.
            "drop": (
                "is_recid",
                "is_violent_recid",
                "decile_score",
                "score_text",
                "v_decile_score",
                "v_score_text",
                "days_b_screening_arrest",
                "c_days_from_compas",
            ),
            "origin": "Larson, Mattu, Kirchner and Angwin (2016), COMPAS recidivism, ProPublica, public records",
        },
        md5={"compas-scores-two-years.csv": "9165d40c400bba93a8cffece2b74622b"},
        other_names=("compas_two_years_reduced.csv",),
    ),
    "bank": Source(
        rows=45211,
        positives=5289,
        files=("bank-full.csv",),
        read=read_bank,
        address=f"{UCI}/222/bank+marketing.zip",
        roles={
            "label": "y",
            "positive": "yes",
            "groups": ("marital", "job", "education"),
            "drop": ("duration",),  # known only after the call whose outcome is the label
            "origin": "Moro, Rita and Cortez (2014), Bank Marketing, UCI Machine Learning Repository, "
            "doi 10.24432/C5K306, CC BY 4.0",
        },
        md5={"bank-full.csv": "e6b0ca77f3f200ec5428e04dd104da53"},
    ),
    "communities": Source(
        rows=1994,
        positives=583,
        files=("communities.data", "communities.names"),
        read=read_communities,
        address=f"{UCI}/183/communities+and+crime.zip",
        roles={
            "label": "ViolentCrimesPerPop",
            "threshold": 0.28,  # the upper 30 %
            "groups": ("black_share",),
            "drop": ("state", "county", "community", "communityname", "fold"),
            "origin": "Redmond (2002), Communities and Crime, UCI Machine Learning Repository, "
            "doi 10.24432/C53W3X, CC BY 4.0",
        },
    ),
    "hmda": Source(
        rows=2380,
        positives=285,
        files=("HMDA.csv",),
        read=read_hmda,
        address="https://vincentarelbundock.github.io/Rdatasets/csv/AER/HMDA.csv",
        roles={
            "label": "deny",
            "positive": "yes",
            "groups": ("afam", "single"),
            "drop": ("rownames",),
            "origin": "Munnell, Tootell, Browne and McEneaney (1996), Boston HMDA, R package AER, GPL-2 or GPL-3",
        },
        other_names=("hmda_boston_aer.csv",),
    ),
}


def describe() -> pd.DataFrame:
    """All tables that `load` knows; reads and fetches nothing."""
    rows = [
        {
            "name": name,
            "rows": source.rows,
            "label": source.roles["label"],
            "groups": ", ".join(source.roles["groups"]),
            "bundled": source.bundled is not None,
            "origin": source.roles["origin"],
        }
        for name, source in SOURCES.items()
    ]
    return pd.DataFrame(rows)


def load(name: str) -> Table:
    """A public table by its name."""
    if name not in SOURCES:
        folder = f" (your folder is {name}/, with the slash)" if Path(name).is_dir() else ""
        hint = f"{suggest(name, SOURCES, *NEAREST)}{folder}; known are {', '.join(SOURCES)}"
        raise UserError(f"unknown data {name!r}{hint}.")
    source = SOURCES[name]
    frame = obtain(name, source, lambda contents, where: _read(name, source, contents, where), source.bundled)
    return Table(name=name, frame=frame, **source.roles)


def _read(name: str, source: Source, contents: dict[str, bytes], where: str) -> pd.DataFrame:
    """The frame; files without a published checksum are known by their counts."""
    files = " and ".join(contents)
    try:
        frame = source.read(*contents.values())
        positives = int(Table(name=name, frame=frame, **source.roles).labels().sum())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{files} from {where} is not the table {name!r} ({summarise_error(error)}). {REMEDY}"
        ) from None
    if (len(frame), positives) != (source.rows, source.positives):
        raise UserError(
            f"{files} from {where} has {len(frame)} rows with {positives} positive labels, expected are {source.rows} "
            f"and {source.positives}. {REMEDY}"
        )
    return frame
