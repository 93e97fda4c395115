"""What a checkpoint knows a run by: code, closures, defaults and globals, the same in every process."""

import dataclasses
import functools
import importlib
import random
import subprocess
import sys
import textwrap
import threading
from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import regression
from numpy.testing import assert_allclose
from scipy import interpolate

from nestfed import Rows, Schedule, Task, make, simulate, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.core.identity import Unidentifiable, identify
from nestfed.core.settings import UserError, static
from nestfed.problems import SingleLevel
from nestfed.problems.robust import MeanLoss
from nestfed.uploads.privacy import LocalDP
from nestfed.uploads.transforms import Transform
from nestfed.verbs.checkpoints import CheckpointError


def compiled(source, **names):
    """What `source` binds as `f`, as if it stood in a file of the user's."""
    names = {
        "__name__": "own",
        "jnp": jnp,
        "np": np,
        "jax": jax,
        "functools": functools,
        "dataclasses": dataclasses,
    } | names
    names |= {"NamedTuple": NamedTuple, "Enum": Enum, "random": random, "interpolate": interpolate}
    exec(textwrap.dedent(source), names)
    return names["f"]


WRAPPER = """
class A:
    def __init__(self, g, c):
        functools.update_wrapper(self, g)
        self.c = c
    def __call__(self, x): return self.c * self.__wrapped__(x)
"""

SAME = {
    "another line": ("f = lambda x: x + 1", "\n\n\nf = lambda x: x + 1"),
    "comments and docstrings": ("def f(x):\n 'one'\n return x + 1", "def f(x):\n 'two'\n # why\n return x + 1"),
    "other names in a module": ("a = 1\nf = lambda x: x", "a = 2\nf = lambda x: x"),
    "an attribute named as a global": ("size = 1\nf = lambda x: x.size", "size = 2\nf = lambda x: x.size"),
}
OTHER = {
    "a constant": ("f = lambda x: x + 1", "f = lambda x: x + 2"),
    "the type of a constant": ("f = lambda x: x + 1", "f = lambda x: x + 1.0"),
    "an operation": ("f = lambda x: x + 1", "f = lambda x: x - 1"),
    "a function of a library": ("f = lambda x: jnp.sin(x)", "f = lambda x: jnp.cos(x)"),
    "a default": ("def f(x, a=1): return x", "def f(x, a=2): return x"),
    "a keyword default": ("def f(x, *, a=1): return x", "def f(x, *, a=2): return x"),
    "a global": ("a = 1\nf = lambda x: x + a", "a = 2\nf = lambda x: x + a"),
    "a global array": ("a = np.ones(3)\nf = lambda x: x + a", "a = np.zeros(3)\nf = lambda x: x + a"),
    "a global function": (
        "g = lambda x: x + 1\nf = lambda x: g(x)",
        "g = lambda x: x + 2\nf = lambda x: g(x)",
    ),
    "a global behind another function": (
        "a = 1\ng = lambda x: x + a\nf = lambda x: g(x)",
        "a = 2\ng = lambda x: x + a\nf = lambda x: g(x)",
    ),
    "a closure": (
        "def make(a): return lambda x: x + a\nf = make(1)",
        "def make(a): return lambda x: x + a\nf = make(2)",
    ),
    "a closure in a closure": (
        "def make(a):\n def g(x): return x + a\n return lambda x: g(x)\nf = make(1)",
        "def make(a):\n def g(x): return x + a\n return lambda x: g(x)\nf = make(2)",
    ),
    "inside a comprehension": ("f = lambda x: [y + 1 for y in x]", "f = lambda x: [y + 2 for y in x]"),
    "under jit": ("f = jax.jit(lambda x: x + 1)", "f = jax.jit(lambda x: x + 2)"),
    "recursion": (
        "def f(n): return 1 if n == 0 else n * f(n - 1)",
        "def f(n): return 2 if n == 0 else n * f(n - 1)",
    ),
    "a class that it uses": (
        "class A:\n def m(self): return 1\nf = lambda x: A().m()",
        "class A:\n def m(self): return 2\nf = lambda x: A().m()",
    ),
    "a class constant": ("class A: c = 1\nf = lambda x: A.c", "class A: c = 2\nf = lambda x: A.c"),
    "a base class": (
        "class B:\n def m(self): return 1\nclass A(B): pass\nf = A()",
        "class B:\n def m(self): return 2\nclass A(B): pass\nf = A()",
    ),
    "how an object is made": (
        "class A:\n def __init__(self, c): self.c = 2 * c\nf = lambda x: A(1).c * x",
        "class A:\n def __init__(self, c): self.c = 3 * c\nf = lambda x: A(1).c * x",
    ),
    "a named tuple that is called": (
        "class A(NamedTuple):\n c: float\n def __call__(self, t): return self.c * t\nf = A(1.0)",
        "class A(NamedTuple):\n c: float\n def __call__(self, t): return self.c / t\nf = A(1.0)",
    ),
    "a default of a named tuple": (
        "class A(NamedTuple):\n c: float = 1.0\nf = lambda t: A().c * t",
        "class A(NamedTuple):\n c: float = 2.0\nf = lambda t: A().c * t",
    ),
    "an object that wraps a function": (WRAPPER + "f = A(len, 1)", WRAPPER + "f = A(len, 2)"),
    "a derivative of its own": (
        "@jax.custom_jvp\ndef f(x): return x\n@f.defjvp\ndef rule(p, t): return p[0], t[0]",
        "@jax.custom_jvp\ndef f(x): return x\n@f.defjvp\ndef rule(p, t): return p[0], -t[0]",
    ),
    "a pull-back of its own": (
        "@jax.custom_vjp\ndef f(x): return x\nf.defvjp(lambda x: (x, 0), lambda r, g: (g,))",
        "@jax.custom_vjp\ndef f(x): return x\nf.defvjp(lambda x: (x, 0), lambda r, g: (-g,))",
    ),
    "the owner of a method in C": ("f = {0: 1}.get", "f = {0: 2}.get"),
    "the array of a method": ("f = np.ones(3).dot", "f = np.zeros(3).dot"),
    "an attribute of a function": ("def f(x): return f.c * x\nf.c = 1", "def f(x): return f.c * x\nf.c = 2"),
    "slots": ("class A: __slots__ = ('c',)\nf = A()\nf.c = 1", "class A: __slots__ = ('c',)\nf = A()\nf.c = 2"),
    "what an object in C holds": ("f = random.Random(1)", "f = random.Random(2)"),
    "attributes and slots of a library's object": (
        "f = interpolate.CubicSpline([0, 1, 2], [0, 1, 2.0])",
        "f = interpolate.CubicSpline([0, 1, 2], [0, 1, 3.0])",
    ),
    "the class of a number": (
        "class A(float):\n def m(self): return 1\nf = A(1)",
        "class A(float):\n def m(self): return 2\nf = A(1)",
    ),
    "the class of a dictionary": (
        "class A(dict):\n def m(self): return 1\nf = A(a=1)",
        "class A(dict):\n def m(self): return 2\nf = A(a=1)",
    ),
    "the value of a choice": (
        "class A(Enum): one = 1\nf = lambda x: x + A.one.value",
        "class A(Enum): one = 2\nf = lambda x: x + A.one.value",
    ),
    "what makes a default": (
        "@dataclasses.dataclass\nclass A: c: list = dataclasses.field(default_factory=lambda: 1)\nf = lambda x: A().c",
        "@dataclasses.dataclass\nclass A: c: list = dataclasses.field(default_factory=lambda: 2)\nf = lambda x: A().c",
    ),
    "a class of classes": (
        "class M(type): c = 1\nclass A(metaclass=M): pass\nf = lambda x: A.c",
        "class M(type): c = 2\nclass A(metaclass=M): pass\nf = lambda x: A.c",
    ),
    "a function that NumPy repeats": ("f = np.vectorize(lambda x: x + 1)", "f = np.vectorize(lambda x: x + 2)"),
    "axes of a vmap": ("f = jax.vmap(jnp.dot, (0, None))", "f = jax.vmap(jnp.dot, (None, 0))"),
}


@pytest.mark.parametrize("one, other", SAME.values(), ids=SAME)
def test_what_does_the_same_is_the_same(one, other):
    assert identify(compiled(one)) == identify(compiled(other))


@pytest.mark.parametrize("one, other", OTHER.values(), ids=OTHER)
def test_what_does_something_else_is_another(one, other):
    assert identify(compiled(one)) != identify(compiled(other))
    assert identify(compiled(one)) == identify(compiled(one))


def test_values_and_library_objects():
    different = [
        optax.sgd(1.0), optax.sgd(0.01), optax.sgd(1.0, momentum=0.9), optax.adam(1.0),
        optax.cosine_decay_schedule(1.0, 10), optax.cosine_decay_schedule(1.0, 11),
        jnp.sin, jnp.cos, np.sin, jax.nn.relu, jax.nn.softplus, len, sum,
        functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1),
        np.arange(3), np.arange(3.0), np.arange(3)[::-1], (1, 2), [1, 2], (1.0, 2), {"a": 1}, {"a": 2}, {1, 2}, {1, 3},
        np.asarray(["a", None], object), jax.random.key(0), jax.random.key(1), None, "1", 1, True, b"1",
    ]  # fmt: skip
    assert len({identify(value) for value in different}) == len(different)
    assert identify({"a": 1, "b": 2}) == identify({"b": 2, "a": 1})
    assert identify(np.asfortranarray(np.ones((2, 3)))) == identify(np.ones((2, 3)))


def test_records_and_methods():
    @struct
    class Settings:
        rate: float = 1.0
        function: object = static(default=None)

        def apply(self, x):
            return x * self.rate

    different = [Settings(), Settings(rate=2.0), Settings(function=jnp.sin), Settings().apply, Settings(rate=2.0).apply]
    assert len({identify(value) for value in different}) == len(different)


REFUSED = {
    "lock": threading.Lock(),
    "generator": (i for i in range(3)),
    "object": object(),
    "ufunc of a function": np.frompyfunc(lambda x: x + 1, 1, 1),
}


@pytest.mark.parametrize("source", ["eval('a')", "globals()['a']", "exec('a')", "[__import__('a') for _ in x]"])
def test_a_function_that_may_reach_anything_is_refused(source):
    with pytest.raises(Unidentifiable, match=r"it calls \w+\(\), by which it may reach anything"):
        identify(compiled(f"a = 1\nf = lambda x: {source}"))
    assert identify(compiled(f"eval = globals = exec = __import__ = len\nf = lambda x: {source}"))


@pytest.mark.parametrize("what", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_identified_is_refused_with_one_line(what, tmp_path):
    with pytest.raises(Unidentifiable, match="cannot be told apart"):
        identify(what)

    def losses(x, batch, key):
        assert what is not None
        return (batch[0] @ x - batch[1]) ** 2

    task = Task.create(MeanLoss(losses=losses), regression().data, jnp.zeros(3))
    with pytest.raises(UserError, match="the task > problem > losses > what is a") as caught:
        simulate(make("fedavg", lr=0.1), task, rounds=1, checkpoint=tmp_path / "run.npz", progress=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "run.npz").exists()
    simulate(make("fedavg", lr=0.1), task, rounds=1, progress=False)  # without a checkpoint nobody needs to know


def test_the_same_in_every_process(tmp_path):
    (tmp_path / "helpers.py").write_text("scale = 2.0\ndef half(x): return x / scale\n")
    script = """
import sys, numpy as np, jax, optax
import helpers
from nestfed import make, struct
from nestfed import Schedule
from nestfed.core.identity import identify
from nestfed.problems import SingleLevel
@struct
class Own(SingleLevel):
    strength: float = 1.0
    def loss(self, x, batch, key):
        return helpers.half(self.strength * (x - batch).sum() ** 2)
table = {name: np.arange(3.0) for name in ("a", "b", "c")}
values = {1.5, 2.5, 3.5}
print(identify((Own(), lambda x: x + table["a"] + len(values), optax.adam(optax.cosine_decay_schedule(1.0, 10)),
                make("fedbioacc"), Schedule(function=lambda t: 1 / (1 + t)))))
"""

    def run(*flags, **environment):
        done = subprocess.run([sys.executable, *flags, "-c", script], cwd=tmp_path, capture_output=True, text=True,
                              env={**__import__("os").environ, "PYTHONPATH": str(tmp_path), **environment})  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first = run(PYTHONHASHSEED="1")
    assert first == run(PYTHONHASHSEED="2")
    (tmp_path / "helpers.py").write_text("scale = 3.0\ndef half(x): return x / scale\n")
    assert first != run(PYTHONHASHSEED="1")  # a module of the user's counts with its content


OWN_MODULES = {
    "own_rates.py": "base = 2.0\n",
    "own_package/__init__.py": "",
    "own_package/steps.py": "from own_rates import base\ndef step(x): return x / base\n",
    "own_loss.py": """
import own_package.steps
import own_rates
def named(x): return own_package.steps.step(x)
def inside(x):
    from own_package.steps import step
    return step(x)
def whole(x):
    import own_rates
    return x / own_rates.base
def set_by_a_program(x): return x / own_rates.base
""",
}


@pytest.mark.parametrize("name", ["named", "inside", "whole", "set_by_a_program"])
def test_what_comes_from_modules_of_the_user_counts(name, tmp_path, monkeypatch):
    """However it was imported, from whichever file, and as it is now."""
    for path, content in OWN_MODULES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the next writing is not told apart by its time

    def read():
        for own in [own for own in sys.modules if own.startswith("own_")]:
            monkeypatch.delitem(sys.modules, own)
        importlib.invalidate_caches()
        return importlib.import_module("own_loss"), importlib.import_module("own_rates")

    first = identify(getattr(read()[0], name))
    assert identify(getattr(read()[0], name)) == first
    loss, rates = read()
    rates.base = 3.0  # no file says so
    told = identify(getattr(loss, name)) != first
    assert told == (name in ("whole", "set_by_a_program"))  # the others took it when they were imported
    (tmp_path / "own_rates.py").write_text("base = 3.0\n")
    assert identify(getattr(read()[0], name)) != first


# ------------------------------------------------------------------------------------------------- checkpoints


@struct
class Scaled(SingleLevel):
    factor = 1.0

    def loss(self, x, batch, key):
        return self.factor * jnp.sum((x - batch) ** 2)


def scaled_by(factor):
    """The same problem with another constant in its class."""
    kind = type("Scaled", (Scaled,), {"factor": factor})
    return struct(kind)()


def closing_over(constant):
    return MeanLoss(losses=lambda x, batch, key: constant * jnp.sum((x - batch) ** 2, keepdims=True))


def squares_task(problem):
    return Task.create(problem, Rows.from_clients(constants=jnp.arange(3.0)), jnp.zeros(()))


FEDOPT = lambda optimizer: (make("fedopt", lr=0.1, optimizer=optimizer), regression(), {})
SCHEDULE = lambda function: (FedAvg(lr=Schedule(function=function)), regression(), {})
LOSS = lambda constant: (make("fedavg", lr=0.1), squares_task(closing_over(constant)), {})
CLASS = lambda factor: (make("fedavg", lr=0.1), squares_task(scaled_by(factor)), {})
METRIC = lambda name: (make("fedavg", lr=0.1), regression(), {"metrics": lambda *_: {"same": jnp.asarray(name)}})


def halving(factor):
    """A transform of uploads with this constant in its code's class."""

    class Halve(Transform):
        part = factor

        def apply(self, tree, key):
            return jax.tree.map(lambda a: self.part * a, tree)

    return struct(Halve)()


UPLOADS = lambda factor: (make("fedavg", lr=0.1), regression(), {"uploads": halving(factor)})
RESUMED = {
    "optimiser": (FEDOPT, optax.sgd(1.0), optax.sgd(0.01), "a function that the algorithm holds"),
    "schedule": (SCHEDULE, lambda t: 0.1 / (1 + t), lambda t: 0.2 / (1 + t), "a function that the algorithm holds"),
    "loss": (LOSS, 1.0, 2.0, "the task differs.*a function or constant"),
    "constant of a class": (CLASS, 1.0, 2.0, "the task differs"),
    "metrics": (METRIC, 1.0, 2.0, "the metrics= function differs"),
    "transform": (UPLOADS, 0.5, 0.25, "the code of a transform in uploads= differs"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_with_the_same_and_not_with_another(case, tmp_path):
    setting, one, other, words = RESUMED[case]
    path = tmp_path / "run.npz"

    def run(value, rounds, **file):
        algorithm, task, options = setting(value)
        return simulate(algorithm, task, rounds=rounds, progress=False, **options, **file)

    run(one, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match=f"belongs to another run .{words}"):
        run(other, 4, checkpoint=path, resume=True)
    resumed, whole = run(one, 4, checkpoint=path, resume=True), run(one, 4)
    assert_allclose(resumed.server.x, whole.server.x, rtol=0)


def test_a_run_with_noise_that_anybody_can_repeat_does_not_go_on_as_a_private_one(tmp_path):
    path, noisy = tmp_path / "run.npz", LocalDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    run = lambda rounds, **more: simulate(
        make("fedavg", lr=0.1), regression(), rounds=rounds, uploads=noisy, checkpoint=path, progress=False, **more
    )
    run(1, noise_seed=3)
    for other in (None, 4):
        with pytest.raises(CheckpointError, match=f"noise_seed: 3 in the file, {other} now"):
            run(2, noise_seed=other, resume=True)
    assert any("it protects nobody" in remark for remark in run(2, noise_seed=3, resume=True).remarks)


def test_numbers_are_told_as_numbers(tmp_path):
    path = tmp_path / "run.npz"
    simulate(make("fedavg", lr=0.1), regression(), rounds=1, checkpoint=path, progress=False)
    with pytest.raises(CheckpointError, match=r"algorithm: FedAvg\(.*lr=0.1\) in the file, FedAvg\(.*lr=0.2\) now\)"):
        simulate(make("fedavg", lr=0.2), regression(), rounds=2, checkpoint=path, resume=True, progress=False)
