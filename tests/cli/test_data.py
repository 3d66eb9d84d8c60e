"""`motley data fetch`, against a server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data import fetch as fetching
from motley.data import load_dataset
from motley.data.dataset import DATASETS
from motley.data.fetch import fetch
from motley.data.sources import SOURCES, RemoteFile
from tests.cli.conftest import Command


class Server(ThreadingHTTPServer):
    """Serves `files` from memory, and records which ranges were asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        #: (path, Range header or "") of each request.
        self.requests: list[tuple[str, str]] = []
        #: Path -> bytes after which connections are cut, one number per request.
        self.cuts: dict[str, list[int]] = {}
        self.ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def ranges_of(self, path: str) -> list[str]:
        return [asked for requested, asked in self.requests if requested == f"/{path}"]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.requests.append((self.path, asked))
        content = self.server.files.get(self.path.removeprefix("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        cuts = self.server.cuts.get(self.path.removeprefix("/"), [])
        if cuts:
            body = body[: cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def publish(server: Server, monkeypatch: pytest.MonkeyPatch, name: str, *contents: bytes) -> None:
    """Serve other contents for a data set's files, with their checksums."""
    source = SOURCES[name]
    files = []
    for file, content in zip(source.files, contents, strict=True):
        server.files[file.name] = content
        files.append(replace(file, urls=(server.url,), checksum=md5(content)))
    monkeypatch.setitem(SOURCES, name, replace(source, files=tuple(files)))


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes())


def digits() -> list[bytes]:
    """Return the four files of a small MNIST. Random pixels cannot be compressed: 20 kB."""
    random = np.random.default_rng(0)
    arrays = []
    for count in (30, 12):
        arrays.append(random.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        arrays.append(np.arange(count, dtype=np.uint8) % 10)
    return [idx(array) for array in arrays]


@pytest.fixture
def mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    publish(server, monkeypatch, "mnist", *digits())
    return server


IMAGES = "train-images-idx3-ubyte.gz"


# --- downloads


def test_files_are_downloaded_and_can_be_read(
    mnist: Server, motley: Command, tmp_path: Path
) -> None:
    answer = motley("data", "fetch", "mnist", "--to", tmp_path / "data")
    assert (answer.code, answer.err) == (0, "")
    size = len(mnist.files[IMAGES])
    assert answer.out.splitlines()[0] == f"downloading {IMAGES}, {size:,} bytes"
    assert f"mnist: in {tmp_path / 'data' / 'mnist'}\n" in answer.out
    assert f"data.root = '{tmp_path / 'data'}'" in answer.out
    data = load_dataset("mnist", root=tmp_path / "data")
    assert (len(data.train), len(data.test)) == (30, 12)
    assert not list(tmp_path.rglob("*.part"))
    requests = len(mnist.requests)
    assert motley("data", "fetch", "mnist", "--to", tmp_path / "data").code == 0
    assert len(mnist.requests) == requests  # nothing is downloaded twice


def test_the_data_folder_is_the_default(
    mnist: Server, motley: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(tmp_path / "root"))
    assert "missing: motley data fetch mnist" in motley("list", "datasets").out
    answer = motley("data", "fetch", "mnist")
    assert answer.code == 0 and "data.root" not in answer.out
    assert f"in {tmp_path / 'root' / 'mnist'} " in motley("list", "datasets").out


def test_a_partial_download_is_continued(mnist: Server, motley: Command, tmp_path: Path) -> None:
    content = mnist.files[IMAGES]
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(content[:7000])
    answer = motley("data", "fetch", "mnist", "--to", tmp_path)
    assert answer.code == 0
    assert f"{IMAGES}, {len(content):,} bytes, continued after 7,000" in answer.out
    assert mnist.ranges_of(IMAGES) == ["bytes=7000-"]
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == content


def test_a_cut_connection_is_resumed(mnist: Server, tmp_path: Path) -> None:
    mnist.cuts[IMAGES] = [5000, 6000]
    fetch("mnist", tmp_path)
    assert mnist.ranges_of(IMAGES) == ["", "bytes=5000-", "bytes=11000-"]
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == mnist.files[IMAGES]


def test_a_connection_that_is_always_cut_is_reported_and_what_came_is_kept(
    mnist: Server, motley: Command, tmp_path: Path
) -> None:
    mnist.cuts[IMAGES] = [5000, 0, 0, 0]
    answer = motley("data", "fetch", "mnist", "--to", tmp_path)
    assert answer.code == 2 and "Traceback" not in answer.err
    assert "the connection was cut" in answer.err and "5,000 bytes are kept" in answer.err
    assert (tmp_path / "mnist" / f"{IMAGES}.part").stat().st_size == 5000
    assert motley("data", "fetch", "mnist", "--to", tmp_path).code == 0
    assert mnist.ranges_of(IMAGES)[-1] == "bytes=5000-"


def test_a_server_that_ignores_ranges_sends_the_whole_file(mnist: Server, tmp_path: Path) -> None:
    mnist.ranges = False
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(b"x" * 7000)
    fetch("mnist", tmp_path)
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == mnist.files[IMAGES]


@pytest.mark.parametrize("length", [7000, 10**6])
def test_a_partial_download_of_something_else_is_started_over(
    length: int, mnist: Server, tmp_path: Path
) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(b"x" * length)
    fetch("mnist", tmp_path)
    assert mnist.ranges_of(IMAGES) == [f"bytes={length}-", ""]
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == mnist.files[IMAGES]


def test_a_download_that_was_only_not_renamed_is_complete(mnist: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(mnist.files[IMAGES])
    fetch("mnist", tmp_path)
    assert len(mnist.ranges_of(IMAGES)) == 1


def test_a_wrong_checksum_is_refused(mnist: Server, motley: Command, tmp_path: Path) -> None:
    expected = SOURCES["mnist"].files[0].checksum
    mnist.files[IMAGES] = b"something else"
    answer = motley("data", "fetch", "mnist", "--to", tmp_path)
    assert answer.code == 2
    actual = md5(b"something else")
    assert f"has the wrong checksum {actual}, not {expected}, and was not kept" in answer.err
    assert not (tmp_path / "mnist" / IMAGES).exists() and not list(tmp_path.rglob("*.part"))


def test_the_next_address_is_tried(
    mnist: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = SOURCES["mnist"]
    urls = (f"http://127.0.0.1:{unused_port()}/", f"{mnist.url}absent/", mnist.url)
    files = tuple(replace(file, urls=urls) for file in source.files)
    monkeypatch.setitem(SOURCES, "mnist", replace(source, files=files))
    assert fetch("mnist", tmp_path) == tmp_path / "mnist"


def test_a_server_that_sends_too_much_is_stopped(
    mnist: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetching, "MAX_DOWNLOAD_BYTES", 1000)
    with pytest.raises(MotleyError, match="it sends more than 1,000 bytes"):
        fetch("mnist", tmp_path)


# --- no network


def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "no-such-host.invalid"])
def test_without_a_network_the_message_says_which_files_to_put_where(
    host: str, motley: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"http://{host.format(port=unused_port())}/"
    for name in ("svhn", "cifar10"):
        source = SOURCES[name]
        files = tuple(replace(file, urls=(url,)) for file in source.files)
        monkeypatch.setitem(SOURCES, name, replace(source, files=files))
    answer = motley("data", "fetch", "svhn", "--to", tmp_path)
    assert answer.code == 2 and "Traceback" not in answer.err
    assert f"could not be downloaded: {url}train_32x32.mat: " in answer.err
    for name in ("train_32x32.mat", "test_32x32.mat"):
        assert f"  {tmp_path / 'svhn' / name}\n" in answer.err
    assert "e26dedcc434d2e4c54c9b2d4a06d8373" in answer.err
    assert "the same command will check them" in answer.err
    answer = motley("data", "fetch", "cifar10", "--to", tmp_path)
    assert f"  {tmp_path / 'cifar-10-python.tar.gz'}\n" in answer.err
    assert "the same command will unpack them" in answer.err


def test_files_that_were_copied_are_verified(mnist: Server, tmp_path: Path) -> None:
    for file in SOURCES["mnist"].files:
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / "mnist" / file.name).write_bytes(mnist.files[file.name])
    assert fetch("mnist", tmp_path) == tmp_path / "mnist"
    assert mnist.requests == []
    (tmp_path / "mnist" / IMAGES).write_bytes(b"damaged")
    with pytest.raises(MotleyError, match=f"{IMAGES} has the wrong checksum: .* Delete it"):
        fetch("mnist", tmp_path)


def test_an_unknown_data_set_and_a_folder_that_cannot_be_written(
    motley: Command, tmp_path: Path
) -> None:
    answer = motley("data", "fetch", "cifar-10")
    assert answer.code == 2 and "Did you mean 'cifar10'?" in answer.err
    (tmp_path / "file").write_text("")
    answer = motley("data", "fetch", "mnist", "--to", tmp_path / "file")
    assert answer.code == 2 and "Traceback" not in answer.err and str(tmp_path) in answer.err


# --- archives


def tar(files: dict[str, bytes], *members: tarfile.TarInfo) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member)
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            info.mode = 0o4777
            archive.addfile(info, io.BytesIO(body))
    return content.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


BATCHES = {f"cifar-10-batches-py/{name}": b"x" for name in SOURCES["cifar10"].layouts[0].files}


def test_an_archive_is_unpacked_and_removed(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder_entry = special("cifar-10-batches-py", tarfile.DIRTYPE)
    content = tar({**BATCHES, "elsewhere/readme": b"not needed"}, folder_entry)
    publish(server, monkeypatch, "cifar10", content)
    folder = tmp_path / "cifar-10-batches-py"
    # Left behind by an earlier attempt that was killed.
    folder.with_name("cifar-10-batches-py.part").mkdir()
    assert fetch("cifar10", tmp_path) == folder
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        SOURCES["cifar10"].layouts[0].files
    )
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-py"]
    assert not folder.joinpath("test_batch").stat().st_mode & 0o4111  # modes are not taken over


def test_an_archive_that_was_copied_is_unpacked(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    classes = {f"./{part}/cat/a.png": b"x" for part in ("train", "valid", "test")}
    publish(server, monkeypatch, "cinic10", tar({**classes, "./README.md": b"x"}))
    (tmp_path / "CINIC-10.tar.gz").write_bytes(server.files["CINIC-10.tar.gz"])
    assert fetch("cinic10", tmp_path) == tmp_path / "cinic-10"
    assert server.requests == []
    assert (tmp_path / "cinic-10" / "valid" / "cat" / "a.png").exists()


HOSTILE = {
    "a name above": (tar({**BATCHES, "../evil": b"x"}), "refused to unpack '../evil'"),
    "a name above, inside": (
        tar({"cifar-10-batches-py/../../evil": b"x"}),
        "refused to unpack 'cifar-10-batches-py/../../evil'",
    ),
    "an absolute name": (tar({"/tmp/evil": b"x"}), "refused to unpack '/tmp/evil'"),
    "a symbolic link": (
        tar({}, special("cifar-10-batches-py/a", tarfile.SYMTYPE, "/etc/passwd")),
        "which is no plain file",
    ),
    "a hard link": (
        tar({}, special("cifar-10-batches-py/a", tarfile.LNKTYPE, "../../b")),
        "which is no plain file",
    ),
    "a device": (tar({}, special("cifar-10-batches-py/a", tarfile.CHRTYPE)), "no plain file"),
    "no archive": (b"this is no archive", "is damaged"),
    "truncated": (tar(BATCHES)[:-30], "is damaged"),
    "other files": (tar({"other/a": b"x"}), "has no files in cifar-10-batches-py"),
    "files missing": (tar({"cifar-10-batches-py/a": b"x"}), "not those that the reader expects"),
    "too many files": (tar({f"cifar-10-batches-py/{i}": b"" for i in range(40)}), "holds more"),
    "too large": (tar({"cifar-10-batches-py/a": bytes(200_000)}), "holds more than any archive"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_damaged_archives_are_refused(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content, message = HOSTILE[name]
    monkeypatch.setattr(fetching, "MAX_MEMBERS", 30)
    monkeypatch.setattr(fetching, "MAX_UNPACKED_BYTES", 100_000)
    publish(server, monkeypatch, "cifar10", content)
    root = tmp_path / "root"
    with pytest.raises(MotleyError, match=message):
        fetch("cifar10", root)
    assert not list(root.rglob("*.part")) and not (tmp_path / "evil").exists()
    if name != "files missing":
        assert not (root / "cifar-10-batches-py").exists()


def test_a_folder_that_is_in_the_way_is_not_touched(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(server, monkeypatch, "cifar10", tar(BATCHES))
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "mine").write_text("mine")
    with pytest.raises(MotleyError, match="exists and lacks files of this data set"):
        fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar-10-batches-py" / "mine").exists()


# --- the sources


def test_every_data_set_with_files_has_a_source() -> None:
    assert set(SOURCES) == {entry.name for entry in DATASETS} - {"digits", "npz", "files"}


@pytest.mark.parametrize("name", SOURCES)
def test_files_end_up_where_the_reader_looks(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    # Two data sets can be made from the same files.
    assert all(layout.name in (name, source.folder) for layout in source.layouts)
    published = source.layouts[0]
    assert source.folder in published.folders
    for file in source.files:
        algorithm, _, checksum = file.checksum.partition(":")
        assert len(bytes.fromhex(checksum)) == {"md5": 16, "sha256": 32}[algorithm]
        assert all(address.startswith(("http://", "https://")) for address in file.addresses)
    plain = [file for file in source.files if file.unpack is None]
    if plain:
        endings = published.endings
        names = {file.name.removesuffix(endings[-1]) for file in plain}
        assert names == set(published.files)


def test_a_remote_file_has_an_address_per_mirror() -> None:
    file = RemoteFile("a.gz", ("http://one/", "http://two/x/"), "md5:00")
    assert file.addresses == ("http://one/a.gz", "http://two/x/a.gz")


def test_fashion_mnist_is_the_published_one(shared_data: Path) -> None:
    for file in SOURCES["fashion-mnist"].files:
        assert md5((shared_data / "fashion-mnist" / file.name).read_bytes()) == file.checksum
