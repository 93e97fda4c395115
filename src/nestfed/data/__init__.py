"""Tables and images, their features, and how rows are dealt to clients."""

from nestfed.data.features import RECIPES, Encoder
from nestfed.data.federated import Federated, federate
from nestfed.data.files import read_table
from nestfed.data.images import (
    FederatedImages,
    Images,
    channel_statistics,
    deal_images,
    load_images,
    normalise,
    random_crop_flip,
)
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
    "FederatedImages",
    "Images",
    "Table",
    "assign",
    "balanced_validation",
    "by_column",
    "by_ratios",
    "channel_statistics",
    "classes",
    "deal_images",
    "describe",
    "dirichlet",
    "federate",
    "holdings",
    "iid",
    "load",
    "load_images",
    "normalise",
    "overview",
    "random_crop_flip",
    "read_table",
    "shards",
    "split_by_group",
    "summary",
]
