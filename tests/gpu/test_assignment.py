"""Which GPUs a process sees, on every engine; where there are none, asking for one is an error before any work."""

import os
from collections.abc import Iterator

import pytest
import torch

import torchlake as tl
from torchlake import plugins
from torchlake.engines import Resources
from torchlake.errors import UsageError


def seen_devices() -> "Iterator[list[str]]":
    def worker(items: Iterator[int]) -> Iterator[list[str]]:
        for _ in items:
            yield [os.environ.get("CUDA_VISIBLE_DEVICES", "unset"), str(torch.cuda.device_count())]

    return worker  # type: ignore[return-value]


def engine_named(name: str) -> "tl.Engine":
    pytest.importorskip({"spark": "pyspark", "ray": "ray"}.get(name, "torch"))
    gpus = torch.cuda.device_count()
    if name == "local":
        return tl.Local(processes=max(1, gpus))
    if name == "ray":
        return tl.Ray(processes=max(1, gpus), gpus_per_process=1.0 if gpus else None)
    if not gpus:
        return tl.Spark(processes=1)
    pytest.skip("Spark assigns GPUs by its cluster manager, and there is none here")


@pytest.mark.parametrize("name", plugins.names("engines"))
@pytest.mark.usefixtures("cuda")
def test_every_process_sees_one_gpu(name: str) -> None:
    engine = engine_named(name)
    chunks = range(4 * torch.cuda.device_count())
    one_each = Resources(processes=torch.cuda.device_count(), gpus=1)
    found = list(engine.run_chunks(seen_devices, chunks, resources=one_each))
    assert {count for _, count in found} == {"1"}
    assert len({devices for devices, _ in found}) == torch.cuda.device_count()


def test_more_gpus_than_there_are_is_an_error() -> None:
    engine = tl.Local(processes=1)
    wanted = torch.cuda.device_count() + 1
    with pytest.raises(UsageError, match=rf"1 processes with {wanted} GPUs each need {wanted} GPUs"):
        list(engine.run_chunks(seen_devices, range(1), resources=Resources(processes=1, gpus=wanted)))
