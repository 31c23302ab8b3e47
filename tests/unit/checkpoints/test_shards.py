"""Pieces of tensors, written by any number of ranks, are whole again for any other."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchlake.checkpoints import shards as sharding
from torchlake.checkpoints.shards import Piece
from torchlake.errors import DataError

WEIGHT = torch.arange(35.0).view(7, 5)


def write(folder: Path, cuts: list[int], **more: torch.Tensor) -> list[Path]:
    """The weight cut before the rows `cuts`, a file for each piece; `more` goes whole into the first."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, 7], strict=True)):
        pieces = {"weight": Piece(WEIGHT[first:end].contiguous(), first, (7, 5))}
        if number == 0:
            pieces |= sharding.whole(more)
        paths.append(folder / f"{number}.safetensors")
        save_file({name: piece.tensor for name, piece in pieces.items()}, paths[-1], metadata=sharding.header(pieces))
    return paths


@settings(max_examples=40)
@given(cuts=st.sets(st.integers(1, 6)), first=st.integers(0, 7), rows=st.integers(0, 7))
def test_any_rows_of_any_cut(tmp_path_factory: pytest.TempPathFactory, cuts: set[int], first: int, rows: int) -> None:
    files = write(tmp_path_factory.mktemp("cut"), sorted(cuts))
    rows = min(rows, 7 - first)
    with sharding.open_shards(files) as shards:
        assert torch.equal(shards.read("weight"), WEIGHT)
        assert torch.equal(shards.read("weight", first, rows), WEIGHT[first : first + rows])


def test_numbers_and_empty_tensors_are_kept(tmp_path: Path) -> None:
    files = write(tmp_path, [3], step=torch.tensor(7.0), empty=torch.zeros(0, 3))
    with sharding.open_shards(files) as shards:
        assert shards.read("step") == 7
        assert shards.read("empty").shape == (0, 3)
        assert shards.shapes == {"weight": (7, 5), "step": (), "empty": (0, 3)}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_file_that_is_missing_is_noticed(tmp_path: Path, lost: int) -> None:
    files = write(tmp_path, [2, 4])
    del files[lost]
    with pytest.raises(DataError, match=r"rows of the tensor 'weight' are missing"), sharding.open_shards(files):
        pass


def test_a_piece_that_is_there_twice_is_noticed(tmp_path: Path) -> None:
    files = write(tmp_path / "one", [2, 4])
    twice = write(tmp_path / "two", [2, 4])[1]
    with pytest.raises(DataError, match="missing or duplicate"), sharding.open_shards([*files, twice]):
        pass


def test_files_of_two_models_do_not_mix(tmp_path: Path) -> None:
    files = write(tmp_path, [4])
    other = {"weight": Piece(torch.zeros(3, 5), 4, (9, 5))}
    save_file({"weight": other["weight"].tensor}, files[1], metadata=sharding.header(other))
    with pytest.raises(DataError, match="but not in another file"), sharding.open_shards(files):
        pass


@pytest.mark.parametrize("said", ["{", "[]", json.dumps({"weight": 3}), json.dumps({"weight": ["x", [7, 5]]})])
def test_what_a_header_says_is_not_believed(tmp_path: Path, said: str) -> None:
    save_file({"weight": WEIGHT}, tmp_path / "a.safetensors", metadata={sharding.PIECES: said})
    with pytest.raises(DataError, match="cannot be read"), sharding.open_shards([tmp_path / "a.safetensors"]):
        pass


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_whole_tensors_are_dealt_out_evenly_and_once(world_size: int) -> None:
    tensors = {f"layer.{number}": torch.zeros(number + 1, 100) for number in range(24)} | {"step": torch.tensor(1.0)}
    shares = [sharding.local_shard(tensors, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(name for local_shard in shares for name in local_shard) == sorted(tensors)
    loads = [sum(piece.tensor.nbytes for piece in local_shard.values()) for local_shard in shares]
    assert max(loads) <= sum(loads) / world_size + max(tensor.nbytes for tensor in tensors.values())


def test_a_copy_keeps_its_values() -> None:
    tensor = torch.ones(2, 2)
    copy = Piece(tensor, 0, (2, 2)).copied()
    tensor.zero_()
    assert torch.equal(copy.tensor, torch.ones(2, 2))
