"""Tell whether a message of an Arrow stream is compressed, without decompressing it.

A compressed message of a few kilobytes can expand to gigabytes, and pyarrow has no limit for that.
The only place that says so is the message's metadata, a table in the format of FlatBuffers: its
first 4 bytes are the offset of the table. A table starts with the (negative) offset of its vtable,
a list of 16-bit numbers: the length of the vtable, the length of the table, and the offset of each
field in the table, 0 if the field is absent.
"""

from __future__ import annotations

import struct

#: Fields of the tables Message, DictionaryBatch and RecordBatch of Arrow's format.
MESSAGE_HEADER = 2
DICTIONARY_DATA = 1
BATCH_COMPRESSION = 3


def is_compressed(metadata: bytes, *, is_dictionary: bool) -> bool:
    """Tell whether a message with a record batch, or with a dictionary, is compressed.

    Raises struct.error if the metadata is damaged.
    """
    message = _follow(metadata, 0)
    batch = _follow(metadata, _field(metadata, message, MESSAGE_HEADER))
    if is_dictionary:
        batch = _follow(metadata, _field(metadata, batch, DICTIONARY_DATA))
    return bool(_field(metadata, batch, BATCH_COMPRESSION))


def _follow(data: bytes, place: int) -> int:
    """Return the place that an offset points to."""
    (offset,) = struct.unpack_from("<I", data, place)
    return place + int(offset)


def _field(data: bytes, table: int, number: int) -> int:
    """Return the place of a field of a table, or 0 if it is absent."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if vtable < 0:
        raise struct.error("a vtable is outside of the metadata")
    (length,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > length:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + entry)
    return table + offset if offset else 0
