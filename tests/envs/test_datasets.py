"""Where labelled data comes from: the packed MNIST, IDX files, .npz files; damage is named."""

import copy
import gzip
import pickle
import struct
from importlib import resources

import numpy as np
import pytest
import torch

from tpo_gym.envs import datasets
from tpo_gym.envs.datasets import load_image_dataset, load_npz_dataset, read_idx, read_idx_split

# Of the published files, digit by digit.
TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def idx_bytes(array, magic=None):
    head = bytes([0, 0, 8, array.ndim]) if magic is None else magic
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture(params=["plain", "gz", "dotted"])
def idx_dir(request, tmp_path):
    """A directory of small IDX files: train (6 images of 4 x 5), test (3), in several spellings."""
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 6), ("t10k", 3)):
        arrays = {"images-idx3": rng.integers(256, size=(count, 4, 5)), "labels-idx1": np.arange(count) + 5}
        for name, array in arrays.items():
            file = f"{prefix}-{name}-ubyte"
            if request.param == "gz":
                (tmp_path / f"{file}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                file = file.replace("-idx", ".idx") if request.param == "dotted" else file
                (tmp_path / file).write_bytes(idx_bytes(array))
    return tmp_path


def find(directory, stem):
    return next(directory.glob(f"{stem}*"))


def damage(file, change):
    """Applies ``change`` to the file's (unpacked) bytes."""
    packed = file.suffix == ".gz"
    data = change(gzip.decompress(file.read_bytes()) if packed else file.read_bytes())
    file.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize(("split", "counts"), [("train", TRAIN_COUNTS), ("test", TEST_COUNTS)])
def test_packed_mnist_is_mnist(split, counts, device):
    data = load_image_dataset(split, None, device)
    assert data.features.shape == (sum(counts), 28, 28)
    assert data.features.dtype == torch.uint8
    assert data.features.device.type == device
    assert torch.bincount(data.labels).tolist() == counts
    assert data.num_classes == 10
    mean = {"train": 0.1307, "test": 0.1325}[split]  # widely published
    assert data.features.cpu().numpy().mean() / 255 == pytest.approx(mean, abs=1e-4)


def test_data_is_loaded_once():
    assert load_image_dataset("test", None, "cpu") is load_image_dataset("test", None, "cpu")
    assert datasets.read_packed_mnist() is datasets.read_packed_mnist()


def test_a_damaged_pack_is_refused():
    data = bytearray(resources.files("tpo_gym.envs").joinpath("data", datasets.MNIST_FILE).read_bytes())
    data[5000] ^= 1
    with pytest.raises(ValueError, match=r"mnist.npz.*damaged.*Reinstall"):
        datasets.unpack_mnist(bytes(data))


def test_copies_and_pickles_hold_no_second_copy():
    data = load_image_dataset("test", None, "cpu")
    assert copy.deepcopy(data) is data
    packed = pickle.dumps(data)
    assert len(packed) < 1000
    assert pickle.loads(packed) is data


def test_idx_files(idx_dir):
    images, labels = read_idx_split(idx_dir, "train")
    assert images.shape == (6, 4, 5)
    assert labels.tolist() == [5, 6, 7, 8, 9, 10]
    data = load_image_dataset("train", str(idx_dir), "cpu")
    assert data.num_classes == 11  # labels beyond 9 add classes
    assert load_image_dataset("test", str(idx_dir), "cpu").num_classes == 10
    assert torch.equal(data.features, torch.tensor(images))


def test_truncated_images_name_the_file(idx_dir):
    file = find(idx_dir, "train-images")
    damage(file, lambda data: data[:-3])
    with pytest.raises(ValueError, match=f"{file.name} is truncated"):
        read_idx_split(idx_dir, "train")
    damage(file, lambda data: data[:9])
    with pytest.raises(ValueError, match=f"{file.name} is truncated"):
        read_idx_split(idx_dir, "train")
    read_idx_split(idx_dir, "test")


def test_trailing_bytes_name_the_file(idx_dir):
    file = find(idx_dir, "train-labels")
    damage(file, lambda data: data + b"x")
    with pytest.raises(ValueError, match=f"{file.name} is too long"):
        read_idx_split(idx_dir, "train")


def test_wrong_kinds_name_the_file(idx_dir):
    file = find(idx_dir, "train-labels")
    for change in (lambda data: bytes([0, 0, 13, 1]) + data[4:], lambda data: b"", lambda data: b"<html>no</html>"):
        damage(file, change)
        with pytest.raises(ValueError, match=f"{file.name} starts with"):
            read_idx_split(idx_dir, "train")
    images = find(idx_dir, "t10k-images")
    with pytest.raises(ValueError, match=f"{images.name} starts with"):
        read_idx(images, 1)


def test_counts_that_differ_name_both_files(idx_dir):
    file = find(idx_dir, "train-labels")
    damage(file, lambda data: idx_bytes(np.arange(5)))
    with pytest.raises(ValueError, match=rf"train-images.*6 images.*{file.name} holds 5 labels"):
        read_idx_split(idx_dir, "train")


def test_broken_compression_names_the_file(tmp_path):
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = gzip.compress(idx_bytes(np.zeros((9, 28, 28))))
    for data in (whole[:-20], whole[:30], b"not gzip at all", whole[:20] + b"\xff" * 10 + whole[30:]):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"{file.name} cannot be unpacked"):
            read_idx(file, 3)


def test_missing_files_are_named(idx_dir, tmp_path):
    find(idx_dir, "t10k-labels").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        read_idx_split(idx_dir, "test")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_image_dataset("train", str(tmp_path / "nowhere"), "cpu")


def test_empty_files_are_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(0)))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte holds no image"):
        read_idx_split(tmp_path, "train")


def test_npz_files(npz, device):
    data = load_npz_dataset(str(npz), device)
    assert data is load_npz_dataset(str(npz), device)
    assert data.features.dtype == torch.float32
    assert data.features.device.type == device
    assert data.num_classes == 4
    assert pickle.loads(pickle.dumps(data)) is data


def test_a_rewritten_npz_is_read_again(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, features=np.zeros((2, 1)), labels=[0, 1])
    assert len(load_npz_dataset(str(file), "cpu").labels) == 2
    np.savez(file, features=np.zeros((30, 1)), labels=[0, 1] * 15)
    assert len(load_npz_dataset(str(file), "cpu").labels) == 30


def test_bad_npz_files_are_named(tmp_path):
    file = tmp_path / "data.npz"
    with pytest.raises(FileNotFoundError, match=r"data\.npz"):
        load_npz_dataset(str(file), "cpu")
    np.savez(file, features=np.zeros((2, 1)))
    with pytest.raises(ValueError, match=r"data\.npz.*labels"):
        load_npz_dataset(str(file), "cpu")
    np.savez(file, features=np.array([{}, {}]), labels=[0, 1])
    with pytest.raises(ValueError, match=r"data\.npz"):
        load_npz_dataset(str(file), "cpu")
    whole = file.read_bytes()
    for data in (b"", b"nonsense", whole[: len(whole) // 2]):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"data\.npz is not a readable"):
            load_npz_dataset(str(file), "cpu")
    np.savez(file, features=np.zeros((2, 1)), labels=[0.0, 1.0])
    with pytest.raises(TypeError, match=r"data\.npz.*integers"):
        load_npz_dataset(str(file), "cpu")
