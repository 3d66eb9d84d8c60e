"""Small files in the real formats of UCI HAR, QMNIST, heart disease and LEAF's Shakespeare."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np

SIGNALS = [
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
]


# ---- UCI HAR


def har_recordings(people: int, chains: int, windows: int = 3) -> dict[str, np.ndarray]:
    """Return `chains` recordings of each activity of each person, as overlapping windows."""
    random = np.random.default_rng(5)
    arrays: dict[str, list[np.ndarray | int]] = {"x": [], "y": [], "subject": [], "chain": []}
    chain = 0
    for person in range(1, people + 1):
        for activity in range(6):
            for _ in range(chains):
                signal = random.normal(activity - 2.5, 1, (9, 64 * (windows + 1)))
                # As the text files have it: 7 decimal places.
                signal = np.array([f"{value:.7e}" for value in signal.ravel()], dtype=np.float32)
                signal = signal.reshape(9, -1)
                for window in range(windows):
                    arrays["x"].append(signal[:, 64 * window : 64 * window + 128])
                    arrays["y"].append(activity)
                    arrays["subject"].append(person)
                    arrays["chain"].append(chain)
                chain += 1
    return {name: np.array(values) for name, values in arrays.items()}


def write_har_release(root: Path, people: int = 3, chains: int = 2) -> dict[str, np.ndarray]:
    """Write the release's folders; the last person is in `test`, as the release divides people."""
    arrays = har_recordings(people, chains)
    folder = root / "UCI HAR Dataset"
    for part in ("train", "test"):
        rows = (arrays["subject"] == people) == (part == "test")
        signals = folder / part / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(SIGNALS):
            lines = []
            for window in arrays["x"][rows][:, channel]:
                lines.append("".join(f" {value: .7e}" for value in window))
            (signals / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")
        people_lines = "".join(f"{person}\n" for person in arrays["subject"][rows])
        (folder / part / f"subject_{part}.txt").write_text(people_lines)
        activity_lines = "".join(f"{activity + 1}\n" for activity in arrays["y"][rows])
        (folder / part / f"y_{part}.txt").write_text(activity_lines)
    return arrays


def write_har_arrays(root: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    arrays = {**har_recordings(3, 2), **changes}
    root.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / "uci_har.npz", **arrays)
    return arrays


# ---- MNIST by writer


def digits_by_writer(
    train: int = 4, test: int = 2, each: int = 12, first_test_writer: int = 900
) -> dict[str, np.ndarray]:
    """Return images that show their class as a bright row, of `train` and `test` writers."""
    random = np.random.default_rng(6)
    arrays = {}
    for part, writers, first in (("train", train, 7), ("test", test, first_test_writer)):
        labels = random.integers(0, 10, writers * each).astype(np.uint8)
        images = random.integers(0, 60, (len(labels), 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] = 250
        arrays[f"x_{part}"], arrays[f"y_{part}"] = images, labels
        # Not consecutive, as in NIST's forms.
        numbers = first + 3 * np.repeat(np.arange(writers), each)
        arrays[f"writer_{part}"] = numbers.astype(np.int16)
    return arrays


def write_writers(root: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    arrays = {**digits_by_writer(), **changes}
    root.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / "mnist_writers.npz", **arrays)
    return arrays


def idx_bytes(array: np.ndarray) -> bytes:
    code, dtype = (8, ">u1") if array.dtype == np.uint8 else (12, ">i4")
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(dtype).tobytes()


def qmnist_labels(labels: np.ndarray, writers: np.ndarray) -> np.ndarray:
    """Return QMNIST's eight columns: class, series, writer, and five that are not read."""
    table = np.full((len(labels), 8), 4, dtype=np.int32)
    table[:, 0], table[:, 2] = labels, writers
    return table


def write_qmnist(root: Path) -> dict[str, np.ndarray]:
    arrays = digits_by_writer()
    folder = root / "qmnist"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        images = idx_bytes(arrays[f"x_{part}"])
        labels = idx_bytes(qmnist_labels(arrays[f"y_{part}"], arrays[f"writer_{part}"]))
        (folder / f"qmnist-{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(gzip.compress(labels))
    return arrays


# ---- heart disease

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def patient(random: np.random.Generator) -> str:
    """Return a row as UCI writes it, of someone whose oldpeak tells the diagnosis."""
    sick = int(random.integers(0, 2))
    values = [
        f"{random.integers(30, 70)}.0",
        f"{random.integers(0, 2)}",
        f"{random.integers(1, 5)}.0",
        f"{random.integers(100, 180)}",
        f"{random.integers(150, 350)}",
        f"{random.integers(0, 2)}",
        f"{random.integers(0, 3)}",
        f"{random.integers(90, 190)}",
        f"{random.integers(0, 2)}",
        f"{random.normal(2 * sick, 0.4):.1f}",
        "?",
        "?",
        "7.0",
        f"{sick * random.integers(1, 5)}",
    ]
    return ",".join(values)


def write_heart(root: Path, **changes: str) -> None:
    """Write 30 patients per hospital, or a given text as the file of a hospital."""
    random = np.random.default_rng(7)
    folder = root / "heart-disease"
    folder.mkdir(parents=True, exist_ok=True)
    for hospital in HOSPITALS:
        text = "\n".join(patient(random) for _ in range(30)) + "\n"
        file = folder / f"processed.{hospital}.data"
        file.write_text(changes.get(hospital, text))


# ---- Shakespeare

SPEECH = "To be, or not to be: that is the question; whether 'tis nobler in the mind to suffer. "


def texts(length: int = 700) -> dict[str, str]:
    """Return the texts of four roles; the last is too short to have a test part."""
    endless = SPEECH * 20
    return {
        "HAMLET_HAMLET": endless[3 : 3 + length],
        "HAMLET_HORATIO": endless[7 : 7 + length],
        "HAMLET_OPHELIA": endless[11 : 11 + length],
        "HAMLET_GHOST": endless[:90],
    }


def write_texts(root: Path, roles: dict[str, str] | None = None) -> dict[str, str]:
    roles = texts() if roles is None else roles
    root.mkdir(parents=True, exist_ok=True)
    content = {name: {"play": "HAMLET", "text": text} for name, text in roles.items()}
    (root / "shakespeare.json").write_text(json.dumps(content))
    return roles


def leaf_samples(text: str) -> dict[str, list[str]]:
    starts = range(len(text) - 80)
    return {"x": [text[at : at + 80] for at in starts], "y": [text[at + 80] for at in starts]}


def leaf_file(samples: dict[str, dict[str, list[str]]]) -> str:
    counts = [len(role["y"]) for role in samples.values()]
    return json.dumps({"users": list(samples), "num_samples": counts, "user_data": samples})


def write_leaf(root: Path, divided: bool) -> dict[str, str]:
    """Write LEAF's `all_data`, or its folders `train` and `test` as its script divides them."""
    roles = texts()
    samples = {name: leaf_samples(text) for name, text in roles.items()}
    folder = root / "shakespeare"
    if not divided:
        (folder / "all_data").mkdir(parents=True)
        (folder / "all_data" / "all_data.json").write_text(leaf_file(samples))
        return roles
    train, test = {}, {}
    for name, role in samples.items():
        count = int(0.8 * len(role["y"]))
        if count + 79 < len(role["y"]):
            train[name] = {key: values[:count] for key, values in role.items()}
            test[name] = {key: values[count + 79 :] for key, values in role.items()}
    for part, content in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True)
        file = folder / part / f"all_data_niid_0_keep_0_{part}_8.json"
        file.write_text(leaf_file(content))
    return roles
