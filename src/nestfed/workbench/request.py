"""What a user asks for: one flat table of settings, from keywords, flags or a TOML file, checked before it runs."""

import dataclasses
import functools
import shlex
from collections.abc import Mapping
from typing import Any, Self

from nestfed.core.settings import UserError
from nestfed.uploads.privacy import CentralDP, Guarantee, LocalDP
from nestfed.workbench.fields import list_options
from nestfed.workbench.scenario import Scenario
from nestfed.workbench.scenarios import SCENARIOS
from nestfed.workbench.stages import Budget
from nestfed.workbench.task_options import (
    DELTA,
    NEIGHBOURS,
    PRIVACY,
    TASKS,
    USUAL_TASK,
    CommonOptions,
    find_task,
    refuse,
)

GUARANTEES: dict[str, type[Guarantee]] = {"local": LocalDP, "central": CentralDP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(CommonOptions):
    """A run as the user asked for it; what a TOML file may say is exactly this and the options of the task."""

    task: str = USUAL_TASK
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the task, those that were given

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Request":
        """From flat settings: those of every run, and options of the task that they name."""
        task = find_task(settings.get("task", USUAL_TASK))
        of_task, of_run = list_options(TASKS[task]), list_options(CommonOptions)
        given = {name: value for name, value in settings.items() if value is not None and name != "task"}
        for name in given:
            if name not in of_task and name not in of_run:
                raise refuse(name, task)
        read = TASKS[task](**{name: value for name, value in given.items() if name in of_task})
        return cls(
            task=task,
            options={name: getattr(read, name) for name in of_task if name in given},
            **{name: value for name, value in given.items() if name in of_run},
        )

    @functools.cached_property
    def scenario(self) -> Scenario[Any]:
        """The task with these options; it reads its data once."""
        # FCFL changes its rule after a share of all steps: with `rounds` given, they say how many there are.
        steps = {"steps": self.rounds} if self.rounds else {}
        return SCENARIOS[self.task](TASKS[self.task](**{**self.options, **steps}))

    @property
    def methods(self) -> list[str]:
        names = list(self.scenario.choose_methods(self.algorithm))
        for name in names:
            self.scenario.method(name)
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
        if self.output not in (None, "last") and not SCENARIOS[self.task].any_output:
            raise UserError(
                f"output={self.output!r} was given; in the task {self.task} clients keep models of their own, and only "
                "the last one is there: leave output out."
            )
        known = [field.name for field in dataclasses.fields(Budget)]
        shared = {name: getattr(self, name) for name in list_options(CommonOptions) if name in known}
        return Budget(**{**shared, "privacy": self.guarantee})

    @property
    def guarantee(self) -> Guarantee | None:
        """The differential privacy that was asked for."""
        if self.privacy is None:
            for name, option in list_options(CommonOptions).items():
                if option.panel == PRIVACY and getattr(self, name) is not None:
                    raise UserError(f"{name} was given without privacy; say who is trusted: privacy local or central.")
            return None
        if self.clip is None or self.noise_multiplier is None:
            raise UserError(
                "privacy needs clip (largest norm of an upload) and noise_multiplier (noise / sensitivity)."
            )
        self.scenario.check_private()
        return GUARANTEES[self.privacy](
            clip=self.clip,
            noise_multiplier=self.noise_multiplier,
            budget=self.epsilon_budget,
            delta=DELTA if self.delta is None else self.delta,
            neighbours=self.neighbours or NEIGHBOURS,
        )

    def changes(self, method: str) -> dict[str, Any]:
        """The user's settings of one method: `lr` is for all of them, `fedbio.lr` for one."""
        general, mine = {}, {}
        for key, value in (self.set or {}).items():
            head, _, tail = key.partition(".")
            if head not in SCENARIOS[self.task].methods:
                general[key] = value
            elif head not in self.methods:
                raise UserError(f"a setting of {head!r} was given, but {head!r} is not among {self.methods}.")
            elif head == method:
                mine[tail] = value
        return general | mine  # what is said of one method wins over what is said of all

    def adopt(self, changes: Mapping[str, Any]) -> Self:
        """With settings of the methods that tuning has chosen: nothing is left to tune."""
        return dataclasses.replace(self, set={**(self.set or {}), **changes}, tune=False)

    def settings(self) -> dict[str, Any]:
        """As a TOML file says it."""
        said = {"task": self.task, "algorithm": self.methods, "seeds": self.seed_list, **self.options}
        for name, option in list_options(CommonOptions).items():
            value = getattr(self, name)
            if name not in said and value != option.default and value != {}:
                said[name] = value
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}

    def command(self, verb: str = "run") -> str:
        """The same as a command line."""
        seeds = self.seed_list
        first = seeds == list(range(len(seeds)))
        said = self.settings() | {"seeds": len(seeds) if first else seeds}
        options = list_options(CommonOptions) | list_options(TASKS[self.task])
        words = [options[name].words(value) for name, value in said.items() if name != "task"]
        return shlex.join(["nestfed", verb, self.task, *(word for some in words for word in some)])
