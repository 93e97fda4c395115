"""All algorithms by name. To add one, write its file, add its row here and add its row to tests/cases.py."""

import dataclasses
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError, suggest, validate


class Registry(Mapping[str, type[Algorithm]]):
    """Classes of algorithms by name. The file of one is imported when it is asked for, which most of them never are."""

    def __init__(self, places: Mapping[str, str]):
        self._places = places  # "file:Class" by name

    def __getitem__(self, name: str) -> type[Algorithm]:
        return pkgutil.resolve_name(f"{__name__}.{self._places[name]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


ALGORITHMS = Registry(
    {
        "fedavg": "fedavg:FedAvg",
        "fedprox": "fedavg:FedProx",
        "scaffold": "scaffold:Scaffold",
        "fedopt": "fedopt:FedOpt",
        "fedadagrad": "fedopt:FedAdagrad",
        "fedadam": "fedopt:FedAdam",
        "fedyogi": "fedopt:FedYogi",
        "fedbio": "fedbio:FedBiO",
        "fedbioacc": "fedbio:FedBiOAcc",
        "fednest": "fednest:FedNest",
        "lfednest": "fednest:LFedNest",
        "fednest-sgd": "fednest:FedNestSGD",
        "fedmbo": "fedmbo:FedMBO",
        "simfbo": "simfbo:SimFBO",
        "shrofbo": "simfbo:ShroFBO",
        "fedminmax": "fedminmax:FedMinMax",
        "fcfl": "fcfl:FCFL",
        "fedavg-co-1": "fedavg_co:FedAvgCO1",
        "fedavg-co-2": "fedavg_co:FedAvgCO2",
        "feddro": "feddro:FedDRO",
        "ds-feddro": "feddro:DSFedDRO",
        "mbsgd": "mbsgd:MBSGD",
        "unconstrained": "mbsgd:Unconstrained",
        "scgd": "scgd:SCGD",
        "gcivr": "gcivr:GCIVR",
        "comfedl": "comfedl:ComFedL",
        "local-scgd": "local_scgd:LocalSCGD",
        "local-scgdm": "local_scgd:LocalSCGDM",
        "local-scgd-own": "local_scgd:LocalSCGDOwn",
        "local-scgdm-own": "local_scgd:LocalSCGDMOwn",
        "local-scgd-conditional": "local_scgd:LocalSCGDConditional",
        "local-scgdm-conditional": "local_scgd:LocalSCGDMConditional",
        "fastdro": "fastdro:FastDRO",
        "pdsgd": "pdsgd:PDSGD",
        "fcsg": "fcsg:FCSG",
        "fcsg-m": "fcsg:FCSGM",
        "acc-fcsg-m": "fcsg:AccFCSGM",
        "bsgd": "bsgd:BSGD",
        "bspiderboost": "bsgd:BSpiderBoost",
        "coda-plus": "coda:CODAPlus",
        "codasca": "coda:CODASCA",
        "soap": "soap:SOAP",
        "fedreco": "fedreco:FedReCo",
        "fedreco-pvr": "fedreco:FedReCoPVR",
        "ditto": "ditto:Ditto",
        "fedrep": "fedrep:FedRep",
        "fedbabu": "fedrep:FedBABU",
        "fedpac": "fedpac:FedPAC",
        "fedcr": "fedcr:FedCR",
        "fedavg-whole": "fedavg_personal:FedAvgWhole",
        "local-only": "fedavg_personal:LocalOnly",
    }
)


def find(name: str) -> type[Algorithm]:
    """Return the class of the algorithm of this name."""
    cls = ALGORITHMS.get(name.lower())
    if cls is None:
        raise UserError(f"there is no algorithm {name!r}{suggest(name, ALGORITHMS)} All: {', '.join(ALGORITHMS)}.")
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
            raise UserError(f"{name} has no setting {key!r}{suggest(key, fields)} Its settings: {', '.join(fields)}.")
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
                    f"{name}.{head} has no setting {tail!r}{suggest(tail, names)} It has: {', '.join(names)}."
                )
        plain[head] = dataclasses.replace(part, **changes)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in plain]
    if missing:
        raise UserError(f"{name} needs {', '.join(missing)}; for example make({name!r}, {missing[0]}=0.1, ...).")
    algorithm = cls(**plain)
    validate(algorithm)
    return algorithm
