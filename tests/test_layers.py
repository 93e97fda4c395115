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
