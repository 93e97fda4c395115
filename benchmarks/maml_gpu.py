"""Federated MAML on Omniglot-like tasks: local steps per second in the engine, against a loop in PyTorch.

    python benchmarks/maml_gpu.py [--small] [--rounds 3] [--out FILE]

Clients side by side, 5-way 1-shot tasks with 15 queries, one inner step with second derivatives, the four-layer network
of the papers (91,781 parameters), FCSG with 10 local steps per round; 1 and 4 tasks per step; float32 and bfloat16.
The data are random bytes in Omniglot's shapes: only the time matters here.

nestfed is timed inside `nestfed.advance`, drawing of tasks and averaging included, after a first call that compiles
(its time is given too). PyTorch does the same work in the obvious way: a loop over clients and tasks, autograd.grad
with create_graph=True, tasks drawn before the clock starts. It computes in float32, with the same tf32 setting.

Work is counted in the multiplications of convolutions and the head, forward: a step of a client is, per task,
    support: forward 1, backward 2, and the second derivative through both, about twice that: 9 forwards of 5 images
    query:   forward 1, backward 2: 3 forwards of 75 images
and 2 operations per multiplication. The share of the card's peak is that count per second over the peak of the type
that multiplies: on an H200 67 TFLOP/s in float32 without tensor cores, 495 with TF32, 989 in bfloat16 (dense). XLA
multiplies float32 matrices on an H200 with TF32 unless the precision is raised, so 495 is what float32 is held against.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import nestfed
from nestfed.experiments.maml.data import SIDE, FederatedCharacters
from nestfed.experiments.maml.task import CONV4, make_character_task
from nestfed.models import CNN

LOCAL_STEPS, INNER_LR, LR, QUERIES = 10, 0.01, 0.001, 15  # steps so small that nothing diverges on random bytes
PEAKS = {"float32": ("TF32", 495e12), "bfloat16": ("bfloat16", 989e12)}  # of an H200, dense


@dataclasses.dataclass(frozen=True)
class Size:
    clients: int = 16
    characters: int = 64  # of a client
    tasks: tuple[int, ...] = (1, 4)
    model: CNN = CONV4


SMALL = Size(
    clients=2,
    characters=4,
    tasks=(1,),
    model=dataclasses.replace(CONV4, layers=(CONV4.layers[0]._replace(channels=4, stride=4),)),
)


def make_data(size: Size) -> FederatedCharacters:
    random = np.random.default_rng(0)
    images = lambda: {"image": random.integers(0, 256, (size.characters, 20, SIDE, SIDE)).astype(np.uint8)}
    rows = nestfed.Rows.from_clients([images() for _ in range(size.clients)])
    return FederatedCharacters(rows=rows, aside=rows.reorder([0, 1]))


def operations(model: CNN, tasks: int) -> float:
    """Of one local step of one client: see above."""
    side, channels, forward = SIDE, 1, 0
    for layer in model.layers:
        side = (side - layer.kernel) // layer.stride + 1
        forward += side**2 * layer.channels * layer.kernel**2 * channels
        channels = layer.channels
    forward += side**2 * channels * model.outputs
    return 2.0 * tasks * forward * (9 * model.outputs + 3 * QUERIES * model.outputs)


# ------------------------------------------------------------------------------------------------- the two systems


def nestfed_steps(size: Size, tasks: int, dtype: str) -> Callable[[int], None]:
    model = dataclasses.replace(size.model, dtype=None if dtype == "float32" else dtype)
    made = make_character_task(
        make_data(size), model=model, queries=QUERIES, inner_lr=INNER_LR, batch_size=tasks, tasks=2
    )
    task = jax.device_put(made)
    algorithm = nestfed.make("fcsg", lr=LR, local_steps=LOCAL_STEPS)
    options: dict[str, Any] = {"client_axis": "vmap"}
    state = nestfed.start(algorithm, task, **options)

    def run(rounds: int) -> None:
        nonlocal state
        state, _ = nestfed.advance(algorithm, task, 0, state, rounds=rounds, evaluate_every=None, **options)
        jax.block_until_ready(state)
        # A run that diverged keeps its last finite state and does no more work: its time would mean nothing.
        if int(state.diverged) >= 0:
            raise SystemExit(f"nestfed diverged in round {int(state.diverged)}; nothing was measured.")

    return run


def torch_steps(size: Size, tasks: int) -> Callable[[int], None]:
    import torch
    from torch.nn import functional

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    ways, layers = size.model.outputs, size.model.layers
    random = torch.Generator().manual_seed(0)

    def start() -> list[Any]:
        params, channels, side = [], 1, SIDE
        for layer in layers:
            shape = (layer.channels, channels, layer.kernel, layer.kernel)
            deviation = (2 / (channels * layer.kernel**2)) ** 0.5
            params += [torch.randn(shape, generator=random) * deviation, torch.zeros(layer.channels)]
            params += [torch.ones(layer.channels), torch.zeros(layer.channels)]
            channels, side = layer.channels, (side - layer.kernel) // layer.stride + 1
        width = channels * side**2
        params += [torch.randn((ways, width), generator=random) / width**0.5, torch.zeros(ways)]
        return [p.to(device) for p in params]

    def loss(params: list[Any], rows: tuple[Any, Any]) -> Any:
        values, labels = rows
        for i, layer in enumerate(layers):
            kernel, bias, scale, shift = params[4 * i : 4 * i + 4]
            values = functional.relu(functional.conv2d(values, kernel, bias, stride=layer.stride))
            values = functional.batch_norm(values, None, None, scale, shift, training=True)
        return functional.cross_entropy(functional.linear(values.flatten(1), params[-2], params[-1]), labels)

    def rows(count: int) -> tuple[Any, Any]:
        images = torch.rand((ways * count, 1, SIDE, SIDE), generator=random)
        return images.to(device), torch.arange(ways).repeat_interleave(count).to(device)

    drawn = [[(rows(1), rows(QUERIES)) for _ in range(tasks)] for _ in range(size.clients)]
    server = start()

    def run(rounds: int) -> None:
        nonlocal server
        for _ in range(rounds):
            total = [torch.zeros_like(p) for p in server]
            for client in range(size.clients):
                own = [p.clone() for p in server]
                for _ in range(LOCAL_STEPS):
                    own = [p.detach().requires_grad_() for p in own]
                    value = torch.zeros((), device=device)
                    for support, query in drawn[client]:
                        inner = torch.autograd.grad(loss(own, support), own, create_graph=True)
                        adapted = [p - INNER_LR * g for p, g in zip(own, inner, strict=True)]
                        value = value + loss(adapted, query) / tasks
                    outer = torch.autograd.grad(value, own)
                    own = [p.detach() - LR * g for p, g in zip(own, outer, strict=True)]
                total = [t + p / size.clients for t, p in zip(total, own, strict=True)]
            server = total
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


# ------------------------------------------------------------------------------------------------- measuring, printing


def measure(make: Callable[[], Callable[[int], None]], rounds: int, repeats: int = 3) -> dict[str, float]:
    """Seconds of a local step of all clients together (the median of the repeats), and of the first call."""
    began = time.perf_counter()
    run = make()
    run(1)
    first = time.perf_counter() - began
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(rounds)
        taken.append((time.perf_counter() - began) / (rounds * LOCAL_STEPS))
    return {"step": statistics.median(taken), "fastest": min(taken), "slowest": max(taken), "first_call": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a measurement, of 10 local steps each")
    parser.add_argument("--out", metavar="FILE", help="write everything that was measured to this file, as JSON")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    torch_there = importlib.util.find_spec("torch") is not None
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "python": platform.python_version()}
    if torch_there:
        import torch

        machine |= {"torch": torch.__version__, "torch device": "cuda" if torch.cuda.is_available() else "cpu"}
    print(json.dumps(machine), flush=True)
    if not torch_there:
        print("torch is not installed: nestfed alone, nothing to compare with.")
    results = []
    print(
        f"{'system':<14}{'type':<10}{'tasks':>6}{'ms/step':>10}{'steps/s':>10}{'first s':>9}{'TFLOP/s':>9}  of the peak"
    )
    for tasks in size.tasks:
        systems = [("nestfed", dtype) for dtype in PEAKS] + ([("PyTorch loop", "float32")] if torch_there else [])
        for system, dtype in systems:
            make = (
                (lambda: nestfed_steps(size, tasks, dtype))
                if system == "nestfed"
                else (lambda: torch_steps(size, tasks))
            )
            found = measure(make, options.rounds)
            rate = size.clients * operations(size.model, tasks) / found["step"]
            kind, peak = PEAKS[dtype]
            results.append({"system": system, "type": dtype, "tasks": tasks, **found, "flops": rate, "peak": peak})
            share = f"{100 * rate / peak:.2f} % of {peak / 1e12:.0f} ({kind})" if "H200" in machine["device"] else "-"
            print(
                f"{system:<14}{dtype:<10}{tasks:>6}{1e3 * found['step']:>10.2f}{1 / found['step']:>10.1f}"
                f"{found['first_call']:>9.1f}{rate / 1e12:>9.3f}  {share}",
                flush=True,
            )
        if torch_there:
            steps = {r["system"]: r["step"] for r in results if r["tasks"] == tasks and r["type"] == "float32"}
            ratio = steps["PyTorch loop"] / steps["nestfed"]
            print(f"{tasks} tasks: PyTorch loop / nestfed = {ratio:.1f} (float32)", flush=True)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "clients": size.clients, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
