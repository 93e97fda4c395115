"""Images of two kinds, the rare one positive: classes made binary, and dealt with every client's negatives first."""

import dataclasses

import numpy as np

from nestfed.core.rows import Rows
from nestfed.data.images import FederatedImages, Images, deal_images


def thin_out_second_half(images: Images, keep: float) -> Images:
    """Classes of the first half become negatives, the others positives, of which the first `keep` of each class's
    training images remain; test images all stay."""
    half = len(images.class_names) // 2
    kept = images.train_labels < half
    for label in range(half, len(images.class_names)):
        places = np.flatnonzero(images.train_labels == label)
        kept[places[: round(keep * len(places))]] = True
    binary = lambda labels: (labels >= half).astype(np.int32)
    return Images(
        images.train_images[kept],
        binary(images.train_labels[kept]),
        images.test_images,
        binary(images.test_labels),
        ("negative", "positive"),
    )


def deal_ranked(images: Images, *, clients: int, validation: float, seed: int) -> FederatedImages:
    """Dealt at random; every client's rows negatives first, as `AveragePrecision` wants them."""
    dealt = deal_images(images, clients=clients, validation=validation, seed=seed)
    rows = dealt.rows
    client, label = np.repeat(np.arange(rows.clients), rows.sizes), rows.columns["label"]
    order = np.lexsort((label, client))
    columns = {name: column[order] for name, column in rows.columns.items()}
    positives = np.bincount(client[label == 1], minlength=rows.clients).astype(np.int32)
    return dataclasses.replace(dealt, rows=Rows.from_table(columns, client, constants={"positives": positives}))
