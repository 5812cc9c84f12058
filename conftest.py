"""Which modules `pytest --doctest-modules` (make docs) leaves out: those whose extra is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") and find_spec("transformers") else ["tpo_gym/llm/*.py"]
