"""An option stands once: flags, help, files, Python and the way back all follow from its field."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import tomli_w
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

import nestfed
from nestfed import cli
from nestfed.workbench.fields import Option, list_options
from nestfed.workbench.request import Request
from nestfed.workbench.task_options import PRIVACY, TASKS, ClusterOptions, CommonOptions

HEAVY = ("jax", "jaxlib", "numpy", "pandas", "pyarrow", "matplotlib", "scipy", "sklearn", "jinja2")
OF_VERBS = {
    "run": {
        "out",
        "resume",
        "track",
        "json",
        "quiet",
        *(option.flag[2:] for option in list_options(ClusterOptions).values()),
    },
    "sweep": {"grid", "out", "json", "quiet"},
    "cost": {"json"},
}


def start(*words: str, **environment: str) -> tuple[int, str, str]:
    """A process of the command line, wide enough for a line per option; it fails where something slow is imported."""
    program = (
        "import sys; from nestfed import cli\n"
        f"sys.argv = ['nestfed', *{list(words)!r}]\n"
        "try: cli.main()\n"
        "except SystemExit as end: code = end.code or 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, f'imported: {loaded}'\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env=os.environ | {"TERMINAL_WIDTH": "300", "COLUMNS": "300"} | environment,
    )  # fmt: skip
    assert "imported" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def lines_of_flags(page: str) -> dict[str, str]:
    """Help's line of every flag."""
    found = (re.match(r"│ (?:-\w|\*)? *--([a-z-]+)\b", line) for line in page.splitlines())
    return {match[1]: match.string for match in found if match}


# ------------------------------------------------------------------------------------------------- help


def test_help_and_completion_import_nothing_slow():
    code, page, _ = start("--help")
    assert code == 0 and all(name in page for name in ("demo", "run", "sweep", "compare", "reproduce"))
    ask = lambda line, number: start(_NESTFED_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(number))
    assert ask("nestfed re", 1)[1].split() == ["report", "reproduce"]
    assert ask("nestfed run ", 2)[1].split() == list(TASKS)
    assert ask("nestfed run robust --div", 3)[1].split() == ["--divergence"]
    assert ask("nestfed run robust --divergence ", 4)[1].split() == ["kl", "chi-square", "cvar"]
    assert ask("nestfed run robust --weigh", 3)[1].split() == []  # that is of another task


@pytest.mark.parametrize("verb", OF_VERBS)
def test_a_verb_alone_lists_the_tasks(verb):
    _, page, _ = start(verb)
    for name, task in TASKS.items():
        assert re.search(rf"│ {name} +{re.escape(task.description[0].upper() + task.description[1:])}\.", page)
    assert set(lines_of_flags(page)) == {"help"}


@pytest.mark.parametrize("verb", OF_VERBS)
@pytest.mark.parametrize("name", TASKS)
def test_help_of_a_task_shows_its_options_and_no_others_with_what_happens_without_them(verb, name):
    code, page, _ = start(verb, name, "--help")
    shown, options = lines_of_flags(page), list_options(TASKS[name]) | list_options(CommonOptions)
    assert code == 0
    assert set(shown) == {option.flag[2:] for option in options.values()} | OF_VERBS[verb] | {"help"}
    usual = {option: getattr(TASKS[name](), option) for option in list_options(TASKS[name])}
    for option in options.values():
        line = shown[option.flag[2:]]
        assert option.help in line
        real = usual.get(option.name, option.default)
        if isinstance(real, bool):
            assert f"[default: {'' if real else 'no-'}{option.flag[2:]}]" in line
        elif real not in (None, ()):
            assert f"[default: {real}]" in line
        assert all(choice in line for choice in option.choices)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare",), "Folders of runs of one task"),
        (("run", "fairness"), "flags win over them"),
        (("reproduce",), "dro-fairness: Adult with noisy groups"),
    ],
)
def test_help_says_what_arguments_are(words, said):
    code, page, _ = start(*words, "--help")
    assert code == 0 and said in " ".join(page.replace("│", " ").split())


def test_help_says_what_happens_where_nothing_is_given():
    of_fairness, of_robust = (lines_of_flags(start("run", name, "--help")[1]) for name in ("fairness", "robust"))
    assert "[default: (fedavg, fedbio)]" in of_fairness["algorithm"]
    assert "[default: (fedavg, feddro, ds-feddro)]" in of_robust["algorithm"]
    assert "[default: (iid, or by the column of the clients)]" in of_fairness["partition"]
    assert "[default: (dirichlet:0.5, or by the column of the clients)]" in of_robust["partition"]
    of_personal = lines_of_flags(start("run", "personal", "--help")[1])
    assert "[default: (samples)]" in of_fairness["averaging"] and "[default: (uniform)]" in of_personal["averaging"]
    assert "weights: chances go with weights;" in of_robust["sampling"]
    assert "At least 0 and below 1." in of_robust["dropout"] and "May be repeated." in of_robust["drop"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "fairness", "--strength", "2"], "no setting 'strength' for the task fairness, only for robust;"),
        (["run", "robust", "--no-full-batch"], "no setting 'full_batch' for the task robust, only for fairness;"),
        (["run", "--strength", "2"], "no setting 'strength' for the task fairness, only for robust;"),
        (["cost", "robust", "--weigh", "group"], "no setting 'weigh' for the task robust, only for fairness;"),
        (["sweep", "personal", "--batch-positives", "2"], "no setting 'batch_positives' for the task personal, only"),
    ],
)
def test_a_flag_of_another_task_is_refused_in_one_line(words, message):
    code, _, err = start(*words)
    assert code == 1 and message in err and len(err.strip().splitlines()) == 1
    assert "`nestfed run " in err and "--help` shows those that there are." in err


def test_a_flag_of_no_task_gets_the_nearest_one():
    code, _, err = start("run", "fairness", "--stpes", "2")
    assert code == 2 and "--steps" in err


def test_a_file_names_its_task_and_no_other_command_takes_it(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('task = "robust"\nstrength = -1')
    code, _, err = start("run", "fairness", str(path))
    assert code == 1 and "is about the task 'robust', and this command about 'fairness'" in err
    code, _, err = start("run", str(path), "--weigh", "group")
    assert code == 1 and "no setting 'weigh' for the task robust" in err
    code, page, _ = start("run", str(path), "--help")
    assert code == 0 and "strength" in lines_of_flags(page)


# ------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    "given, message",
    [
        ({"task": "robust", "strength": 0.0}, "strength=0.0 was given, but strength .* must be greater than 0"),
        ({"task": "robust", "divergence": "cvr"}, "divergence='cvr' was given, .* must be one of 'kl', 'chi-square'"),
        ({"task": "robust", "strength": float("nan")}, "must be a number, not NaN"),
        ({"task": "auprc", "recall": "high"}, "recall='high' was given; it must be a number."),
        ({"task": "auprc", "recall": 1.5}, "must be at most 1"),
        ({"steps": 2.5}, "steps=2.5 was given; it must be a whole number."),
        ({"steps": True}, "steps=True was given; it must be a whole number."),
        ({"full_batch": 1}, "full_batch=1 was given; it must be true or false."),
        ({"dropout": 1.0}, "dropout=1.0 was given, but dropout .* must be below 1"),
        ({"weigh": None, "drop": 3.5, "seeds": "3"}, "seeds='3' was given; it must be a whole number or a list."),
        ({"strength": 1.0}, "there is no setting 'strength' for the task fairness, only for robust; `nestfed run"),
        ({"strenth": 1.0, "task": "robust"}, "no setting 'strenth' for the task robust; did you mean 'strength'?"),
    ],
)
def test_what_is_wrong_is_said_wherever_it_comes_from(given, message):
    with pytest.raises(nestfed.UserError, match=message):
        Request.of(given)


# ------------------------------------------------------------------------------------------------- there and back

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\x00"), min_size=1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PROGRAM: Any = typer.main.get_command(cli.app)
WORD = st.from_regex("[a-z_]{3,8}", fullmatch=True).filter(lambda word: word not in ("true", "false", "inf", "nan"))


def values(option: Option) -> st.SearchStrategy:
    """What may be given for an option."""
    if option.choices:
        return st.sampled_from(option.choices)
    low, high = (option.rules.get(name) for name in ("at_least", "at_most"))
    inside = {
        "min_value": low if option.rules.get("above") is None else option.rules["above"],
        "max_value": high if option.rules.get("below") is None else option.rules["below"],
        "exclude_min": option.rules.get("above") is not None,
        "exclude_max": option.rules.get("below") is not None,
    }
    whole = st.integers(low, high)
    kinds: dict[type, st.SearchStrategy] = {
        bool: st.booleans(), int: whole, float: st.floats(allow_nan=False, allow_infinity=False, **inside), str: TEXT,
    }  # fmt: skip
    several = [kinds[kind] for kind in option.kinds if kind in kinds]
    if option.entries is str:
        several.append(st.lists(TEXT, min_size=1))
    return st.one_of(several)


def requests(name: str) -> st.SearchStrategy:
    """Settings that a user may give for this task; methods, their settings and seeds are sensible ones."""
    methods = TASKS[name].usual
    seeds = st.integers(1, 9) | st.lists(st.integers(0, 99), min_size=1, unique=True)
    keys = st.builds("{}{}".format, st.sampled_from(["", *(f"{method}." for method in methods)]), WORD)
    apart = {
        "algorithm": st.lists(st.sampled_from(methods), min_size=1, unique=True),
        "seeds": seeds,
        "set": st.dictionaries(keys, st.booleans() | st.integers() | NUMBERS | WORD),
    }
    known = list_options(TASKS[name]) | list_options(CommonOptions)
    optional = {option.name: apart.get(option.name, values(option)) for option in known.values()}
    optional = {key: value for key, value in optional.items() if key != "algorithm"}
    return st.fixed_dictionaries({"task": st.just(name), "algorithm": apart["algorithm"]}, optional=optional)


def parse(command: str) -> dict[str, Any]:
    """The settings of a command, which is not run."""
    seen: dict[str, Any] = {}
    PROGRAM.commands["run"].act = lambda settings, file, **flags: seen.update(settings)
    PROGRAM.main(shlex.split(command)[1:], standalone_mode=False)
    return seen


@pytest.mark.parametrize("name", TASKS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_given_comes_back_from_a_file_and_from_a_command_line(name, data):
    request = Request.of(data.draw(requests(name)))
    said = request.settings()
    from_file = Request.of(tomllib.loads(tomli_w.dumps(said)))
    assert from_file.settings() == said and from_file.command() == request.command()
    from_flags = Request.of(parse(request.command()))
    assert from_flags.settings() == said and from_flags.command() == request.command()


def test_every_privacy_option_needs_privacy():
    for option in list_options(CommonOptions).values():
        if option.panel == PRIVACY and option.name != "privacy":
            value = option.choices[0] if option.choices else 1
            with pytest.raises(nestfed.UserError, match=f"{option.name} was given without privacy"):
                _ = Request.of({option.name: value}).guarantee
