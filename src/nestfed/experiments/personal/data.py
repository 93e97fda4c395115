"""Images dealt to clients that each have a test of their own: some classes for each, or a writer's own drawings."""

import dataclasses

import numpy as np

from nestfed.core.rows import Rows
from nestfed.core.settings import UserError
from nestfed.data.images import Images
from nestfed.experiments.personal.femnist import CLASS_NAMES, Femnist

TRAIN_SHARE = 0.7


@dataclasses.dataclass(frozen=True)
class PersonalImages:
    """Every client's images to train on and to be judged by: columns (image, uint8 [..., channels]; label, int32)."""

    train: Rows
    test: Rows  # of the same clients in the same order
    class_names: tuple[str, ...]
    newcomers: tuple[tuple[Rows, Rows], ...] = ()  # (train, test) of clients that come after training, of equal sizes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image: height, width and channels."""
        height, width, channels = self.train.columns[0].shape[1:]
        return height, width, channels


def deal_classes(images: Images, *, clients: int = 50, per_client: int = 2, seed: int = 0) -> PersonalImages:
    """All images, also those meant for the test. Client i holds the classes i, i + 1, ... (modulo their number), a
    class is dealt evenly to those who hold it, and each of them trains on 70 % of its images of that class."""
    classes = len(images.class_names)
    if not 1 <= per_client <= classes:
        raise UserError(f"per_client={per_client!r} was given; a client holds from 1 to all {classes} classes.")
    if clients < classes - per_client + 1:
        raise UserError(
            f"clients={clients} with {per_client} classes each were given: some of the {classes} classes would be "
            f"nobody's; use at least {classes - per_client + 1} clients."
        )
    pixels = np.concatenate([images.train_images, images.test_images])
    labels = np.concatenate([images.train_labels, images.test_labels])
    random = np.random.default_rng(seed)
    train: list[list[np.ndarray]] = [[] for _ in range(clients)]
    test: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(classes):
        holders = [i for i in range(clients) if (label - i) % classes < per_client]
        order = random.permutation(np.flatnonzero(labels == label))
        for holder, part in zip(holders, np.array_split(order, len(holders)), strict=True):
            mine = _cut(part)
            train[holder].append(mine[0])
            test[holder].append(mine[1])
    rows = lambda parts: Rows.from_clients([(pixels[i], labels[i]) for i in map(np.concatenate, parts)])
    return PersonalImages(rows(train), rows(test), images.class_names)


def deal_writers(
    femnist: Femnist, *, at_least: int = 80, writers: int | None = None, newcomers: int = 10, seed: int = 0
) -> PersonalImages:
    """Each writer is a client, and trains on 70 % of its images.

    at_least    images of a writer; who has fewer is left out
    writers     how many there are at most, newcomers included
    newcomers   the last so many come after training, with as many images each as the poorest of them has
    """
    counts = np.bincount(femnist.writer, minlength=len(femnist.writers))
    chosen = np.flatnonzero(counts >= at_least)[:writers]
    if len(chosen) <= newcomers:
        raise UserError(
            f"{len(chosen)} writers with at least {at_least} images were found, {newcomers} of them are to come after "
            "training: nobody is left to train; ask for fewer newcomers or fewer images."
        )
    stay, late = chosen[: len(chosen) - newcomers], chosen[len(chosen) - newcomers :]
    random = np.random.default_rng(seed)
    shuffled = lambda writer: random.permutation(np.flatnonzero(femnist.writer == writer))
    one = lambda rows: (femnist.images[rows], femnist.labels[rows])
    cuts = [_cut(shuffled(writer)) for writer in stay]
    late_cuts = [_cut(shuffled(writer)[: counts[late].min()]) for writer in late]
    alone = lambda rows, writer: Rows.from_clients([one(rows)], ids=[int(writer)])
    return PersonalImages(
        train=Rows.from_clients([one(rows) for rows, _ in cuts]),
        test=Rows.from_clients([one(rows) for _, rows in cuts]),
        class_names=CLASS_NAMES,
        newcomers=tuple((alone(cut[0], w), alone(cut[1], w)) for w, cut in zip(late, late_cuts, strict=True)),
    )


def hold_out(images: PersonalImages, *, seed: int = 0) -> PersonalImages:
    """The same clients with their training images alone, cut again: settings are chosen by images that are neither
    trained on then nor ever tested on."""
    random, rows = np.random.default_rng(seed), images.train
    parts = [
        _cut(random.permutation(int(size)) + int(first)) for first, size in zip(rows.offsets, rows.sizes, strict=True)
    ]
    cut = lambda which: Rows.from_clients([tuple(column[part[which]] for column in rows.columns) for part in parts])
    return dataclasses.replace(images, train=cut(0), test=cut(1), newcomers=())


def _cut(rows: np.ndarray) -> list[np.ndarray]:
    """[70 % to train on, the rest]; at least one of both."""
    if len(rows) < 2:
        raise UserError(f"a client has {len(rows)} images: too few to train and to be judged by; use fewer clients.")
    return np.split(rows, [min(max(1, round(TRAIN_SHARE * len(rows))), len(rows) - 1)])
