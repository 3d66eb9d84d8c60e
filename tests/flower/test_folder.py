"""The folder of a deployment, what a node's file may say, and which flags Flower's commands get."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509

from motley.deploy.commands import node_command, server_command
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.engine.flower.settings import read_node
from motley.errors import MotleyError
from motley.settings import validate
from tests.cli.conftest import call
from tests.flower.grid import three_nodes


@pytest.fixture
def folder(tmp_path: Path) -> DeployFolder:
    return create(tmp_path / "fed", three_nodes(), DeploySettings(host="fed.example", port=9000))


def test_a_node_has_what_it_needs_and_no_more(folder: DeployFolder) -> None:
    place = folder.nodes / "node-1"
    assert sorted(file.name for file in place.iterdir()) == ["ca.crt", "key", "key.pub", "node.toml"]
    node = read_node(place / "node.toml")
    assert (node.client, node.size, node.superlink) == (1, "resnet14", "fed.example:9000")
    assert node.memory == str(place / "memory")


def test_secrets_are_their_owners_alone(folder: DeployFolder) -> None:
    secrets = [*folder.path.rglob("key"), *folder.path.rglob("*.key")]
    assert len(secrets) == 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}


def test_the_certificate_names_the_host_and_is_the_authoritys(folder: DeployFolder) -> None:
    server, authority = (
        x509.load_pem_x509_certificate((folder.certificates / name).read_bytes()) for name in ("server.pem", "ca.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fed.example" in names.get_values_for_type(x509.DNSName)


def test_flags_are_safe_unless_asked_otherwise(folder: DeployFolder, tmp_path: Path) -> None:
    server, node = server_command(folder), node_command(folder.nodes / "node-0" / "node.toml")
    assert {"--enable-supernode-auth", "--ssl-keyfile", "--disable-runtime-dependency-installation"} <= set(server)
    assert {"--auth-supernode-private-key", "--root-certificates"} <= set(node)
    assert "--insecure" not in server + node and server[server.index("--host") + 1] == "0.0.0.0"
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    server, node = server_command(plain), node_command(plain.nodes / "node-0" / "node.toml")
    assert "--insecure" in server and "--insecure" in node and server[server.index("--host") + 1] == "127.0.0.1"
    assert not plain.public_keys()


def test_the_run_is_the_one_that_was_configured(folder: DeployFolder) -> None:
    assert folder.read_config() == three_nodes()
    app = tomllib.loads((folder.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"]["serverapp"] == "motley.engine.flower.server:app"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host": "fed.example", "insecure": True}, "host = 'fed.example' should be 127.0.0.1"),
        ({"port": 0}, "port = 0: should be greater than or equal to 1"),
    ],
)
def test_settings_that_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(MotleyError, match=said):
        validate(DeploySettings, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size = 'resnet10'", "client: is required and was not given"),
        ("client = -1", "client = -1: should be greater than or equal to 0"),
        ("client = 0\nsize = 'a'\n[budget]\ngflops = 2", "size = 'a' and [budget]: give one of the two"),
        (
            "client = 0\nbudget_mib = 2",
            "budget_mib = 2: this key (the weights alone, in MiB) is gone. Use",
        ),
        ("client = 0\n[budget]\nmemory_mb = 0", "budget.memory_mb = 0: should be greater than 0"),
        ("client = 0\nsise = 'a'", "unknown key 'sise'. Did you mean 'size'?"),
        ("client = ", "cannot be read"),
    ],
)
def test_node_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(MotleyError) as raised:
        read_node(file)
    assert said in str(raised.value)


def test_the_command_writes_a_folder_once(tmp_path: Path) -> None:
    path = tmp_path / "fed"
    clients = ("--set", "federation.clients=5", "--set", "federation.clients_per_round=2")
    code, out, err = call("deploy", "init", path, *clients, "--insecure")
    assert (code, err) == (0, "") and out.startswith("5 nodes, server at 127.0.0.1:8443\n")
    assert f"motley deploy node {path}/nodes/node-4" in out
    config = DeployFolder.open(path).read_config()
    assert (config.engine.name, config.server.min_share) == ("flower", 0.5)
    code, out, err = call("deploy", "init", path)
    assert code == 2 and "already exists and is not empty" in err
    code, out, err = call("deploy", "status", tmp_path)
    assert code == 2 and "is no deployment: there is no deploy.toml in it" in err
