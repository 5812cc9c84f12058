"""Packs the four IDX files of MNIST into the compressed file that ships in the package.

Usage: python scripts/pack_mnist.py SOURCE_DIR [TARGET_FILE]

The same input gives the same bytes (with the same versions of numpy and zlib); the SHA-256 printed at the end belongs
into ``tpo_gym/envs/datasets.py``.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from tpo_gym.envs.datasets import MNIST_FILE, SPLITS, read_idx_split

TARGET = Path(__file__).resolve().parent.parent / "tpo_gym" / "envs" / "data" / MNIST_FILE


def pack(source: Path, target: Path) -> str:
    """Writes the packed file and returns its SHA-256.

    Raises:
        FileNotFoundError: A file is missing in ``source``.
        ValueError: A file is damaged.
    """
    arrays: dict[str, Any] = {}
    for split in SPLITS:
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = read_idx_split(source, split)
    target.parent.mkdir(parents=True, exist_ok=True)
    # numpy dates every member 1980-01-01, so the bytes do not depend on the time.
    np.savez_compressed(target, **arrays)
    return hashlib.sha256(target.read_bytes()).hexdigest()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Pack MNIST's IDX files into the file that ships in the package.")
    parser.add_argument("source", type=Path, help="directory with the four IDX files (.gz or plain)")
    parser.add_argument("target", type=Path, nargs="?", default=TARGET, help="file to write (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"{pack(arguments.source, arguments.target)}  {arguments.target}")


if __name__ == "__main__":
    main()
