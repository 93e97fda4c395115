"""Records with synthetic but plausible numbers, for the tests of the report."""

from typing import Any

import numpy as np
import pandas as pd

from nestfed.report.record import Record

GROUPS = ("White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other")
METHODS = {"fedavg": "FedAvg", "fedminmax": "FedMinMax", "twostage": "FedFair (two stages)"}
METRICS = [
    {"name": "accuracy", "title": "test accuracy", "better": "higher", "digits": 4},
    {"name": "gap", "title": "gap of true positive rates", "better": "lower", "digits": 4},
    {"name": "loss", "title": "training loss", "better": "lower", "digits": 4},
]
LEVELS = {"fedavg": (0.848, 0.21, 0.33), "fedminmax": (0.839, 0.09, 0.36), "twostage": (0.851, 0.06, 0.34)}


def example(
    *,
    methods: dict[str, str] = METHODS,
    seeds: tuple[int, ...] = (0, 1, 2),
    groups: tuple[str, ...] = GROUPS,
    clients: int = 3,
    rounds: int = 300,
    every: int = 2,
    more_metrics: int = 0,
    **about: Any,
) -> Record:
    """Methods that approach their levels with noise; every method whose name has "stage" in it has two stages, and the
    first of them does not record the gap.
    """
    random = np.random.default_rng(7)
    levels = {method: LEVELS.get(method, (0.84, 0.1, 0.35)) for method in methods}
    shared = {seed: random.normal(0, 0.008) for seed in seeds}  # what makes pairs: the same for all methods of a seed
    history, final, slices, holdings = [], [], [], []
    for method in methods:
        for seed in seeds:
            at = np.arange(0, rounds + 1, every)
            stage = np.where((at > rounds // 3) & ("stage" in method), "fine-tuning", "training")
            fade = np.exp(-at / (rounds / 8))
            own = random.normal(0, 0.002)
            noise = lambda scale: shared[seed] + own + random.normal(0, scale, len(at)) * (0.2 + fade)
            accuracy, gap, loss = levels[method]
            frame = pd.DataFrame(
                {
                    "method": method,
                    "seed": seed,
                    "stage": stage,
                    "round": at,
                    "bytes": at * (3 * 2 * 412 if method == "fedavg" else 3 * 2 * 432) * clients,
                    "oracle_calls": at * clients * (5 if method == "fedavg" else 7),
                    "samples": at * clients * 64,
                    "accuracy": accuracy - 0.09 * fade + noise(0.004),
                    "gap": np.where(
                        ("stage" in method) & (stage == "training"), np.nan, gap + 0.1 * fade + noise(0.01)
                    ),
                    "loss": loss * (1 + fade) + noise(0.003),
                }
                | {f"extra_{i}": 1 + fade * random.normal(1, 0.1) for i in range(more_metrics)}
            )
            history.append(frame)
            last = frame.iloc[-1]
            final.append(
                {"method": method, "seed": seed, "status": "finished"}
                | {name: last[name] for name in ("accuracy", "gap", "loss")}
            )
            for metric in ("true_positive_rate", "accuracy"):
                for split in ("validation", "test"):
                    slices += [
                        {"method": method, "seed": seed, "kind": kind, "slice": name, "split": split}
                        | {"metric": metric, "value": 0.72 - gap * i / len(names) + random.normal(0, 0.02)}
                        for kind, names in (("group", groups), ("client", [f"client {k}" for k in range(clients)]))
                        for i, name in enumerate(names)
                    ]
    for seed in seeds:
        for k in range(clients):
            for group in groups:
                size = random.lognormal(5.5, 0.9)
                holdings += [
                    {"seed": seed, "client": f"client {k}", "group": group, "label": label, "part": part}
                    | {"rows": int(size * share * (0.25 if label else 0.75))}
                    for label in (0, 1)
                    for part, share in (("train", 0.56), ("validation", 0.14), ("test", 0.3))
                ]

    def ledger(exchanges: int, size: int, **oracles: int) -> dict[str, Any]:
        return {
            "exchanges": exchanges, "gathers": 0, "bytes_up": size, "bytes_down": size, "oracles": oracles,
            "calls": {}, "samples": 64 * sum(oracles.values()),
        }  # fmt: skip

    def stages(method: str) -> dict[str, Any]:
        training = {"start": ledger(0, 0), "round": ledger(1, 412, GRAD=5), "rounds": rounds}
        if "stage" not in method:
            return {"training": training}
        tuning = {"start": ledger(1, 20, VAL=1), "round": ledger(3, 1_648, GRAD=2, HVP=3, MIX=1), "rounds": rounds}
        return {"training": training, "fine-tuning": tuning}

    return Record(
        settings={"task": "adult", "seeds": list(seeds), "rounds": rounds, "fedavg": {"lr": 0.1, "local_steps": 5}},
        about={
            "name": "adult-race",
            "title": "Fairness between groups on Adult",
            "task": "adult, groups by race",
            "command": "nestfed run fairness --data adult --group race --clients 3 --seeds 0:3 --rounds 300",
            "methods": methods,
            "baseline": "fedavg",
            "metrics": METRICS,
            "seeds": list(seeds),
            "versions": {"nestfed": "0.1.0", "jax": "0.10.2", "numpy": "2.4.6", "python": "3.11.2"},
            "machine": "Linux, 2 cores, CPU",
            "started": "2025-11-03T09:12:44+00:00",
            "seconds": 192.4,
            "status": "finished",
            "notes": [],
        }
        | about,
        history=pd.concat(history, ignore_index=True),
        final=pd.DataFrame(final),
        slices=pd.DataFrame(slices),
        holdings=pd.DataFrame(holdings),
        cost={method: stages(method) for method in methods},
    )
