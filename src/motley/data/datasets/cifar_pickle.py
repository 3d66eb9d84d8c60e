"""Read the pickled batches of CIFAR-10 and CIFAR-100 without Python's unpickler.

A pickle is a program for a small stack machine, and these files are copied from one person to the
next. Restricting the names that Python's unpickler looks up does not make it safe: `numpy.ndarray`
called with an object dtype takes pointers from the file, a memo index of 2**28 allocates gigabytes,
and nested tuples overflow the C stack when they are hashed. So this module interprets the files
itself, with only the few opcodes that such a batch consists of:

- Globals are never imported. The known ones are markers, and calling a marker runs a function of
  this module.
- The only arrays are of unsigned bytes. They are made by `numpy.frombuffer`, after checking that
  the shape matches the number of bytes.
- Every operation creates at most one small object or copies bytes that are in the file. The file's
  size and the number of operations are limited, and with them the memory.
- Nothing recurses into nested values: keys of dicts must be strings, and no value is hashed,
  compared or printed.

Protocols 2 to 5 are supported. Python 2 wrote the original release with protocol 2; people who
load and save it again with Python 3 produce the others.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import Examples, make_examples

#: Twice as many as the largest file needs, which is CIFAR-100's training part as Python 3 writes it
#: with protocol 2.
MAX_OPERATIONS = 1_000_000


def read_cifar_examples(path: Path, label_key: str, classes: int, max_bytes: int) -> Examples:
    """Return the images and labels of a pickled file, with channels last.

    The file stores an image as a row of 1,024 red, then 1,024 green, then 1,024 blue bytes.
    """
    batch = read_pickled_batch(path, max_bytes)
    for key in ("data", label_key):
        if key not in batch:
            raise MotleyError(f"{path} is not a batch of this data set: it has no {key!r}.")
    data, labels = batch["data"], batch[label_key]
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072:
        is_array = isinstance(data, np.ndarray)
        actual = f"{data.dtype} {data.shape}" if is_array else type(data).__name__
        raise MotleyError(f"{path}: 'data' must be bytes of shape (N, 3072), not {actual}.")

    def is_label(value: object) -> bool:
        # `type(...) is int` and not `isinstance`, which would accept True and False.
        return type(value) is int and 0 <= value < classes

    if not isinstance(labels, list) or not all(map(is_label, labels)):
        raise MotleyError(
            f"{path}: {label_key!r} must be a list of whole numbers in 0..{classes - 1}."
        )
    images = np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return make_examples(images, np.array(labels, dtype=np.int64), classes, path)


def read_pickled_batch(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the dict in a pickled batch: strings, integers, lists and arrays of unsigned bytes.

    Keys are returned as `str`, whether the file has them as text or as bytes. Files larger than
    `max_bytes` are rejected without reading them.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise MotleyError(
                f"{path} has {size:,} bytes; a batch of this data set has at most {max_bytes:,}."
            )
        raw = path.read_bytes()
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    try:
        batch = _Interpreter(raw).run()
    except _RefusedError as error:
        raise MotleyError(
            f"{path}: refused to load {error}. Nothing was run; do not trust this file."
        ) from None
    except _DamagedError as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None
    if not isinstance(batch, dict):
        raise MotleyError(
            f"{path} is not a pickled batch: it holds a {_type_name(batch)}, not a dict."
        )
    result = {}
    for key, value in batch.items():
        result[key.decode("latin1") if isinstance(key, bytes) else key] = value
    return result


class _RefusedError(Exception):
    """The file asks for something that no batch needs."""


class _DamagedError(Exception):
    """The file is not a complete pickle."""


class _Global(Enum):
    """Markers that stand in for the globals which a pickled byte array refers to."""

    RECONSTRUCT = "numpy's _reconstruct"
    FROM_BUFFER = "numpy's _frombuffer"
    ARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    ENCODE = "_codecs.encode"


_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): _Global.FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _Global.FROM_BUFFER,
    ("numpy", "ndarray"): _Global.ARRAY,
    ("numpy", "dtype"): _Global.DTYPE,
    ("_codecs", "encode"): _Global.ENCODE,
}


class _Bytes:
    """Stands in for numpy.dtype("u1"), the only supported dtype.

    Its state (byte order, alignment) is ignored; it has no meaning for single bytes.
    """


class _Array:
    """An array that was created without values; the BUILD opcode sets `values` later."""

    values: np.ndarray | None = None


def _type_name(value: object) -> str:
    return "array" if isinstance(value, _Array | np.ndarray) else type(value).__name__


def _byte_array(shape: object, dtype: object, fortran: object, content: object) -> np.ndarray:
    """Return the bytes as an array, after checking that their number matches the shape."""
    if not isinstance(dtype, _Bytes):
        raise _RefusedError("an array that is not of unsigned bytes")
    if not isinstance(content, bytes):
        raise _RefusedError(f"an array whose content is a {_type_name(content)}")
    if not isinstance(shape, tuple) or len(shape) > 4:
        raise _RefusedError("an array without a plain shape")
    for length in shape:
        if type(length) is not int or not 0 <= length <= len(content):
            raise _RefusedError("an array whose shape does not match its bytes")
    if math.prod(shape) != len(content):
        raise _RefusedError("an array whose shape does not match its bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran is True else "C")


class _Interpreter:
    """The stack machine: one method per opcode."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.position = 0
        self.stack: list[Any] = []
        #: Stacks that were set aside by a mark; the items after the mark are in `stack`.
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        #: Bytes made by _codecs.encode. Each call copies, so the total is limited to the file's
        #: size.
        self.encoded = 0

    def run(self) -> Any:
        """Run the program and return the value it leaves on the stack."""
        for _ in range(MAX_OPERATIONS):
            opcode = self.take(1)
            if opcode == b".":
                value = self.pop()
                return value.values if isinstance(value, _Array) else value
            operation = _OPERATIONS.get(opcode)
            if operation is None:
                raise _RefusedError(f"pickle opcode {opcode!r}, which no batch needs")
            operation(self)
        raise _RefusedError(f"more than {MAX_OPERATIONS:,} pickle operations")

    # ---- reading

    def take(self, count: int) -> bytes:
        """Return the next bytes of the file."""
        end = self.position + count
        if count < 0 or end > len(self.raw):
            raise _DamagedError("it ends too early")
        piece = self.raw[self.position : end]
        self.position = end
        return piece

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self.take(count)

    def number(self, layout: str) -> int:
        """Return the next number; `layout` is a format of the `struct` module."""
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def line(self) -> str:
        """Return the text up to the next line feed."""
        end = self.raw.find(b"\n", self.position)
        if end < 0:
            raise _DamagedError("it ends too early")
        text = self.take(end - self.position)
        self.position += 1
        return text.decode("latin1")

    # ---- the stack

    def pop(self) -> Any:
        """Take the last value off the stack."""
        if not self.stack:
            raise _DamagedError("its stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the last value of the stack."""
        if not self.stack:
            raise _DamagedError("its stack is empty")
        return self.stack[-1]

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        """Take all values after the last mark off the stack."""
        if not self.marked:
            raise _DamagedError("a mark is missing")
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_tuple(self, count: int) -> None:
        """Replace the last values by a tuple of them."""
        if len(self.stack) < count:
            raise _DamagedError("its stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(items)

    # ---- strings and numbers

    def push_bytes(self, layout: str) -> None:
        self.push(self.take(self.number(layout)))

    def push_text(self, layout: str) -> None:
        content = self.take(self.number(layout))
        try:
            self.push(content.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise _DamagedError("a string is not UTF-8") from None

    def push_long(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))

    # ---- containers

    def append(self, items: list[Any]) -> None:
        """Add items to the list on the stack."""
        target = self.top()
        if not isinstance(target, list):
            raise _DamagedError(f"it appends to a {_type_name(target)}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dict on the stack."""
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _DamagedError(f"it sets items of a {_type_name(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deeply nested tuple overflows the C stack, so only strings may be keys.
            if not isinstance(key, str | bytes):
                raise _RefusedError(f"a dict with a {_type_name(key)} as key")
            target[key] = value.values if isinstance(value, _Array) else value

    # ---- the memo

    def remember(self, index: int) -> None:
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise _DamagedError(f"it recalls value {index}, which it has not stored")
        self.push(self.memo[index])

    # ---- globals and arrays

    def push_global(self, module: str, name: str) -> None:
        if (module, name) not in _GLOBALS:
            raise _RefusedError(f"{f'{module}.{name}'[:100]!r}, which no batch needs")
        self.push(_GLOBALS[module, name])

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise _DamagedError("a global has no name")
        self.push_global(module, name)

    def reduce(self) -> None:
        """Call one of the known globals, if the arguments have the expected types."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, tuple):
            raise _DamagedError("the arguments of a call are not a tuple")
        if function is _Global.RECONSTRUCT and arguments and arguments[0] is _Global.ARRAY:
            self.push(_Array())
        elif function is _Global.DTYPE and arguments and _is_one_of(arguments[0], ("u1", "|u1")):
            self.push(_Bytes())
        elif (
            function is _Global.ENCODE
            and len(arguments) == 2
            and _is_one_of(arguments[1], ("latin1",))
        ):
            self.push(self.encode(arguments[0]))
        elif function is _Global.FROM_BUFFER and len(arguments) == 4:
            content, dtype, shape, order = arguments
            self.push(_byte_array(shape, dtype, _is_one_of(order, ("F",)), content))
        else:
            name = function.value if isinstance(function, _Global) else f"a {_type_name(function)}"
            raise _RefusedError(f"a call of {name} with unexpected arguments")

    def encode(self, text: object) -> bytes:
        """Return text encoded as latin1, which is how Python 3 writes bytes with protocol 2."""
        if not isinstance(text, str):
            raise _DamagedError("it encodes something other than text")
        self.encoded += len(text)
        if self.encoded > len(self.raw):
            raise _RefusedError("one string many times over")
        try:
            return text.encode("latin1")
        except UnicodeEncodeError:
            raise _DamagedError("a byte string has characters beyond latin1") from None

    def build(self) -> None:
        """Set the state of an array or of a dtype."""
        state, target = self.pop(), self.top()
        if isinstance(target, _Bytes):
            return
        if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _RefusedError(f"a state for a {_type_name(target)}")
        _, shape, dtype, fortran, content = state
        target.values = _byte_array(shape, dtype, fortran, content)


def _is_one_of(value: object, texts: tuple[str, ...]) -> bool:
    """Tell whether `value` is one of `texts`, as text or as bytes. Other types are not compared."""
    if isinstance(value, bytes):
        return value in tuple(text.encode() for text in texts)
    return isinstance(value, str) and value in texts


_OPERATIONS: dict[bytes, Callable[[_Interpreter], None]] = {
    # The protocol number and the length of a frame. Neither is needed.
    b"\x80": lambda machine: machine.skip(1),
    b"\x95": lambda machine: machine.skip(8),
    b"(": _Interpreter.mark,
    b"}": lambda machine: machine.push({}),
    b"]": lambda machine: machine.push([]),
    b")": lambda machine: machine.push(()),
    b"t": lambda machine: machine.push(tuple(machine.pop_to_mark())),
    b"\x85": lambda machine: machine.push_tuple(1),
    b"\x86": lambda machine: machine.push_tuple(2),
    b"\x87": lambda machine: machine.push_tuple(3),
    b"a": lambda machine: machine.append([machine.pop()]),
    b"e": lambda machine: machine.append(machine.pop_to_mark()),
    b"s": lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    b"u": lambda machine: machine.set_items(machine.pop_to_mark()),
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"J": lambda machine: machine.push(machine.number("<i")),
    b"K": lambda machine: machine.push(machine.number("<B")),
    b"M": lambda machine: machine.push(machine.number("<H")),
    b"\x8a": _Interpreter.push_long,
    # Python 2's byte strings.
    b"U": lambda machine: machine.push_bytes("<B"),
    b"T": lambda machine: machine.push_bytes("<i"),
    # Python 3's bytes and byte arrays.
    b"C": lambda machine: machine.push_bytes("<B"),
    b"B": lambda machine: machine.push_bytes("<I"),
    b"\x8e": lambda machine: machine.push_bytes("<Q"),
    b"\x96": lambda machine: machine.push_bytes("<Q"),
    # Text.
    b"X": lambda machine: machine.push_text("<I"),
    b"\x8c": lambda machine: machine.push_text("<B"),
    b"\x8d": lambda machine: machine.push_text("<Q"),
    # Storing values in the memo and fetching them.
    b"q": lambda machine: machine.remember(machine.number("<B")),
    b"r": lambda machine: machine.remember(machine.number("<I")),
    b"\x94": lambda machine: machine.remember(len(machine.memo)),
    b"h": lambda machine: machine.recall(machine.number("<B")),
    b"j": lambda machine: machine.recall(machine.number("<I")),
    # Globals, calls and states.
    b"c": lambda machine: machine.push_global(machine.line(), machine.line()),
    b"\x93": _Interpreter.stack_global,
    b"R": _Interpreter.reduce,
    b"b": _Interpreter.build,
}
