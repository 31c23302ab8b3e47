"""What executes a forward pass when scoring; one file per runtime.

A runtime is a module with

    TOLERANCE: float            largest difference of a probability to `eager`'s that it may show
    never: dict[str, str]       what it cannot do, by task name, and why; asked for, it is refused before any work
    refusal(folder) -> str | None
                                why it cannot run this model with what is installed here; cheap, loads no torch
    load(folder, spec, *, device) -> Forward
                                raises UsageError for a device that is not its own

where it lets a model write, for text generation,

    load_generator(folder, spec, *, device, options) -> Forward
                                `options`: a `GenerationOptions`; what comes back are no logits but answers
                                (B, W) int32, as torchlake/models/generation.py has them

and, where it makes something of a model once, which `models/exports.py` keeps in the model's folder,

    CALIBRATED: bool            whether that needs the user's rows
    prepare(folder, spec, batches) -> None
                                `batches`: (input_ids, attention_mask) pairs as a Forward takes them, of the user's rows

A `Forward` takes `input_ids` and `attention_mask`, both (B, L) int64 in main memory, padded on the right, and returns
logits, (B, C) float32 in main memory ((B, L, V) of a language model). It is called from one thread at a time, always
with at least one row. What it answers for a row depends neither on the rows beside it nor on the padding, but for
rounding in fp32: an 8-bit runtime takes its scales from a calibration or from each token, never from the batch.
"""

from collections.abc import Callable

import numpy as np

Forward = Callable[[np.ndarray, np.ndarray], np.ndarray]
