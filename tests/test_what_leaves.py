"""A whole run between sites, through real workers: its numbers, and all that the server is sent."""

import functools
import re

import numpy as np
import pandas as pd
import pytest
from site_tables import SITES, cut, people
from test_masks import look_uniform

from nestfed import simulate
from nestfed.core.settings import UserError
from nestfed.engine.options import Options
from nestfed.sites.coordinator import Coordinator, Roll, Run, add_up
from nestfed.sites.masks import LIST_FILE, MaskedSums, make_mask_key
from nestfed.sites.problem import make_worker
from nestfed.sites.wire import Letter, pack, unpack
from nestfed.sites.worker import Leg
from nestfed.workbench.request import Request
from nestfed.workbench.site_setup import ServerSetup

ROUNDS = 12
SAID = {"task": "fairness", "batch_size": 4, "averaging": "samples"}


class Direct:
    """A link to workers in this process, which keeps all that they answer."""

    def __init__(self, workers):
        self.workers, self.heard = workers, []

    def ask(self, letters, timeout):
        for name, letter in letters.items():
            answer = self.workers[name].answer(letter)
            self.heard.append((name, answer))
            yield name, answer

    def close(self):
        pass


def federate(folder, *, masked):
    """A link to the sites whose files lie in this folder."""
    folders = {name: folder / f"site {name}" for name in SITES}
    for own in folders.values():
        own.mkdir()
    keys = {name: make_mask_key(own) for name, own in folders.items()}
    for own in folders.values():
        if masked:
            (own / LIST_FILE).write_text("".join(f'{name} = "{key}"\n' for name, key in keys.items()))
    return Direct({name: make_worker(own, folder / f"{name}.csv", own / "store") for name, own in folders.items()})


def run_between(folder, link, said, method, *, masked, rounds=ROUNDS):
    """The first stage of a method, and where the coordinator ended."""
    roll = Roll(link, SITES, patience=0.0)
    run = Run("a-run", said, (folder / "schema.toml").read_text(), 3, SITES, masked)
    hub = ServerSetup(said, folder / "schema.toml", sites=len(SITES), seed=3)
    sums = add_up(roll, run, hub.EXCHANGES)
    prepared = hub.prepare(sums)
    algorithm, task = prepared.make_algorithms(method, {})[0], prepared.task(method)
    leg, options = Leg(method=method, seed=3, stage=0, changes={}), Options(rounds=rounds, evaluate_every=rounds)
    masks = MaskedSums() if masked else None
    central = Coordinator(roll, run, leg, algorithm, task, options, file=folder / "a.run", sums=sums, masks=masks)
    return central.train(progress=False)


def set_up_pooled(folder, said):
    where = {"data": str(folder / "joined.csv"), "clients": "site", "schema": str(folder / "schema.toml")}
    scenario = Request.of(said | where).scenario
    return scenario, scenario.set_up(3)


def simulate_pooled(folder, said, method):
    scenario, setup = set_up_pooled(folder, said)
    task = scenario.method(method).stages[0].task(scenario, setup, None)
    algorithm = scenario.make_algorithms(method, setup, {})[0]
    return simulate(algorithm, task, 3, rounds=ROUNDS, evaluate_every=ROUNDS, progress=False)


@functools.cache
def named_people():
    """With a column that nobody but its site may see, and labels, groups and numbers that are easy to find."""
    frame = people(90, 5)
    return frame.assign(patient=[f"patient {i} of {site}" for i, site in enumerate(frame["site"])])


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_between_sites_is_its_simulation_and_tells_no_row(masked, tmp_path):
    frame = named_people()
    cut(frame, tmp_path)
    link = federate(tmp_path, masked=masked)
    result = run_between(tmp_path, link, SAID, "fedavg", masked=masked)
    simulated = simulate_pooled(tmp_path, SAID, "fedavg")
    close = {"rtol": 1e-6, "atol": 1e-7} if masked else {"rtol": 1e-9, "atol": 1e-11}
    for mine, theirs in zip(result.position.server, simulated.server, strict=True):
        if theirs is not None:
            np.testing.assert_allclose(mine, theirs, **close)
    for name in ("test_accuracy", "test_eqopp", "validation_loss"):
        np.testing.assert_allclose(result.history[name], simulated.history[name], **close)
    told = b"".join(answer for _, answer in link.heard)
    assert b"patient" not in told
    values = frame[["age", "income"]].to_numpy().ravel()
    values = values[np.isfinite(values) & (values % 1 != 0)]  # whole numbers are counts too
    assert values.size > 100 and not any(value.tobytes() in told for value in values)
    inputs = set_up_pooled(tmp_path, SAID)[1].data.inputs
    assert not any(row.tobytes() in told for row in inputs)
    words = {key for _, answer in link.heard for key in unpack(answer).header}
    # What is told beside arrays: is there a question, how long it took, what has to be alike; never a count of rows.
    assert words == {"asks", "seconds", "party", "wire", "nestfed", "precision", "open"}


def test_with_masks_nothing_tells_of_one_site(tmp_path):
    """All arrays of a whole run are words that look random, each site's; and nobody hears a site in another's words."""
    cut(named_people(), tmp_path)
    link = federate(tmp_path, masked=True)
    run_between(tmp_path, link, SAID, "fedavg", masked=True)
    for name in SITES:
        arrays = [array for who, answer in link.heard if who == name for array in unpack(answer).arrays]
        assert {array.dtype for array in arrays} == {np.dtype(np.uint64)}
        assert look_uniform(np.concatenate(arrays))
        sums = max(arrays, key=len)  # products of features, most of whose words are zero before they are masked
        assert look_uniform(sums)


def test_flipping_one_site_leaves_the_others_words_as_they_were(tmp_path):
    """In what sites tell before they know anything of each other."""
    first = {}
    keys = {}
    for case in ("as it was", "flipped"):
        folder = tmp_path / case
        folder.mkdir()
        frame = named_people()
        cut(frame, folder)
        if case == "flipped":
            own = pd.read_csv(folder / "b.csv")
            own.assign(age=1000 - own["age"], visits=own["visits"].iloc[::-1].to_numpy()).to_csv(
                folder / "b.csv", index=False
            )
        link = federate(folder, masked=True)
        for name in SITES:  # the same keys in both
            site = folder / f"site {name}"
            for file in ("mask.key", LIST_FILE):
                keys.setdefault((name, file), (site / file).read_text())
                (site / file).write_text(keys[name, file])
        head = {"kind": "tell", "attempt": 7, "run": "a-run", "settings": SAID, "names": list(SITES), "seed": 3}
        head |= {"schema": (folder / "schema.toml").read_text(), "masked": True}
        asked = {name: pack(Letter({**head, "number": k}, [])) for k, name in enumerate(SITES)}
        first[case] = {name: unpack(answer).arrays[0] for name, answer in link.ask(asked, 1)}
    before, after = first["as it was"], first["flipped"]
    assert np.array_equal(before["a"], after["a"]) and np.array_equal(before["c"], after["c"])
    assert (before["b"] != after["b"]).any()


def test_a_site_that_has_keys_tells_nothing_unmasked_and_one_without_refuses_masks(tmp_path):
    cut(named_people(), tmp_path)
    link = federate(tmp_path, masked=True)
    with pytest.raises(UserError, match=re.escape("tells nothing that is not masked")):
        run_between(tmp_path, link, SAID, "fedavg", masked=False)
    for name in SITES:
        (tmp_path / f"site {name}" / LIST_FILE).unlink()
    with pytest.raises(UserError, match="has no masks.toml, the list of all sites' public keys"):
        run_between(tmp_path, link, SAID, "fedavg", masked=True)


@pytest.mark.parametrize(
    ("said", "method", "reason"),
    [
        ({"task": "fairness"}, "fcfl", "FCFL gathers clients' values"),
        ({"task": "robust"}, "feddro", "FedDRO takes means of numbers with a common exponent"),
    ],
)
def test_what_sums_cannot_answer_is_refused_before_anybody_is_asked(said, method, reason, tmp_path):
    cut(named_people(), tmp_path)
    link = federate(tmp_path, masked=True)
    with pytest.raises(UserError, match=reason):
        run_between(tmp_path, link, said | {"batch_size": 4}, method, masked=True)
    assert {tuple(unpack(answer).header) for _, answer in link.heard} == {(), ("wire", "nestfed", "precision", "open")}


@pytest.mark.parametrize(("task", "method"), [("robust", "fedavg"), ("auprc", "fedavg")])
def test_metrics_that_would_gather_rows_are_means_instead(task, method, tmp_path):
    cut(named_people(), tmp_path)
    said = {"task": task, "batch_size": 4}
    result = run_between(tmp_path, federate(tmp_path, masked=True), said, method, masked=True, rounds=2)
    for name in ("train_loss", "test_accuracy"):
        assert np.isfinite(result.history[name]).all()
    assert 0 <= result.final["test_accuracy"] <= 1


def test_a_site_that_has_nothing_to_rank_takes_no_part(tmp_path):
    """It has no positive row, so it weighs nothing, and what it would compute is not asked for."""
    cut(named_people(), tmp_path)
    said = {"task": "auprc", "batch_size": 4, "warm_start": False}
    result = run_between(tmp_path, federate(tmp_path, masked=False), said, "fcsg-m", masked=False)
    simulated = simulate_pooled(tmp_path, said, "fcsg-m")
    np.testing.assert_allclose(result.position.server.x, simulated.server.x, rtol=1e-9, atol=1e-11)
    masked = tmp_path / "masked"
    masked.mkdir()
    cut(named_people(), masked)
    with pytest.raises(UserError, match="2 of the sites weigh something in fcsg-m, .* takes 3"):
        run_between(masked, federate(masked, masked=True), said, "fcsg-m", masked=True)
