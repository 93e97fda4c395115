"""Trained models on tables: saved and opened without anything of their training, and used on new rows.

A model knows its columns: which it reads, which of them are numbers, which categories there were. A file of one holds
plain arrays and text.
"""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest
from nestfed.core.types import PyTree
from nestfed.data import Encoder
from nestfed.data.table import check_column, list_values, name_groups
from nestfed.models import RowModel, describe_model, make_model


class GroupThresholds(NamedTuple):
    """A threshold of the logit for every group, and the columns that say who belongs to which."""

    columns: tuple[str, ...]
    of_groups: dict[str, float]

    def of_rows(self, frame: pd.DataFrame) -> np.ndarray:
        for column in self.columns:
            check_column(frame.columns, column, "group", "the rows")
        codes, names = name_groups([frame[column] for column in self.columns])
        unknown = [name for name in names if name not in self.of_groups]
        if unknown:
            raise UserError(
                f"{'+'.join(self.columns)} is {unknown[0]!r} in a row, and this model has thresholds for "
                f"{list_values(self.of_groups)} only."
            )
        return np.array([self.of_groups[name] for name in names])[codes]


@dataclasses.dataclass(frozen=True)
class TabularModel:
    """A trained model with what it takes to use it on new rows."""

    model: RowModel
    theta: PyTree
    encoder: Encoder
    thresholds: GroupThresholds | None = None  # only of a model that may ask for the group

    def probability(self, frame: pd.DataFrame) -> np.ndarray:
        """The probability of the positive label for every row of a table with the columns of the training data.

        With thresholds by group the logit is less by that of the row's group: above one half is a positive decision for
        everybody.
        """
        self.encoder.check(frame)
        logits = self.model(self.theta, jnp.asarray(self.encoder.transform(frame)))
        return np.asarray(
            jax.nn.sigmoid(logits if self.thresholds is None else logits - self.thresholds.of_rows(frame))
        )

    def save(self, path: Path) -> None:
        """One file of plain arrays and text: nothing in it can run code."""
        more = {} if self.thresholds is None else {"thresholds": self.thresholds._asdict()}
        save_model(path, self.model, self.theta, self.encoder, **more)

    @classmethod
    def load(cls, path: str | Path) -> "TabularModel":
        model, theta, encoder, about = read_model(path)
        if "clients" in about:
            raise UserError(
                f"{path} holds models of {len(about['clients'])} clients; load it by nestfed.ClientModels.load "
                "and take that of one client: .of(name)."
            )
        said = about.get("thresholds")
        return cls(model, theta, encoder, said and GroupThresholds(tuple(said["columns"]), said["of_groups"]))


def save_model(path: Path, model: RowModel, theta: PyTree, encoder: Encoder, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {f"theta/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(theta))}
    about = {"model": describe_model(model), "encoder": encoder.to_dict(), **more}
    np.savez(path, allow_pickle=False, about=np.array(json.dumps(about)), **leaves)


def read_model(path: str | Path) -> tuple[RowModel, PyTree, Encoder, dict[str, Any]]:
    """What `save_model` wrote: (model, parameters, encoder, all that the file says)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            leaves = [file[f"theta/{i}"] for i in range(len(file.files) - 1)]
        model, encoder = make_model(about["model"]), Encoder.from_dict(about["encoder"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a model that a run saved ({type(error).__name__}: {error}).") from error
    structure = jax.tree.structure(jax.eval_shape(lambda: model.init(jax.random.key(0), len(encoder.names))))
    return model, jax.tree.unflatten(structure, leaves), encoder, about


@dataclasses.dataclass(frozen=True)
class ClientModels:
    """The models of all clients, with what it takes to use them on new rows."""

    model: RowModel
    thetas: PyTree  # every leaf [clients, ...]
    encoder: Encoder
    clients: tuple[str, ...]

    def of(self, client: str) -> TabularModel:
        """The model of the client of this name."""
        if client not in self.clients:
            hint = f"{suggest(client, self.clients)} Known are {', '.join(self.clients)}."
            raise UserError(f"there is no model of the client {client!r}{hint}")
        theta = jax.tree.map(lambda a: a[self.clients.index(client)], self.thetas)
        return TabularModel(self.model, theta, self.encoder)

    def save(self, path: Path) -> None:
        """One file of plain arrays and text: nothing in it can run code."""
        save_model(path, self.model, self.thetas, self.encoder, clients=list(self.clients))

    @classmethod
    def load(cls, path: str | Path) -> "ClientModels":
        model, thetas, encoder, about = read_model(path)
        if "clients" not in about:
            raise UserError(f"{path} holds one model for all clients; load it by nestfed.TabularModel.load.")
        return cls(model, thetas, encoder, tuple(about["clients"]))
