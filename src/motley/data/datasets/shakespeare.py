"""LEAF's Shakespeare: the next character in the lines of one role of one play.

An example is 80 characters of a role's text; its target is the character that follows. There are 80
classes: LEAF's 79 characters with LEAF's numbers 1 to 79, and 0 for any other character. Each role
is one client. Two forms are read:

- LEAF's JSON files, in the folders `train` and `test` or only in `all_data`: `users` lists the
  roles, and `user_data[ROLE]` has `x`, strings of 80 characters, and `y`, the next characters;
- one file `shakespeare.json` with the text of every role: `{"ROLE": {"text": "..."}}`.

If the files are not divided, they are divided as LEAF does: the first 80 % of a role's examples are
for training, the next 79 are left out, because they overlap with them, and the rest is the test
part. Roles without any test example are left out.

Neighbouring windows share 79 of their characters, and there are 4.2 million of them. A limit per
role (`data.max_per_client`) takes windows at equal distances, before they are copied out of the
text.

`shakespeare-every` has the same examples, but a training target at each of the 80 positions: the
character that follows it. A step then learns from 80 times as many targets at about the same cost,
which makes short runs useful. The test part is LEAF's, so accuracies of both can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout
from motley.data.natural import equally_spaced
from motley.limits import bounded
from motley.models.inputs import TokenShape

#: LEAF's characters. Its table starts with the newline, which no text has: 0 is "unknown" here.
CHARACTERS = " !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = 0
VOCABULARY = 1 + len(CHARACTERS)
LENGTH = 80
TRAIN_FRACTION = 0.8
FOLDERS = ("shakespeare", "shakespeare/data")
LEAF_LAYOUT = FileLayout("shakespeare", ("train", "test"), folders=FOLDERS, holds_folders=True)
WHOLE_LEAF_LAYOUT = FileLayout("shakespeare", ("all_data",), folders=FOLDERS, holds_folders=True)
TEXT_LAYOUT = FileLayout("shakespeare", ("shakespeare.json",), folders=("shakespeare", ""))
#: LEAF's own all_data.json has about 400 MB.
MAX_JSON_BYTES = 1_000_000_000


class _Role(NamedTuple):
    """The examples of one role: windows (N, 80) and next characters (N), both uint8."""

    windows: np.ndarray
    targets: np.ndarray

    def rows(self, chosen: np.ndarray) -> _Role:
        return _Role(self.windows[chosen], self.targets[chosen])


@DATASETS.register(
    "shakespeare",
    "the next of 80 characters in the lines of 1,129 roles of Shakespeare's plays; LEAF's JSON "
    "files, or shakespeare.json with the roles' texts",
    paper="Caldas et al. 2018 (LEAF), arXiv:1812.01097",
)
def load(source: DataSource) -> Dataset:
    """Read the examples of all roles, with one target each."""
    return _load(source, "shakespeare")


@DATASETS.register(
    "shakespeare-every",
    "the same files as shakespeare, for models with outputs at every position: training targets at "
    "all 80 positions, and the test part of shakespeare",
    paper="Caldas et al. 2018 (LEAF), arXiv:1812.01097",
)
def load_every(source: DataSource) -> Dataset:
    """Read the examples of all roles; those for training with a target at every position."""
    dataset = _load(source, "shakespeare-every")
    train = dataset.train
    following = np.concatenate([train.inputs[:, 1:], train.targets[:, None]], axis=1)
    return replace(dataset, train=replace(train, targets=following))


def _load(source: DataSource, name: str) -> Dataset:
    """Read LEAF's divided files, its undivided ones or the texts, whichever is there."""
    source.refuse_path(name)
    root = source.root
    if LEAF_LAYOUT.folder_in(root) is not None:
        train_folder, test_folder = LEAF_LAYOUT.find(root)
        train = dict(_read_leaf_folder(train_folder))
        test = dict(_read_leaf_folder(test_folder))
    else:
        if WHOLE_LEAF_LAYOUT.folder_in(root) is not None:
            (where,) = WHOLE_LEAF_LAYOUT.find(root)
            roles = dict(_read_leaf_folder(where))
        else:
            (where,) = TEXT_LAYOUT.find(root)
            roles = dict(_read_texts(where))
        train, test = _divided(roles)
        if not train:
            raise MotleyError(f"{where}: no role is long enough for a test part.")
    # Roles are numbered in the order of their names. A role that is only in the test part is a
    # client too, after those that train.
    names = sorted(train) + sorted(set(test) - set(train))
    return Dataset(
        name,
        _combined(train, names, source.max_per_client),
        _combined(test, names, source.max_per_client),
        classes=VOCABULARY,
        task="next-token",
        class_names=("unknown", *CHARACTERS),
    )


def _divided(roles: dict[str, _Role]) -> tuple[dict[str, _Role], dict[str, _Role]]:
    """Divide each role's examples as LEAF does. Nothing is copied."""
    train, test = {}, {}
    for name, role in roles.items():
        count = len(role.targets)
        train_count = max(1, int(TRAIN_FRACTION * count))
        first_test = train_count + LENGTH - 1
        if first_test < count:
            train[name] = _Role(role.windows[:train_count], role.targets[:train_count])
            test[name] = _Role(role.windows[first_test:], role.targets[first_test:])
    return train, test


def _combined(roles: dict[str, _Role], names: list[str], limit: int) -> Examples:
    """Return the examples of all roles, at most `limit` of each (0: no limit)."""
    windows, targets, clients = [], [], []
    for client, name in enumerate(names):
        if name not in roles:
            continue
        role = roles[name]
        if limit and len(role.targets) > limit:
            role = role.rows(equally_spaced(len(role.targets), limit))
        windows.append(role.windows)
        targets.append(role.targets)
        clients.append(np.full(len(role.targets), client, dtype=np.int64))
    # Windows stay bytes: all of them are 0.3 GB, and would be 2.7 GB as int64.
    return Examples(
        np.concatenate(windows),
        np.concatenate(targets).astype(np.int64),
        np.concatenate(clients),
        TokenShape(LENGTH, VOCABULARY),
    )


# ---- characters


def _code_table() -> np.ndarray:
    table = np.full(128, UNKNOWN, dtype=np.uint8)
    for number, character in enumerate(CHARACTERS, start=1):
        table[ord(character)] = number
    return table


CODES = _code_table()


def encode(text: str) -> np.ndarray:
    """Return the number of every character (uint8)."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    return np.where(points < 128, CODES[np.minimum(points, 127)], np.uint8(UNKNOWN))


# ---- files


def _read_texts(path: Path) -> Iterator[tuple[str, _Role]]:
    """Yield the roles of a file with texts. Their windows are views of the text."""
    content = _parse_json(path)
    if not isinstance(content, dict) or not content:
        raise MotleyError(f"{path} must be a table with one entry per role.")
    for name, entry in content.items():
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise MotleyError(f"{path}: role {name!r} has no 'text'.")
        if len(text) > LENGTH:
            codes = encode(text)
            windows = np.lib.stride_tricks.sliding_window_view(codes[:-1], LENGTH)
            yield name, _Role(windows, codes[LENGTH:])


def _read_leaf_folder(folder: Path) -> Iterator[tuple[str, _Role]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise MotleyError(f"{folder}: there are no .json files in it.")
    names: set[str] = set()
    for file in files:
        for name, role in _read_leaf_file(file):
            if name in names:
                raise MotleyError(f"{file}: the role {name!r} occurs twice.")
            names.add(name)
            yield name, role
    if not names:
        raise MotleyError(f"{folder}: there are no roles in it.")


def _read_leaf_file(path: Path) -> Iterator[tuple[str, _Role]]:
    content = _parse_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
        raise MotleyError(f"{path} is not a file of LEAF: it has no table 'user_data'.")
    users, user_data = content.get("users", list(content["user_data"])), content["user_data"]
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise MotleyError(f"{path}: 'users' must be a list of names.")
    if sorted(users) != sorted(user_data):
        raise MotleyError(f"{path}: 'users' and 'user_data' name different roles.")
    for name, samples in user_data.items():
        where = f"{path}: role {name!r}"
        if not isinstance(samples, dict) or "x" not in samples or "y" not in samples:
            raise MotleyError(f"{where} has no 'x' and 'y'.")
        windows = _encode_all(samples["x"], LENGTH, f"{where}: 'x'")
        targets = _encode_all(samples["y"], 1, f"{where}: 'y'")[:, 0]
        if len(windows) != len(targets):
            raise MotleyError(f"{where} has {len(windows)} texts, but {len(targets)} targets.")
        if len(targets):
            yield name, _Role(windows, targets)


def _encode_all(texts: object, length: int, where: str) -> np.ndarray:
    """Return a list of strings of one length as an array (N, length)."""
    if not isinstance(texts, list):
        raise MotleyError(f"{where} must be a list of strings.")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            raise MotleyError(f"{where}: entry {number} must be a string of length {length}.")
    return encode("".join(texts)).reshape(-1, length)


def _parse_json(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise MotleyError(f"{path} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read.")
        # Empty lists take 20 times as much memory as text.
        with bounded(f"{path}: its content"):
            return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None
