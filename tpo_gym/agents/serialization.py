"""Python values as JSON plus tensors, and back, without running anything that a file names."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from torch import Tensor, nn

TAG = "$type"
SAFE_PACKAGES = ("tpo_gym", "stable_baselines3", "sb3_contrib", "torch", "gymnasium", "numpy")
"""Packages whose modules may be imported because a file names them. Others must be imported already."""
CLASS_KINDS = (nn.Module, torch.optim.Optimizer, Distribution)
"""What a class that a file names must be."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_SCHEDULES: dict[str, tuple[type, tuple[str, ...]]] = {
    "FloatSchedule": (FloatSchedule, ("value_schedule",)),
    "ConstantSchedule": (ConstantSchedule, ("val",)),
    "LinearSchedule": (LinearSchedule, ("start", "end", "end_fraction")),
}
_SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple", "Text")
_REMEDY = (
    "Leave it out with save(..., exclude=[...]), use something that can be stored (a number, a schedule of "
    "stable_baselines3.common.utils such as LinearSchedule, a function or class at the top of a module), or call "
    "save(..., allow_pickle=True): such a file can only be read with load(..., trust=True)."
)


class Kind(NamedTuple):
    """How values of one kind are stored: which they are, to JSON, and back."""

    matches: Callable[[Any], bool]
    encode: Callable[[Writer, Any, str], dict[str, Any]]
    decode: Callable[[Reader, dict[str, Any], str], Any]


class Writer:
    """Encodes values; arrays and tensors are put aside in :attr:`tensors`.

    Args:
        allow_pickle: Pickle what cannot be stored otherwise.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return ``value`` as JSON data.

        Args:
            value: What to store.
            where: The attribute it belongs to, for error messages. Functions are stored as attributes only.

        Raises:
            TypeError: If the value can only be pickled, and that was not allowed.
        """
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is list:
            return self.items(value, where)
        if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        for name, kind in KINDS.items():
            if kind.matches(value):
                return {TAG: name, **kind.encode(self, value, where)}
        return self.unstorable(value, where, f"is a {type(value).__name__}")

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        """Encode a sequence."""
        return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(values)]

    def put(self, tensor: Tensor) -> str:
        """Keep a copy of a tensor; returns its name."""
        name = str(len(self.tensors))
        self.tensors[name] = tensor.detach().cpu().clone()
        return name

    def unstorable(self, value: Any, where: str, reason: str) -> dict[str, Any]:
        """Pickle a value if that is allowed."""
        if not self.allow_pickle:
            raise TypeError(f"Cannot store {where}={value!r}: it {reason}. {_REMEDY}")
        return {TAG: "pickle", "data": base64.b64encode(cloudpickle.dumps(value)).decode(), "was": repr(value)[:200]}


class Reader:
    """Decodes what a :class:`Writer` encoded.

    Args:
        tensors: The tensors put aside.
        device: Where tensors go that were not on the CPU.
        trust: Unpickle pickled values, and import any module that is named. Both can run any code.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, trust: bool = False) -> None:
        self.tensors = tensors
        self.device = device
        self.trust = trust

    def decode(self, node: Any, where: str) -> Any:
        """Return the value that was encoded as ``node``.

        Raises:
            ValueError: If the node is damaged, or would have to be trusted.
        """
        if isinstance(node, list):
            return self.items(node, where)
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.decode(item, f"{where}[{key!r}]") for key, item in node.items()}
        if node[TAG] == "pickle":
            return self._unpickle(node, where)
        kind = KINDS.get(node[TAG])
        if kind is None:
            raise ValueError(f"{where} is stored as {node[TAG]!r}, which this version of tpo_gym does not know.")
        try:
            return kind.decode(self, node, where)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is damaged: {node[TAG]!r} cannot be read ({error!r}).") from error

    def items(self, nodes: Iterable[Any], where: str) -> list[Any]:
        """Decode a sequence."""
        return [self.decode(item, f"{where}[{index}]") for index, item in enumerate(nodes)]

    def _unpickle(self, node: dict[str, Any], where: str) -> Any:
        if not self.trust:
            attribute = where.partition("[")[0]
            raise ValueError(
                f"{where} is a pickled object (it was {node.get('was')!r}), and reading one can run any code. "
                f"Replace it with custom_objects={{{attribute!r}: ...}}, or pass trust=True if you trust the file."
            )
        return cloudpickle.loads(base64.b64decode(node["data"]))

    def find(self, path: str, where: str) -> Any:
        """The object at an import path ``module:qualname``.

        Raises:
            ValueError: If it does not exist, or its module is neither imported nor of one of the safe packages.
        """
        module_name, _, qualname = path.partition(":")
        module = sys.modules.get(module_name)
        if module is None:
            if not (may_import(module_name) or self.trust):
                raise ValueError(
                    f"{where} is {path!r}, but the module {module_name!r} is not imported, and importing what a file "
                    f"names can run any code. Import it before loading, replace it with custom_objects, or pass "
                    "trust=True if you trust the file."
                )
            try:
                module = importlib.import_module(module_name)
            except ImportError as error:
                raise ValueError(f"{where} is {path!r}, but {module_name!r} cannot be imported: {error}.") from error
        found = _walk(module, qualname)
        # The home of the object must be the path itself: else "torch:os.system" would reach any module.
        if found is None or _path_of(found) != path:
            raise ValueError(
                f"{where} is {path!r}, which does not exist (any more). Replace it with custom_objects={{...}}."
            )
        return found


def may_import(module_name: str) -> bool:
    """Whether a module may be imported because a file names it."""
    parts = module_name.split(".")
    return parts[0] in SAFE_PACKAGES and "__main__" not in parts  # a package's __main__ is a program: importing runs it


def _walk(module: Any, qualname: str) -> Any:
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _path_of(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', None)}"


def _encode_import(writer: Writer, value: Any, where: str) -> dict[str, Any]:
    if _walk(sys.modules.get(value.__module__), value.__qualname__) is not value:
        return writer.unstorable(value, where, "is local or a lambda, so it has no import path")
    if isinstance(value, type) and not issubclass(value, CLASS_KINDS):
        return writer.unstorable(value, where, "is neither a torch module nor an optimizer nor an SB3 distribution")
    if isinstance(value, FunctionType) and not where.isidentifier():
        return writer.unstorable(value, where, "is a function inside another value")
    return {"path": _path_of(value)}


def _decode_class(reader: Reader, node: dict[str, Any], where: str) -> type:
    found = reader.find(node["path"], where)
    if not (isinstance(found, type) and (issubclass(found, CLASS_KINDS) or reader.trust)):
        raise ValueError(
            f"{where} is {node['path']!r}, which is neither a torch module, an optimizer nor an SB3 distribution. "
            "Pass trust=True if you trust the file."
        )
    return found


def _decode_function(reader: Reader, node: dict[str, Any], where: str) -> FunctionType:
    # A function inside `policy_kwargs` would be called with arguments that the file chooses; as an attribute it is a
    # schedule, called with one number. The standard library holds no schedules.
    root = node["path"].partition(":")[0].split(".")[0]
    if not reader.trust and (not where.isidentifier() or root in sys.stdlib_module_names):
        raise ValueError(f"{where} is the function {node['path']!r}. Pass trust=True if you trust the file.")
    found = reader.find(node["path"], where)
    if not isinstance(found, FunctionType):
        raise ValueError(f"{where} is {node['path']!r}, which is not a function.")
    return found


def _encode_array(writer: Writer, value: np.ndarray, where: str) -> dict[str, Any]:
    if value.dtype.kind not in "biufcSU":
        return writer.unstorable(value, where, f"is an array of {value.dtype}")
    flat = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "tensor": writer.put(torch.from_numpy(flat))}


def _decode_array(reader: Reader, node: dict[str, Any], where: str) -> np.ndarray:
    dtype = np.dtype(node["dtype"])
    if dtype.kind not in "biufcSU":
        raise ValueError(f"{where} is damaged: an array of {dtype} is never stored.")
    flat = reader.tensors[node["tensor"]].cpu().numpy()
    return np.frombuffer(flat.tobytes(), dtype=dtype).reshape(node["shape"]).copy()


def _encode_generator(writer: Writer, value: np.random.Generator, where: str) -> dict[str, Any]:
    state = dict(value.bit_generator.state)
    if state["bit_generator"] not in _BIT_GENERATORS:
        return writer.unstorable(value, where, "is a random generator of another package")
    return {"state": writer.encode(state, where)}


def _decode_generator(reader: Reader, node: dict[str, Any], where: str) -> np.random.Generator:
    state = reader.decode(node["state"], where)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(f"{where} is damaged: there is no random generator {state['bit_generator']!r}.")
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


def _encode_schedule(writer: Writer, value: Any, where: str) -> dict[str, Any]:
    name = type(value).__name__
    return {
        "name": name,
        **{key: writer.encode(getattr(value, key), f"{where}[{key!r}]") for key in _SCHEDULES[name][1]},
    }


def _decode_schedule(reader: Reader, node: dict[str, Any], where: str) -> Any:
    made, keys = _SCHEDULES[node["name"]]
    return made(**{key: reader.decode(node[key], f"{where}[{key!r}]") for key in keys})


def _encode_space(writer: Writer, value: Any, where: str) -> dict[str, Any]:
    name = type(value).__name__
    arguments: dict[str, Any] = {}
    if name == "Box":
        arguments = {"low": value.low, "high": value.high, "dtype": value.dtype.str}
    elif name in ("Discrete", "MultiDiscrete"):
        size = "n" if name == "Discrete" else "nvec"
        arguments = {size: getattr(value, size), "start": value.start, "dtype": value.dtype.str}
    elif name == "MultiBinary":
        arguments = {"n": value.n}
    elif name == "Text":
        arguments = {k: getattr(value, k) for k in ("min_length", "max_length")} | {"charset": value.characters}
    elif name == "Dict":
        arguments = {"spaces": list(value.spaces.items())}
    else:
        arguments = {"spaces": list(value.spaces)}
    return {
        "name": name,
        "arguments": writer.encode(arguments, where),
        "random": writer.encode(value._np_random, where),
    }


def _decode_space(reader: Reader, node: dict[str, Any], where: str) -> spaces.Space:
    name = node["name"]
    if name not in _SPACES:
        raise ValueError(f"{where} is damaged: there is no stored space {name!r}.")
    arguments = reader.decode(node["arguments"], where)
    if name == "Discrete" and np.dtype(arguments["dtype"]) == np.int64:
        del arguments["dtype"]  # older versions of Gymnasium know no other
    elif "dtype" in arguments:
        arguments["dtype"] = np.dtype(arguments["dtype"]).type
    if name == "Dict":
        arguments["spaces"] = OrderedDict(arguments["spaces"])
    space = getattr(spaces, name)(**arguments)
    if name == "Dict":
        space.spaces = dict(arguments["spaces"])  # Gymnasium may have sorted the keys
    space._np_random = reader.decode(node["random"], where)
    return space


def _encode_dataclass(writer: Writer, value: Any, where: str) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {"path": _path_of(type(value)), "fields": writer.encode(fields, where)}


def _decode_dataclass(reader: Reader, node: dict[str, Any], where: str) -> Any:
    found = reader.find(node["path"], where)
    if not (isinstance(found, type) and _is_our_dataclass(found)):
        raise ValueError(f"{where} is {node['path']!r}, which is not a dataclass of tpo_gym.")
    return found(**reader.decode(node["fields"], where))


def _is_our_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and kind.__module__.split(".")[0] == "tpo_gym"


def _decode_tensor(reader: Reader, node: dict[str, Any], where: str) -> Tensor:
    tensor = reader.tensors[node["tensor"]]
    return tensor if node["on_cpu"] else tensor.to(reader.device)


def _dtype(node: dict[str, Any], where: str) -> torch.dtype:
    found = getattr(torch, node["value"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{where} is damaged: there is no torch.{node['value']}.")
    return found


KINDS: dict[str, Kind] = {
    "float": Kind(lambda v: type(v) is float, lambda w, v, at: {"value": repr(v)}, lambda r, n, at: float(n["value"])),
    "tuple": Kind(
        lambda v: type(v) is tuple,
        lambda w, v, at: {"items": w.items(v, at)},
        lambda r, n, at: tuple(r.items(n["items"], at)),
    ),
    "set": Kind(
        lambda v: type(v) is set,
        lambda w, v, at: {"items": w.items(v, at)},
        lambda r, n, at: set(r.items(n["items"], at)),
    ),
    "deque": Kind(
        lambda v: type(v) is deque,
        lambda w, v, at: {"items": w.items(v, at), "maxlen": v.maxlen},
        lambda r, n, at: deque(r.items(n["items"], at), maxlen=n["maxlen"]),
    ),
    "dict": Kind(
        lambda v: type(v) is dict,
        lambda w, v, at: {"items": [w.items(pair, at) for pair in v.items()]},
        lambda r, n, at: dict(r.items(pair, at) for pair in n["items"]),
    ),
    "OrderedDict": Kind(
        lambda v: type(v) is OrderedDict,
        lambda w, v, at: {"items": [w.items(pair, at) for pair in v.items()]},
        lambda r, n, at: OrderedDict(r.items(pair, at) for pair in n["items"]),
    ),
    "number": Kind(
        lambda v: isinstance(v, np.generic) and v.dtype.kind in "biuf",
        lambda w, v, at: _encode_array(w, np.asarray(v), at),
        lambda r, n, at: _decode_array(r, n, at)[()],
    ),
    "array": Kind(lambda v: type(v) is np.ndarray, _encode_array, _decode_array),
    "tensor": Kind(
        lambda v: type(v) is Tensor,
        lambda w, v, at: {"tensor": w.put(v), "on_cpu": v.device.type == "cpu"},
        _decode_tensor,
    ),
    "torch.dtype": Kind(
        lambda v: isinstance(v, torch.dtype),
        lambda w, v, at: {"value": str(v).removeprefix("torch.")},
        lambda r, n, at: _dtype(n, at),
    ),
    "device": Kind(
        lambda v: isinstance(v, torch.device),
        lambda w, v, at: {"value": str(v)},
        lambda r, n, at: torch.device(n["value"]),
    ),
    "path": Kind(
        lambda v: isinstance(v, PurePath), lambda w, v, at: {"value": str(v)}, lambda r, n, at: Path(n["value"])
    ),
    "generator": Kind(lambda v: type(v) is np.random.Generator, _encode_generator, _decode_generator),
    "schedule": Kind(
        lambda v: type(v) in (FloatSchedule, ConstantSchedule, LinearSchedule), _encode_schedule, _decode_schedule
    ),
    "space": Kind(lambda v: type(v) in [getattr(spaces, name) for name in _SPACES], _encode_space, _decode_space),
    "class": Kind(lambda v: isinstance(v, type), _encode_import, _decode_class),
    "function": Kind(lambda v: isinstance(v, FunctionType), _encode_import, _decode_function),
    "dataclass": Kind(lambda v: _is_our_dataclass(type(v)), _encode_dataclass, _decode_dataclass),
}
