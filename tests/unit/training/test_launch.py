"""launch and launch_script: what torchrun starts, they start; and what cannot be started is said before."""

import json
import os
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchlake.engines.local import Local
from torchlake.errors import ConfigError, RankFailed, UsageError
from torchlake.launching import scripts
from torchlake.launching.launch import launch, launch_script

TWO = Local(processes=2)


def test_a_function_returns_rank_0s_value() -> None:
    assert launch(_place, "a", processes=2) == ("0", "2", "a")
    assert launch(_place, "a", engine=TWO) == ("0", "2", "a")
    assert launch(_place, "a") == ("0", "1", "a")


@pytest.mark.timeout(120)
def test_a_loop_whose_module_outlives_its_group_ends(tmp_path: Path) -> None:
    """About every second of these rounds would hang."""
    assert launch(_reduce_in_groups, tmp_path, 8, processes=2) == [3.0] * 8


@pytest.mark.timeout(120)
def test_a_script_whose_module_is_global_ends(tmp_path: Path) -> None:
    script = _write(
        tmp_path / "train.py",
        """
        import os, torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(64, 10))

        def train():
            model(torch.ones(8, 64)).sum().backward()

        train()
        total = torch.ones(())
        dist.all_reduce(total)
        assert total.item() == 2
        dist.destroy_process_group()
        """,
    )
    assert launch_script(str(script), engine=TWO) is None


def test_a_function_that_cannot_travel_is_named() -> None:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    with pytest.raises(UsageError, match="guarded cannot be sent to another process"):
        launch(guarded, processes=2)


def test_only_functions_are_launched() -> None:
    with pytest.raises(UsageError, match=r"launch takes a function, not 'train.py'; .*launch_script"):
        launch("train.py")  # type: ignore[arg-type]


def test_a_script_runs_as_python_would_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    _write(
        folder / "train.py",
        """
        import json, os, pickle, sys
        import beside

        class Kept:
            pass

        assert type(pickle.loads(pickle.dumps(Kept()))) is Kept
        seen = {"name": __name__, "argv": sys.argv, "file": __file__, "first": sys.path[0], "beside": beside.NAME,
                "cwd": os.getcwd(), "world": os.environ["WORLD_SIZE"]}
        with open(f"rank_{os.environ['RANK']}.json", "w") as file:
            json.dump(seen, file)
        """,
    )
    monkeypatch.chdir(tmp_path)
    assert launch_script("project/train.py", ["--lr", "0.1", ""], engine=TWO) is None
    for rank in range(2):
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == {
            "name": "__main__",
            "argv": ["project/train.py", "--lr", "0.1", ""],
            "file": "project/train.py",
            "first": str(folder),
            "beside": "beside",
            "cwd": str(tmp_path),
            "world": "2",
        }


@pytest.mark.parametrize("leaving", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_a_script_may_leave_with_status_0(tmp_path: Path, leaving: str) -> None:
    assert launch_script(str(_write(tmp_path / "fine.py", f"import sys\n{leaving}\n"))) is None


def test_a_script_that_fails_names_rank_line_and_cause(tmp_path: Path) -> None:
    script = _write(tmp_path / "broken.py", "import os\nif os.environ['RANK'] == '1':\n    {}['absent']\n")
    with pytest.raises(RankFailed, match="rank 1 failed with KeyError: 'absent'") as caught:
        launch_script(str(script), engine=TWO)
    assert 'broken.py", line 3, in <module>' in caught.value.traceback
    assert "runpy" not in caught.value.traceback


def test_a_script_that_leaves_with_another_status_fails(tmp_path: Path) -> None:
    script = _write(tmp_path / "status.py", "import os, sys\nsys.exit(int(os.environ['RANK']) * 3)\n")
    with pytest.raises(RankFailed, match=r"rank 1 called sys.exit\(3\)") as caught:
        launch_script(str(script), engine=TWO)
    assert caught.value.rank == 1


def test_a_function_is_found_by_name_and_called_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    _write(package / "jobs.py", "class Jobs:\n    @staticmethod\n    def train(*args):\n        return list(args)\n")
    monkeypatch.chdir(tmp_path)
    assert launch_script("my_package.jobs:Jobs.train", ["--lr", "0.1"]) == ["--lr", "0.1"]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "my_jobs.py", "rate = 1\ndef train():\n    pass\n")
    refused = {
        "trian.py": "trian.py: there is no such file",
        str(tmp_path): "it is a folder",
        "no_such_module:train": "no_such_module: no such module",
        "my_jobs.inner:train": "my_jobs.inner: no such module",
        "my_jobs:": "there is no such file",
        "my_jobs:trian": "the module has no 'trian'. Did you mean 'train'",
        "my_jobs:rate": "my_jobs:rate is 1, not a function",
    }
    for target, message in refused.items():
        with pytest.raises(UsageError, match=message):
            launch_script(target)


def test_a_module_that_lacks_a_module_of_its_own_is_not_a_missing_module(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "needs_more.py", "import no_such_library\n")
    with pytest.raises(RankFailed, match="No module named 'no_such_library'"):
        launch_script("needs_more:train")


def test_an_error_of_ours_comes_back_as_itself() -> None:
    with pytest.raises(ConfigError, match=r"job.yaml:3: no such key"):
        launch(_refuse)


@pytest.mark.slow
def test_a_script_for_torchrun_trains(tmp_path: Path) -> None:
    script = _write(
        tmp_path / "ddp.py",
        """
        import argparse
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float, required=True)
            parser.add_argument("--out", required=True)
            args = parser.parse_args()
            dist.init_process_group("gloo")
            rank, world = dist.get_rank(), dist.get_world_size()
            model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
            torch.nn.init.ones_(model.module.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
            model(torch.full((1, 2), float(rank + 1))).sum().backward()
            optimizer.step()
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            if rank == 0:
                with open(args.out, "w") as file:
                    file.write(f"{world} {total.item()} {model.module.weight[0, 0].item():.3f}")
            dist.destroy_process_group()

        if __name__ == "__main__":
            main()
        """,
    )
    launch_script(str(script), ["--lr", "0.1", "--out", str(tmp_path / "out")], engine=TWO)
    assert (tmp_path / "out").read_text() == "2 3.0 0.850"  # 1 - 0.1 * mean(1, 2)


def _write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def _place(word: str) -> tuple[str, str, str]:
    assert "pytest" not in sys.argv[0]
    return os.environ["RANK"], os.environ["WORLD_SIZE"], word


def _reduce_in_groups(folder: Path, rounds: int) -> list[float]:
    return [_reduce(dist.FileStore(str(folder / str(number)), 2)) for number in range(rounds)]


def _reduce(store: dist.Store) -> float:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    model(torch.ones(8, 64)).sum().backward()
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    value = total.item()
    dist.destroy_process_group()
    return value


def _refuse() -> None:
    raise ConfigError("job.yaml:3: no such key")


def test_a_script_runs_where_its_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    scripts.run_script(
        "/nowhere/train.py", b"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(__name__)", f"{tmp_path}/said"
    )
    assert (tmp_path / "said").read_text() == "__main__"


SHIPPED = """
import json, multiprocessing, os, sys
import beside

def which(_):
    return "shipped"

class Kept:
    pass

def main():
    import inspect, pickle, traceback
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(which, [0])
    try:
        raise ValueError("shown")
    except ValueError:
        shown = traceback.format_exc()
    facts = {"spawned": spawned, "shown": shown, "argv": sys.argv, "file": __file__, "beside": beside.NAME,
             "source": inspect.getsource(which), "pickled": type(pickle.loads(pickle.dumps(Kept()))) is Kept}
    with open(f"rank_{os.environ['RANK']}.json", "w") as file:
        json.dump(facts, file)

if __name__ == "__main__":
    main()
"""
STALE = "raise RuntimeError('the stale copy ran')\n" * 40


@pytest.mark.parametrize("here", ["stale", "absent", pytest.param("same", marks=pytest.mark.slow)])
def test_every_rank_runs_what_the_driver_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str) -> None:
    """On a machine that has another file under the script's path, or none: in the ranks, and in what they spawn."""
    folder = tmp_path / "project"
    folder.mkdir()
    _write(folder / "beside.py", "NAME = 'beside'\n")
    if here != "absent":
        (folder / "train.py").write_text(STALE if here == "stale" else SHIPPED)
    monkeypatch.chdir(tmp_path)
    launch(partial(scripts.run_script, "project/train.py", SHIPPED.encode()), "--lr", engine=TWO)
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert facts["spawned"] == ["shipped"]
        assert 'File "project/train.py", line 16, in main\n    raise ValueError("shown")' in facts["shown"]
        assert facts["source"] == 'def which(_):\n    return "shipped"\n'
        assert facts["argv"] == ["project/train.py", "--lr"]
        assert facts["file"] == "project/train.py"
        assert facts["beside"] == "beside"
        assert facts["pickled"]
    assert sorted(path.name for path in folder.glob("*.py")) == ["beside.py", *(["train.py"] * (here != "absent"))]


def test_a_failure_of_what_the_driver_read_shows_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "train.py", STALE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankFailed, match="KeyError: 'absent'") as caught:
        launch(partial(scripts.run_script, "train.py", b"rate = 1\n{}['absent']\n"), engine=TWO)
    assert "File \"train.py\", line 2, in <module>\n    {}['absent']" in caught.value.traceback
    assert "torchlake" not in caught.value.traceback
