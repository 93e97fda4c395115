"""Tables, their features, and how rows are dealt to clients."""

from nestfed.data.features import RECIPES, Encoder
from nestfed.data.federated import Federated, federate
from nestfed.data.files import read_table
from nestfed.data.partition import (
    PARTS,
    TEST,
    TRAIN,
    VALIDATION,
    assign,
    balanced_validation,
    by_column,
    by_ratios,
    classes,
    dirichlet,
    draw_holdings,
    holdings,
    iid,
    shards,
    split_by_group,
)
from nestfed.data.sources import describe, load
from nestfed.data.table import Table, overview, summary

__all__ = [
    "PARTS",
    "RECIPES",
    "TEST",
    "TRAIN",
    "VALIDATION",
    "Encoder",
    "Federated",
    "Table",
    "assign",
    "balanced_validation",
    "by_column",
    "by_ratios",
    "classes",
    "describe",
    "dirichlet",
    "draw_holdings",
    "federate",
    "holdings",
    "iid",
    "load",
    "overview",
    "read_table",
    "shards",
    "split_by_group",
    "summary",
]
