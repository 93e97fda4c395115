"""The demonstration: a fairer classifier on the bundled Adult data."""

SETTINGS = {
    "task": "fairness",
    "data": "adult",
    "group": "sex",
    "partition": "ratios:2:2:6",
    "algorithm": ["fedavg", "fedbio", "fedbioacc"],
    "seeds": 3,
    "evaluations": 25,
    # Past the paper: a weight for every group and label, and an upper loss that counts every client's own gap.
    "objective": "paper",
    "weigh": "group+label",
    "gap": 1.0,
    "tune": False,
    # Chosen on validation data; FedBiOAcc's step sizes come with a factor alpha_t of about 0.1 to 0.01.
    "set": {
        "fedavg.lr": 1.0,
        "fedbio": {"lr": 0.05, "lower_lr": 1.0, "model.lr": 1.0},
        "fedbioacc": {"lr": 0.1, "lower_lr": 10.0, "model.lr": 1.0},
    },
}
