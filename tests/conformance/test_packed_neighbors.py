"""Rows that are packed whole: another row in a block, whatever it says, does not move a row's loss by a bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import families
from sweeps import sweep
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.bins import Bins, pack_whole
from torchlake.data.packing import input_ids_of
from torchlake.models import probes

LENGTHS = (17, 9, 12, 5)


def losses(model: torch.nn.Module, blocks: Bins, *, isolated: bool) -> list[torch.Tensor]:
    """The loss of each token, row by row, as training computes them: in blocks, or in lines of their own."""
    every = np.arange(len(blocks))
    if isolated:
        ids, mask = blocks.padded(every, 0)
        options = {"position_ids": torch.from_numpy(blocks.positions_of(every))}
    else:
        ids, mask = blocks.unpacked(every, 0)
        options = {"attention_mask": torch.from_numpy(mask)}
    inputs = torch.from_numpy(input_ids_of(ids))
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False, **options).logits.float()
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
    lines = each.view(len(ids), -1)
    if not isolated:
        return [line[: int(row.sum()) - 1] for line, row in zip(lines, mask, strict=True)]
    ends = np.cumsum([LENGTHS[row] for row in blocks.order])
    return [lines[0, end - LENGTHS[row] : end - 1] for row, end in zip(blocks.order, ends, strict=True)]


@pytest.mark.parametrize("name", sweep(families.writers(), quick={"llama"}))
def test_another_row_of_a_block_does_not_move_a_rows_loss(name: str, tmp_path: Path) -> None:
    folder = families.build(tmp_path, name, kind="writer", dropout=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    words = model.config.get_text_config().vocab_size - len(LENGTHS)
    ids = np.random.default_rng(0).integers(5, words, sum(LENGTHS)).astype(np.int32)
    rows = np.split(ids.astype(np.int64), np.cumsum(LENGTHS)[:-1])
    isolated = probes.isolates(model, rows[:2], {"use_cache": False})
    # The number of tokens that an expert gets decides how its products are rounded.
    experts = any("expert" in module for module, _ in model.named_modules())
    offsets, order = offsets_of(np.array(LENGTHS)), np.arange(len(LENGTHS))
    before = losses(model, pack_whole(Ragged(ids, offsets), order, sum(LENGTHS)), isolated=isolated)
    for changed in order:
        other = ids.copy()
        other[offsets[changed] : offsets[changed + 1]] = words + changed
        blocks = pack_whole(Ragged(other, offsets), order, sum(LENGTHS))
        after = losses(model, blocks, isolated=isolated)
        for row, one, now in zip(blocks.order, before, after, strict=True):
            if row != changed and experts:
                torch.testing.assert_close(now, one, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(one, now) == (row != changed), f"row {row} beside {changed}"
