"""Which devices a setting means on a machine with so many GPUs; an outer CUDA_VISIBLE_DEVICES stands in for them."""

from __future__ import annotations

import pytest

from cli.devices import CPU, Device, chosen_devices
from cli.problems import CommandError


def test_auto_takes_every_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert chosen_devices("auto") == [Device("cuda:0", "2"), Device("cuda:0", "GPU-abc")]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_auto_takes_the_cpu_when_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert chosen_devices("auto") == [CPU]


def test_indices_count_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert chosen_devices("2,0") == [Device("cuda:0", "6"), Device("cuda:0", "4")]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(CommandError, match="names GPU 1, but this machine has 1 GPUs"):
        chosen_devices("0,1")


def test_cpu_asks_for_no_gpu_even_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert chosen_devices("cpu") == [CPU]
