"""`nestfed deploy init`: keys, certificates and start-up kits for a server, its coordinator and the sites.

For NVIDIA FLARE by its own provisioning, for Flower by `cryptography`. A kit is a folder that is sent to its party and
to nobody else: it has the party's private key, and a README with the commands to type. The key of the authority that
signs is not kept: nobody can add a party afterwards.
"""

import datetime
import ipaddress
import json
import os
import re
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nestfed.core.settings import UserError

PORTS = {"flare": 8002, "flower": 8000}  # the ones that the frameworks' documentation has
DEPLOYMENT, KIT = "deployment.toml", "nestfed.toml"
OURS = ("server", "coordinator")  # folders of a deployment that are no site's
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # FLARE's rule for sites
USER = "coordinator@example.org"  # as whom the coordinator logs in at FLARE's server: a name, no address
DAYS = 360  # that certificates are valid: FLARE's default

# The classes that FLARE may load for a job. A job is a configuration that names classes; code in a job is refused
# (`byoc`), and any other class too.
AT_SITES = ["nvflare.collab.runtime.executor.CollabExecutor", "nestfed.sites.flare_job.Relay"]
AT_SERVER = ["nvflare.collab.runtime.controller.CollabController", "nestfed.sites.flare_job.Post"]
RIGHTS = {  # of the coordinator, and nobody has others: no code in jobs, no shell commands, no downloads
    "lead": {
        "submit_job": "any",
        "manage_job": "n:submitter",
        "view": "any",
        "clone_job": "none",
        "download_job": "none",
        "operate": "none",
        "shell_commands": "none",
        "byoc": "none",
        "server-predeployed-flwr": "none",
    }
}


class Deployment(NamedTuple):
    """What a deployment's folder says."""

    engine: str
    sites: list[str]
    server: str
    port: int


def make_kits(
    folder: Path, sites: Sequence[str], engine: str = "flare", server: str = "localhost", port: int | None = None
) -> Deployment:
    """A deployment's folder with one kit for the server, the coordinator and each site."""
    if engine not in PORTS:
        raise UserError(f"--engine {engine} was given; there are: {', '.join(PORTS)}.")
    for site in sites:
        if not NAME.fullmatch(site) or site in OURS:
            raise UserError(
                f"--sites has the name {site!r}; a name has letters, digits, - and _ (at most 40) and is none of: "
                f"{', '.join(OURS)}."
            )
    if len({site.lower() for site in sites}) != len(sites) or not sites:
        raise UserError(f"--sites {','.join(sites)} was given; give each site a name of its own.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} has files already; give a new folder: keys are made once.")
    deployment = Deployment(engine, list(sites), server, port or PORTS[engine])
    folder.mkdir(parents=True, exist_ok=True)
    {"flare": _make_flare_kits, "flower": _make_flower_kits}[engine](folder, deployment)
    (folder / DEPLOYMENT).write_bytes(tomli_w.dumps(deployment._asdict()).encode())
    for site in sites:
        kit = Kit(engine, site, server, deployment.port)
        (folder / site / KIT).write_bytes(tomli_w.dumps(kit._asdict()).encode())
        (folder / site / "README.md").write_text(_write_site_page(deployment, site), encoding="utf-8")
    (folder / "README.md").write_text(_write_coordinator_page(folder, deployment), encoding="utf-8")
    _make_private(folder)
    return deployment


def read_deployment(folder: Path) -> Deployment:
    try:
        with (folder / DEPLOYMENT).open("rb") as file:
            return Deployment(**tomllib.load(file))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {DEPLOYMENT}; `nestfed deploy init {folder} --sites ...` makes one."
        ) from None
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{folder / DEPLOYMENT} cannot be read ({error}); give the one of `deploy init`.") from None


class Kit(NamedTuple):
    """What a site's kit says."""

    engine: str
    site: str
    server: str
    port: int


def read_kit(folder: Path) -> Kit:
    try:
        with (folder / KIT).open("rb") as file:
            return Kit(**tomllib.load(file))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {KIT}; give the folder that the coordinator sent (your kit).") from None
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{folder / KIT} cannot be read ({error}); unpack the kit again.") from None


def find_free_port() -> int:
    """A port of this machine, for a deployment that is all on it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _make_private(folder: Path) -> None:
    """Nobody but the owner reads anything here; what could be run still can."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700 if path.is_dir() or path.stat().st_mode & 0o100 else 0o600)


# ------------------------------------------------------------------------------------------------- NVIDIA FLARE


def _make_flare_kits(folder: Path, deployment: Deployment) -> None:
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    project = Project("nestfed", "nestfed")
    others = ["127.0.0.1"] if deployment.server == "localhost" else []
    ports = {"fed_learn_port": deployment.port, "admin_port": deployment.port}
    project.set_server(deployment.server, "nestfed", {**ports, "host_names": others})
    for site in deployment.sites:
        project.add_client(site, "nestfed", {})
    project.add_admin(USER, "nestfed", {"role": "lead"})
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", require_signed_jobs=True),
        CertBuilder(),
        SignatureBuilder(),
    ]
    with tempfile.TemporaryDirectory(dir=folder) as work:
        said = _Log()
        context = Provisioner(work, builders).provision(project, logger=said)
        if context.get(CtxKey.BUILD_ERROR):
            raise UserError(f"FLARE made no kits: {said.problem}")
        kits = Path(work, project.name, "prod_00")
        shutil.move(kits / deployment.server, folder / "server")
        shutil.move(kits / USER, folder / "coordinator")
        for site in deployment.sites:
            shutil.move(kits / site, folder / site)
    _restrict(folder / "server", AT_SERVER)
    for site in deployment.sites:
        _restrict(folder / site, AT_SITES)


class _Log:
    """Where FLARE's provisioning says what it does."""

    problem = ""

    def debug(self, message: str) -> None: ...

    info = warning = debug

    def error(self, message: str) -> None:
        self.problem = message


def _restrict(kit: Path, classes: list[str]) -> None:
    """FLARE's own settings of a party, narrowed to what our job needs."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    # As provisioned, a site's error log is sent to the server while a job runs.
    components = [part for part in resources["components"] if part["id"] not in ("site_log_streamer", "log_receiver")]
    resources |= {"allow_log_streaming": False, "components": components}
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": classes}
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    rights = {"format_version": "1.0", "permissions": RIGHTS}
    (local / "authorization.json").write_text(json.dumps(rights, indent=2))


# ------------------------------------------------------------------------------------------------- Flower


def _make_flower_kits(folder: Path, deployment: Deployment) -> None:
    """An authority, a certificate of the server, and a key for each site, whose public half the server must know."""
    key, name = ec.generate_private_key(ec.SECP384R1()), _name_subject("nestfed deployment")
    authority = (
        _begin_certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_use_key(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    own = ec.generate_private_key(ec.SECP384R1())
    certificate = (
        _begin_certificate(_name_subject(deployment.server), name, own.public_key())
        .add_extension(x509.SubjectAlternativeName(_list_addresses(deployment.server)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(_use_key(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA384())
    )
    public = authority.public_bytes(serialization.Encoding.PEM)
    _write_file(folder / "server" / "ca.crt", public)
    _write_file(folder / "server" / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write_file(folder / "server" / "server.key", _dump_key(own))
    for site in deployment.sites:
        node = ec.generate_private_key(ec.SECP384R1())
        openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        _write_file(folder / site / "keys" / "ca.crt", public)
        _write_file(folder / site / "keys" / "node", _dump_key(node, serialization.PrivateFormat.OpenSSH))
        _write_file(folder / "server" / "sites" / f"{site}.pub", node.public_key().public_bytes(*openssh) + b"\n")


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _name_subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _use_key(signs: bool) -> x509.KeyUsage:
    """For signing certificates, or for TLS."""
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


def _list_addresses(server: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for one in [server, *(["127.0.0.1"] if server == "localhost" else [])]:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            names.append(x509.DNSName(one))
    return names


def _dump_key(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


# ------------------------------------------------------------------------------------------------- what people read


def _write_site_page(deployment: Deployment, site: str) -> str:
    engine, address = deployment.engine, f"{deployment.server}:{deployment.port}"
    return f"""# The kit of {site}

With this folder {site} takes part in a training run. Its rows stay here; `docs/site.md` of nestfed says exactly what
leaves. **The folder holds a private key: whoever has it is {site}.** Give it to nobody, and keep it readable by you
alone (`chmod -R go-rwx .`). The keys end after {DAYS} days.

1. Install, with Python 3.11 or newer, on a machine of this site that has the rows and may open connections to
   {address} (nobody connects to it; {_SAYS_SECURITY[engine]}):

       pip install 'nestfed[{engine}]'

2. Draft the schema of the table (names, kinds and levels of columns; no statistics), read it, and send it to the
   coordinator, who sends back the one on which all agree:

       nestfed site schema --data my.csv --label ... --out {site}.toml

3. Start, and leave it running until the coordinator says that all is done; Ctrl-C ends it. It may be started again at
   any time:

       nestfed site start . --data my.csv

{_SAYS_CODE[engine]}
"""


_SAYS_SECURITY = {
    "flare": "TLS with certificates on both sides",
    "flower": "TLS, and the server knows this site by its key",
}
_SAYS_CODE = {
    "flare": """No code comes from outside. A job of NVIDIA FLARE is a configuration here: `local/authorization.json`
refuses code in jobs (`byoc`), shell commands and downloads, and `local/resources.json` allows the two classes that a
job may name. Leave them as they are.""",
    "flower": """Flower sends the code of an app along, and this machine runs it: here three lines that import what
nestfed has installed. **Whoever reaches the port of the SuperLink can start an app, and so run code here as your
user**: Flower asks for no account. Ask the coordinator who reaches it, and run this kit as a user who can read these
rows and nothing else.""",
}


_SAYS_PORT = {"flare": "", "flower": ", and nobody else: who reaches it can start apps at the sites"}


def _write_coordinator_page(folder: Path, deployment: Deployment) -> str:
    engine, sites = deployment.engine, ", ".join(deployment.sites)
    mine = "`server` and `coordinator`" if engine == "flare" else "`server`"
    return f"""# A deployment on {"NVIDIA FLARE" if engine == "flare" else "Flower"}: {sites}

This folder was made by `nestfed deploy init`. Every folder in it that is named after a site is that site's kit and
holds its private key: send it to that site alone, by a way that nobody else reads, and delete it here. What is left
({mine}) stays with the coordinator. The keys end after {DAYS} days, and no site can be added: make a new deployment.

1. On this machine, which the sites must reach as {deployment.server}, port {deployment.port} (TCP){_SAYS_PORT[engine]}:

       pip install 'nestfed[{engine}]'

2. Every site sends the draft of its schema; merge them, and send the result to all:

       nestfed deploy schema {" ".join(f"{site}.toml" for site in deployment.sites)} --out schema.toml

3. When the sites say that they have started (their README has the command), run. Settings are those of `nestfed run`:

       nestfed deploy run . settings.toml

   The run's folder has the history, the models and a report. It can be interrupted and goes on with `--resume`.

To rehearse all of it on one machine: `nestfed deploy local fairness --sites {len(deployment.sites)} --engine {engine}`.
"""
