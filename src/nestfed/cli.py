"""The command line: parse, call, print; no logic.

Exit codes: 0 done, 1 something that was given is wrong, 2 the command line is wrong, 3 a method diverged in every seed,
130 interrupted. Help and shell completion import nothing that is slow: what a task may be asked for is described in
`nestfed.workbench.task_options`, and `nestfed.workbench` loads its verbs when they are called.
"""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import click
import typer
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from nestfed import workbench
from nestfed.core.settings import UserError
from nestfed.experiments import EXPERIMENTS
from nestfed.workbench import cluster
from nestfed.workbench.fields import Option, flatten, list_options, merge_file, parse_pair, parse_value, read_settings
from nestfed.workbench.task_options import (
    DATA,
    PRIVACY,
    TASK,
    TASKS,
    TRACKERS,
    TRAINING,
    USUAL_TASK,
    ClusterOptions,
    CommonOptions,
    TabularOptions,
    find_task,
    refuse,
)

if TYPE_CHECKING:
    import pandas as pd

OUTPUT = "Output"
PANELS = (TASK, DATA, TRAINING, PRIVACY, OUTPUT)  # in the order of help
ORDER = ("demo", "run", "sweep", "compare", "report", "cost", "list", "reproduce", "deploy", "site")
EXIT_CODES = {"finished": 0, "diverged": 3}  # by the status of a study
MOST_ROWS = 60  # of a table on the screen

OUT_HELP = "Folder for the results (runs/...)."
JSON_HELP = "Print the result as JSON and nothing else."
QUIET_HELP = "Print the path of the result and nothing else."


class Commands(TyperGroup):
    """All commands, in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(
    cls=Commands,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning with nested objectives: train, compare, report.",
)


# ------------------------------------------------------------------------------------------------- verbs about a task


class Choice(click.ParamType):
    """One of several words. A wrong one is refused where all options are checked, with one message for flags, files and
    Python; here they are shown and completed."""

    name = "text"

    def __init__(self, words: Sequence[str]):
        self.words = words

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.words)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


def make_flag(option: Option, task: type[TabularOptions]) -> TyperOption:
    """The flag of an option, as this task has it."""
    names, switch = [option.name, "/".join(option.flags)], option.is_switch
    if option.short is not None:
        names.append(option.short)
    kinds, metavar = list(option.kinds), None
    if option.is_table:
        metavar = "KEY=VALUE"
    elif len(kinds) > 1:
        metavar = "NUMBER" if option.entries is None else "NUMBER,..."
    plain = {int: click.INT, float: click.FLOAT}.get(kinds[0] if metavar is None else str, click.STRING)
    return TyperOption(
        param_decls=names,
        type=None if switch else Choice(option.choices) if option.choices else plain,
        is_flag=switch,
        multiple=option.is_repeated,
        default=None if option.is_repeated else option.default,
        show_default=option.find_usual(task) or option.default is not None,
        metavar=metavar,
        help=escape(option.help),
        rich_help_panel=option.panel,
    )


class TaskCommand(TyperCommand):
    """A verb about one task: its flags are the options of the task and those of every run."""

    def __init__(self, verb: "Verb", task: type[TabularOptions]):
        self.verb, self.task, self.options = verb, task, list_options(task) | list_options(CommonOptions)
        options = sorted(self.options.values(), key=lambda option: PANELS.index(option.panel))
        what = "Settings of a file; flags win over them."
        file = TyperArgument(param_decls=["file"], required=False, metavar="[FILE.toml]", help=what)
        super().__init__(
            task.name,
            callback=self.call,
            params=[file, *(make_flag(option, task) for option in options), *verb.flags],
            help=f"{verb.summary} The task {task.name}: {task.description}.\n\n"
            f"`nestfed list {task.name}` shows its methods.",
            short_help=f"{task.description[0].upper()}{task.description[1:]}.",
            rich_markup_mode=verb.rich_markup_mode,
            rich_help_panel="Tasks",
        )

    def call(self, file: str | None, **values: Any) -> None:
        source = click.get_current_context().get_parameter_source
        said = [name for name in self.options if source(name) is ParameterSource.COMMANDLINE]
        given = {name: self.options[name].parse(values[name]) for name in said}
        own = {name: value for name, value in values.items() if name not in self.options}
        self.verb.act(merge_file(file, {"task": self.task.name, **given}), file, **own)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        files = [word for word in args if Path(word).suffix not in ("", ".toml") and Path(word).is_file()]
        if len(files) > 1:  # the shell has replaced a pattern
            raise UserError(
                f"{len(files)} files were given ({', '.join(files[:3])}...) where one may stand; for one file per "
                "client, put the pattern in quotes (--data 'sites/*.csv'), or give their folder (--data sites/)."
            )
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            others = [option for task in TASKS.values() for option in list_options(task).values()]
            name = next((option.name for option in others if error.option_name in option.flags), None)
            if name is None:
                raise
            raise refuse(name, self.task.name) from None


class Verb(TyperGroup):
    """`nestfed VERB TASK [FILE.toml] [OPTIONS]`: a command for every task.

    The file may stand in place of the task, which it names. Where options come first, the task is the usual one.
    """

    act: ClassVar[Callable[..., None]]  # (settings, file or None, **flags)
    flags: ClassVar[tuple[TyperOption, ...]]  # of the verb itself

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = {name: TaskCommand(self, task) for name, task in TASKS.items()}

    @property
    def summary(self) -> str:
        return str(self.help).partition("\n")[0]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["TASK", "[FILE.toml]", "[OPTIONS]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options_first = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        return super().parse_args(ctx, [USUAL_TASK, *args] if options_first else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_file = args[0].endswith(".toml")
        try:
            task = find_task(read_settings(args[0]).get("task", USUAL_TASK) if is_file else args[0])
        except UserError:
            if ctx.resilient_parsing:  # the shell asks what may follow
                return None, None, args
            raise
        return task, self.commands[task], args if is_file else args[1:]


def add_verb(
    *flags: TyperOption, to: typer.Typer = app, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function (settings, file, **flags) a verb about a task; its first line of help is that of every task."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        word, how = name or function.__name__, {"act": staticmethod(function), "flags": flags}
        group = typer.Typer(cls=type(word.title(), (Verb,), how), no_args_is_help=True, help=function.__doc__)
        to.add_typer(group, name=word)
        return function

    return register


def _make_output_flag(*names: str, help: str, **more: Any) -> TyperOption:
    return TyperOption(param_decls=list(names), help=help, rich_help_panel=OUTPUT, **more)


OUT = _make_output_flag("--out", type=click.Path(path_type=Path), help=OUT_HELP)
TRACK = _make_output_flag(
    "--track", multiple=True, type=Choice(TRACKERS), help="Tell settings, curves and results to it. May be repeated."
)
RESUME_HELP = "Go on with the run in --out, or with that of the file."
RESUME = _make_output_flag("--resume", is_flag=True, default=False, help=RESUME_HELP)
JSON = _make_output_flag("--json", "json_", is_flag=True, default=False, help=JSON_HELP)
QUIET = _make_output_flag("--quiet", "-q", is_flag=True, default=False, help=QUIET_HELP)
GRID = TyperOption(
    param_decls=["--grid"],
    multiple=True,
    metavar="KEY=VALUE,...",
    rich_help_panel=TRAINING,
    help="Values of a setting: lr=0.01,0.1,1. May be repeated.",
)


PROCESSES = [make_flag(option, TASKS[USUAL_TASK]) for option in list_options(ClusterOptions).values()]


@add_verb(OUT, RESUME, TRACK, JSON, QUIET, *PROCESSES)
def run(
    settings: dict[str, Any],
    file: str | None,
    out: Path | None,
    resume: bool,
    track: Sequence[str],
    json_: bool,
    quiet: bool,
    **processes: Any,
) -> None:
    """Train one or several methods on a task, write a folder with everything, and a report.

    nestfed run fairness --algorithm fedavg --algorithm fedbio --seeds 3

    nestfed run fairness --data my.csv --label income --group sex --clients region

    nestfed run robust --data my.csv --label ill --clients hospital --divergence kl --strength 2

    nestfed run my.toml --seeds 5

    `nestfed run TASK --help` shows what a task may be asked for.
    """
    code = cluster.lead(ClusterOptions(**processes))
    if code is not None:
        raise typer.Exit(code)
    out, named = _choose_out(settings, out), settings.pop("track", ())
    if resume and out is None:
        # The settings of a run lie in its folder: going on with them means going on there.
        out = Path(file).parent if file is not None and Path(file).name == "settings.toml" else None
        if out is None:
            raise UserError("--resume was given without --out; name the folder of the run to go on with.")
    _run(settings, out=out, resume=resume, track=track or named, json_=json_, quiet=quiet)


@add_verb(GRID, OUT, JSON, QUIET)
def sweep(
    settings: dict[str, Any], file: str | None, grid: Sequence[str], out: Path | None, json_: bool, quiet: bool
) -> None:
    """Try a grid of settings x seeds in one program, and choose by validation data (never by test data).

    nestfed sweep fairness --algorithm fedbio --grid lower_lr=0.1,1 --grid model.lr=0.1,1

    `nestfed sweep TASK --help` shows what a task may be asked for.
    """
    out = _choose_out(settings, out)
    values = flatten(settings.pop("grid", {}))
    values |= {key: [parse_value(one) for one in text.split(",")] for key, text in map(parse_pair, grid or ())}
    search = workbench.sweep(**settings, grid=values, out=out, progress=False if quiet or json_ else None)
    if json_:
        _print_json({"folder": str(search.folder), "best": search.best, "settings": _list_records(search.table)})
    elif quiet:
        typer.echo(str(search.folder / "best.toml"))
    else:
        shown = [c for c in search.table.columns if c in values or c.startswith(("score", "validation", "diverged"))]
        _make_console().print(
            _make_table(search.table.loc[:, shown], title="Settings, best first (chosen by validation data)")
        )
        typer.echo(f"run the best one: {search.command}")
        typer.echo(str(search.folder))


@add_verb(JSON)
def cost(settings: dict[str, Any], file: str | None, json_: bool) -> None:
    """Show what every method of a task costs one client in a round: exchanges, bytes, oracle calls, samples.

    nestfed cost fairness --data german

    `nestfed cost TASK --help` shows what a task may be asked for.
    """
    table = workbench.tabulate_costs(**settings)
    _print_json(_list_records(table)) if json_ else _make_console().print(
        _make_table(table, title="One client, one round")
    )


# ------------------------------------------------------------------------------------------------- other commands


def _make_switch(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=OUTPUT, show_default=False)


Out = Annotated[Path | None, _make_switch(OUT_HELP)]
Json = Annotated[bool, _make_switch(JSON_HELP, "--json")]
Quiet = Annotated[bool, _make_switch(QUIET_HELP, "--quiet", "-q")]


@app.command()
def demo(
    out: Annotated[Path, _make_switch(OUT_HELP)] = Path("runs/demo"),
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train fair classifiers on the bundled Adult data, three clients: FedAvg, FedBiO and FedBiOAcc."""
    from nestfed.workbench.commands import find_fresh
    from nestfed.workbench.demo import SETTINGS

    _run({**SETTINGS}, out=find_fresh(out), json_=json_, quiet=quiet)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, data, a task, or an algorithm.")] = "algorithms",
    json_: Json = False,
) -> None:
    """Show algorithms, tasks or data sets, the methods of one task, or the settings of one algorithm."""
    import pandas as pd

    from nestfed.algorithms import ALGORITHMS, find
    from nestfed.data import describe
    from nestfed.workbench.scenarios import SCENARIOS

    if what == "algorithms":
        inner = {"bilevel": "lower level", "compositional": "inner function"}
        scope = lambda cls: "" if cls.scope is None else f", {cls.scope} {inner[cls.family]}"
        rows = [(n, c.family + scope(c), (c.__doc__ or "").strip().splitlines()[0]) for n, c in ALGORITHMS.items()]
        frame = pd.DataFrame(rows, columns=["name", "problems", "what it does"])
    elif what == "tasks":
        rows = [(name, TASKS[name].description, ", ".join(kind.methods)) for name, kind in SCENARIOS.items()]
        frame = pd.DataFrame(rows, columns=["name", "what it trains", "methods"])
    elif what in SCENARIOS:
        stages = lambda method: ", then ".join(stage.algorithm for stage in method.stages)
        rows = [(name, method.description, stages(method)) for name, method in SCENARIOS[what].methods.items()]
        frame = pd.DataFrame(rows, columns=["method", "what it does", "algorithms"])
    elif what == "data":
        frame = describe()
    else:
        default = lambda field: "required" if field.default is dataclasses.MISSING else str(field.default)
        fields = dataclasses.fields(find(what))
        rows = [(field.name, default(field), field.metadata.get("description", "")) for field in fields]
        frame = pd.DataFrame(rows, columns=["setting", "default", "meaning"])
    _print_json(frame.to_dict("records")) if json_ else _make_console().print(_make_table(frame))


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs of one task.")],
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put several runs into one report, with differences paired by seed."""
    _show(workbench.compare(folders, out=out), json_=json_, quiet=quiet)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], json_: Json = False) -> None:
    """Write the report of a run again, from its files."""
    page = str(workbench.report(folder))
    _print_json({"report": page}) if json_ else typer.echo(page)


@app.command()
def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(help="\n\n".join(f"{name}: {what}." for name, what in EXPERIMENTS.items()), show_default=False),
    ],
    out: Out = None,
    quick: Annotated[bool, _make_switch("A small version, to see that it works.")] = False,
    resume: Annotated[bool, _make_switch("Go on in a folder that is there.")] = False,
    from_cells: Annotated[
        bool,
        _make_switch("Write page, figures and verdicts again from kept trainings; in a clone, those of experiments/."),
    ] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a paper's experiment and put the numbers beside the paper's."""
    from nestfed.experiments import reproduce as repeat

    silent = False if quiet or json_ else None
    page = str(repeat(experiment, out=out, quick=quick, resume=resume, from_cells=from_cells, progress=silent))
    _print_json({"page": page}) if json_ else typer.echo(page)


# ------------------------------------------------------------------------------------------------- sites

MASKED_HELP = "The coordinator sees sums only, of three sites or more (pairwise masks)."
SITES = TyperOption(
    param_decls=["--sites"], type=click.INT, default=3, show_default=True, rich_help_panel=DATA, help="How many sites."
)
ENGINE = TyperOption(
    param_decls=["--engine"],
    type=Choice(("flare", "flower", "direct")),
    rich_help_panel=OUTPUT,
    help="What carries letters; direct: no framework between. [default: flare where it is installed]",
)
MASKED = TyperOption(
    param_decls=["--secure-aggregation"], is_flag=True, default=False, rich_help_panel=PRIVACY, help=MASKED_HELP
)
deploy_group = typer.Typer(no_args_is_help=True, help="Train at sites that keep their rows: the coordinator's part.")
site_group = typer.Typer(no_args_is_help=True, help="Train at sites that keep their rows: the part of one site.")
app.add_typer(deploy_group, name="deploy")
app.add_typer(site_group, name="site")


@deploy_group.command("init")
def make_deployment(
    folder: Annotated[Path, typer.Argument(help="The new folder of the deployment.")],
    sites: Annotated[str, typer.Option(help="Names of the sites: berlin,lyon,turin")],
    engine: Annotated[str, typer.Option(help="flare, or flower for those who run Flower.")] = "flare",
    server: Annotated[str, typer.Option(help="How sites reach the coordinator's machine.")] = "localhost",
    port: Annotated[int | None, typer.Option(help="Its port.", show_default="8002 for flare, 8000 for flower")] = None,
) -> None:
    """Make keys and start-up kits: a folder for the coordinator, and one to send to each site.

    nestfed deploy init trial --sites berlin,lyon,turin --server fl.example.org
    """
    from nestfed.sites.engines import choose_engine
    from nestfed.sites.kits import make_kits

    choose_engine(engine)
    made = make_kits(folder, [name.strip() for name in sites.split(",") if name.strip()], engine, server, port)
    typer.echo(f"send each site its folder, by a way that nobody else reads: {', '.join(made.sites)}", err=True)
    typer.echo(str(folder / "README.md"))


@deploy_group.command("schema")
def merge_schemas(
    drafts: Annotated[list[Path], typer.Argument(help="The drafts of all sites.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The schema that all sites get.")] = Path("schema.toml"),
) -> None:
    """Merge the drafts of all sites into the schema that they agree on."""
    from nestfed.workbench.schemas import write_agreement

    _say_lines(write_agreement(drafts, out), out)


@site_group.command("schema")
def draft_schema(
    data: Annotated[Path, typer.Option(help="Your CSV or Parquet file.")],
    label: Annotated[str, typer.Option(help="Column to predict.")],
    group: Annotated[str | None, typer.Option(help="Column of the groups; sex+race joins two.")] = None,
    positive: Annotated[str | None, typer.Option(help="Value of the label that counts as 1.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Or: the label counts as 1 above this number.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column that is no feature. May be repeated.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the draft goes.")] = Path("schema.toml"),
) -> None:
    """Draft a schema from this site's file: names, kinds and levels of its columns, no statistics."""
    from nestfed.workbench.schemas import write_draft

    said = write_draft(data, out, label=label, group=group, positive=positive, threshold=threshold, drop=drop or ())
    _say_lines(said, out)


@site_group.command("key")
def make_key(
    folder: Annotated[Path, typer.Argument(help="This site's folder.")],
    name: Annotated[str | None, typer.Option(help="This site's name.", show_default="the folder's")] = None,
) -> None:
    """Make this site's key for sums that nobody can take apart, and print its line for the list of all sites."""
    from nestfed.sites.masks import make_mask_key

    typer.echo(f'{name or folder.resolve().name} = "{make_mask_key(folder)}"')


@add_verb(SITES, ENGINE, MASKED, OUT, RESUME, JSON, QUIET, to=deploy_group, name="local")
def deploy_local(
    settings: dict[str, Any],
    file: str | None,
    sites: int,
    engine: str | None,
    secure_aggregation: bool,
    out: Path | None,
    resume: bool,
    json_: bool,
    quiet: bool,
) -> None:
    """Train between processes of this machine that do not share their rows: a rehearsal of a deployment.

    nestfed deploy local fairness --sites 3 --algorithm fedavg --rounds 20
    """
    from nestfed.sites.deployment import run_local

    _check_dealing(settings, sites)
    out, how = _choose_out(settings, out), {"sites": sites, "engine": engine, "masked": secure_aggregation}
    _run_sites(lambda **more: run_local(settings, out=out, resume=resume, **how, **more), json_=json_, quiet=quiet)


@deploy_group.command("run")
def deploy_run(
    folder: Annotated[Path, typer.Argument(help="The folder that `nestfed deploy init` made.")],
    file: Annotated[Path, typer.Argument(help="Settings of the run, as of `nestfed run`.", metavar="FILE.toml")],
    secure_aggregation: Annotated[bool, _make_switch(MASKED_HELP, "--secure-aggregation")] = False,
    out: Out = None,
    resume: Annotated[bool, _make_switch("Go on with the run in --out, or with that of the file.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train at the sites of a deployment, and write a folder with a report."""
    from nestfed.sites.deployment import run_deployment

    settings = read_settings(file)
    out = _choose_out(settings, out)
    if resume and out is None and file.name == "settings.toml":
        out = file.parent
    how = {"out": out, "resume": resume, "masked": secure_aggregation}
    _run_sites(lambda **more: run_deployment(folder, settings, **how, **more), json_=json_, quiet=quiet)


@site_group.command("start")
def start_site(
    folder: Annotated[Path, typer.Argument(help="The kit that this site was sent.")],
    data: Annotated[Path, typer.Option(help="Your CSV or Parquet file: it stays here.")],
) -> None:
    """Take part in a deployment with the rows of a file, until Ctrl-C."""
    from nestfed.sites.engines import run_site

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_site(folder, data, typer.echo)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _check_dealing(settings: dict[str, Any], sites: int) -> None:
    clients = settings.get("clients")
    if clients is not None and str(clients).isdecimal():
        raise UserError(f"clients={clients} was given; say how many sites there are with --sites.")
    if sites < 1:
        raise UserError(f"--sites {sites} was given; give one site or more.")


def _run_sites(train: Callable[..., Any], *, json_: bool, quiet: bool) -> None:
    silent = quiet or json_
    how: dict[str, Any] = {"progress": False} if silent else {"say": typer.echo}
    _finish(lambda: train(**how), json_=json_, quiet=quiet)


def _say_lines(lines: Sequence[str], path: Path) -> None:
    for line in lines:
        typer.echo(line, err=True)
    typer.echo(str(path))


# ------------------------------------------------------------------------------------------------- printing


def _choose_out(settings: dict[str, Any], flag: Path | None) -> Path | None:
    """The folder that a flag or a file names."""
    named = settings.pop("out", None)
    return flag if flag is not None or named is None else Path(str(named))


def _run(
    settings: dict[str, Any],
    *,
    out: Path | None,
    resume: bool = False,
    track: Sequence[str] = (),
    json_: bool,
    quiet: bool,
) -> None:
    def show(tables: Sequence[tuple[str, Any]]) -> None:
        for title, frame in tables:
            _make_console().print(_make_table(frame, title=title))

    silent = quiet or json_
    how: dict[str, Any] = {"out": out, "resume": resume, "track": track}
    how |= {"progress": False} if silent else {"show": show, "say": typer.echo}
    _finish(lambda: workbench.run(**settings, **how), json_=json_, quiet=quiet)


def _finish(train: Callable[[], Any], *, json_: bool, quiet: bool) -> None:
    """Show what was trained; the exit code says how it ended."""
    try:
        study = train()
    except workbench.Stopped as error:  # typer would end every KeyboardInterrupt without a word
        print(f"nestfed: {error}", file=sys.stderr)
        raise typer.Exit(130) from None
    _show(study, json_=json_, quiet=quiet)
    for warning in study.warnings:
        print(f"nestfed: {warning}", file=sys.stderr)
    raise typer.Exit(EXIT_CODES[study.status])


def _show(study: "workbench.Study", *, json_: bool, quiet: bool) -> None:
    from nestfed.report import statistics, tables

    if json_:
        table = statistics.make_headline(study.record).reset_index()
        content = {"folder": str(study.folder), "report": str(study.report), "headline": _list_records(table)}
        _print_json(content | {name: study.record.about.get(name) for name in ("notes", "gains", "tuned")})
        return
    if not quiet:
        _, shown = tables.tabulate_headline(study.record)
        # On a terminal a metric per line reads better than one very wide table.
        shown = shown.set_index("method").T.rename_axis("").reset_index()
        seeds = len(study.record.about["seeds"])
        title = (
            f"{study.record.about['title']}, {seeds} seed{'s' * (seeds > 1)}: mean ± std, difference [95 % interval]"
        )
        _make_console().print(_make_table(shown, title=title))
        if len(study.record.candidates):
            _, found = tables.tabulate_candidates(study.record)
            _make_console().print(_make_table(found, title="What a limit on the gap costs (validation rows decide)"))
        for note in study.record.about["notes"]:
            typer.echo(f"note: {note}")
        for gain in study.record.about["gains"].values():
            typer.echo(gain)
    typer.echo(str(study.report))


def _make_console() -> Console:
    """As wide as the terminal; a file or a pipe has room."""
    return Console(width=None if sys.stdout.isatty() else 150)


def _make_table(frame: "pd.DataFrame", title: str | None = None) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in frame.columns:
        numeric = frame[column].dtype.kind in "biufc"
        shown.add_column(escape(str(column)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.head(MOST_ROWS).itertuples(index=False):
        shown.add_row(*(escape(f"{cell:,.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    if len(frame) > MOST_ROWS:
        shown.caption = f"and {len(frame) - MOST_ROWS} more rows"
    return shown


def _list_records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    return json.loads(str(frame.to_json(orient="records")))  # NaN becomes null


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """The command, or what it does as one of several processes."""
    cluster.run_member(_main) if cluster.is_member() else _main()


def _main() -> None:
    """Bad input is one line on standard error and an exit code, never a traceback."""
    try:
        app()
    except UserError as error:
        print(f"nestfed: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"nestfed: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        raise SystemExit(1) from None
