"""What a user asks for: one flat table of settings, from keywords, flags or a TOML file, checked before it runs."""

import dataclasses
import numbers
import shlex
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from nestfed.core.settings import UserError
from nestfed.engine.options import OUTPUTS
from nestfed.uploads.privacy import CentralDP, Guarantee, LocalDP
from nestfed.workbench.scenario import Kind, nearest
from nestfed.workbench.scenarios import TASKS
from nestfed.workbench.stages import Budget


@dataclasses.dataclass(frozen=True)
class Request:
    """A run as the user asked for it; what a TOML file may say is exactly this and the options of the task."""

    task: str = "fairness"
    algorithm: str | Sequence[str] | None = None
    seeds: int | Sequence[int] = 1
    rounds: int | None = None
    cohort: int | float | None = None
    sampling: str = "weights"
    dropout: float = 0.0
    evaluations: int = 100
    output: str | None = None
    privacy: str | None = None
    clip: float | None = None
    noise_multiplier: float | None = None
    neighbours: str | None = None
    noise_seed: int | None = None
    delta: float | None = None
    epsilon_budget: float | None = None
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Request":
        """From flat settings: those of a run, and options of its task."""
        own = {name: hint for name, hint in get_type_hints(cls).items() if name != "options"}
        kind = find_task(_checked("task", settings.get("task", "fairness"), str))
        of_task = {field.name: get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
        known = own | of_task
        for key in settings:
            if key not in known:
                raise UserError(f"there is no setting {key!r} for the task {kind.name}{nearest(key, known)}")
        given = {key: _checked(key, value, known[key]) for key, value in settings.items() if value is not None}
        options = {key: value for key, value in given.items() if key not in own}
        if "data" in options and Path(options["data"]).is_file():  # the run can go on from any folder
            options["data"] = str(Path(options["data"]).resolve())
        return cls(**{key: value for key, value in given.items() if key in own}, options=options)

    @property
    def kind(self) -> Kind:
        # FCFL changes its rule after a share of all steps: with `rounds` given, they say how many there are.
        steps = {"steps": self.rounds} if self.rounds else {}
        return find_task(self.task).from_options({**self.options, **steps})

    @property
    def methods(self) -> list[str]:
        kind = find_task(self.task)
        chosen = kind.usual if self.algorithm is None else self.algorithm
        names = [chosen.lower()] if isinstance(chosen, str) else [name.lower() for name in chosen]
        for name in names:
            if name not in kind.methods:
                raise UserError(f"{name!r} is no method for the task {kind.name}{nearest(name, kind.methods)}")
        if len(set(names)) != len(names) or not names:
            raise UserError(f"algorithm={names} was given; name one or several different methods.")
        return names

    @property
    def seed_list(self) -> list[int]:
        numbers = list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)
        if not numbers or len(set(numbers)) != len(numbers) or min(numbers) < 0:
            raise UserError(f"seeds={self.seeds!r} was given; give a number of seeds, or a list of different ones.")
        return numbers

    @property
    def budget(self) -> Budget:
        for name, value in (("rounds", self.rounds), ("evaluations", self.evaluations)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value!r} was given; it must be a whole number, 1 or more.")
        if self.output is not None and self.output not in OUTPUTS:
            raise UserError(f"output={self.output!r} was given; use one of {', '.join(OUTPUTS)}.")
        if self.output not in (None, "last") and not find_task(self.task).any_output:
            raise UserError(
                f"output={self.output!r} was given; in the task {self.task} clients keep models of their own, and only "
                "the last one is there: leave output out."
            )
        guarantee = self.guarantee
        if self.noise_seed is not None and guarantee is None:
            raise UserError("noise_seed was given without privacy; there is no noise to repeat.")
        return Budget(
            self.rounds, self.cohort, self.sampling, self.dropout, self.evaluations, self.output, guarantee,
            self.noise_seed,
        )  # fmt: skip

    @property
    def guarantee(self) -> Guarantee | None:
        """The differential privacy that was asked for."""
        names = ("clip", "noise_multiplier", "neighbours", "delta", "epsilon_budget")
        given = {name: getattr(self, name) for name in names}
        kinds: dict[str, type[Guarantee]] = {"local": LocalDP, "central": CentralDP}
        if self.privacy is None:
            said = [name for name, value in given.items() if value is not None]
            if said:
                raise UserError(f"{said[0]} was given without privacy; say who is trusted: privacy local or central.")
            return None
        if self.privacy not in kinds:
            raise UserError(f"privacy={self.privacy!r} was given; use 'local' or 'central'.")
        if self.clip is None or self.noise_multiplier is None:
            raise UserError(
                "privacy needs clip (largest norm of an upload) and noise_multiplier (noise / sensitivity)."
            )
        return kinds[self.privacy](
            clip=self.clip, noise_multiplier=self.noise_multiplier, budget=self.epsilon_budget,
            delta=1e-5 if self.delta is None else self.delta, neighbours=self.neighbours or "replace",
        )  # fmt: skip

    def changes(self, method: str) -> dict[str, Any]:
        """The user's settings of one method: `lr` is for all of them, `fedbio.lr` for one."""
        known = find_task(self.task).methods
        general, mine = {}, {}
        for key, value in flat(self.set).items():
            head, _, tail = key.partition(".")
            if head not in known:
                general[key] = value
            elif head not in self.methods:
                raise UserError(f"a setting of {head!r} was given, but {head!r} is not among {self.methods}.")
            elif head == method:
                mine[tail] = value
        return general | mine  # what is said of one method wins over what is said of all

    def settings(self) -> dict[str, Any]:
        """As a TOML file says it."""
        said = {"task": self.task, "algorithm": self.methods, "seeds": self.seed_list, **self.options}
        for name in (
            "rounds", "cohort", "sampling", "dropout", "evaluations", "output",
            "privacy", "clip", "noise_multiplier", "neighbours", "noise_seed", "delta", "epsilon_budget",
        ):  # fmt: skip
            if getattr(self, name) != getattr(Request, name):
                said[name] = getattr(self, name)
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in said.items()}
        return plain | ({"set": flat(self.set)} if self.set else {})

    def command(self, verb: str = "run") -> str:
        """The same as a command line."""
        words = ["nestfed", verb, self.task]
        for name in self.methods:
            words += ["--algorithm", name]
        seeds = self.seed_list
        listed = ",".join(map(str, seeds)) + "," * (len(seeds) == 1)  # "7," is seed 7, "7" are seven seeds
        words += ["--seeds", str(len(seeds)) if seeds == list(range(len(seeds))) else listed]
        for key, value in self.settings().items():
            if key in ("task", "algorithm", "seeds", "set"):
                continue
            flag = f"--{key.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                for one in value if isinstance(value, list) else [value]:
                    words += [flag, str(one)]
        for key, value in flat(self.set).items():
            words += ["--set", f"{key}={value}"]
        return shlex.join(words)


def find_task(name: str) -> type[Kind]:
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A value of the type that the setting has, with what a file or a shell cannot say exactly converted."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    if typing.get_origin(hint) in (tuple, Sequence, Mapping):
        kinds = [hint]
    for kind in kinds:
        fitting = _fitting(name, value, kind)
        if fitting is not None:
            return fitting
    if str in kinds and isinstance(value, (int, float, Path)):
        return str(value)
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Mapping: "a table"}
    wanted = [words.get(typing.get_origin(kind) or kind, "a list") for kind in kinds]
    raise UserError(f"{name}={value!r} was given; it must be {' or '.join(wanted)}.")


def _fitting(name: str, value: Any, kind: Any) -> Any:
    """The value as one of this kind, or None."""
    origin = typing.get_origin(kind) or kind
    if isinstance(value, bool) or origin is bool:
        return value if isinstance(value, bool) and origin is bool else None
    if origin is int:
        return int(value) if isinstance(value, numbers.Integral) else None
    if origin is float:
        return float(value) if isinstance(value, numbers.Real) else None
    if origin in (str, Mapping):
        return value if isinstance(value, origin) else None
    if isinstance(value, str):  # one of what may be several
        return (value,) if origin is tuple else None
    entry = typing.get_args(kind)[0]
    return tuple(_checked(name, one, entry) for one in value) if isinstance(value, Sequence) else None


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}.") from error


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    dotted = {}
    for key, value in settings.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return dotted
