"""Which public key belongs to which client, and which keys were revoked.

`nodes/node-N/key.pub` in the server's folder is the key of client N. `revoked_keys` lists the keys
that the server no longer admits: one OpenSSH public key per line, with the name of the node as its
comment. Both survive a restart of the server.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

from motley.core.errors import MotleyError
from motley.deploy.control import EXCLUDED, Control, NoServerError
from motley.deploy.folder import DeployFolder
from motley.deploy.keys import fingerprint_of, parse_public_key, read_public_key
from motley.files import write_atomically

#: Seconds to wait for Flower's database while the server writes to it.
DATABASE_S = 30.0


@cache
def _read_key(file: Path, stamp: tuple[int, int]) -> bytes:
    return read_public_key(file)


def key_in(file: Path) -> bytes:
    """Return the public key in a file, which is parsed once as long as it does not change."""
    try:
        status = file.stat()
    except OSError as error:
        raise MotleyError(f"{file}: cannot be read: {error.strerror}.") from None
    return _read_key(file, (status.st_mtime_ns, status.st_size))


def bound_keys(folder: DeployFolder) -> dict[bytes, int]:
    """Return the client of every key, also of revoked ones."""
    clients: dict[bytes, int] = {}
    for client, file in folder.public_keys().items():
        key = key_in(file)
        if key in clients:
            raise MotleyError(
                f"{file}: is also the key of client {clients[key]}. Every client needs its own: "
                f"motley deploy keygen makes one."
            )
        clients[key] = client
    return clients


def revoked_keys(folder: DeployFolder) -> dict[bytes, str]:
    """Return the revoked keys, and the node that each of them belonged to."""
    return {key: comment for key, (comment, _) in _read_revoked(folder).items()}


def _read_revoked(folder: DeployFolder) -> dict[bytes, tuple[str, str]]:
    """Return the comment and the line of every revoked key."""
    try:
        text = folder.revoked_keys.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        # Without the list, revoked keys would be admitted again.
        raise MotleyError(f"{folder.revoked_keys}: cannot be read: {error}.") from None
    keys = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            key = parse_public_key(line.encode(), f"{folder.revoked_keys}, line {number}")
            keys[key] = (" ".join(line.split()[2:]), line)
    return keys


def revoked_clients(folder: DeployFolder) -> set[int]:
    """Return the clients whose present keys are revoked."""
    revoked = revoked_keys(folder)
    if not revoked:
        return set()
    return {client for key, client in bound_keys(folder).items() if key in revoked}


def admitted_keys(folder: DeployFolder) -> dict[bytes, int]:
    """Return the client of every key that the server should admit."""
    revoked = revoked_keys(folder)
    return {key: client for key, client in bound_keys(folder).items() if key not in revoked}


# ---- changes


def revoke(folder: DeployFolder, client: int) -> str:
    """Revoke the key of a client; return the fingerprint of the key."""
    file = _key_file(folder, client)
    if not file.exists():
        raise MotleyError(f"client {client} has no key: there is no {file}.")
    key = key_in(file)
    if key in revoked_keys(folder):
        raise MotleyError(f"client {client}: its key is revoked already.")
    _add_revoked(folder, client, file.read_bytes())
    return fingerprint_of(file.read_bytes())


def admit(folder: DeployFolder, client: int, new: Path | None) -> str:
    """Bind a key to a client, and no longer count it as revoked; return its fingerprint.

    Without `new`, the key is the one in the client's folder. With it, that file's key replaces the
    client's present key, which is revoked.
    """
    file = _key_file(folder, client)
    if new is None and not file.exists():
        raise MotleyError(
            f"client {client} has no key yet: --key should be the key.pub that "
            f"`motley deploy keygen` made on its machine."
        )
    source = file if new is None else new
    content = _read_bytes(source)
    key = parse_public_key(content, str(source))
    node = f"node-{client}"
    bound_to = bound_keys(folder).get(key, client)
    revoked_as = revoked_keys(folder).get(key, node)
    if bound_to != client or revoked_as != node:
        owner = f"client {bound_to}" if bound_to != client else revoked_as
        raise MotleyError(
            f"{source}: is the key of {owner}. Every client needs its own: motley deploy keygen "
            "makes one."
        )
    present_key = key_in(file) if file.exists() else None
    if present_key != key:
        if present_key is not None and present_key not in revoked_keys(folder):
            _add_revoked(folder, client, file.read_bytes())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    _remove_revoked(folder, key)
    return fingerprint_of(content)


def _key_file(folder: DeployFolder, client: int) -> Path:
    """Return the place of a client's key, if there is such a client and if there are keys."""
    if folder.read_settings().insecure:
        raise MotleyError(
            f"{folder.path} has no keys: it was made with --insecure, for tests on one machine."
        )
    clients = folder.read_config().federation.clients
    if not 0 <= client < clients:
        raise MotleyError(
            f"CLIENT = {client}: should be one of 0 to {clients - 1}; "
            f"federation.clients = {clients}."
        )
    return folder.nodes / f"node-{client}" / "key.pub"


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise MotleyError(f"{file}: cannot be read: {error.strerror}.") from None


def _add_revoked(folder: DeployFolder, client: int, public_key: bytes) -> None:
    key_type, key, *_ = public_key.decode().split()
    lines = [line for _, line in _read_revoked(folder).values()]
    _write_revoked(folder, [*lines, f"{key_type} {key} node-{client}"])


def _remove_revoked(folder: DeployFolder, key: bytes) -> None:
    listed = _read_revoked(folder)
    if key in listed:
        _write_revoked(folder, [line for other, (_, line) in listed.items() if other != key])


def _write_revoked(folder: DeployFolder, lines: list[str]) -> None:
    write_atomically(folder.revoked_keys, "".join(f"{line}\n" for line in lines).encode())


# ---- the running server


def register_nodes(folder: DeployFolder, control: Control) -> None:
    """Admit exactly the nodes whose public keys are in the folder and not revoked."""
    if folder.read_settings().insecure:
        return
    wanted = admitted_keys(folder)
    revoked = revoked_keys(folder)
    known = {bytes(node.public_key): node for node in control.all_nodes()}
    for key, node in known.items():
        if key not in wanted and node.status != EXCLUDED:
            control.unregister(node.node_id)
            why = "its key is revoked"
            if key not in revoked:
                why = f"its key.pub is not under {folder.nodes}"
            print(f"node {node.name or node.node_id} is no longer admitted: {why}", flush=True)
    for key, client in wanted.items():
        if key in known and known[key].status == EXCLUDED:
            forget_excluded(folder, key)
        if key not in known or known[key].status == EXCLUDED:
            control.register(key, f"node-{client}")


def forget_excluded(folder: DeployFolder, key: bytes) -> None:
    """Delete a node that is no longer admitted from Flower's list.

    Flower keeps the keys of such nodes, never admits them again, and has no call that changes this.
    """
    try:
        with closing(sqlite3.connect(folder.database, timeout=DATABASE_S)) as database, database:
            database.execute(
                "DELETE FROM node WHERE public_key = ? AND status = ?", (key, EXCLUDED)
            )
    except sqlite3.Error as error:
        raise MotleyError(f"{folder.database}: cannot be changed: {error}.") from None


class FolderRegistrar:
    """Tells a run which client a node's key is bound to (flower/nodes.py)."""

    def __init__(self, folder: DeployFolder) -> None:
        self.folder = folder
        self.control = Control(folder)
        #: Flower's id of a node -> its key. A node's key never changes.
        self._keys: dict[int, bytes] = {}

    def clients_of(self, nodes: Collection[int]) -> Mapping[int, int | None]:
        """Return the client that each node's key is bound to; None if it is bound to no client."""
        if set(nodes) - self._keys.keys():
            self._ask_server()
        bound = bound_keys(self.folder)
        return {node: bound.get(self._keys[node]) for node in nodes if node in self._keys}

    def _ask_server(self) -> None:
        try:
            listed = self.control.all_nodes()
        except NoServerError:
            return  # a busy server: the next poll asks again, and no node is admitted meanwhile
        self._keys = {node.node_id: bytes(node.public_key) for node in listed}

    def revoked(self) -> Collection[int]:
        """Return the clients whose keys were revoked."""
        return revoked_clients(self.folder)
