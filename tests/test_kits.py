"""Keys and start-up kits: who can read them, what they allow, and that they belong together."""

import json
import ssl
import stat
import tomllib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from nestfed.core.settings import UserError
from nestfed.sites.kits import make_kits, read_deployment

PARTIES = ("server", "north", "south-2")


@pytest.fixture(scope="module", params=["flare", "flower"])
def kits(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits") / "deployment"
    return folder, make_kits(folder, ["north", "south-2"], engine=request.param, server="server.example.org", port=8123)


def test_a_deployment_says_what_it_is(kits):
    folder, made = kits
    assert read_deployment(folder) == made
    assert made.sites == ["north", "south-2"] and (made.server, made.port) == ("server.example.org", 8123)
    with (folder / "south-2" / "nestfed.toml").open("rb") as file:
        kit = tomllib.load(file)
    assert kit == {"engine": made.engine, "site": "south-2", "server": "server.example.org", "port": 8123}


def test_nobody_else_can_read_anything(kits):
    folder, _ = kits
    open_to_others = [path for path in [folder, *folder.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []


def test_a_private_key_lies_with_its_party_alone(kits):
    folder, _ = kits
    keys: dict[bytes, list[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file() and b"PRIVATE KEY" in (content := path.read_bytes()):
            loader = serialization.load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
            public = loader(content, None).public_key()
            form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            keys.setdefault(public.public_bytes(*form), []).append(path.relative_to(folder).parts[0])
    assert all(len(holders) == 1 for holders in keys.values())
    assert {"server", "north", "south-2"} <= {holder for [holder] in keys.values()} <= {"coordinator", *PARTIES}


def test_the_certificate_of_the_server_is_for_its_name(kits):
    folder, made = kits
    authority = folder / "north" / ("startup/rootCA.pem" if made.engine == "flare" else "keys/ca.crt")
    certificate = folder / "server" / ("startup/server.crt" if made.engine == "flare" else "server.pem")
    ssl.create_default_context(cafile=str(authority))  # it can be loaded
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    server = x509.load_pem_x509_certificate(certificate.read_bytes())
    server.verify_directly_issued_by(issuer)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "server.example.org" in names.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize("party", ["server", "north"])
def test_flare_may_load_two_classes_and_no_code_of_a_job(tmp_path, party):
    make_kits(tmp_path / "d", ["north"])
    local = tmp_path / "d" / party / "local"
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert len(resources["class_allow_list"]) == 2
    assert not any("log" in component["id"] for component in resources["components"])  # no logs travel
    assert resources["allow_log_streaming"] is False
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert list(rights) == ["lead"]
    assert {name for name, value in rights["lead"].items() if value != "none"} == {"submit_job", "manage_job", "view"}


@pytest.mark.parametrize(
    ("sites", "engine", "message"),
    [
        (["a", "A"], "flare", "a name of its own"),
        (["../a"], "flare", "'../a'"),
        (["server"], "flower", "'server'"),
        ([], "flare", "a name of its own"),
        (["a"], "smoke", "--engine smoke"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, sites, engine, message):
    with pytest.raises(UserError, match=message):
        make_kits(tmp_path / "d", sites, engine=engine)
    assert not (tmp_path / "d").exists()


def test_keys_are_made_once(tmp_path):
    make_kits(tmp_path / "d", ["a"], engine="flower")
    with pytest.raises(UserError, match="has files already"):
        make_kits(tmp_path / "d", ["a"], engine="flower")
