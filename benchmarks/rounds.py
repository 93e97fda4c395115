"""What a round costs: nestfed against plain loops, and 10 clients against 10,000.

    python benchmarks/rounds.py [--rounds 100] [--repeats 3] [--parts fedavg bilevel scale] [--json FILE]

fedavg    FedAvg on logistic regression: 30,000 rows of 100 features, 50 clients of 600 rows, 5 local steps of batch 64.
          nestfed with JAX's default generator (and, for information, with `unsafe_rbg`), a NumPy loop over clients and
          steps with the gradient written by hand, and, where torch is installed, two PyTorch loops on one thread: with
          nn.Linear and SGD, as people write it, and on bare tensors, the least PyTorch can do with autograd.
bilevel   FedBiOAcc with Q = 10 Neumann terms on the same data: the lower problem is a logistic regression whose rows
          are weighted by group (y: 100 features, x: weights of 5 groups) with an L2 term, the upper one a logistic
          loss. Against a NumPy loop with the same products: 13 batches a step, each used at two points, and Q
          Hessian-vector products at each of them.
scale     FedAvg and SCAFFOLD (which keeps a state per client) on 10 up to 10,000 clients, cohorts of at most 100. The
          time per participating client must not grow with the number of clients. 10,000 clients are compared with 100,
          whose cohort is the same, and with 10, whose rows (80 kB) fit in a processor's fastest cache.

Every system runs in a process of its own, which gives its peak resident memory (getrusage; "before" is the peak after
imports and data, ahead of the first round). The processes wait for one another: repeats are interleaved, and medians
printed, because machines are shared. All systems of a part do the same work, which the last column checks: the loss
over all rows after `--rounds` rounds from the same start, computed by the same NumPy code.

A measurement of nestfed is one call of `nestfed.start` and one of `nestfed.advance` without evaluations, compiled
before, for up to ten times `--rounds` rounds: what the calls themselves cost, about 0.1 s of checks, is included but
small. "compile" is the first such run, of `--rounds` rounds, less its rounds at the steady speed; no compilation cache
is used. "cpu" is processor time, all threads together.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from processes import Process, header, peak_mb, print_table, timed

CLIENTS, ROWS, FEATURES = 50, 600, 100  # rows: per client
GROUPS, RIDGE = 5, 0.1
BATCH, STEPS, LR = 64, 5, 0.1
TERMS, SERIES_LR = 10, 0.5  # of the Neumann series
ACC = {"lr": 0.5, "lower_lr": 1.0, "delta": 1.0, "u": 8.0, "sigma2": 1.0, "c_nu": 1.0, "c_omega": 1.0}
SCALE_ROWS, SCALE_BATCH = 20, 16

# ------------------------------------------------------------------------------------------------- data and losses


def make_data(clients: int = CLIENTS, rows: int = ROWS):
    """(features, labels -1 or 1, groups); client k has the rows k * rows .. (k + 1) * rows - 1."""
    import numpy as np

    random = np.random.default_rng(0)
    features = random.standard_normal((clients * rows, FEATURES), dtype=np.float32)
    truth = 0.5 * random.standard_normal(FEATURES, dtype=np.float32)
    chance = 1 / (1 + np.exp(-features @ truth))
    labels = np.where(random.random(clients * rows) < chance, 1, -1).astype(np.float32)
    groups = random.integers(0, GROUPS, clients * rows).astype(np.int32)
    return features, labels, groups


def sigmoid(z):
    import numpy as np

    return 1 / (1 + np.exp(-z))


def full_loss(x, features, labels) -> float:
    """The logistic loss over all rows, in float64."""
    import numpy as np

    return float(np.logaddexp(0, -labels * (features @ np.asarray(x, np.float64))).mean())


def mean_of_clients(ys, features, labels) -> float:
    """The mean over clients of the logistic loss of their own y on their own rows."""
    own = (slice(k * ROWS, (k + 1) * ROWS) for k in range(CLIENTS))
    return sum(full_loss(y, features[rows], labels[rows]) for y, rows in zip(ys, own, strict=True)) / CLIENTS


# ------------------------------------------------------------------------------------------------- nestfed


class Bench(NamedTuple):
    """One system, ready to run: `run` does a number of rounds from the start, `score` is the loss of its result."""

    run: Callable[[int], Any]
    score: Callable[[Any], float]


def nestfed_run(algorithm, task, seed: Any = 0, **options: Any) -> Callable[[int], Any]:
    import jax

    import nestfed

    def run(rounds: int):
        state = nestfed.start(algorithm, task, seed, **options)
        state, _ = nestfed.advance(algorithm, task, seed, state, rounds=rounds, evaluate_every=None, **options)
        return jax.block_until_ready(state)

    return run


def logistic_task(clients: int, rows: int, batch_size: int):
    import jax.numpy as jnp
    import numpy as np

    import nestfed
    from nestfed.problems import SingleLevel

    @nestfed.struct
    class Logistic(SingleLevel):
        def loss(self, x, batch, key):
            features, labels = batch
            return jnp.mean(jnp.logaddexp(0.0, -labels * (features @ x)))

    features, labels, _ = make_data(clients, rows)
    data = nestfed.Rows.from_table((features, labels), np.repeat(np.arange(clients), rows))
    start = np.zeros(FEATURES, np.float32)
    task = nestfed.Task.create(Logistic(), data, start, batch_size=batch_size)
    return task, lambda run: full_loss(run.server.x, features, labels)


def nestfed_fedavg(generator: str | None = None) -> Bench:
    import jax

    import nestfed

    task, score = logistic_task(CLIENTS, ROWS, BATCH)
    algorithm = nestfed.make("fedavg", lr=LR, local_steps=STEPS)
    return Bench(nestfed_run(algorithm, task, jax.random.key(0, impl=generator)), score)


def nestfed_scale(name: str, clients: int, cohort: int) -> Bench:
    import nestfed

    task, score = logistic_task(clients, SCALE_ROWS, SCALE_BATCH)
    return Bench(nestfed_run(nestfed.make(name, lr=LR, local_steps=STEPS), task, cohort=cohort), score)


def nestfed_bilevel() -> Bench:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import nestfed
    from nestfed.problems import Bilevel
    from nestfed.problems.hypergradients import Neumann

    @nestfed.struct
    class GroupWeights(Bilevel):
        def upper(self, x, y, batch, key):
            features, labels, _ = batch
            return jnp.mean(jnp.logaddexp(0.0, -labels * (features @ y)))

        def lower(self, x, y, batch, key):
            features, labels, groups = batch
            losses = jnp.logaddexp(0.0, -labels * (features @ y))
            return jnp.mean(jax.nn.sigmoid(x)[groups] * losses) + RIDGE / 2 * jnp.sum(y**2)

    columns = make_data()
    data = nestfed.Rows.from_table(columns, np.repeat(np.arange(CLIENTS), ROWS))
    start = np.zeros(GROUPS, np.float32), np.zeros(FEATURES, np.float32)
    task = nestfed.Task.create(GroupWeights(), data, start, batch_size=BATCH)
    series = Neumann(terms=TERMS, lr=SERIES_LR)
    algorithm = nestfed.make("fedbioacc", local_steps=STEPS, hypergradient=series, **ACC)
    return Bench(nestfed_run(algorithm, task), lambda run: mean_of_clients(run.clients.y, *columns[:2]))


# ------------------------------------------------------------------------------------------------- NumPy


def numpy_fedavg() -> Bench:
    import numpy as np

    features, labels, _ = make_data()

    def run(rounds: int):
        random, x = np.random.default_rng(0), np.zeros(FEATURES, np.float32)
        for _ in range(rounds):
            total = np.zeros_like(x)
            for client in range(CLIENTS):
                mine = x.copy()
                for _ in range(STEPS):
                    rows = client * ROWS + random.integers(0, ROWS, BATCH)
                    a, b = features[rows], labels[rows]
                    mine += LR / BATCH * ((b * sigmoid(-b * (a @ mine))) @ a)
                total += mine
            x = total / CLIENTS
        return x

    return Bench(run, lambda x: full_loss(x, features, labels))


def numpy_grad_lower(x, y, batch):
    a, b, groups = batch
    return -(sigmoid(x)[groups] * b * sigmoid(-b * (a @ y))) @ a / BATCH + RIDGE * y


def numpy_hessian_vector(x, y, batch, v):
    a, b, groups = batch
    s = sigmoid(-b * (a @ y))
    return (sigmoid(x)[groups] * s * (1 - s) * (a @ v)) @ a / BATCH + RIDGE * v


def numpy_mixed_vector(x, y, batch, v):
    import numpy as np

    a, b, groups = batch
    slope = sigmoid(x) * (1 - sigmoid(x))
    per_row = -b * sigmoid(-b * (a @ y)) * (a @ v) / BATCH
    return slope * np.bincount(groups, per_row, GROUPS).astype(np.float32)


def numpy_hypergradient(point, upper, mixed, hessians):
    """df/dx - (d2g/dxdy) z, with z the Neumann series of the inverse Hessian times df/dy; here df/dx = 0."""
    x, y = point
    a, b, _ = upper
    remainder = -(b * sigmoid(-b * (a @ y))) @ a / BATCH
    total = remainder.copy()
    for batch in hessians:
        remainder = remainder - SERIES_LR * numpy_hessian_vector(x, y, batch, remainder)
        total += remainder
    return -numpy_mixed_vector(x, y, mixed, SERIES_LR * total)


def numpy_acc_estimates(now, before, omega, nu, forget, draw):
    """The two recursive estimates of FedBiOAcc: one set of batches, two points."""
    lower, upper, mixed, *hessians = (draw() for _ in range(3 + TERMS))
    keep_omega, keep_nu = (1 - f for f in forget)
    omega = numpy_grad_lower(*now, lower) + keep_omega * (omega - numpy_grad_lower(*before, lower))
    phi, phi_before = (numpy_hypergradient(point, upper, mixed, hessians) for point in (now, before))
    return omega, phi + keep_nu * (nu - phi_before)


def numpy_bilevel() -> Bench:
    import numpy as np

    columns = make_data()
    alpha = lambda t: np.float32(ACC["delta"] / (ACC["u"] + ACC["sigma2"] * (t + 1)) ** (1 / 3))
    factor = lambda c, t: np.float32(1) if t == 0 else np.float32(min(1, c * alpha(t - 1) ** 2))

    def run(rounds: int):
        random = np.random.default_rng(0)
        x, x_prev, nu = (np.zeros(GROUPS, np.float32) for _ in range(3))
        ys, ys_prev, omegas = (np.zeros((CLIENTS, FEATURES), np.float32) for _ in range(3))

        def batch_of(client: int):
            rows = client * ROWS + random.integers(0, ROWS, BATCH)
            return tuple(column[rows] for column in columns)

        for r in range(rounds):
            sums = np.zeros((2, GROUPS), np.float32)
            for k in range(CLIENTS):
                own_x, own_prev, own_nu = x, x_prev, nu
                for j in range(STEPS):
                    t = r * STEPS + j
                    forget = factor(ACC["c_omega"], t), factor(ACC["c_nu"], t)
                    now, before = (own_x, ys[k].copy()), (own_prev, ys_prev[k])
                    omegas[k], own_nu = numpy_acc_estimates(now, before, omegas[k], own_nu, forget, lambda: batch_of(k))
                    ys_prev[k] = now[1]
                    ys[k] -= ACC["lower_lr"] * alpha(t) * omegas[k]
                    if j < STEPS - 1:
                        own_x, own_prev = own_x - ACC["lr"] * alpha(t) * own_nu, own_x
                sums += own_x, own_nu
            x_prev, nu = sums / CLIENTS
            x = x_prev - ACC["lr"] * alpha(t) * nu
        return ys

    return Bench(run, lambda ys: mean_of_clients(ys, *columns[:2]))


# ------------------------------------------------------------------------------------------------- PyTorch


def torch_data():
    import torch

    torch.set_num_threads(1)
    return (torch.from_numpy(column) for column in make_data()[:2])


def torch_fedavg() -> Bench:
    """nn.Linear, SGD and state dicts, one client after the other; batches by indexing, no DataLoader."""
    import torch

    features, labels = torch_data()

    def run(rounds: int):
        random = torch.Generator().manual_seed(0)
        server, model = (torch.nn.Linear(FEATURES, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(server.weight)
        loss_of = torch.nn.SoftMarginLoss()  # mean of log(1 + exp(-label * output))
        for _ in range(rounds):
            total = torch.zeros_like(server.weight)
            for client in range(CLIENTS):
                model.load_state_dict(server.state_dict())
                optimiser = torch.optim.SGD(model.parameters(), lr=LR)
                for _ in range(STEPS):
                    rows = client * ROWS + torch.randint(ROWS, (BATCH,), generator=random)
                    optimiser.zero_grad()
                    loss_of(model(features[rows])[:, 0], labels[rows]).backward()
                    optimiser.step()
                total += model.weight.detach()
            server.load_state_dict({"weight": total / CLIENTS})
        return server.weight.detach()[0].numpy()

    return Bench(run, lambda x: full_loss(x, features.numpy(), labels.numpy()))


def torch_fedavg_bare() -> Bench:
    """The same on bare tensors: autograd and nothing else."""
    import torch

    features, labels = torch_data()

    def run(rounds: int):
        random, x = torch.Generator().manual_seed(0), torch.zeros(FEATURES)
        for _ in range(rounds):
            total = torch.zeros_like(x)
            for client in range(CLIENTS):
                mine = x.clone()
                for _ in range(STEPS):
                    rows = client * ROWS + torch.randint(ROWS, (BATCH,), generator=random)
                    mine.requires_grad_()
                    loss = torch.nn.functional.soft_margin_loss(features[rows] @ mine, labels[rows])
                    (gradient,) = torch.autograd.grad(loss, mine)
                    mine = mine.detach() - LR * gradient
                total += mine
            x = total / CLIENTS
        return x.numpy()

    return Bench(run, lambda x: full_loss(x, features.numpy(), labels.numpy()))


# ------------------------------------------------------------------------------------------------- the systems


class System(NamedTuple):
    """`stretch`: how many times `--rounds` rounds a repeat takes, so that fast systems run for seconds too."""

    build: Callable[[], Bench]
    stretch: int = 1
    compiled: bool = True
    needs: str = "numpy"
    participants: int = CLIENTS


def _scale(name: str, clients: int) -> tuple[str, System]:
    cohort = min(clients, 100)
    label = f"{name}, {clients:,} clients, cohort {cohort}"
    return label, System(lambda: nestfed_scale(name, clients, cohort), stretch=5, participants=cohort)


PARTS: dict[str, dict[str, System]] = {
    "fedavg": {
        "nestfed": System(nestfed_fedavg, stretch=10),
        "nestfed, unsafe_rbg": System(lambda: nestfed_fedavg("unsafe_rbg"), stretch=10),
        "NumPy loop": System(numpy_fedavg, compiled=False),
        "PyTorch loop": System(torch_fedavg, compiled=False, needs="torch"),
        "PyTorch, bare tensors": System(torch_fedavg_bare, compiled=False, needs="torch"),
    },
    "bilevel": {
        "nestfed": System(nestfed_bilevel),
        "NumPy loop": System(numpy_bilevel, compiled=False),
    },
    "scale": dict(_scale(name, n) for name in ("fedavg", "scaffold") for n in (10, 100, 1_000, 10_000)),
}


# ------------------------------------------------------------------------------------------------- a system's process


def serve(part: str, name: str) -> None:
    """Answer every number of rounds on standard input by a measurement of that many rounds, as a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may print between the answers
    bench = PARTS[part][name].build()
    print(json.dumps({"before_mb": peak_mb()}), file=answers, flush=True)
    for line in sys.stdin:
        result, answer = timed(lambda: bench.run(int(line)))
        print(json.dumps(answer | {"loss": bench.score(result)}), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------- measuring, printing


def measure_part(part: str, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row per system: all are started and compiled, then asked in turn, `repeats` times."""
    systems = {n: s for n, s in PARTS[part].items() if importlib.util.find_spec(s.needs)}
    # The loops' products are tiny: threads of a BLAS would only spin. XLA has its own threads.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    processes = {name: Process("--serve", part, name, **threads) for name in systems}
    before_mb = {name: process.answer()["before_mb"] for name, process in processes.items()}
    first, answers = {}, {name: [] for name in systems}
    for name, system in systems.items():
        first[name] = processes[name].ask(rounds if system.compiled else 1)
        if system.stretch > 1:
            processes[name].ask(rounds * system.stretch)  # another length may be another program
    for _ in range(repeats):
        for name, system in systems.items():
            answers[name].append(processes[name].ask(rounds * system.stretch))
    for process in processes.values():
        process.close()
    rows = [summary(part, name, systems[name], rounds, before_mb[name], first[name], answers[name]) for name in systems]
    return [row | {"ratio": row["ms"] / rows[0]["ms"]} for row in rows]


def summary(part, name, system: System, rounds: int, before_mb: float, first, answers) -> dict[str, Any]:
    per_round = lambda field: [1e3 * a[field] / (rounds * system.stretch) for a in answers]
    wall = statistics.median(per_round("wall"))
    return {
        "part": part,
        "system": name,
        "ms": wall,
        "ms_min": min(per_round("wall")),
        "ms_max": max(per_round("wall")),
        "cpu_ms": statistics.median(per_round("cpu")),
        "us_per_client": 1e3 * wall / system.participants,
        "compile_s": max(0.0, first["wall"] - wall * rounds / 1e3) if system.compiled else None,
        "before_mb": before_mb,
        "peak_mb": answers[-1]["peak_mb"],
        "loss": first["loss"] if system.compiled else answers[-1]["loss"],
    }


COLUMNS = {  # heading: (field, decimals)
    "ms/round": ("ms", 2),
    "min": ("ms_min", 2),
    "max": ("ms_max", 2),
    "cpu ms": ("cpu_ms", 2),
    "us/client": ("us_per_client", 1),
    "x first": ("ratio", 1),
    "compile s": ("compile_s", 1),
    "before MB": ("before_mb", 0),
    "peak MB": ("peak_mb", 0),
    "loss": ("loss", 4),
}


def check(part: str, rows: list[dict[str, Any]], rounds: int) -> str:
    """Did the systems do the same work? In `scale`: does the time per participating client stay?"""
    if part != "scale":
        losses = [row["loss"] for row in rows]
        spread = max(losses) / min(losses) - 1
        verdict = "the same work" if spread < 0.02 else "NOT the same work"
        return f"losses after {rounds} rounds agree within {100 * spread:.1f} %: {verdict}"
    lines = []
    for name in ("fedavg", "scaffold"):
        ten, hundred, _, many = (row["us_per_client"] for row in rows if row["system"].startswith(name))
        for few, clients in ((ten, 10), (hundred, 100)):
            verdict = "does not grow" if many < 1.25 * few else "GROWS"
            lines.append(
                f"{name}, time per participating client, 10,000 / {clients} clients: {many / few:.2f}, {verdict}"
            )
    return "\n".join(lines)


TITLES = {
    "fedavg": "(1) FedAvg, 50 clients x 600 rows x 100 features, 5 steps of batch 64",
    "bilevel": "(2) FedBiOAcc, the same data, 10 Neumann terms, 5 steps of 13 batches of 64",
    "scale": "(3) numbers of clients, 20 rows each, 100 parameters, 5 steps of batch 16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="rounds of a run (default 100)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats, of which the median (default 3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured to this file")
    parser.add_argument("--serve", nargs=2, metavar=("PART", "SYSTEM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    facts = header() | {"rounds": options.rounds, "repeats": options.repeats}
    print(json.dumps(facts), flush=True)
    results = []
    for part in options.parts:
        rows = measure_part(part, options.rounds, options.repeats)
        print(f"\n{TITLES[part]}")
        print_table(rows, COLUMNS, (36, 9))
        print(check(part, rows, options.rounds), flush=True)
        results += rows
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"header": facts, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
