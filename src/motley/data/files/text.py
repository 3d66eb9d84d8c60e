"""Plain text as windows of characters, for predicting the next character.

One file is one stream of text. A folder of .txt files has one client per file, named after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.opening import lines_of, open_text

ENDINGS = frozenset({".txt", ".text"})
#: The number of a character that is not in the training text, and of padding.
UNKNOWN = 0


@dataclass(frozen=True, eq=False)
class TextFile:
    """The text of one file."""

    path: Path
    text: str

    @property
    def client(self) -> str:
        """The client's name: the file's name without its ending."""
        return self.path.stem


def read_texts(path: Path, encoding: str = "auto") -> list[TextFile]:
    """Return one text file, or all text files of a folder, with their texts."""
    if not path.is_dir():
        return [TextFile(path, _read(path, encoding))]
    files = text_files(path)
    if not files:
        raise MotleyError(f"{path}: there are no text files in it (files ending in .txt).")
    return [TextFile(file, _read(file, encoding)) for file in files]


def text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder, sorted."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise MotleyError(f"{folder} cannot be read: {error}.") from None
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    return [entry for entry in visible if entry.suffix.lower() in ENDINGS]


def _read(path: Path, encoding: str) -> str:
    with open_text(path, encoding) as file:
        text = "".join(lines_of(file, path))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def vocabulary_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the characters that occur, sorted. Character i has the number i + 1."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    return tuple(sorted(characters))


def token_numbers(text: str, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Return the number of each character of a text; 0 if it is not in the vocabulary."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    known = np.array([ord(character) for character in vocabulary], dtype=np.uint32)
    position = np.searchsorted(known, points)
    position = np.minimum(position, max(len(known) - 1, 0))
    if not len(known):
        return np.full(len(points), UNKNOWN, dtype=np.int64)
    return np.where(known[position] == points, position + 1, UNKNOWN).astype(np.int64)


def windows_of(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into windows that do not overlap.

    Returns inputs and targets of shape (N, length). A target is the token after its input. Tokens
    at the end that do not fill a window are not used.
    """
    count = max(0, (len(tokens) - 1) // length)
    used = count * length
    inputs = tokens[:used].reshape(count, length)
    targets = tokens[1 : used + 1].reshape(count, length)
    return inputs, targets


def cut_or_pad(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the first `length` tokens, padded at the end."""
    padded = np.full(length, UNKNOWN, dtype=np.int64)
    padded[: min(length, len(tokens))] = tokens[:length]
    return padded
