"""The layers of the package: who may import whom, read from the source."""

import ast
import collections
import graphlib
from pathlib import Path

import pytest

import nestfed

# From the bottom up: a package, and those below it that it may use.
LAYERS = {
    "core": set(),
    "uploads": {"core"},
    "problems": {"core"},
    "models": {"core"},
    "data": {"core"},
    "report": {"core"},
    "algorithms": {"core", "problems"},
    "engine": {"core", "uploads"},
    "verbs": {"core", "uploads", "problems", "algorithms", "engine"},
    "workbench": {"core", "uploads", "problems", "models", "data", "report", "algorithms", "engine", "verbs"},
    "experiments": {
        "core", "uploads", "problems", "models", "data", "report", "algorithms", "engine", "verbs", "workbench",
    },
    "sklearn": {"core", "data", "workbench"},
    "sites": {"core", "uploads", "data", "report", "algorithms", "engine", "verbs", "workbench"},
    "cli": {"core", "data", "report", "algorithms", "workbench", "experiments", "sites"},
}  # fmt: skip
SOURCE = Path(nestfed.__file__).parent
MODULES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
PER_EXPERIMENT = {"data", "task", "plan", "page"}  # files that every experiment has
# Names that stand for one thing in several places: a named task, its experiment in a paper, and what both are about.
ALIKE = {"fairness", "auprc", "personal", "maml", "privacy"}

# Functions are named by what they do: these words begin their names (after an underscore), or one of a question.
VERBS = set(
    """
    adapt add advance agree align answer append apply ask assign attempt average begin bound call capitalise carry
    change check choose claim clip collect combine compare compose compute connect convert convolve correct count
    crop cut deal decide decode deploy derive descend describe divide download draft draw drop dump embed end escape
    estimate evaluate exchange explain federate fetch fill find finish fit flatten fold follow format gather get
    group gunzip halve hang hash hide hold identify init inspect join judge keep label lead list listen load locate
    lower make map mark maximise measure merge minimise move multiply name need normalise obtain open outline pack
    pair parse pass pick pose predict prefer prepare print prove pull rank read receive recommend refuse relay
    remove render repeat replace replay reply report reproduce respond restrict round run save say scale seed select
    send serve set settle shape share shorten show shuffle simulate solve split spoil spread square stack
    standardise start step strip subtract suggest sum summarise sweep tabulate take tell thin trace train tune turn
    unpack unzip update use validate wait watch weigh widen write
    """.split()
)
VERBS |= {"blow_up", "fine_tune"}  # a first word that is no verb by itself
QUESTIONS = {"are", "can", "depends", "does", "has", "is", "needs"}
# What keeps a noun, as in the field: values that are handed on by name rather than called for their effect.
NOUNS = {
    "functions of mathematics": "chi_square chi_square_ball cvar effective_sample_size half_square kl kl_cvar "
    "negative_share",
    "layers of networks": "average_pool batch_norm conv2d dense group_norm layer_norm max_pool",
    "metrics that a run is given": "bilevel compositional consensus curvature gradients hypergradients "
    "lipschitz_quotient momentum_errors objective single_level worst_case",
    "problems with known answers": "counterexample quadratics scalar_bilevel",
    "what a field, a class or a method is declared to be": "at option oracle setting static struct",
    "what a claim says of a difference": "above below exactly within",
    "commands and the program itself": "cost demo main",
}


def package_of(module: str) -> str:
    return module.split(".")[1]


def imported_by(module: str, *, at_once: bool = False) -> set[str]:
    """The modules of nestfed that this one imports; only those it loads at once, or those within functions too."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    nodes = tree.body if at_once else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            known = lambda name: name in MODULES or f"{name}.__init__" in MODULES
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if known(name) else node.module for name in inside}
    return {name for name in found if name.startswith("nestfed.")}


def test_every_package_has_a_place_in_the_table():
    packages = {package_of(module) for module in MODULES if module != "nestfed.__init__"}
    assert packages == set(LAYERS)
    below: set[str] = set()
    for package, uses in LAYERS.items():
        assert uses <= below, f"the table has {package} below something that it uses"
        below.add(package)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"nestfed.__init__"}))
def test_imports_only_go_downwards(module):
    package = package_of(module)
    upwards = {name for name in imported_by(module) if package_of(name) not in LAYERS[package] | {package}}
    assert not upwards, f"{module} imports {sorted(upwards)}"


def test_modules_of_a_package_do_not_import_each_other_in_a_circle():
    whole = {
        f"{module.removesuffix('.__init__')}.__init__": module for module in MODULES if module.endswith(".__init__")
    }
    name = lambda module: whole.get(f"{module}.__init__", module)
    graph = {module: {name(one) for one in imported_by(module, at_once=True)} - {module} for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())  # a circle is an error that names its modules


def test_no_two_modules_or_packages_share_a_name():
    places = collections.defaultdict(list)
    for module in MODULES:
        *package, name = module.removesuffix(".__init__").split(".")
        if not (name in PER_EXPERIMENT and package[1:2] == ["experiments"] and len(package) == 3):
            places[name].append(module)
    assert {name for name, modules in places.items() if len(modules) > 1} == ALIKE


def functions_of(module: str) -> set[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_verb(name: str) -> bool:
    words = name.strip("_").split("_")
    return words[0] in VERBS | QUESTIONS or "_".join(words[:2]) in VERBS


def test_functions_are_verbs():
    functions = [(module, name) for module in MODULES for name in functions_of(module)]
    nouns = set(" ".join(NOUNS.values()).split())
    offenders = [f"{module}.{name}" for module, name in functions if not is_verb(name) and name.strip("_") not in nouns]
    assert offenders == [], "begin these names with a verb, one of VERBS if it says the same"
    assert nouns <= {name for _, name in functions}, "the table has nouns that are gone"
