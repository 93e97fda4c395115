"""Tables and images, their features, and how rows are dealt to clients."""

from nestfed.data.features import RECIPES, Encoder
from nestfed.data.federated import Federated, federate
from nestfed.data.files import read_table
from nestfed.data.images import (
    FederatedImages,
    Images,
    crop_and_flip,
    deal_images,
    load_images,
    measure_channels,
    normalise,
)
from nestfed.data.partition import (
    PARTS,
    TEST,
    TRAIN,
    VALIDATION,
    assign,
    count_holdings,
    deal_by_column,
    deal_by_ratios,
    deal_classes,
    deal_dirichlet,
    deal_iid,
    deal_shards,
    draw_balanced_validation,
    split_by_group,
)
from nestfed.data.sources import describe, load
from nestfed.data.table import Table, describe_columns, describe_groups

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
    "draw_balanced_validation",
    "deal_by_column",
    "deal_by_ratios",
    "measure_channels",
    "deal_classes",
    "deal_images",
    "describe",
    "deal_dirichlet",
    "federate",
    "count_holdings",
    "deal_iid",
    "load",
    "load_images",
    "normalise",
    "describe_groups",
    "crop_and_flip",
    "read_table",
    "deal_shards",
    "split_by_group",
    "describe_columns",
]
