"""All numbers of an entry lie in one event, and TensorBoard reads them as SB3's output."""

import pytest
from stable_baselines3.common.logger import HParam, Logger, TensorBoardOutputFormat
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpo_gym.experiments.events import events_logger


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, events


def fill(logger):
    logger.record("hparams", HParam({"rate": 0.1}, {"error": 0.0}))
    for step in (10, 20):
        logger.record("error", 1 / step)
        logger.record("count", step)
        logger.record("hidden", 3.0, exclude="tensorboard")
        logger.record("words", "some text")
        logger.dump(step)
    logger.close()


def test_it_is_read_as_sb3s(tmp_path):
    fill(events_logger(tmp_path / "ours"))
    fill(Logger(str(tmp_path / "sb3"), [TensorBoardOutputFormat(str(tmp_path / "sb3"))]))
    ours, events = read(tmp_path / "ours")
    sb3, theirs = read(tmp_path / "sb3")
    assert ours == sb3
    assert ours["count"] == [(10, 10.0), (20, 20.0)]
    assert ours["error"][1] == (20, pytest.approx(0.05))
    assert set(events.SummaryMetadata("_hparams_/experiment").plugin_data.plugin_name) == set("hparams")
    assert events.Tags()["tensors"] == theirs.Tags()["tensors"] == ["words/text_summary"]
