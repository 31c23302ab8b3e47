"""What executes a forward pass when scoring; one file per runtime. Read `eager.py` first.

A runtime is a module with

    TOLERANCE: float            largest allowed difference of a probability from `eager`'s
    tasks: tuple[str, ...] | None   the tasks that it computes; None: every task
    never: dict[str, str]       reasons for some of the others: task name -> reason; refused before any work
    TOKEN_TYPES: bool           whether it computes pairs of texts with token types
    refusal(folder) -> str | None
                                why it cannot run this model here, as `first_reason` orders it; cheap, without torch
    load(folder, spec, *, device) -> Forward
                                raises UsageError for an unsupported device

for text generation

    load_generator(folder, spec, *, device, options) -> Forward
                                `options`: a `GenerationOptions`; returns answers (B, W) int32 instead of logits, as in
                                torchlake/models/generation.py. If the Forward takes `watch`, it gets a `Watch`: it
                                continues texts, and reports those that have ended
    cannot_write(options) -> str | None
                                why it cannot write with these options; a runtime without it can with all
    load_log_probs(folder, spec, *, device) -> LogProbs
                                if `load` returns no logits of answers, or at a greater cost

and for an export that `models/exports.py` stores in the model folder

    CALIBRATED: bool            whether the export needs the user's rows
    prepare(folder, spec, batches) -> None
                                `batches`: (input_ids, attention_mask) pairs of the user's rows

A `Forward` takes a batch as the task's `collate` makes it, by keyword: of texts `input_ids` and `attention_mask`, both
(B, L) int64 in main memory, B at least 1, padded on the right, and for pairs `token_type_ids`. It returns the model's
outputs, (B, C) float32 in main memory ((B, L, V) for a language model). It is called from one thread at a
time. The result of a row depends neither on other rows nor on padding, except for fp32 rounding: an 8-bit runtime takes
its scales from calibration or from each token, never from the batch.
"""

from collections.abc import Callable, Sequence

import numpy as np

Forward = Callable[..., np.ndarray]
LogProbs = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], list[np.ndarray]]
"The log-probability of each token of the answers that follow prompts, both as token ids, row by row."


def first_reason(*, model: str | None = None, machine: str | None = None, library: str | None = None) -> str | None:
    """Return the reason that lasts longest: the model's on every machine, then this machine's, then a library's."""
    return model or machine or library
