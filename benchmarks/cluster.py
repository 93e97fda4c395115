"""What a run costs in two processes: one process's time against theirs, and what a message between them takes.

    python benchmarks/cluster.py [--rounds 1] [--small-rounds 200] [--repeats 3] [--json FILE]

cnn       a round of `benchmarks/cnn.py` (FedAvg, 50 clients, 96,938 parameters, one client after the other): processor
          time of each of two processes / processor time of one process that does it alone; at most 0.65
small     FedAvg on logistic regression, 50 clients of 100 features, 5 local steps of batch 64, side by side: a round
          must not take longer than one process's and as many all-reduces as it has exchanges, and one. They are counted
          in the compiled program, and what one takes is measured on 100 numbers in the same processes.

One process and two take turns, and medians are printed, because machines are shared. Each process is started once, and
compiles before it is measured.
"""

import argparse
import json
import os
import re
import socket
import statistics
import sys
import time
from typing import Any

from cnn import BATCH, CLIENTS, LR, ROWS, STEPS, make_data, make_network
from processes import Process, header, timed

SMALL_ROWS, SMALL_FEATURES, SMALL_BATCH, SMALL_STEPS = 600, 100, 64, 5  # rows: per client
JOIN = "BENCHMARK_JOIN"


def make_cnn() -> tuple[Any, Any]:
    import jax.numpy as jnp
    import numpy as np
    import optax

    import nestfed
    from nestfed.problems import SingleLevel

    network, start, _ = make_network()

    @nestfed.struct
    class Classification(SingleLevel):
        def loss(self, x, batch, key):
            images, labels = batch
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(x, images), labels))

    data = nestfed.Rows.from_table(make_data(), np.repeat(np.arange(CLIENTS), ROWS))
    task = nestfed.Task.create(Classification(), data, start, batch_size=BATCH)
    return nestfed.make("fedavg", lr=LR, local_steps=STEPS), task


def make_small() -> tuple[Any, Any]:
    import jax.numpy as jnp
    import numpy as np

    import nestfed
    from nestfed.problems import SingleLevel

    @nestfed.struct
    class Logistic(SingleLevel):
        def loss(self, x, batch, key):
            inputs, labels = batch
            return jnp.mean(jnp.logaddexp(0.0, -labels * (inputs @ x)))

    random = np.random.default_rng(0)
    inputs = random.standard_normal((CLIENTS * SMALL_ROWS, SMALL_FEATURES), dtype=np.float32)
    labels = np.sign(inputs[:, 0] + 0.1).astype(np.float32)
    data = nestfed.Rows.from_table((inputs, labels), np.repeat(np.arange(CLIENTS), SMALL_ROWS))
    task = nestfed.Task.create(Logistic(), data, np.zeros(SMALL_FEATURES, np.float32), batch_size=SMALL_BATCH)
    return nestfed.make("fedavg", lr=0.1, local_steps=SMALL_STEPS), task


def run_rounds(algorithm: Any, task: Any, rounds: int) -> dict[str, float]:
    """Wall and processor time of a round, by the programs of a run."""
    from nestfed.engine.options import Options
    from nestfed.verbs.simulation import Programs

    programs = Programs(algorithm, task, 0, Options(evaluate_every=None))
    run, _ = programs.advance(programs.start(), 0, 1)
    _, cost = timed(lambda: programs.advance(run, 1, rounds))
    return {"wall": cost["wall"] / rounds, "cpu": cost["cpu"] / rounds}


def count_messages(algorithm: Any, task: Any) -> dict[str, int]:
    """All-reduces and other messages in the compiled program of rounds without evaluations."""
    from nestfed.engine import rounds
    from nestfed.engine.options import Options
    from nestfed.verbs.simulation import Programs

    programs = Programs(algorithm, task, 0, Options(evaluate_every=None))
    text = rounds.advance.lower(programs.laid, programs.start(), 0, 1, programs.plan).compile().as_text()
    count = lambda word: len(re.findall(rf" {word}(?:-start)?\(", text))
    return {"all-reduces": count("all-reduce"), "all-gathers": count("all-gather")}


def time_message() -> float:
    """Seconds of an all-reduce of 100 numbers."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import AxisType, PartitionSpec

    number, times = len(jax.devices()), 200
    mesh = jax.make_mesh((number,), ("d",), axis_types=(AxisType.Auto,))
    body = lambda i, x: lax.psum(x, "d") / number
    loop = lambda x: lax.fori_loop(0, times, body, x)
    common = PartitionSpec()
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=common, out_specs=common, check_vma=False))
    values = jnp.ones(100)
    jax.block_until_ready(program(values))
    began = time.perf_counter()
    jax.block_until_ready(program(values))
    return (time.perf_counter() - began) / times


def serve() -> None:
    """A process under measurement: it answers what it is asked, and is told what to measure."""
    number = 1
    if JOIN in os.environ:
        from nestfed.engine import processes

        coordinator, count, own = os.environ[JOIN].split(",")
        number = int(count)
        processes.join(coordinator, number, int(own))
    # What JAX writes there is no answer.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    cnn, small = make_cnn(), make_small()
    for line in sys.stdin:
        what, rounds = line.split()
        if what == "messages":
            found: Any = count_messages(*small) | {"seconds": time_message() if number > 1 else 0.0}
        else:
            found = run_rounds(*(cnn if what == "cnn" else small), int(rounds))
        print(json.dumps(found), file=answers, flush=True)


class Group:
    """Processes of one run."""

    def __init__(self, number: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        threads = str(max(1, (os.cpu_count() or 1) // number))  # each its share, as `nestfed run --processes` does
        places = [{JOIN: f"{address},{number},{own}", "PJRT_NPROC": threads} for own in range(number)]
        places = places if number > 1 else [{}]
        self.members = [Process("--serve", **place) for place in places]

    def ask(self, what: str, rounds: int = 0) -> list[dict[str, float]]:
        for member in self.members:
            assert member.child.stdin
            member.child.stdin.write(f"{what} {rounds}\n")
            member.child.stdin.flush()
        return [member.answer() for member in self.members]

    def close(self) -> None:
        for member in self.members:
            assert member.child.stdin
            member.child.stdin.close()
        for member in self.members:
            member.child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--small-rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    one, two = Group(1), Group(2)
    sizes, groups = {"cnn": given.rounds, "small": given.small_rounds}, {"one": one, "two": two}
    measured: dict[str, list[dict[str, float]]] = {f"{what} {name}": [] for what in sizes for name in groups}
    for _ in range(given.repeats):
        for what, rounds in sizes.items():
            for name, group in groups.items():
                answers = group.ask(what, rounds)
                measured[f"{what} {name}"].append({key: max(a[key] for a in answers) for key in ("wall", "cpu")})
    messages, alone = two.ask("messages")[0], one.ask("messages")[0]
    one.close()
    two.close()
    median = lambda name, key: statistics.median(answer[key] for answer in measured[name])
    ratio = median("cnn two", "cpu") / median("cnn one", "cpu")
    extra = (median("small two", "wall") - median("small one", "wall")) / messages["seconds"]
    for name in measured:
        print(f"{name:10s}  wall {1e3 * median(name, 'wall'):9.2f} ms  cpu {1e3 * median(name, 'cpu'):9.2f} ms")
    print(f"cnn: processor time of each of two / of one alone: {ratio:.2f} (at most 0.65)")
    print(
        f"small: all-reduces {messages['all-reduces']:.0f} (at most 2), all-gathers {messages['all-gathers']:.0f}; in"
    )
    print(f"  one process {alone['all-reduces']:.0f}; one takes {1e3 * messages['seconds']:.3f} ms")
    print(f"small: a round of two is longer than one's by {extra:.2f} all-reduces (at most 2)")
    if given.json:
        found = {"measured": measured, "messages": messages, "cnn ratio": ratio, "small extra all-reduces": extra}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(header() | found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
