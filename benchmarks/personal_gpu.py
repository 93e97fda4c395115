"""FedReCo with a five-layer network on 50 clients: time per round in the engine, against a loop in PyTorch.

    python benchmarks/personal_gpu.py [--small] [--network grey|colour|both] [--rounds 5] [--repeats 3] [--out FILE]

The network of the paper (two 5 x 5 convolutions with pooling, two layers of 1024, a linear head) for images as those of
Fashion-MNIST (grey: 1,258,798 numbers; 980 images per client, 4 classes each) and of CIFAR-10 (colour: 2,806,602; 840
images, 2 classes). A round of FedReCo is one epoch of head steps and one of extractor steps in batches of 48, every
gradient clipped, and the gradient of the distance of representations on one batch for the server. The images are made:
a pattern for each class, in noise.

nestfed         `nestfed.advance`, all clients side by side on an accelerator, as the engine chooses on a CPU; after a
                first call that compiles, whose time is given too
PyTorch loop    one client after the other, autograd, batches by indexing, in float32 with the same TF32 setting; on a
                CPU with all threads and with one, which is the faster way where a machine has other work too

Both start from the same numbers, and the mean loss of clients' own models over their images is computed by the same
code before the first round and after the last repeat: it says whether they do the same work. Repeats are interleaved,
medians printed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from processes import print_table

import nestfed
from nestfed.experiments.personal.data import PersonalImages
from nestfed.experiments.personal.task import COLOUR, GREY, ImageClasses, make_personal_task
from nestfed.models import CNN

LR, SERVER_LR, COUPLING, CLIP = 0.01, 0.001, 0.01, 10.0


@dataclasses.dataclass(frozen=True)
class Size:
    model: CNN
    shape: tuple[int, int, int]
    images: int  # of a client
    classes: int  # of a client
    clients: int = 50
    batch: int = 48

    @property
    def epoch(self) -> int:
        return -(-self.images // self.batch)


SIZES = {"grey": Size(GREY, (28, 28, 1), 980, 4), "colour": Size(COLOUR, (32, 32, 3), 840, 2)}
SMALL = {
    name: dataclasses.replace(
        size,
        images=16,
        clients=2,
        batch=8,
        model=dataclasses.replace(
            size.model, hidden=(8, 8), layers=tuple(layer._replace(channels=2, kernel=2) for layer in size.model.layers)
        ),
    )
    for name, size in SIZES.items()
}


class Bench(NamedTuple):
    """One system: `run` goes on for a number of rounds; `models` are all clients' (extractors, heads) as they are now,
    as the trees of the network, with an axis of clients."""

    run: Callable[[int], None]
    models: Callable[[], tuple[Any, Any]]


def make_data(size: Size) -> list[tuple[np.ndarray, np.ndarray]]:
    """(images, labels) of every client."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 128, (10, *size.shape))

    def one(client: int) -> tuple[np.ndarray, np.ndarray]:
        labels = (client + random.integers(0, size.classes, size.images)) % 10
        pixels = patterns[labels] + random.integers(0, 128, (size.images, *size.shape))
        return pixels.astype(np.uint8), labels.astype(np.int32)

    return [one(client) for client in range(size.clients)]


def make_task(size: Size) -> Any:
    rows = nestfed.Rows.from_clients(make_data(size))
    images = PersonalImages(train=rows, test=rows, class_names=tuple("0123456789"))
    return make_personal_task(images, ImageClasses(model=size.model), batch_size=size.batch)


def mean_loss(size: Size, models: tuple[Any, Any]) -> float:
    """Of clients' own models on a part of their images: the same code for both systems."""
    problem = ImageClasses(model=size.model)
    images, labels = (np.stack([client[i][:64] for client in make_data(size)]) for i in (0, 1))

    @jax.jit
    def loss(extractor, head, images, labels):
        return problem.loss(problem.head(head, problem.features(extractor, images, None)), labels)

    one = lambda k: loss(*jax.tree.map(lambda a: a[k], models), images[k], labels[k])
    return float(np.mean([one(k) for k in range(size.clients)]))


# ------------------------------------------------------------------------------------------------- the two systems


def nestfed_rounds(size: Size) -> Bench:
    task = jax.device_put(make_task(size))
    algorithm = nestfed.make(
        "fedreco",
        lr=LR,
        server_lr=SERVER_LR,
        coupling=COUPLING,
        clip=CLIP,
        head_steps=size.epoch,
        local_steps=size.epoch,
    )
    state = nestfed.start(algorithm, task)

    def run(rounds: int) -> None:
        nonlocal state
        state, _ = nestfed.advance(algorithm, task, 0, state, rounds=rounds, evaluate_every=None)
        jax.block_until_ready(state)
        # A run that diverged keeps its last finite state and does no more work: its time would mean nothing.
        if int(state.diverged) >= 0:
            raise SystemExit(f"nestfed diverged in round {int(state.diverged)}; nothing was measured.")

    tree = lambda i, vectors: jax.vmap(lambda vector: task.problem.tree(i, vector))(vectors)
    return Bench(run, lambda: (tree(0, state.clients.u), tree(1, state.clients.v)))


def torch_rounds(size: Size, threads: int | None = None) -> Bench:
    import torch
    from torch.nn import functional

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    task = make_task(size)
    start = tuple(task.problem.tree(i, jnp.asarray(vector)) for i, vector in enumerate(task.params))
    (extractor, form), (head, head_form) = (jax.tree.flatten(tree) for tree in start)
    there = lambda array: torch.from_numpy(np.array(array, np.float32)).to(device)

    def features(tensors: list[Any], images: Any) -> Any:
        network, values = jax.tree.unflatten(form, tensors), images
        for layer in network["convolutions"]:
            kernel = layer["kernel"].permute(3, 2, 0, 1)
            values = functional.max_pool2d(functional.relu(functional.conv2d(values, kernel, layer["bias"])), 2)
        values = values.permute(0, 2, 3, 1).flatten(1)  # the order of nestfed, so that weights are the same
        for layer in network["hidden"]:
            values = functional.relu(functional.linear(values, layer["weight"].T, layer["bias"]))
        return values

    def loss(head: list[Any], z: Any, labels: Any) -> Any:
        layer = jax.tree.unflatten(head_form, head)
        return functional.cross_entropy(functional.linear(z, layer["weight"].T, layer["bias"]), labels)

    def distance(ours: Any, common: Any) -> Any:
        return ((ours - common) ** 2).sum(1).mean()

    def clipped(gradients: tuple[Any, ...]) -> list[Any]:
        norm = torch.stack([(g * g).sum() for g in gradients]).sum().sqrt()
        factor = torch.clamp(CLIP / norm, max=1.0)  # stays on the device: no waiting
        return [g * factor for g in gradients]

    def step(tensors: list[Any], value: Any) -> list[Any]:
        gradients = clipped(torch.autograd.grad(value, tensors))
        return [(p - LR * g).detach().requires_grad_() for p, g in zip(tensors, gradients, strict=True)]

    fresh = lambda arrays: [there(array).requires_grad_() for array in arrays]
    clients = [(fresh(extractor), fresh(head)) for _ in range(size.clients)]
    common = fresh(extractor)
    data = [
        (there((images / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long().to(device))
        for images, labels in make_data(size)
    ]
    random = torch.Generator(device=device).manual_seed(0)

    def batch(client: int) -> tuple[Any, Any]:
        images, labels = data[client]
        rows = torch.randint(len(labels), (size.batch,), generator=random, device=device)
        return images[rows], labels[rows]

    def run(rounds: int) -> None:
        nonlocal common
        if threads is not None:
            torch.set_num_threads(threads)
        for _ in range(rounds):
            total = [torch.zeros_like(p) for p in common]
            for k in range(size.clients):
                u, v = clients[k]
                for _ in range(size.epoch):
                    images, labels = batch(k)
                    with torch.no_grad():
                        z = features(u, images)
                    v = step(v, loss(v, z, labels))
                fixed = [p.detach() for p in v]
                for _ in range(size.epoch):
                    images, labels = batch(k)
                    with torch.no_grad():
                        there_z = features(common, images)
                    z = features(u, images)
                    u = step(u, loss(fixed, z, labels) + COUPLING / 2 * distance(z, there_z))
                clients[k] = u, v
                images, _ = batch(k)
                with torch.no_grad():
                    z = features(u, images)
                sent = torch.autograd.grad(distance(z, features(common, images)), common)
                total = [t + g / size.clients for t, g in zip(total, sent, strict=True)]
            moved = zip(common, clipped(tuple(total)), strict=True)
            common = [(p - SERVER_LR * g).detach().requires_grad_() for p, g in moved]
        if device.type == "cuda":
            torch.cuda.synchronize()

    def models() -> tuple[Any, Any]:
        stacked = lambda which, number: [
            np.stack([client[which][i].detach().cpu().numpy() for client in clients]) for i in range(number)
        ]
        return (
            jax.tree.unflatten(form, stacked(0, len(extractor))),
            jax.tree.unflatten(head_form, stacked(1, len(head))),
        )

    return Bench(run, models)


# ------------------------------------------------------------------------------------------------- measuring, printing


def measure(size: Size, systems: dict[str, Callable[[Size], Bench]], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row per system: all are started and run once, then asked in turn."""
    rows, benches = {}, {}
    for name, make in systems.items():
        benches[name] = bench = make(size)
        before = mean_loss(size, bench.models())
        began = time.perf_counter()
        bench.run(1)
        rows[name] = {"system": name, "loss_before": before, "first_round": time.perf_counter() - began}
    taken: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, bench in benches.items():
            began = time.perf_counter()
            bench.run(rounds)
            taken[name].append((time.perf_counter() - began) / rounds)
    for name, bench in benches.items():
        rows[name] |= {"s": statistics.median(taken[name]), "s_all": taken[name]}
        rows[name]["loss_after"] = mean_loss(size, bench.models())
    return list(rows.values())


COLUMNS = {  # heading: (field, decimals)
    "s/round": ("s", 4),
    "first s": ("first_round", 2),
    "loss before": ("loss_before", 4),
    "after": ("loss_after", 4),
}


def report(name: str, size: Size, rows: list[dict[str, Any]]) -> None:
    print(f"{name}: {size.clients} clients, {size.images} images each, {2 * size.epoch} steps of {size.batch}")
    print_table(rows, COLUMNS, (14, 12))
    for row in rows:
        print(f"{row['system']}, every repeat: {', '.join(f'{s:.4f}' for s in row['s_all'])} s/round")
    if len(rows) > 1:
        ours, *others = rows
        near = lambda field, share: all(abs(row[field] - ours[field]) < share * ours["loss_before"] for row in others)
        verdict = "the same work" if near("loss_before", 1e-3) and near("loss_after", 0.1) else "NOT the same work"
        print(f"fastest PyTorch loop / nestfed = {min(row['s'] for row in others) / ours['s']:.2f}; {verdict}")


def main(description: str, networks: tuple[str, ...], rounds: int, repeats: int) -> None:
    """The benchmark with these defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--network", choices=(*SIZES, "both"), help=f"default: {' and '.join(networks)}")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of a measurement (default {rounds})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"of which the median (default {repeats})")
    parser.add_argument("--out", metavar="FILE", help="write everything that was measured to this file, as JSON")
    options = parser.parse_args()
    chosen = {None: networks, "both": tuple(SIZES)}.get(options.network, (options.network,))
    machine = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    systems: dict[str, Callable[[Size], Bench]] = {"nestfed": nestfed_rounds}
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: nestfed alone, nothing to compare with.")
    else:
        import torch

        device, threads = "cuda" if torch.cuda.is_available() else "cpu", torch.get_num_threads()
        machine |= {"torch": torch.__version__, "torch device": device, "torch threads": threads}
        systems["PyTorch loop"] = functools.partial(torch_rounds, threads=threads)
        if device == "cpu":
            systems["one thread"] = functools.partial(torch_rounds, threads=1)
    print(json.dumps(machine), flush=True)
    results = {}
    for name in chosen:
        size = (SMALL if options.small else SIZES)[name]
        results[name] = measure(size, systems, options.rounds, options.repeats)
        report(name, size, results[name])
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main(__doc__ or "", networks=("grey", "colour"), rounds=5, repeats=3)
