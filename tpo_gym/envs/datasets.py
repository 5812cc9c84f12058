"""Labelled data for the classification bandits: packed MNIST, directories of IDX files, ``.npz`` files and arrays."""

from __future__ import annotations

import gzip
import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MNIST_FILE = "mnist.npz"
MNIST_SHA256 = "39b9b1ffaa0ba4d8995a616551f0966941fe02a3fe79ba4a9db7373db16d53ad"
SPLITS = ("train", "test")
_IDX_PREFIX = {"train": "train", "test": "t10k"}
_UINT8_CODE = 0x08
_NPZ_ERRORS = (ValueError, KeyError, OSError, AttributeError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Dataset:
    """Labelled examples on a device; never written to, so environments (and their copies) share one.

    Attributes:
        features: uint8 or float32 (N, ...). uint8 stands for brightness and is divided by 255 on use.
        labels: int64 (N,), the classes.
        num_classes: Number of classes.
        source: Arguments of the ``load_...`` function that gave it, by name; None for arrays. A pickle holds this
            instead of the data.
    """

    features: Tensor
    labels: Tensor
    num_classes: int
    source: tuple[str, tuple[Any, ...]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        """Returns itself: it never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles where the data came from, where that is known."""
        if self.source is not None:
            return _reload, self.source
        return Dataset, (self.features, self.labels, self.num_classes)


def load_image_dataset(split: str, data_dir: str | None, device: str) -> Dataset:
    """Loads MNIST, or the IDX files of a directory; once per process and device.

    Args:
        split: "train" or "test".
        data_dir: A directory with IDX files (``read_idx_split``); None for the packed MNIST.
        device: Where the tensors go.

    Returns:
        Images uint8 (N, height, width) and at least 10 classes.

    Raises:
        FileNotFoundError: The directory or a file is missing.
        ValueError: ``split`` is unknown or a file is not what it should be; the message names the file.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; choose 'train' or 'test'.")
    return _load_images(split, None if data_dir is None else str(Path(data_dir).resolve()), device)


@lru_cache(maxsize=8)
def _load_images(split: str, data_dir: str | None, device: str) -> Dataset:
    if data_dir is None:
        packed = read_packed_mnist()
        images, labels = packed[f"{split}_images"], packed[f"{split}_labels"]
    else:
        images, labels = read_idx_split(Path(data_dir), split)
    source = ("load_image_dataset", (split, data_dir, device))
    num_classes = max(10, int(labels.max()) + 1)
    return Dataset(_to(images, device), _to(labels.astype(np.int64), device), num_classes, source)


def load_npz_dataset(path: str, device: str) -> Dataset:
    """Loads a ``.npz`` file with arrays ``features`` and ``labels``; once per process, device and version of the file.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: The arrays have a wrong dtype.
        ValueError: The file is no ``.npz`` file, lacks an array, or the arrays do not fit; the message names the file.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such file; it should be a .npz file.")
    stat = file.stat()
    return _load_npz(str(file), device, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _load_npz(path: str, device: str, mtime: int, size: int) -> Dataset:
    arrays = read_npz(Path(path).read_bytes(), path, ("features", "labels"))
    source = ("load_npz_dataset", (path, device))
    return make_dataset(arrays["features"], arrays["labels"], device, path, source)


def make_dataset(
    features: Any, labels: Any, device: str, name: str = "the arrays", source: tuple[str, tuple[Any, ...]] | None = None
) -> Dataset:
    """Checks arrays and puts copies of them on a device.

    Args:
        features: (N, ...) numbers; uint8 stays uint8, everything else becomes float32.
        labels: (N,) integers from 0.
        device: Where the tensors go.
        name: What messages call the data.
        source: See ``Dataset``.

    Raises:
        TypeError: Features are not numbers or labels are not integers.
        ValueError: The shapes do not fit, there is no example, or a value is not finite or negative (labels).
    """
    x, y = _as_array(features), _as_array(labels)
    if x.dtype.kind not in "fiub":
        raise TypeError(f"features of {name} have dtype {x.dtype}, but they must be numbers.")
    if y.dtype.kind not in "iu":
        raise TypeError(f"labels of {name} have dtype {y.dtype}, but they must be integers: cast them, from 0 up.")
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not x.size:
        raise ValueError(
            f"features {x.shape} and labels {y.shape} of {name} do not fit together: they must be (N, ...) and (N,) "
            "with the same N > 0."
        )
    if y.min() < 0:
        raise ValueError(f"labels of {name} hold {int(y.min())}, but classes count from 0.")
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"features of {name} hold values that are not finite in float32; remove or replace them.")
    return Dataset(_to(x, device), _to(y.astype(np.int64), device), int(y.max()) + 1, source)


def _as_array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _to(array: np.ndarray, device: str) -> Tensor:
    return torch.tensor(array, device=device)


def _reload(loader: str, arguments: tuple[Any, ...]) -> Dataset:
    return load_image_dataset(*arguments) if loader == "load_image_dataset" else load_npz_dataset(*arguments)


@lru_cache(maxsize=1)
def read_packed_mnist() -> dict[str, np.ndarray]:
    """Reads the MNIST that ships in the package: {train,test}_{images,labels}, uint8; once per process.

    Raises:
        ValueError: The file is not the one that was shipped.
    """
    data = resources.files("tpo_gym.envs").joinpath("data", MNIST_FILE).read_bytes()
    return unpack_mnist(data)


def unpack_mnist(data: bytes) -> dict[str, np.ndarray]:
    """Checks and unpacks the bytes of the packed file.

    Raises:
        ValueError: Their SHA-256 is not the shipped file's.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest != MNIST_SHA256:
        raise ValueError(
            f"{MNIST_FILE} in the package is damaged (SHA-256 {digest} instead of {MNIST_SHA256}). Reinstall tpo_gym."
        )
    return read_npz(data, MNIST_FILE, ("train_images", "train_labels", "test_images", "test_labels"))


def read_npz(data: bytes, name: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Reads arrays ``keys`` from the bytes of a ``.npz`` file.

    Raises:
        ValueError: It is no such file or lacks an array; the message holds ``name``.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            missing = [key for key in keys if key not in arrays]
            if missing:
                raise KeyError(f"it lacks {missing}, it has {list(arrays)}")
            return {key: arrays[key] for key in keys}
    except _NPZ_ERRORS as error:
        raise ValueError(f"{name} is not a readable .npz file with arrays {list(keys)}: {error}") from error


def read_idx_split(directory: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads images and labels of a split from IDX files, ``.gz`` or plain.

    The names are MNIST's: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... for "test"; a dot before "idx"
    instead of the dash will do.

    Returns:
        Images uint8 (N, height, width) and labels uint8 (N,).

    Raises:
        FileNotFoundError: The directory or a file is missing.
        ValueError: A file is truncated or corrupt, or the counts differ; the message names the file.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"data_dir={str(directory)!r} is not a directory.")
    prefix = _IDX_PREFIX[split]
    image_file = _find(directory, f"{prefix}-images", "idx3-ubyte")
    label_file = _find(directory, f"{prefix}-labels", "idx1-ubyte")
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise ValueError(f"{image_file} holds {len(images)} images, but {label_file} holds {len(labels)} labels.")
    if not images.size:
        raise ValueError(f"{image_file} holds no image (its shape is {images.shape}).")
    return images, labels


def _find(directory: Path, stem: str, kind: str) -> Path:
    names = [f"{stem}{mark}{kind}{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"{directory} holds none of {', '.join(names)}.")


def read_idx(file: Path, ndim: int) -> np.ndarray:
    """Reads one IDX file of unsigned bytes with ``ndim`` dimensions.

    Raises:
        ValueError: It is corrupt, of another kind, or shorter or longer than its header says; the message names it.
    """
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file} cannot be unpacked, it is truncated or corrupt: {error}") from error
    header = 4 + 4 * ndim
    magic = bytes([0, 0, _UINT8_CODE, ndim])
    if data[:4] != magic:
        raise ValueError(
            f"{file} starts with bytes {data[:4].hex(' ') or '(none)'} instead of {magic.hex(' ')}: it is not an IDX "
            f"file of unsigned bytes with {ndim} dimension(s)."
        )
    if len(data) < header:
        raise ValueError(f"{file} is truncated: {len(data)} bytes, but its header alone has {header}.")
    shape = tuple(np.frombuffer(data, ">u4", count=ndim, offset=4).tolist())
    expected = header + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "too long"
        raise ValueError(f"{file} is {what}: {len(data)} bytes, but shape {shape} in its header needs {expected}.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
