"""The folder of a deployment, what a node's file may say, and which flags Flower's commands get."""

from __future__ import annotations

import socket
import stat
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509

from motley.core.errors import MotleyError
from motley.deploy.commands import (
    free_port,
    listen,
    node_command,
    superexec_command,
    warn_of_unknown_host,
)
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.deploy.worker import TaskSource
from motley.flower.settings import read_node
from motley.settings import validate
from tests.cli.conftest import call
from tests.flower.grid import three_nodes


@pytest.fixture
def folder(tmp_path: Path) -> DeployFolder:
    settings = DeploySettings(host="fed.example", port=9000)
    return create(tmp_path / "fed", three_nodes(), settings, keys="here")


def test_a_nodes_folder_has_its_own_files_only(folder: DeployFolder) -> None:
    place = folder.nodes / "node-1"
    assert sorted(file.name for file in place.iterdir()) == [
        "ca.crt",
        "key",
        "key.pub",
        "node.toml",
    ]
    node = read_node(place / "node.toml")
    assert (node.client, node.size, node.superlink) == (1, "resnet14", "fed.example:9000")
    assert node.memory == str(place / "memory")


def test_secrets_are_their_owners_alone(folder: DeployFolder) -> None:
    secrets = [*folder.path.rglob("key"), *folder.path.rglob("*.key")]
    folder.write_secrets("127.0.0.1:9001")
    secrets += [folder.control, folder.superexec]
    assert len(secrets) == 7
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    assert stat.S_IMODE(folder.flower.stat().st_mode) == 0o700


def test_the_certificate_names_the_host_and_is_the_authoritys(folder: DeployFolder) -> None:
    server, authority = (
        x509.load_pem_x509_certificate((folder.certificates / name).read_bytes())
        for name in ("server.pem", "ca.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fed.example" in names.get_values_for_type(x509.DNSName)


def test_flags_are_safe_unless_asked_otherwise(folder: DeployFolder, tmp_path: Path) -> None:
    folder.write_secrets("127.0.0.1:9001")
    tasks = TaskSource(tmp_path / "node", 9002)
    server, node = (
        superexec_command(folder),
        node_command(folder.nodes / "node-0" / "node.toml", tasks),
    )
    assert {"--root-certificates", "--superexec-auth-secret-file"} <= set(server)
    assert {
        "--auth-supernode-private-key",
        "--root-certificates",
        "--superexec-auth-secret-file",
    } <= set(node)
    assert "--insecure" not in server + node
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    plain.write_secrets("127.0.0.1:9001")
    server, node = (
        superexec_command(plain),
        node_command(plain.nodes / "node-0" / "node.toml", tasks),
    )
    assert "--insecure" in server and "--insecure" in node
    assert not plain.public_keys()


def test_a_node_never_runs_the_app_that_the_server_sends(
    folder: DeployFolder, tmp_path: Path
) -> None:
    """Flower's own part that installs and runs apps is not started; see tests/flower/test_attack.py."""
    command = node_command(
        folder.nodes / "node-0" / "node.toml", TaskSource(tmp_path / "node", 9002)
    )
    assert command[command.index("--isolation") + 1] == "process"
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "insecure", "bound"),
    [
        ("fed.example", False, "0.0.0.0"),
        ("192.0.2.1", False, "0.0.0.0"),
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
    ],
)
def test_where_the_server_listens(host: str, insecure: bool, bound: str) -> None:
    with listen(DeploySettings(host=host, port=free_port(), insecure=insecure)) as public:
        assert public.getsockname()[0] == bound


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        create(tmp_path / "fed", three_nodes(), DeploySettings(port=port))
        code, _, err = call("deploy", "server", tmp_path / "fed")
    assert code == 2 and f"port = {port}: cannot be listened on: Address already in use" in err


def test_a_server_whose_host_is_not_in_dns_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_unknown_host(DeploySettings(host="nowhere.invalid"))
    assert "host = 'nowhere.invalid': is not found from this machine" in capsys.readouterr().err
    warn_of_unknown_host(DeploySettings(host="127.0.0.1"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["run", "status"])
def test_without_a_server_the_error_is_one_line(folder: DeployFolder, command: str) -> None:
    code, out, err = call("deploy", command, folder.path)
    assert (code, out) == (2, "")
    assert (
        err
        == f"motley: no server is running for {folder.path}. To start it: motley deploy server {folder.path}\n"
    )
    folder.write_secrets(f"127.0.0.1:{free_port()}")
    code, out, err = call("deploy", command, folder.path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert (
        err.startswith(f"motley: no server answers for {folder.path} (")
        and "Connection refused" in err
    )


def test_the_run_is_the_one_that_was_configured(folder: DeployFolder) -> None:
    assert folder.read_config() == three_nodes()
    app = tomllib.loads((folder.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"]["serverapp"] == "motley.cli.server_app:app"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host": "fed.example", "insecure": True}, "host = 'fed.example' should be 127.0.0.1"),
        ({"port": 0}, "port = 0: should be greater than or equal to 1"),
        ({"host": ""}, "host = '': should be the host name or the IP address"),
        ({"host": "bad_host!"}, "host = 'bad_host!': should be the host name or the IP address"),
        ({"host": "bad host"}, "host = 'bad host': should be the host name"),
        ({"host": "-a.example"}, "host = '-a.example': should be the host name"),
        ({"host": "fed.example:8443"}, "host = 'fed.example:8443': should be the host name"),
        ({"host": "300.1.1.1"}, "host = '300.1.1.1': should be the host name"),
        ({"host": "0.0.0.0"}, "they cannot reach this one"),
    ],
)
def test_rejected_settings(values: dict[str, object], said: str) -> None:
    with pytest.raises(MotleyError, match=said):
        validate(DeploySettings, values)


@pytest.mark.parametrize(
    "host", ["fed.example", "localhost", "a", "10.0.0.1", "2001:db8::1", "a" * 63 + ".example"]
)
def test_accepted_hosts(tmp_path: Path, host: str) -> None:
    folder = create(tmp_path / "fed", three_nodes(), DeploySettings(host=host))
    address = read_node(folder.nodes / "node-0" / "node.toml").superlink
    assert address == (f"[{host}]:8443" if ":" in host else f"{host}:8443")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("", "--host '': is empty"),
        ("bad_host!", "host = 'bad_host!': should be the host name or the IP address"),
    ],
)
def test_init_refuses_such_a_host_before_it_writes_anything(
    tmp_path: Path, host: str, message: str
) -> None:
    code, _, err = call("deploy", "init", tmp_path / "fed", "--host", host)
    assert code == 2 and message in err
    assert not (tmp_path / "fed").exists()


def test_init_into_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    for place, said in (
        (tmp_path / "afile", "is a file; a deployment needs a folder of its own."),
        (tmp_path / "afile" / "x", "a deployment cannot be written there: Not a directory."),
        (Path("/proc/x"), "a deployment cannot be written there: No such file or directory."),
    ):
        code, _, err = call("deploy", "init", place)
        assert (code, err) == (2, f"motley: {place}: {said}\n".replace("afile: is", "afile is"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size = 'resnet10'", "client: is required and was not given"),
        ("client = -1", "client = -1: should be greater than or equal to 0"),
        (
            "client = 0\nsize = 'a'\n[budget]\ngflops = 2",
            "size = 'a' and [budget]: set one of the two",
        ),
        (
            "client = 0\nbudget_mib = 2",
            "budget_mib = 2: this key (the weights alone, in MiB) was removed. Use",
        ),
        ("client = 0\n[budget]\nmemory_mb = 0", "budget.memory_mb = 0: should be greater than 0"),
        ("client = 0\nsise = 'a'", "unknown key 'sise'. Did you mean 'size'?"),
        ("client = ", "cannot be read"),
    ],
)
def test_rejected_node_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(MotleyError) as raised:
        read_node(file)
    assert said in str(raised.value)
    assert str(file) in str(raised.value)


def test_the_command_writes_a_folder_once(tmp_path: Path) -> None:
    path = tmp_path / "fed"
    clients = ("--set", "federation.clients=5", "--set", "federation.clients_per_round=2")
    code, out, err = call("deploy", "init", path, *clients, "--insecure")
    assert (code, err) == (0, "") and out.startswith("5 nodes, server at 127.0.0.1:8443\n")
    assert f"motley deploy node {path}/nodes/node-4" in out
    config = DeployFolder.open(path).read_config()
    assert (config.engine.name, config.server.min_fraction) == ("flower", 0.5)
    assert config.server.max_norm == "auto"
    code, out, err = call("deploy", "init", path)
    assert code == 2 and "already exists and is not empty" in err
    code, out, err = call("deploy", "status", tmp_path)
    assert code == 2 and "is no deployment: there is no deploy.toml in it" in err
