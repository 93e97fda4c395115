"""The command line: parse, call, print; no logic.

Exit codes: 0 done, 1 something that was given is wrong, 2 the command line is wrong, 3 a method diverged in every seed,
130 interrupted.
"""

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nestfed.core.settings import UserError
from nestfed.workbench.request import flat, read_settings

app = typer.Typer(
    add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Federated learning with nested objectives: train, compare, report.",
)  # fmt: skip

DATA, TRAINING, PRIVACY, OUTPUT = "Data", "Training", "Privacy", "Output"
MOST_ROWS = 60  # of a table on the screen


def _flag(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


Out = Annotated[Path | None, _flag("Folder for the results (runs/...).", OUTPUT)]
Json = Annotated[bool, _flag("Print the result as JSON and nothing else.", OUTPUT, "--json")]
Quiet = Annotated[bool, _flag("Print the path of the result and nothing else.", OUTPUT, "--quiet", "-q")]

# What every command about a task takes. A TOML file has the same names, with _ for -.
OPTIONS: dict[str, Any] = {
    "task": Annotated[str | None, typer.Argument(help="A task (`nestfed list tasks`), or a TOML file of settings.")],
    "algorithm": Annotated[
        list[str] | None, _flag("A method of the task; may be repeated.", TRAINING, "--algorithm", "-a")
    ],
    "set": Annotated[list[str] | None, _flag("A setting: lr=0.1, fedbio.lower_lr=1, model.lr=0.5.", TRAINING)],
    "seeds": Annotated[str | None, _flag("Number of seeds, or a list: 0,3,7.", TRAINING)],
    "rounds": Annotated[int | None, _flag("Rounds of every stage; without it --steps decides.", TRAINING)],
    "steps": Annotated[int | None, _flag("Local steps of every stage (2000).", TRAINING)],
    "cohort": Annotated[str | None, _flag("Clients per round: a number, or a fraction such as 0.1.", TRAINING)],
    "sampling": Annotated[
        str | None,
        _flag("How they are drawn: weights (chances go with weights), uniform, poisson (each by its coin).", TRAINING),
    ],
    "dropout": Annotated[float | None, _flag("Probability that a chosen client fails.", TRAINING)],
    "evaluations": Annotated[int | None, _flag("About so many evaluations per stage (100).", TRAINING)],
    "output": Annotated[str | None, _flag("Which iterate counts: last, average, random, best (validation).", TRAINING)],
    "privacy": Annotated[str | None, _flag("local (nobody is trusted) or central (the server is).", PRIVACY)],
    "clip": Annotated[float | None, _flag("Largest norm of an upload.", PRIVACY)],
    "noise_multiplier": Annotated[
        float | None,
        _flag(
            "Noise / sensitivity of an exchange. The sensitivity is 2 x clip where a client's data may be replaced, so "
            "this is half of what Opacus calls so; with --neighbours add-or-remove it is clip, and the same.", PRIVACY,
        ),
    ],
    "neighbours": Annotated[
        str | None,
        _flag("What is hidden: replace (what a client holds), add-or-remove (that it is there).", PRIVACY),
    ],
    "noise_seed": Annotated[int | None, _flag("Repeatable noise, for tests: it protects nobody.", PRIVACY)],
    "delta": Annotated[float | None, _flag("delta of the guarantee (1e-5).", PRIVACY)],
    "epsilon_budget": Annotated[float | None, _flag("End before a round that would spend more.", PRIVACY)],
    "model": Annotated[str | None, _flag("logistic, or network (two layers; personal).", TRAINING)],
    "penalty": Annotated[float | None, _flag("mu of (mu / 2) |theta|^2 (0.001).", TRAINING)],
    "batch_size": Annotated[int | None, _flag("Rows per batch (128, or 32 for small tables).", TRAINING)],
    "averaging": Annotated[str | None, _flag("Weights of clients: uniform, samples (robust, auprc).", TRAINING)],
    "divergence": Annotated[str | None, _flag("robust: kl, chi-square, cvar (the worst rows alone).", TRAINING)],
    "strength": Annotated[
        float | None,
        _flag(
            "robust: how cautious, above 0 (1). Moving weight to bad rows costs 1 / strength; cvar counts the worst "
            "1 / (1 + strength) of rows.", TRAINING,
        ),
    ],
    "margin": Annotated[
        float | None, _flag("auprc: how far positives should lie above negatives, in probability (0.5).", TRAINING)
    ],
    "batch_positives": Annotated[int | None, _flag("auprc: positives per batch (half of its rows).", TRAINING)],
    "recall": Annotated[float | None, _flag("auprc: at which recall precision is reported (0.8).", TRAINING)],
    "weigh": Annotated[str | None, _flag("What FedBiO weighs: group, group+label.", TRAINING)],
    "weight_form": Annotated[str | None, _flag("FedBiO's weights: projected, softmax.", TRAINING)],
    "gap": Annotated[float | None, _flag("Weight of the EqOpp gap in FedBiO's upper loss (0).", TRAINING)],
    "regulariser": Annotated[float | None, _flag("Coefficient of FedReg (0.1).", TRAINING)],
    "full_batch": Annotated[bool | None, _flag("FedMinMax uses all rows.", TRAINING, "--full-batch/--no-full-batch")],
    "data": Annotated[str | None, _flag("A data set (`nestfed list data`), or your CSV or Parquet file.", DATA)],
    "label": Annotated[str | None, _flag("Column to predict (own file).", DATA)],
    "positive": Annotated[str | None, _flag("Value of the label that counts as 1.", DATA)],
    "threshold": Annotated[float | None, _flag("Or: the label counts as 1 above this number.", DATA)],
    "group": Annotated[str | None, _flag("Column of the groups; sex+race joins two. Only fairness needs one.", DATA)],
    "clients": Annotated[str | None, _flag("Number of clients, or the column that names them (3).", DATA)],
    "partition": Annotated[str | None, _flag("iid (fairness), dirichlet:0.5, shards:2, classes:1, ratios:2:6.", DATA)],
    "features": Annotated[str | None, _flag("standard, minimax-fair, minimax-fair-raw.", DATA)],
    "keep_group": Annotated[bool | None, _flag("The group column is a feature.", DATA, "--keep-group/--no-keep-group")],
    "drop": Annotated[list[str] | None, _flag("A column that is no feature; may be repeated.", DATA)],
    "test_fraction": Annotated[float | None, _flag("Share of test rows (0.3).", DATA)],
}  # fmt: skip


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all of OPTIONS; it receives those that were given as its first argument."""
    first, *own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def parsed(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in OPTIONS}
        command({name: value for name, value in given.items() if value is not None}, **arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(n, keyword, default=None, annotation=a) for n, a in OPTIONS.items()]
    own = [parameter.replace(kind=keyword) for parameter in own]
    parsed.__signature__ = inspect.Signature([*options, *own])  # pyright: ignore[reportAttributeAccessIssue]
    parsed.__annotations__ = OPTIONS | {parameter.name: parameter.annotation for parameter in own}
    return parsed


@app.command()
def demo(
    out: Annotated[Path, _flag("Folder for the results.", OUTPUT)] = Path("runs/demo"),
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train fair classifiers on the bundled Adult data, three clients: FedAvg, FedBiO and FedBiOAcc."""
    from nestfed.workbench.commands import fresh
    from nestfed.workbench.demo import SETTINGS

    _run({**SETTINGS}, out=fresh(out), resume=False, json_=json_, quiet=quiet)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, data, a task, or an algorithm.")] = "algorithms",
    json_: Json = False,
) -> None:
    """Show algorithms, tasks or data sets, the methods of one task, or the settings of one algorithm."""
    from nestfed.algorithms import ALGORITHMS, find
    from nestfed.data import describe
    from nestfed.workbench.scenarios import TASKS

    if what == "algorithms":
        inner = {"bilevel": "lower level", "compositional": "inner function"}
        scope = lambda cls: "" if cls.scope is None else f", {cls.scope} {inner[cls.family]}"
        rows = [(n, c.family + scope(c), (c.__doc__ or "").strip().splitlines()[0]) for n, c in ALGORITHMS.items()]
        frame = pd.DataFrame(rows, columns=["name", "problems", "what it does"])
    elif what == "tasks":
        rows = [(name, kind.description, ", ".join(kind.methods)) for name, kind in TASKS.items()]
        frame = pd.DataFrame(rows, columns=["name", "what it trains", "methods"])
    elif what in TASKS:
        stages = lambda method: ", then ".join(stage.algorithm for stage in method.stages)
        rows = [(name, method.description, stages(method)) for name, method in TASKS[what].methods.items()]
        frame = pd.DataFrame(rows, columns=["method", "what it does", "algorithms"])
    elif what == "data":
        frame = describe()
    else:
        default = lambda field: "required" if field.default is dataclasses.MISSING else str(field.default)
        fields = dataclasses.fields(find(what))
        rows = [(field.name, default(field), field.metadata.get("description", "")) for field in fields]
        frame = pd.DataFrame(rows, columns=["setting", "default", "meaning"])
    _print_json(frame.to_dict("records")) if json_ else _console().print(_table(frame))


@app.command()
@_with_options
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Annotated[bool, _flag("Go on with the run in --out.", OUTPUT)] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one or several methods on a task, write a folder with everything, and a report.

    nestfed run fairness --algorithm fedavg --algorithm fedbio --seeds 3

    nestfed run --data my.csv --label income --group sex --clients region

    nestfed run robust --data my.csv --label ill --clients hospital --divergence kl --strength 2

    nestfed run auprc --data my.csv --label fraud --clients bank

    nestfed run personal --data my.csv --label ill --clients hospital
    """
    settings, source = _settings(given)
    out = _out(settings, out)
    if resume and out is None:
        # The settings of a run lie in its folder: going on with them means going on there.
        out = source.parent if source is not None and source.name == "settings.toml" else None
        if out is None:
            raise UserError("--resume was given without --out; name the folder of the run to go on with.")
    _run(settings, out=out, resume=resume, json_=json_, quiet=quiet)


@app.command()
@_with_options
def sweep(
    given: dict[str, Any],
    grid: Annotated[list[str] | None, _flag("Values of a setting: lr=0.01,0.1,1; may be repeated.", TRAINING)] = None,
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try a grid of settings x seeds in one program, and choose by validation data (never by test data)."""
    from nestfed import workbench

    settings, _ = _settings(given)
    out = _out(settings, out)
    values = flat(settings.pop("grid", {}))
    values |= {key: [_value(one) for one in text.split(",")] for key, text in map(_pair, grid or [])}
    search = workbench.sweep(**settings, grid=values, out=out, progress=False if quiet or json_ else None)
    if json_:
        _print_json({"folder": str(search.folder), "best": search.best, "settings": _records(search.table)})
    elif quiet:
        typer.echo(str(search.folder / "best.toml"))
    else:
        shown = [c for c in search.table.columns if c in values or c.startswith(("score", "validation", "diverged"))]
        _console().print(_table(search.table.loc[:, shown], title="Settings, best first (chosen by validation data)"))
        typer.echo(f"run the best one: {search.command}")
        typer.echo(str(search.folder))


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs of one task.")],
    out: Out = None, json_: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Put several runs into one report, with differences paired by seed."""
    from nestfed import workbench

    _show(workbench.compare(folders, out=out), json_=json_, quiet=quiet)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], json_: Json = False) -> None:
    """Write the report of a run again, from its files."""
    from nestfed import workbench

    page = str(workbench.report(folder))
    _print_json({"report": page}) if json_ else typer.echo(page)


@app.command()
@_with_options
def cost(given: dict[str, Any], json_: Json = False) -> None:
    """What every method of a task costs one client in a round: exchanges, bytes, oracle calls, samples."""
    from nestfed import workbench

    settings, _ = _settings(given)
    table = workbench.cost_table(**settings)
    _print_json(_records(table)) if json_ else _console().print(_table(table, title="One client, one round"))


@app.command()
def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(
            help="fairness, counterexample, dro-images, dro-fairness, invariant, maml, auprc, personal or privacy"
        ),
    ],
    out: Out = None,
    quick: Annotated[bool, _flag("A small version, to see that it works.", TRAINING)] = False,
    resume: Annotated[bool, _flag("Go on in a folder that is there.", OUTPUT)] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a paper's experiment and put the numbers beside the paper's."""
    from nestfed.experiments import reproduce as repeat

    page = str(repeat(experiment, out=out, quick=quick, resume=resume, progress=False if quiet or json_ else None))
    _print_json({"page": page}) if json_ else typer.echo(page)


# ------------------------------------------------------------------------------------------------- parsing


def _settings(given: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """What was given as flags, over what a TOML file says: (settings, the file)."""

    flags = dict(given)
    if "set" in flags:
        flags["set"] = {key: _value(text) for key, text in map(_pair, flags["set"])}
    if "seeds" in flags:
        text = flags["seeds"]
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words or not all(word.isdecimal() for word in words):
            raise UserError(
                f"--seeds {text} was given; write a number of seeds, or a list such as 0,3,7 (one seed alone: 7,)."
            )
        flags["seeds"] = [int(word) for word in words] if "," in text else int(words[0])
    if "cohort" in flags:
        flags["cohort"] = _value(flags["cohort"])
    source = Path(flags["task"]) if str(flags.get("task", "")).endswith(".toml") else None
    if source is None:
        return flags, None
    del flags["task"]
    file = read_settings(source)
    both = file.get("set", {})
    if "set" in flags and isinstance(both, Mapping):
        both = flat(both) | flags["set"]
    return {**file, **flags, "set": both}, source


def _out(settings: dict[str, Any], flag: Path | None) -> Path | None:
    """The folder that a flag or a file names."""
    named = settings.pop("out", None)
    return flag if flag is not None or named is None else Path(str(named))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UserError(f"{text!r} was given; write key=value, for example lr=0.1.")
    return key.strip(), value.strip()


def _value(text: str) -> Any:
    """A number or switch if it reads like one, otherwise the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


# ------------------------------------------------------------------------------------------------- printing


def _run(settings: dict[str, Any], *, out: Path | None, resume: bool, json_: bool, quiet: bool) -> None:
    from nestfed import workbench

    silent = quiet or json_
    if not silent:
        for title, frame in workbench.describe_data(**settings, out=out, resume=resume):
            _console().print(_table(frame, title=title))
    try:
        study = workbench.run(**settings, out=out, resume=resume, progress=False if silent else None)
    except workbench.Stopped as error:  # typer would end every KeyboardInterrupt without a word
        print(f"nestfed: {error}", file=sys.stderr)
        raise typer.Exit(130) from None
    _show(study, json_=json_, quiet=quiet)
    final, title = study.final, study.record.title
    of_seeds = lambda some: {m: len(f) for m, f in final[some].groupby("method", sort=False)}
    for method, seeds in of_seeds(final.above_start).items():
        often = f"in {seeds} of {len(study.record.about['seeds'])} seeds (training objective)"
        advice = "this is not a result. Use smaller step sizes (--set lr=...)."
        print(f"nestfed: {title(str(method))} ended above its start {often}: {advice}", file=sys.stderr)
    failed = [title(m) for m in study.record.methods if m not in of_seeds(final.status == "finished")]
    if failed:
        advice = "use smaller step sizes (--set lr=...)."
        print(f"nestfed: {', '.join(failed)} diverged in every seed; {advice}", file=sys.stderr)
        raise typer.Exit(3)


def _show(study: Any, *, json_: bool, quiet: bool) -> None:
    from nestfed.report import statistics, tables

    if json_:
        table = statistics.headline(study.record).reset_index()
        content = {"folder": str(study.folder), "report": str(study.report), "headline": _records(table)}
        _print_json(content | {"notes": study.record.about["notes"]})
        return
    if not quiet:
        _, shown = tables.headline(study.record)
        # On a terminal a metric per line reads better than one very wide table.
        shown = shown.set_index("method").T.rename_axis("").reset_index()
        seeds = len(study.record.about["seeds"])
        title = (
            f"{study.record.about['title']}, {seeds} seed{'s' * (seeds > 1)}: mean ± std, difference [95 % interval]"
        )
        _console().print(_table(shown, title=title))
        for note in study.record.about["notes"]:
            typer.echo(f"note: {note}")
    typer.echo(str(study.report))


def _console() -> Console:
    """As wide as the terminal; a file or a pipe has room."""
    return Console(width=None if sys.stdout.isatty() else 150)


def _table(frame: pd.DataFrame, title: str | None = None) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in frame.columns:
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        shown.add_column(escape(str(column)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.head(MOST_ROWS).itertuples(index=False):
        shown.add_row(*(escape(f"{cell:,.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    if len(frame) > MOST_ROWS:
        shown.caption = f"and {len(frame) - MOST_ROWS} more rows"
    return shown


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(str(frame.to_json(orient="records")))  # NaN becomes null


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Bad input is one line on standard error and an exit code, never a traceback."""
    from nestfed.workbench.stages import AllDiverged

    try:
        app()
    except UserError as error:
        print(f"nestfed: {error}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, AllDiverged) else 1) from None
    except OSError as error:
        print(f"nestfed: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        raise SystemExit(1) from None
