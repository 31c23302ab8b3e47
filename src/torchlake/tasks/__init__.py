"""What a model predicts from which columns: one file per task, each an instance of a subclass of `BaseTask`.

    training   columns, labels -> examples -> stored arrays -> collate -> model -> outputs -> loss_sum / divisor
    scoring    columns -> features -> collate -> runtime -> reduce_outputs -> answers -> output_columns

A file here ends with `task = MyTask()`. An installed package adds tasks by the entry point group `torchlake.tasks`, and
`train`, `predict` and `evaluate` take one as `task=MyTask()`. Read `text_classification.py` first. `_rendering.py`
renders chat templates, within limits of time and memory.

`BaseTask` (`_contract.py`) is the contract, method by method. `Task` (`_classification.py`, also `torchlake.Task`) is a
classifier or a regression of texts on top of it; a task overrides the methods in which it differs. The engine, the
strategy and the number of ranks never matter to it:

    Inputs    come from columns by their names in `inputs`; a row that lacks one never reaches the task. A row that the
              task itself cannot use is an entry of `Features.errors`: one error row, or a refused training row.
    Features  are flat arrays: `Ragged` for values of any number per row, or numpy of a fixed width. Training stores
              them once and reads each batch from disk, so an epoch does no preprocessing except `collate`.
    A batch   is a dict of numpy arrays of B rows, the keyword arguments of the model. An exception in `collate` costs
              scoring the one row that causes it; RowErrors names all such rows of the batch at once.
    The loss  is summed over the rows that a rank has at once, and divided by `divisor` of the whole batch: it must not
              be a mean, or it would depend on the number of ranks.
    A model   is built by code that is installed or given, never by code in a folder; its weights are safetensors.

B rows, C classes (1: regression), L tokens of the longest row. Nothing here imports torch before a method needs it.
"""

from torchlake.data.batching import Ragged
from torchlake.data.features import Features
from torchlake.models.tokenizer import TOKEN_TYPES
from torchlake.tasks._classification import Task
from torchlake.tasks._columns import ColumnOptions
from torchlake.tasks._contract import NO_TARGET, BaseTask
from torchlake.tasks._inputs import ANY, EXTRA, NUMBER, PAIR, PROMPT, TEXT, Inputs
from torchlake.tasks._pretrained import load_encoder

__all__ = [
    "ANY",
    "EXTRA",
    "NO_TARGET",
    "NUMBER",
    "PAIR",
    "PROMPT",
    "TEXT",
    "TOKEN_TYPES",
    "BaseTask",
    "ColumnOptions",
    "Features",
    "Inputs",
    "Ragged",
    "Task",
    "load_encoder",
]
