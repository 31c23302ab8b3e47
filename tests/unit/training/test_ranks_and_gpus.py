"""How many ranks a training gets where a machine has GPUs. They are pretended: no device is opened."""

from pathlib import Path
from typing import Any

import pytest

import torchlake as tl
import training_runs as runs
from torchlake.engines import ProcessRange, local
from torchlake.errors import Interrupted


class Watched(tl.Local):
    """The local engine, but that it only notes what it should launch."""

    launched: dict[str, Any]

    def launch(self, fn: Any, *args: Any, **options: Any) -> Any:
        self.launched = {**options, "strategy": args[0]["strategy"]}
        raise Interrupted("seen")


@pytest.mark.parametrize(
    ("gpus", "processes", "ranks"),
    [
        ("0,1,2,3", (2, 8), 4),
        ("0,1,2,3", (2, 3), 3),
        ("0", (2, 8), 2),  # never fewer than the fewest
        ("", (2, 8), 8),
        ("0,1,2,3", 2, 2),
        ("0,1,2,3", None, 4),
        ("", None, 1),
    ],
)
def test_ranks_are_as_many_as_there_are_gpus_for_them(
    tmp_path: Path,
    tiny_bert: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    processes: ProcessRange | None,
    ranks: int,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(local, "cores", lambda: 64)
    sections = runs.job(tmp_path, tiny_bert)
    overrides = (
        () if processes is None else (f"engine.processes={list(processes) if type(processes) is tuple else processes}",)
    )
    engine = Watched()
    engine.run_chunks = runs.Inline().run_chunks  # type: ignore[method-assign]  # the table is prepared in this process
    with pytest.raises(Interrupted, match="seen"):
        tl.train(run=tmp_path / "run", engine=engine, overrides=overrides, **sections)
    assert engine.launched["processes"] == ranks
    assert engine.launched["gpus_per_process"] is None, "the engine reserves them"
    assert engine.launched["strategy"] == ("single" if ranks == 1 else "ddp")
