"""Keys are made on nodes, bound to clients, revoked and admitted again; files are their owner's alone."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr")

from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.superlink.federation import NoOpFederationManager

from motley.cli.server_app import registrar_of
from motley.core.errors import MotleyError
from motley.deploy.commands import describe_missing, synchronized, warn_of_private_keys
from motley.deploy.control import EXCLUDED, Control, NoServerError
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.deploy.identity import (
    FolderRegistrar,
    admit,
    admitted_keys,
    bound_keys,
    forget_excluded,
    register_nodes,
    revoke,
    revoked_clients,
)
from motley.deploy.keys import fingerprint_of, make_node_key, read_public_key
from motley.deploy.lock import only_one
from motley.deploy.node import check, private_paths
from motley.deploy.permissions import files_in, private_files, restrict_access
from motley.deploy.status import node_table
from motley.flower.settings import read_node
from tests.cli.conftest import call
from tests.flower.grid import three_nodes
from tests.flower.test_status import Registry, control, shown

REMOTE = DeploySettings(host="fed.example", port=9000)


@pytest.fixture
def folder(tmp_path: Path) -> DeployFolder:
    """A deployment whose nodes are on this machine and have their keys."""
    return create(tmp_path / "fed", three_nodes(), DeploySettings(port=9000))


@pytest.fixture
def remote(tmp_path: Path) -> DeployFolder:
    """A deployment whose nodes are elsewhere and make their keys themselves."""
    return create(tmp_path / "fed", three_nodes(), REMOTE)


def public(folder: DeployFolder, client: int) -> Path:
    return folder.nodes / f"node-{client}" / "key.pub"


def new_key(place: Path) -> Path:
    """Make a key pair in a new folder, and return the public half."""
    place.mkdir()
    make_node_key(place)
    return place / "key.pub"


# ---- made on the node


def test_no_private_key_of_a_remote_node_is_made_on_the_server(remote: DeployFolder) -> None:
    assert not list(remote.nodes.rglob("key*"))
    assert sorted(file.name for file in (remote.nodes / "node-1").iterdir()) == [
        "ca.crt",
        "node.toml",
    ]


@pytest.mark.parametrize(
    ("host", "keys", "made"),
    [
        ("127.0.0.1", (), True),
        ("127.0.0.1", ("--keys", "nodes"), False),
        ("fed.example", (), False),
        ("fed.example", ("--keys", "here"), True),
    ],
)
def test_init_makes_keys_here_if_the_nodes_are_here_or_if_asked(
    tmp_path: Path, host: str, keys: tuple[str, ...], made: bool
) -> None:
    path = tmp_path / "fed"
    code, out, err = call("deploy", "init", path, "--host", host, *keys)
    assert (code, err) == (0, "")
    assert (path / "nodes" / "node-0" / "key").exists() == made
    assert ("motley deploy keygen node-N" in out) != made
    assert (f"motley deploy admit {path} N --key key.pub" in out) != made
    assert (f"motley deploy handover {path}" in out) == (made and host != "127.0.0.1")


def test_a_node_makes_its_key_and_the_server_admits_it(
    remote: DeployFolder, tmp_path: Path
) -> None:
    place = tmp_path / "node-1"
    shutil.copytree(remote.nodes / "node-1", place)
    code, out, err = call("deploy", "keygen", place)
    assert (code, err) == (0, "")
    fingerprint = fingerprint_of((place / "key.pub").read_bytes())
    assert f"made a key pair, {fingerprint}" in out and f"send {place}/key.pub to the server" in out
    assert "motley deploy admit DIR 1 --key key.pub" in out
    code, out, err = call("deploy", "admit", remote.path, 1, "--key", place / "key.pub")
    assert (code, err) == (0, "")
    assert out == (
        f"client 1: the key {fingerprint} is admitted; no server is running, and the next one "
        "will know it\n"
    )
    assert bound_keys(remote) == {read_public_key(place / "key.pub"): 1}
    assert not (remote.nodes / "node-1" / "key").exists()
    # A second pair is made only if asked for.
    code, _, err = call("deploy", "keygen", place)
    assert code == 2 and "key: exists already. With --replace a new key takes its place" in err
    assert call("deploy", "keygen", place, "--replace").code == 0
    assert fingerprint_of((place / "key.pub").read_bytes()) != fingerprint


def test_a_fingerprint_is_what_ssh_keygen_prints(tmp_path: Path) -> None:
    file = new_key(tmp_path / "node")
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    done = subprocess.run(
        ["ssh-keygen", "-l", "-f", file], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[1] == fingerprint_of(file.read_bytes())


def test_the_first_start_of_a_node_makes_its_key(
    remote: DeployFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = remote.nodes / "node-1" / "node.toml"
    check(read_node(file), file)
    said = capsys.readouterr().out
    assert "client 1: made a key pair, SHA256:" in said and "motley deploy admit DIR 1" in said
    key = (file.parent / "key").read_bytes()
    check(read_node(file), file)
    assert (file.parent / "key").read_bytes() == key
    assert "made a key pair" not in capsys.readouterr().out


def test_a_node_whose_private_key_is_elsewhere_makes_no_other(folder: DeployFolder) -> None:
    folder.private_key(1).unlink()
    code, _, err = call("deploy", "node", folder.nodes / "node-1")
    assert code == 2 and "key: there is no such file. It is the private key that belongs to" in err
    assert not folder.private_key(1).exists()


# ---- handed over


def test_hand_over_deletes_private_keys_only(folder: DeployFolder) -> None:
    code, out, err = call("deploy", "handover", folder.path, 1)
    assert (code, err, out) == (0, "", "client 1: its private key is no longer on this machine\n")
    assert [folder.private_key(client).exists() for client in range(3)] == [True, False, True]
    assert call("deploy", "handover", folder.path).out.count("no longer on this machine") == 2
    assert not any(folder.private_key(client).exists() for client in range(3))
    assert len(admitted_keys(folder)) == 3
    code, _, err = call("deploy", "handover", folder.path, 1)
    assert code == 2 and "there is no private key of client 1 here" in err


def test_hand_over_keeps_a_key_that_is_in_use_or_has_no_public_half(folder: DeployFolder) -> None:
    with only_one(folder.nodes / "node-1" / "node.lock"):
        code, _, err = call("deploy", "handover", folder.path, 1)
    assert code == 2 and "a node on this machine is running with this key" in err
    public(folder, 2).unlink()
    code, _, err = call("deploy", "handover", folder.path, 2)
    assert code == 2 and "its public half key.pub is missing" in err
    assert folder.private_key(1).exists() and folder.private_key(2).exists()


def test_a_server_warns_of_private_keys_of_remote_nodes(
    tmp_path: Path, folder: DeployFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_private_keys(folder)
    assert capsys.readouterr().err == ""
    elsewhere = create(tmp_path / "other", three_nodes(), REMOTE, keys="here")
    elsewhere.private_key(1).unlink()
    warn_of_private_keys(elsewhere)
    said = capsys.readouterr().err
    assert "the private keys of clients 0, 2 are on this machine" in said
    assert f"motley deploy handover {elsewhere.path}" in said


# ---- revoked, replaced, admitted again


def test_a_revoked_key_stays_out_and_can_be_admitted_again(folder: DeployFolder) -> None:
    key = read_public_key(public(folder, 1))
    code, out, _ = call("deploy", "revoke", folder.path, 1)
    assert code == 0 and "is revoked; no server is running, and the next one will not" in out
    assert revoked_clients(DeployFolder(folder.path)) == {1}
    assert sorted(admitted_keys(folder).values()) == [0, 2]
    assert folder.revoked_keys.read_text().endswith(" node-1\n")
    code, _, err = call("deploy", "revoke", folder.path, 1)
    assert code == 2 and "client 1: its key is revoked already" in err
    assert call("deploy", "admit", folder.path, 1).code == 0
    assert admitted_keys(folder)[key] == 1 and revoked_clients(folder) == set()


def test_a_replaced_key_is_revoked(folder: DeployFolder, tmp_path: Path) -> None:
    old = read_public_key(public(folder, 1))
    file = new_key(tmp_path / "new")
    admit(folder, 1, file)
    assert admitted_keys(folder)[read_public_key(file)] == 1
    assert old not in admitted_keys(folder)
    assert revoked_clients(folder) == set(), "the client has a key that is admitted"
    admit(folder, 1, file)
    assert folder.revoked_keys.read_text().count("node-1") == 1


def test_a_key_belongs_to_one_client(folder: DeployFolder, tmp_path: Path) -> None:
    for client in (0, 2):
        with pytest.raises(MotleyError, match=r"key.pub: is the key of client 1. Every client"):
            admit(folder, client, public(folder, 1))
    # Nor does a replaced key of one client become the key of another.
    old = tmp_path / "old.pub"
    shutil.copy(public(folder, 1), old)
    admit(folder, 1, new_key(tmp_path / "new"))
    with pytest.raises(MotleyError, match=r"old.pub: is the key of node-1. Every client"):
        admit(folder, 2, old)
    shutil.copy(old, public(folder, 2))
    with pytest.raises(MotleyError, match=r"node-2/key.pub: is the key of node-1. Every client"):
        admit(folder, 2, None)
    shutil.copy(public(folder, 0), public(folder, 2))
    with pytest.raises(MotleyError, match=r"node-2/key.pub: is also the key of client 0"):
        bound_keys(folder)


@pytest.mark.parametrize("command", ["admit", "revoke"])
def test_wrong_clients_and_keys_are_named(
    folder: DeployFolder, tmp_path: Path, command: str
) -> None:
    code, _, err = call("deploy", command, folder.path, 3)
    assert code == 2 and "CLIENT = 3: should be one of 0 to 2; federation.clients = 3." in err
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    code, _, err = call("deploy", command, plain.path, 0)
    assert code == 2 and "has no keys: it was made with --insecure" in err
    public(folder, 1).unlink()
    code, _, err = call("deploy", command, folder.path, 1)
    assert code == 2 and "client 1 has no key" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"ssh-ed25519 AAAA", "is not a public key"),
        (b"\xff\xfe", "is not a public key"),
    ],
)
def test_admit_takes_public_keys_only(
    folder: DeployFolder, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "mine.pub"
    if content is not None:
        file.write_bytes(content)
    before = public(folder, 1).read_bytes()
    code, _, err = call("deploy", "admit", folder.path, 1, "--key", file)
    assert code == 2 and f"{file}: {said}" in err and "Traceback" not in err
    assert public(folder, 1).read_bytes() == before


def test_admit_refuses_a_private_key(folder: DeployFolder, tmp_path: Path) -> None:
    """Nor is it copied into the place of the public one."""
    new_key(tmp_path / "new")
    code, _, err = call("deploy", "admit", folder.path, 1, "--key", tmp_path / "new" / "key")
    assert code == 2 and "key: is not a public key" in err
    assert b"PRIVATE" not in public(folder, 1).read_bytes()


def test_an_unreadable_list_of_revoked_keys_stops_the_server(folder: DeployFolder) -> None:
    folder.revoked_keys.write_text("\nnot a key\n")
    with pytest.raises(MotleyError, match=r"revoked_keys, line 2: is not a public key"):
        register_nodes(folder, control())


def test_a_running_server_admits_exactly_the_keys_that_are_not_revoked(
    folder: DeployFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry()
    register_nodes(folder, cast(Control, registry))
    assert [node.name for node in registry.nodes()] == ["node-0", "node-1", "node-2"]
    revoke(folder, 1)
    register_nodes(folder, cast(Control, registry))
    assert [node.name for node in registry.nodes()] == ["node-0", "node-2"]
    assert "node node-1 is no longer admitted: its key is revoked" in capsys.readouterr().out
    admit(folder, 1, new_key(tmp_path / "new"))
    register_nodes(folder, cast(Control, registry))
    assert [node.name for node in registry.nodes()] == ["node-0", "node-2", "node-1"]
    assert registry.all_nodes()[1].status == EXCLUDED, "the revoked key is not registered again"


def test_a_revoked_key_is_registered_again_when_it_is_admitted(
    folder: DeployFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    register_nodes(folder, cast(Control, registry))
    revoke(folder, 1)
    register_nodes(folder, cast(Control, registry))
    forgotten: list[bytes] = []
    monkeypatch.setattr(
        "motley.deploy.identity.forget_excluded", lambda _, key: forgotten.append(key)
    )
    register_nodes(folder, cast(Control, registry))
    assert forgotten == []
    admit(folder, 1, None)
    register_nodes(folder, cast(Control, registry))
    assert forgotten == [read_public_key(public(folder, 1))]
    assert [node.name for node in registry.nodes()] == ["node-0", "node-2", "node-1"]


def test_flower_registers_a_forgotten_key_again(folder: DeployFolder) -> None:
    """With Flower's own database, which refuses the key before."""
    key = read_public_key(public(folder, 1))
    state = SqlLinkState(str(folder.database), NoOpFederationManager(), cast(Any, None))
    state.initialize()
    node = state.create_node("owner", "name", key, 0)
    forget_excluded(folder, key)
    assert state.get_node_id_by_public_key(key) == node, "only excluded nodes are forgotten"
    state.delete_node("owner", node)
    with pytest.raises(ValueError, match="already in use"):
        state.create_node("owner", "name", key, 0)
    forget_excluded(folder, key)
    assert state.create_node("owner", "name", key, 0) != node


def test_a_database_that_cannot_be_changed_is_named(folder: DeployFolder) -> None:
    sqlite3.connect(folder.database).close()
    with pytest.raises(MotleyError, match=r"state.db: cannot be changed: no such table: node"):
        forget_excluded(folder, b"")


def test_a_server_that_was_killed_counts_as_none(folder: DeployFolder) -> None:
    assert not synchronized(folder)
    folder.write_secrets("127.0.0.1:9")
    assert not synchronized(folder)


def test_the_clients_without_an_admitted_key_are_named(
    folder: DeployFolder, tmp_path: Path
) -> None:
    public(folder, 0).unlink()
    revoke(folder, 1)
    assert describe_missing(folder, control(), 3) == (
        "3 of 3 nodes: 0, 1, 2; no key was admitted for 0 (motley deploy admit); "
        "the key was revoked of 1"
    )
    rows = shown(node_table(folder, []))
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("0", "node-0", "no key yet"),
        ("1", "node-1", "key revoked"),
    ]


# ---- what a run asks


class Listing(Registry):
    """A registry that can be out of reach, and counts how often it was asked."""

    def __init__(self, *nodes: NodeInfo) -> None:
        super().__init__(*nodes)
        self.reachable = True
        self.asked = 0

    def all_nodes(self) -> list[NodeInfo]:
        self.asked += 1
        if not self.reachable:
            raise NoServerError("busy")
        return super().all_nodes()


@pytest.fixture
def registrar(folder: DeployFolder) -> Iterator[tuple[FolderRegistrar, Listing]]:
    folder.write_secrets("127.0.0.1:9")
    found = registrar_of(folder.path)
    assert isinstance(found, FolderRegistrar)
    listing = Listing()
    found.control = cast(Control, listing)
    yield found, listing


def test_a_run_learns_clients_by_the_keys_of_their_nodes(
    folder: DeployFolder, registrar: tuple[FolderRegistrar, Listing], tmp_path: Path
) -> None:
    keys, listing = registrar
    listing.register(read_public_key(public(folder, 1)), "any name")
    listing.register(read_public_key(new_key(tmp_path / "new")), "node-0")
    assert keys.clients_of([1, 2, 3]) == {1: 1, 2: None}
    asked = listing.asked
    keys.clients_of([1, 2])
    assert listing.asked == asked, "a known node is not looked up again"
    listing.reachable = False
    assert keys.clients_of([1, 3]) == {1: 1}
    assert keys.revoked() == set()
    revoke(folder, 1)
    assert keys.revoked() == {1}


def test_a_deployment_without_keys_has_no_registrar(tmp_path: Path) -> None:
    assert registrar_of(tmp_path) is None
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    assert registrar_of(plain.path) is None


# ---- permissions


def modes(paths: Iterator[Path]) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}


@pytest.fixture
def permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("permissive")
def test_a_deployment_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = create(tmp_path / "fed", three_nodes(), DeploySettings())
    for path, mode in modes(files_in(folder.path)).items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o666, "the umask is put back"


@pytest.mark.usefixtures("permissive")
def test_a_node_takes_access_to_its_files_away_and_leaves_its_data_alone(
    folder: DeployFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder.nodes / "node-1"
    file = place / "node.toml"
    with private_files():
        check(read_node(file), file)
    assert stat.S_IMODE((place / "memory").stat().st_mode) == 0o700
    (place / "memory" / "client_states.sqlite").touch()
    (place / "node.log").touch()
    (place / "mine.npz").touch()
    for name in ("node.toml", "key", "memory"):
        (place / name).chmod(0o777)
    place.chmod(0o755)
    restrict_access(private_paths(read_node(file), file), place)
    found = modes(files_in(place))
    assert found.pop(place / "mine.npz") == 0o666
    assert all(not mode & 0o077 for mode in found.values()), found
    said = capsys.readouterr().err
    assert said.startswith(f"motley: {place}: other users had access to 6 files and folders")
    restrict_access(private_paths(read_node(file), file), place)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("permissive")
def test_a_memory_folder_elsewhere_is_warned_of(
    folder: DeployFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.nodes / "node-1" / "node.toml"
    shared = tmp_path / "shared"
    shared.mkdir()
    node = read_node(file).model_copy(update={"memory": str(shared)})
    list(private_paths(node, file))
    assert f"motley: {shared}: other users have access to this folder" in capsys.readouterr().err
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777


def test_a_shared_folder_and_links_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "link").symlink_to(shared)
    restrict_access([shared, tmp_path / "link", tmp_path / "gone"], tmp_path)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert "and this cannot be changed here" in capsys.readouterr().err
