"""All algorithms by name. To add one, write its file, add its row here and add its row to tests/cases.py."""

import dataclasses
from typing import Any

from nestfed.algorithms.bsgd import BSGD, BSpiderBoost
from nestfed.algorithms.coda import CODASCA, CODAPlus
from nestfed.algorithms.comfedl import ComFedL
from nestfed.algorithms.ditto import Ditto
from nestfed.algorithms.fastdro import FastDRO
from nestfed.algorithms.fcfl import FCFL
from nestfed.algorithms.fcsg import FCSG, FCSGM, AccFCSGM
from nestfed.algorithms.fedavg import FedAvg, FedProx
from nestfed.algorithms.fedavg_co import FedAvgCO1, FedAvgCO2
from nestfed.algorithms.fedavg_personal import FedAvgWhole, LocalOnly
from nestfed.algorithms.fedbio import FedBiO, FedBiOAcc
from nestfed.algorithms.fedcr import FedCR
from nestfed.algorithms.feddro import DSFedDRO, FedDRO
from nestfed.algorithms.fedmbo import FedMBO
from nestfed.algorithms.fedminmax import FedMinMax
from nestfed.algorithms.fednest import FedNest, FedNestSGD, LFedNest
from nestfed.algorithms.fedopt import FedAdagrad, FedAdam, FedOpt, FedYogi
from nestfed.algorithms.fedpac import FedPAC
from nestfed.algorithms.fedreco import FedReCo, FedReCoPVR
from nestfed.algorithms.fedrep import FedBABU, FedRep
from nestfed.algorithms.gcivr import GCIVR
from nestfed.algorithms.local_scgd import (
    LocalSCGD,
    LocalSCGDConditional,
    LocalSCGDM,
    LocalSCGDMConditional,
    LocalSCGDMOwn,
    LocalSCGDOwn,
)
from nestfed.algorithms.mbsgd import MBSGD, Unconstrained
from nestfed.algorithms.pdsgd import PDSGD
from nestfed.algorithms.scaffold import Scaffold
from nestfed.algorithms.scgd import SCGD
from nestfed.algorithms.simfbo import ShroFBO, SimFBO
from nestfed.algorithms.soap import SOAP
from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError, closest, validate

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedopt": FedOpt,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedbio": FedBiO,
    "fedbioacc": FedBiOAcc,
    "fednest": FedNest,
    "lfednest": LFedNest,
    "fednest-sgd": FedNestSGD,
    "fedmbo": FedMBO,
    "simfbo": SimFBO,
    "shrofbo": ShroFBO,
    "fedminmax": FedMinMax,
    "fcfl": FCFL,
    "fedavg-co-1": FedAvgCO1,
    "fedavg-co-2": FedAvgCO2,
    "feddro": FedDRO,
    "ds-feddro": DSFedDRO,
    "mbsgd": MBSGD,
    "unconstrained": Unconstrained,
    "scgd": SCGD,
    "gcivr": GCIVR,
    "comfedl": ComFedL,
    "local-scgd": LocalSCGD,
    "local-scgdm": LocalSCGDM,
    "local-scgd-own": LocalSCGDOwn,
    "local-scgdm-own": LocalSCGDMOwn,
    "local-scgd-conditional": LocalSCGDConditional,
    "local-scgdm-conditional": LocalSCGDMConditional,
    "fastdro": FastDRO,
    "pdsgd": PDSGD,
    "fcsg": FCSG,
    "fcsg-m": FCSGM,
    "acc-fcsg-m": AccFCSGM,
    "bsgd": BSGD,
    "bspiderboost": BSpiderBoost,
    "coda-plus": CODAPlus,
    "codasca": CODASCA,
    "soap": SOAP,
    "fedreco": FedReCo,
    "fedreco-pvr": FedReCoPVR,
    "ditto": Ditto,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedpac": FedPAC,
    "fedcr": FedCR,
    "fedavg-whole": FedAvgWhole,
    "local-only": LocalOnly,
}


def find(name: str) -> type[Algorithm]:
    """Return the class of the algorithm of this name."""
    cls = ALGORITHMS.get(name.lower())
    if cls is None:
        raise UserError(f"there is no algorithm {name!r}{_nearest(name, ALGORITHMS)} All: {', '.join(ALGORITHMS)}.")
    return cls


def make(name: str, **settings: Any) -> Algorithm:
    """Return the algorithm of this name with these settings: `make("fedavg", lr=0.1, local_steps=5)`.

    A dotted name reaches into a part: `make("fedbio", ..., **{"hypergradient.terms": 20})`.
    """
    cls = find(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    plain: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        head, _, tail = key.partition(".")
        if head not in fields:
            raise UserError(f"{name} has no setting {key!r}{_nearest(key, fields)} Its settings: {', '.join(fields)}.")
        if tail:
            parts.setdefault(head, {})[tail] = value
        else:
            plain[head] = value
    for head, changes in parts.items():
        part: Any = plain[head] if head in plain else fields[head].default
        for tail in changes:
            names = [field.name for field in getattr(part, "__dataclass_fields__", {}).values()]
            if tail not in names:
                raise UserError(
                    f"{name}.{head} has no setting {tail!r}{_nearest(tail, names)} It has: {', '.join(names)}."
                )
        plain[head] = dataclasses.replace(part, **changes)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in plain]
    if missing:
        raise UserError(f"{name} needs {', '.join(missing)}; for example make({name!r}, {missing[0]}=0.1, ...).")
    algorithm = cls(**plain)
    validate(algorithm)
    return algorithm


def _nearest(name: str, known: Any) -> str:
    meant = closest(name, known)
    return f"; did you mean {meant!r}?" if meant else "."
