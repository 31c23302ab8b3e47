"""What executes a forward pass when scoring; one file per runtime.

A runtime is a module with

    TOLERANCE: float            largest difference of a probability to `eager`'s that it may show
    never: dict[str, str]       what it cannot do, by task name, and why; asked for, it is refused before any work
    load(folder, spec, *, device) -> Forward

and a `Forward` takes `input_ids` and `attention_mask`, both (B, L) int64 in main memory, and returns logits, (B, C)
float32 in main memory. It is called from one thread at a time, always with at least one row.
"""

from collections.abc import Callable

import numpy as np

Forward = Callable[[np.ndarray, np.ndarray], np.ndarray]
