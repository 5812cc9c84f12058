"""Checkpoint files: a zip of plain JSON and tensors, written atomically and verified when read."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
import zlib
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.save_util import open_path

FORMAT = 1
PathLike = str | Path | io.BufferedIOBase
_PLAIN = (torch.Tensor, torch.Size, torch.dtype, torch.device, int, float, str, bool, type(None))
# What Python's zip reader raises on a file that is cut off or damaged.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


def write_checkpoint(path: PathLike, document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        path: Where to; ``.zip`` is added where there is no suffix. Or an open binary file.
        document: JSON data.
        tensors: Contents of the ``.pth`` members: tensors in plain Python containers.

    Raises:
        TypeError: If a member holds anything else.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.json", json.dumps(document))
        for name, value in tensors.items():
            member = io.BytesIO()
            torch.save(_plain(value, name), member)
            archive.writestr(f"{name}.pth", member.getvalue())
    if not isinstance(path, (str, Path)):
        open_path(path, "w").write(buffer.getvalue())
        return
    target = Path(path)
    replace_file(target if target.suffix else target.with_name(f"{target.name}.zip"), buffer.getvalue())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that at any moment, power cuts included, the path holds the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _plain(value: Any, where: str) -> Any:
    """A state dict as it is written; raises an error for what ``weights_only`` would refuse to read.

    Of a tensor that is a part of another, as those of stacked seeds are, torch would write the whole.
    """
    if isinstance(value, dict):
        plain = copy(value)  # an OrderedDict has attributes
        plain.update((key, _plain(item, f"{where}[{key!r}]")) for key, item in value.items())
        return plain
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if not isinstance(value, _PLAIN) or isinstance(value, np.generic):
        raise TypeError(f"Cannot store {where}={value!r}: a state_dict may hold tensors and plain Python values only.")
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.numel() * value.element_size():
        return value.clone()
    return value


def read_members(path: Any) -> dict[str, bytes]:
    """The members of a checkpoint, each verified by its checksum.

    Raises:
        ValueError: If the file is not complete, or of another program.
    """
    file = open_path(path, "r", suffix="zip")
    try:
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is not a complete checkpoint ({error}): it was cut off or is another file."
        ) from error
    finally:
        if isinstance(path, (str, Path)):
            file.close()
    if "_stable_baselines3_version" in members:
        raise ValueError(f"{path} was saved by an algorithm of Stable-Baselines3: load it with that.")
    if "data.json" not in members:  # a checkpoint that is cut off can end with a whole archive, that of its tensors
        raise ValueError(f"{path} is not a complete checkpoint (no data.json): it was cut off or is another file.")
    return members


def document_of(members: dict[str, bytes]) -> dict[str, Any]:
    """The JSON data of a checkpoint.

    Raises:
        ValueError: If it is of a later version.
    """
    document: dict[str, Any] = json.loads(members["data.json"])
    if document["format"] > FORMAT:
        raise ValueError(
            f"The checkpoint has format {document['format']}, this tpo_gym reads {FORMAT}: update tpo_gym."
        )
    return document


def load_tensors(members: dict[str, bytes], name: str, device: torch.device) -> dict[str, Any]:
    """The content of the member ``{name}.pth``, on a device.

    Raises:
        ValueError: If it is missing, or holds anything but tensors and plain values.
    """
    if f"{name}.pth" not in members:
        raise ValueError(f"The checkpoint has no {name}.pth: it is damaged.")
    try:
        return torch.load(io.BytesIO(members[f"{name}.pth"]), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{name}.pth in the checkpoint holds something else than tensors. It was not run.") from error


def newest_members(folder: Path) -> dict[str, bytes]:
    """The members of the newest complete checkpoint in a folder; incomplete ones are skipped with a warning.

    Raises:
        FileNotFoundError: If there is none at all.
        ValueError: If none is complete.
    """
    found: list[tuple[int, dict[str, bytes]]] = []
    errors = []
    for path in folder.glob("*.zip"):
        try:
            members = read_members(path)
            found.append((document_of(members)["saved_at"], members))
        except ValueError as error:
            errors.append(f"{path.name}: {error}")
    if errors and not found:
        raise ValueError(f"No checkpoint in {folder} is complete: {'; '.join(errors)}")
    if not found:
        raise FileNotFoundError(f"There is no checkpoint in {folder}.")
    for message in errors:
        warnings.warn(f"Skipped {message}", UserWarning, stacklevel=4)
    return max(found, key=lambda entry: entry[0])[1]
