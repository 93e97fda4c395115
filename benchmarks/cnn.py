"""What a round of a convolutional network costs: nestfed against a loop in PyTorch.

    python benchmarks/cnn.py [--rounds 2] [--repeats 3] [--client-axis auto] [--client-chunk N] [--json FILE]

FedAvg on made images of 28 x 28 in 10 classes: 50 clients of 200 images, 10 local steps of batch 48, a network of
96,938 parameters (`nestfed.models.CNN`: two 5 x 5 convolutions of 16 and 32 channels, each with a ReLU and 2 x 2
pooling, a layer of 160 and a linear one).

nestfed         `nestfed.advance`, without evaluations, compiled before; `--client-axis` and `--client-chunk` are those
                of `nestfed.simulate`
PyTorch loop    nn.Conv2d, nn.Linear and SGD, as people write it: one client after the other, batches by indexing,
                no DataLoader

Each runs in a process of its own with all cores, and the processes wait for one another: repeats are interleaved, and
medians printed, because machines are shared. Both start from the same weights, and the loss over all images is
computed by the same code, before the first round and after the last repeat: the last columns check that they do the
same work. "compile" is the first measurement less its rounds at the steady speed; no compilation cache is used.
"cpu" is processor time, all threads together.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from processes import Process, header, print_table, timed

CLIENTS, ROWS, CLASSES = 50, 200, 10  # rows: per client
SHAPE = (28, 28, 1)
BATCH, STEPS, LR = 48, 10, 0.02


class Bench(NamedTuple):
    """One system: `run` goes on for a number of rounds; `loss` is that of the model as it is now."""

    run: Callable[[int], None]
    loss: Callable[[], float]


def make_data():
    """(images, labels): coloured patterns, one per class, in noise; client k has the rows k * ROWS and so on."""
    import numpy as np

    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, CLIENTS * ROWS).astype(np.int32)
    patterns = 0.3 * random.standard_normal((CLASSES, *SHAPE), dtype=np.float32)
    images = random.standard_normal((CLIENTS * ROWS, *SHAPE), dtype=np.float32)
    images += patterns[labels]
    return images, labels


def make_network():
    """(network, where it starts, its mean loss over all images as a function of its parameters)."""
    import jax
    import numpy as np

    from nestfed.models import CNN, Convolution

    layer = lambda channels: Convolution(channels, 5, padding="VALID", pool=2)
    network, (images, labels) = CNN(layers=(layer(16), layer(32)), hidden=(160,), outputs=CLASSES), make_data()
    logits = jax.jit(network)

    def full_loss(params) -> float:
        total = 0.0
        for first in range(0, len(labels), 500):
            scores = np.asarray(logits(params, images[first : first + 500]), np.float64)
            chosen = scores[np.arange(500), labels[first : first + 500]]
            total += (np.logaddexp.reduce(scores, 1) - chosen).sum()
        return total / len(labels)

    return network, network.init(jax.random.key(0), SHAPE), full_loss


def nestfed_cnn(client_axis: str, client_chunk: int | None) -> Bench:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import nestfed
    from nestfed.problems import SingleLevel

    network, start, full_loss = make_network()

    @nestfed.struct
    class Classification(SingleLevel):
        def loss(self, x, batch, key):
            images, labels = batch
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(x, images), labels))

    data = nestfed.Rows.from_table(make_data(), np.repeat(np.arange(CLIENTS), ROWS))
    task = jax.device_put(nestfed.Task.create(Classification(), data, start, batch_size=BATCH))
    algorithm = nestfed.make("fedavg", lr=LR, local_steps=STEPS)
    options: dict[str, Any] = {"client_axis": client_axis, "client_chunk": client_chunk}
    state = nestfed.start(algorithm, task, **options)

    def run(rounds: int) -> None:
        nonlocal state
        state, _ = nestfed.advance(algorithm, task, 0, state, rounds=rounds, evaluate_every=None, **options)
        jax.block_until_ready(state)

    return Bench(run, lambda: full_loss(task.problem.tree(0, state.server.x)))


def torch_cnn() -> Bench:
    """Images as PyTorch has them, [rows, channels, height, width]; weights are turned round on the way in and out."""
    import numpy as np
    import torch
    from torch import nn

    _, start, full_loss = make_network()
    images, labels = make_data()
    images, labels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels).long()
    network = lambda: nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 160),
        nn.ReLU(),
        nn.Linear(160, CLASSES),
    )
    server, model = network(), network()
    layers: list[Any] = [layer for layer in server if hasattr(layer, "weight")]
    to_torch = lambda array, axes: torch.from_numpy(np.asarray(array).transpose(axes).copy())
    with torch.no_grad():
        for layer, theirs in zip(layers[:2], start["extractor"]["convolutions"], strict=True):
            layer.weight.copy_(to_torch(theirs["kernel"], (3, 2, 0, 1)))
        (hidden,) = start["extractor"]["hidden"]
        layers[2].weight.copy_(to_torch(np.asarray(hidden["weight"]).reshape(4, 4, 32, 160), (3, 2, 0, 1)).flatten(1))
        layers[3].weight.copy_(to_torch(start["head"]["weight"], (1, 0)))
        for layer in layers:
            layer.bias.zero_()
    random = torch.Generator().manual_seed(0)

    def run(rounds: int) -> None:
        for _ in range(rounds):
            total = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
            for client in range(CLIENTS):
                model.load_state_dict(server.state_dict())
                optimiser = torch.optim.SGD(model.parameters(), lr=LR)
                for _ in range(STEPS):
                    rows = client * ROWS + torch.randint(ROWS, (BATCH,), generator=random)
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
                    optimiser.step()
                for name, value in model.state_dict().items():
                    total[name] += value
            server.load_state_dict({name: value / CLIENTS for name, value in total.items()})

    def loss() -> float:
        from_torch = lambda tensor, axes: tensor.detach().numpy().transpose(axes)
        *convolutions, hidden, head = layers
        weight = from_torch(hidden.weight.reshape(160, 32, 4, 4), (2, 3, 1, 0)).reshape(-1, 160)
        return full_loss(
            {
                "extractor": {
                    "convolutions": [
                        {"kernel": from_torch(layer.weight, (2, 3, 1, 0)), "bias": from_torch(layer.bias, (0,))}
                        for layer in convolutions
                    ],
                    "hidden": [{"weight": weight, "bias": from_torch(hidden.bias, (0,))}],
                },
                "head": {"weight": from_torch(head.weight, (1, 0)), "bias": from_torch(head.bias, (0,))},
            }
        )

    return Bench(run, loss)


# ------------------------------------------------------------------------------------------------- a system's process


def serve(system: str, options: argparse.Namespace) -> None:
    """Answer every number of rounds on standard input by a measurement of that many rounds, as a line of JSON; 0 asks
    for the loss."""
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may print between the answers
    bench = torch_cnn() if system == "PyTorch loop" else nestfed_cnn(options.client_axis, options.client_chunk)
    for line in sys.stdin:
        rounds = int(line)
        if rounds == 0:
            answer = {"loss": bench.loss()}
        else:
            _, answer = timed(lambda: bench.run(rounds))
        print(json.dumps(answer), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------- measuring, printing


def measure(systems: list[str], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row per system: all are started and compiled, then asked in turn, `repeats` times."""
    processes = {name: Process(*sys.argv[1:], "--serve", name) for name in systems}
    before = {name: process.ask(0)["loss"] for name, process in processes.items()}
    first = {name: process.ask(rounds) for name, process in processes.items()}
    answers = {name: [] for name in systems}
    for _ in range(repeats):
        for name, process in processes.items():
            answers[name].append(process.ask(rounds))
    rows = []
    for name, process in processes.items():
        per_round = lambda field: [answer[field] / rounds for answer in answers[name]]
        wall = statistics.median(per_round("wall"))
        rows.append(
            {
                "system": name,
                "s": wall,
                "s_all": per_round("wall"),
                "cpu_s": statistics.median(per_round("cpu")),
                "compile_s": max(0.0, first[name]["wall"] - wall * rounds) if name == "nestfed" else None,
                "peak_mb": answers[name][-1]["peak_mb"],
                "loss_before": before[name],
                "loss_after": process.ask(0)["loss"],
            }
        )
        process.close()
    return [row | {"ratio": row["s"] / rows[0]["s"]} for row in rows]


COLUMNS = {  # heading: (field, decimals)
    "s/round": ("s", 2),
    "cpu s": ("cpu_s", 2),
    "x first": ("ratio", 2),
    "compile s": ("compile_s", 1),
    "peak MB": ("peak_mb", 0),
    "loss before": ("loss_before", 4),
    "after": ("loss_after", 4),
}


def check(rows: list[dict[str, Any]]) -> str:
    """Did the systems start alike and do the same work?"""
    spread = lambda field: max(row[field] for row in rows) / min(row[field] for row in rows) - 1
    before, after = spread("loss_before"), spread("loss_after")
    verdict = "the same work" if before < 1e-5 and after < 0.05 else "NOT the same work"
    return f"losses agree within {100 * before:.4f} % before and {100 * after:.1f} % after: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a measurement (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats, of which the median (default 3)")
    parser.add_argument("--client-axis", choices=("auto", "map", "vmap"), default="auto", help="how clients run")
    parser.add_argument("--client-chunk", type=int, help="how many clients at a time")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured to this file")
    parser.add_argument("--serve", metavar="SYSTEM", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options)
    facts = header() | {name: getattr(options, name) for name in ("rounds", "repeats", "client_axis", "client_chunk")}
    print(json.dumps(facts), flush=True)
    systems = ["nestfed", "PyTorch loop"]
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed, so there is nothing to compare with: pip install torch (the CPU build will do).")
        systems = systems[:1]
    rows = measure(systems, options.rounds, options.repeats)
    print_table(rows, COLUMNS, (14, 11))
    for row in rows:
        print(f"{row['system']}, every repeat: {', '.join(f'{seconds:.2f}' for seconds in row['s_all'])} s/round")
    if len(rows) > 1:
        print(check(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"header": facts, "results": rows}, file, indent=1)


if __name__ == "__main__":
    main()
