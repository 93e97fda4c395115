"""The demonstration: fair classifiers on the bundled Adult data."""

SETTINGS = {
    "task": "fairness",
    "data": "adult",
    "partition": "ratios:2:2:6",
    "algorithm": ["fedavg", "fedbio", "fedbioacc"],
    "seeds": 3,
}
