"""Files: SB3's contract for save and load, what is stored, and that nothing in a file runs (field report 22)."""

import dataclasses
import io
import json
import pickle
import sys
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from torch import nn

from tpo_gym import GRPO, TPO, make_vec_env
from tpo_gym.agents import ActorPolicy
from tpo_gym.agents.serialization import Reader, Writer

ENV = "tpo_gym/ContextualBandit-v0"


def model_of(learning_rate=0.1, policy="MlpPolicy", **kwargs):
    return TPO(policy, ENV, learning_rate, n_contexts=4, seed=0, **{"policy_kwargs": {"net_arch": [8]}, **kwargs})


def round_trip(value):
    writer = Writer()
    text = json.dumps(writer.encode(value, "value"))
    buffer = io.BytesIO()
    torch.save(writer.tensors, buffer)
    buffer.seek(0)
    return Reader(torch.load(buffer, weights_only=True), torch.device("cpu")).decode(json.loads(text), "value")


# Values.

PLAIN = [
    None,
    True,
    2**100,
    0.1,
    float("inf"),
    "π",
    [1, [2.5, None]],
    (1, (2, "a")),
    {"a": {"b": (1,)}},
    {1: "a", (2, 3): "b"},
    {"$type": "tuple", "items": []},
    OrderedDict(b=1, a=2),
    {1, 2},
    deque([{"r": 1.5, "l": 2}], maxlen=7),
    np.float32(0.1),
    np.bool_(True),
    np.int64(3),
    torch.float16,
    torch.device("cpu"),
    Path("runs") / "a",
    nn.ReLU,
    torch.optim.Adam,
    ActorPolicy,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen


def test_nan_comes_back():
    assert np.isnan(round_trip(float("nan")))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint32", "int64", "float16", "float64", "complex64", "<U3"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_come_back(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = round_trip(array)
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert np.array_equal(back, array)
    back += back if dtype not in ("bool", "<U3") else back[...] if dtype == "bool" else ""  # it can be written to


def test_tensors_come_back():
    tensor = torch.randn(2, 3)
    assert torch.equal(round_trip({"a": tensor})["a"], tensor)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.array([1.0, np.inf]), dtype=np.float64),
        spaces.Box(0, 255, (3, 4, 1), np.uint8),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        spaces.MultiBinary((2, 3)),
        spaces.Text(7, min_length=2, charset="abc"),
        spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Dict(b=spaces.MultiBinary(3)))),
        spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
    ],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("seeded", [True, False])
def test_spaces_come_back_with_their_random_state(space, seeded):
    if seeded:
        space.seed(3)
        space.sample()
    back = round_trip(space)
    assert back == space
    if isinstance(space, spaces.Dict):
        assert list(back.spaces) == list(space.spaces)
    if seeded:
        assert repr(back.sample()) == repr(space.sample())


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_come_back(bits):
    generator = np.random.Generator(bits(3))
    generator.random(5)
    assert np.array_equal(round_trip(generator).random(9), generator.random(9))


@pytest.mark.parametrize(
    "schedule", [LinearSchedule(1.0, 0.1, 0.5), ConstantSchedule(0.3), FloatSchedule(LinearSchedule(1, 0, 1))], ids=repr
)
def test_schedules_are_data(schedule):
    back = round_trip(schedule)
    assert [back(x) for x in (1.0, 0.7, 0.2)] == [schedule(x) for x in (1.0, 0.7, 0.2)]
    assert type(back) is type(schedule)


def halving(progress):
    return 0.1 * progress


class LocalPolicy(ActorPolicy):
    """A policy of the user's, in a module that load does not import."""


@dataclasses.dataclass
class Foreign:
    x: int = 0


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        object(),
        Foreign(),
        np.array([None]),
        io.BytesIO(),
        [halving],
        dict,
        spaces.Sequence(spaces.Discrete(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_with_the_remedy(value):
    with pytest.raises(TypeError, match=r"Cannot store value.*exclude.*allow_pickle=True"):
        Writer().encode(value, "value")


# SB3's contract.


def same_parameters(first, second):
    states = [model.policy.state_dict() for model in (first, second)]
    return all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


@pytest.mark.parametrize("cls", [TPO, GRPO])
@pytest.mark.parametrize("name", ["model", "model.zip", "model.v1", "new/folder/model"])
def test_paths(cls, name, tmp_path):
    candidates = "auto" if cls is TPO else "episodes"
    model = cls("MlpPolicy", ENV, 0.02, n_contexts=2, candidates=candidates, group_size=4, seed=1)
    model.learn(16).save(str(tmp_path / name))
    file = tmp_path / (name if "." in name else f"{name}.zip")
    assert file.is_file()
    assert not list(file.parent.glob(".*"))
    for path in (tmp_path / name, str(tmp_path / name), str(file)):
        loaded = cls.load(path)
        assert same_parameters(model, loaded)
        assert (loaded.group_size, loaded.learning_rate, loaded.num_timesteps) == (4, 0.02, model.num_timesteps)


def test_open_files():
    model = model_of()
    buffer = io.BytesIO()
    model.save(buffer)
    assert same_parameters(model, TPO.load(buffer))
    with pytest.raises(TypeError, match="invalid type"):
        model.save(3)
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        TPO.load(buffer)


def test_a_missing_file_and_a_failed_save(tmp_path):
    with pytest.raises(FileNotFoundError):
        TPO.load(tmp_path / "missing")
    model_of().save(tmp_path / "model")
    before = (tmp_path / "model.zip").read_bytes()
    with pytest.raises(TypeError):
        model_of(lambda _: 0.1).save(tmp_path / "model")
    assert (tmp_path / "model.zip").read_bytes() == before  # the old file is not lost


def test_exclude_and_include(tmp_path):
    model = model_of(verbose=2)
    model.save(tmp_path / "model", exclude=["verbose"])
    assert TPO.load(tmp_path / "model").verbose == 0
    model.save(tmp_path / "model", exclude=["verbose"], include=["verbose"])
    assert TPO.load(tmp_path / "model").verbose == 2
    model.save(tmp_path / "model", exclude=["observation_space"])
    with pytest.raises(KeyError, match="observation_space"):
        TPO.load(tmp_path / "model")


def test_arguments_of_load_override(tmp_path, capsys):
    model_of().save(tmp_path / "model")
    loaded = TPO.load(tmp_path / "model", env=ENV, learning_rate=0.5, print_system_info=True, force_reset=False)
    assert loaded.lr_schedule(1) == 0.5
    assert "SAVED MODEL SYSTEM INFO" in capsys.readouterr().out
    assert loaded.env.num_envs == 4
    with pytest.raises(ValueError, match="policy kwargs"):
        TPO.load(tmp_path / "model", policy_kwargs={"net_arch": [9]})
    TPO.load(tmp_path / "model", policy_kwargs={"net_arch": [8]})


def test_the_environment_is_checked(tmp_path):
    model_of().save(tmp_path / "model")
    with pytest.raises(ValueError, match="spaces do not match"):
        TPO.load(tmp_path / "model", env="CartPole-v1")
    other = TPO.load(tmp_path / "model", env=gym.make_vec(ENV, num_envs=12))
    assert other.n_envs == 12
    assert evaluate_policy(other, make_vec_env(ENV, n_envs=2), n_eval_episodes=4)[0] >= 0


def test_set_and_get_parameters(tmp_path):
    first, second = model_of(), TPO("MlpPolicy", ENV, policy_kwargs={"net_arch": [8]})
    first.learn(8)
    assert not same_parameters(first, second)
    first.save(tmp_path / "model")
    second.set_parameters(tmp_path / "model")
    assert same_parameters(first, second)
    third = TPO("MlpPolicy", ENV, policy_kwargs={"net_arch": [8]})
    third.set_parameters(first.get_parameters())
    assert same_parameters(first, third)
    with pytest.raises(ValueError, match="do not match"):
        third.set_parameters({"policy": first.get_parameters()["policy"]})
    third.set_parameters({"policy": first.get_parameters()["policy"]}, exact_match=False)


def test_sb3_reads_the_weights(tmp_path):
    model_of().save(tmp_path / "model")
    _, parameters, _ = load_from_zip_file(tmp_path / "model")
    assert {"policy", "policy.optimizer"} <= set(parameters)


def test_a_file_of_another_class_or_library(tmp_path):
    from stable_baselines3 import PPO

    model_of().save(tmp_path / "tpo")
    with pytest.raises(ValueError, match=r"read it with TPO\.load"):
        GRPO.load(tmp_path / "tpo")
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(tmp_path / "ppo")
    with pytest.raises(ValueError, match="Stable-Baselines3"):
        TPO.load(tmp_path / "ppo")
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        TPO.load(tmp_path / "text")


def test_a_later_format_is_refused(tmp_path):
    model_of().save(tmp_path / "model")
    change(tmp_path / "model.zip", lambda document: document.update(format=99))
    with pytest.raises(ValueError, match="update tpo_gym"):
        TPO.load(tmp_path / "model")


def test_schedules_in_a_file(tmp_path):
    model_of(LinearSchedule(0.1, 0.01, 1.0)).save(tmp_path / "model")
    assert TPO.load(tmp_path / "model").lr_schedule(0.0) == pytest.approx(0.01)
    model_of(halving).save(tmp_path / "model")  # a function at the top of a module: by its path
    assert TPO.load(tmp_path / "model").lr_schedule(0.5) == 0.05


def test_optimizer_state_that_could_not_be_read_is_not_written(tmp_path):
    model = model_of()
    model.policy.optimizer.param_groups[0]["extra"] = object()
    with pytest.raises(TypeError, match=r"policy\.optimizer.*extra"):
        model.save(tmp_path / "model")


def test_a_replaced_method_is_not_written(tmp_path):
    model = model_of()
    model.train = halving
    with pytest.raises(TypeError, match="train was replaced"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", exclude=["train"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_other_devices(source, target, tmp_path):
    model = model_of(device=source).learn(8)
    model.save(tmp_path / "model")
    loaded = TPO.load(tmp_path / "model", env=ENV, device=target)
    assert loaded.policy.device.type == target
    assert loaded.learn(8, reset_num_timesteps=False).num_timesteps == 16


# Safety.


def change(path, edit=lambda document: None, members=()):
    """Rewrite a checkpoint as an attacker could."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(contents["data.json"])
    edit(document)
    contents["data.json"] = json.dumps(document).encode()
    contents.update(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture
def attack(tmp_path):
    """A saved model, the pickle of a payload, and a check that the payload did not run."""
    model_of().save(tmp_path / "model")
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Payload(marker))).close()
    assert marker.exists()  # the payload works
    marker.unlink()
    yield tmp_path / "model.zip", pickle.dumps(Payload(marker), protocol=2)
    assert not marker.exists()


@pytest.mark.parametrize("member", ["policy", "policy.optimizer", "tensors"])
def test_a_hostile_member_does_not_run(member, attack):
    path, payload = attack
    change(path, members={f"{member}.pth": payload})
    with pytest.raises(ValueError, match="It was not run"):
        TPO.load(path)
    if member != "tensors":
        with pytest.raises(ValueError, match="It was not run"):
            model_of().set_parameters(path)


def test_a_hostile_member_in_torch_format_does_not_run(attack, tmp_path):
    path, _ = attack
    buffer = io.BytesIO()
    torch.save({"weights": Payload(tmp_path / "marker")}, buffer)
    change(path, members={"policy.pth": buffer.getvalue()})
    with pytest.raises(ValueError, match="It was not run"):
        TPO.load(path)


@pytest.mark.parametrize("name", ["extra.pth", "data", "data.pkl", "pytorch_variables.pth", "../../evil.pth"])
def test_an_extra_member_is_not_read(name, attack):
    path, payload = attack
    change(path, members={name: payload})
    assert isinstance(TPO.load(path), TPO)  # the fixture checks that the payload did not run


@pytest.mark.parametrize("where", ["attributes", "nested", "resume"])
def test_a_hostile_pickled_value_does_not_run(where, attack):
    import base64

    path, payload = attack
    node = {"$type": "pickle", "data": base64.b64encode(payload).decode()}

    def edit(document):
        if where == "resume":
            document["resume"]["iteration"] = node
        elif where == "nested":
            document["attributes"]["policy_kwargs"] = {"net_arch": [node]}
        else:
            document["attributes"]["learning_rate"] = node

    change(path, edit)
    with pytest.raises(ValueError, match="can run any code"):
        TPO.load(path)


def hostile_class(path):
    return {"$type": "class", "path": path}


@pytest.mark.parametrize(
    ("name", "node", "message"),
    [
        ("policy_class", hostile_class("subprocess:Popen"), "neither a torch module"),
        ("policy_class", hostile_class("torch:os.system"), "does not exist"),
        ("policy_class", hostile_class("tpo_evil:Policy"), "not imported"),
        ("policy_class", hostile_class("numpy.f2py.__main__:main"), "not imported"),
        ("learning_rate", {"$type": "function", "path": "shutil:rmtree"}, "trust=True"),
        ("policy_kwargs", {"f": {"$type": "function", "path": "torch.hub:load"}}, "trust=True"),
        ("policy_kwargs", {"$type": "dataclass", "path": "dataclasses:Field", "fields": {}}, "dataclass"),
        ("set_random_seed", {"$type": "function", "path": "torch.hub:load"}, "not to be trusted"),
        ("__class__", hostile_class("torch.nn.modules.activation:ReLU"), "not to be trusted"),
        ("seed", {"$type": "unheard of"}, "does not know"),
        ("seed", {"$type": "generator", "state": {"bit_generator": "sys"}}, "no random generator"),
        ("seed", {"$type": "space", "name": "os"}, "no stored space"),
        ("seed", {"$type": "array", "dtype": "O", "shape": [], "tensor": "0"}, "never stored"),
        ("seed", {"$type": "torch.dtype", "value": "load"}, "no torch"),
        ("seed", {"$type": "tuple"}, "damaged"),
    ],
)
def test_hostile_data_is_refused(name, node, message, tmp_path):
    (tmp_path / "tpo_evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nclass Policy: ...\n")
    model_of().save(tmp_path / "model")
    change(tmp_path / "model.zip", lambda document: document["attributes"].update({name: node}))
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ValueError, match=message):
            TPO.load(tmp_path / "model")
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "marker").exists()


def test_the_environment_of_a_hostile_file_is_not_imported(tmp_path):
    model_of().save(tmp_path / "model")
    change(tmp_path / "model.zip", lambda document: document["environment"].update(id="tpo_evil:Evil-v0"))
    with pytest.raises(ValueError, match="not a registered environment"):
        TPO.resume(tmp_path / "model")
    # Importing this would run a program.
    change(tmp_path / "model.zip", lambda document: document["environment"].update(id="numpy.f2py.__main__:Evil-v0"))
    with pytest.raises(ValueError, match="not a registered environment"):
        TPO.resume(tmp_path / "model")
    assert "numpy.f2py.__main__" not in sys.modules


def test_only_declared_variables_are_set(tmp_path):
    model_of().save(tmp_path / "model")
    change(tmp_path / "model.zip", lambda document: document["variables"].update({"policy_class.predict": 1}))
    with pytest.raises(ValueError, match=r"policy_class\.predict"):
        TPO.load(tmp_path / "model")


def test_pickles_only_when_allowed_and_trusted(tmp_path):
    model = model_of(lambda progress: 0.25 * progress)
    with pytest.raises(TypeError, match=r"Cannot store learning_rate.*lambda.*LinearSchedule.*allow_pickle=True"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", allow_pickle=True)
    with pytest.raises(ValueError, match=r"custom_objects=\{'learning_rate': \.\.\.\}, or pass trust=True"):
        TPO.load(tmp_path / "model")
    assert TPO.load(tmp_path / "model", trust=True).lr_schedule(1.0) == 0.25
    assert TPO.load(tmp_path / "model", custom_objects={"learning_rate": 0.5, "unknown": 1}).lr_schedule(1.0) == 0.5


def test_custom_objects_are_not_deserialized(attack):
    import base64

    path, payload = attack
    node = {"$type": "pickle", "data": base64.b64encode(payload).decode()}
    change(path, lambda document: document["attributes"].update(learning_rate=node))
    assert TPO.load(path, custom_objects={"learning_rate": 0.5}).learning_rate == 0.5


def test_a_local_class(tmp_path):
    class Inner(ActorPolicy):
        pass

    model = model_of(policy=Inner)
    with pytest.raises(TypeError, match=r"Cannot store policy_class.*local"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", allow_pickle=True)
    loaded = TPO.load(tmp_path / "model", custom_objects={"policy_class": Inner})
    assert isinstance(loaded.policy, Inner)
    assert TPO.load(tmp_path / "model", trust=True).policy_class.__name__ == "Inner"


def test_a_class_of_a_module_that_is_not_imported(tmp_path):
    """The user's own policy: by import path, never imported for the file's sake alone."""
    (tmp_path / "my_policies.py").write_text("from tpo_gym.agents import ActorPolicy\nclass Mine(ActorPolicy): ...\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import my_policies

        model_of(policy=my_policies.Mine).save(tmp_path / "model")
        assert isinstance(TPO.load(tmp_path / "model").policy, my_policies.Mine)
        del sys.modules["my_policies"]
        with pytest.raises(ValueError, match="Import it before loading"):
            TPO.load(tmp_path / "model")
        replaced = TPO.load(tmp_path / "model", custom_objects={"policy_class": LocalPolicy})
        assert isinstance(replaced.policy, LocalPolicy)
        assert TPO.load(tmp_path / "model", trust=True).policy_class.__name__ == "Mine"
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("my_policies", None)


def test_a_file_holds_json_and_tensors_only(tmp_path):
    model_of().learn(8).save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert sorted(archive.namelist()) == ["data.json", "policy.optimizer.pth", "policy.pth", "tensors.pth"]
        text = archive.read("data.json").decode()
    assert '"pickle"' not in text
    assert str(tmp_path) not in text
