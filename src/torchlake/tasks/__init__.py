"""What a model is asked; one file per task.

A task is a module with these names. B rows, C classes (1 for regression):

    AUTO_CLASS: str                     the class of transformers that loads such a model
    DEFAULT_METRIC: dict[problem, str]  the validation metric that chooses the best model
    LOWER_IS_BETTER: frozenset[str]     the metrics of which less is more

    find_labels(arrays) -> (problem, labels)      reads the label column once
    target_type(spec) -> pa.DataType              of encoded labels
    encode_labels(array, spec) -> pa.Array        labels as targets, nulls kept
    tokenize(tokenizer, texts, spec) -> (values (T,) int32, offsets (B+1,) int64, truncated (B,) bool)

    loss_sum(logits (B, C), targets, spec) -> Tensor ()     summed, not averaged; divide by num_targets of all ranks
    num_targets(rows, spec) -> int
    probabilities(logits (B, C) float32, spec) -> (B, C) float32

    output_schema(spec, all_probabilities) -> pa.Schema     the prediction columns, each nullable
    probability_names(spec) -> list[str]    its columns that together are `probabilities`, when all are asked for
    output_columns(probabilities, spec, all_probabilities) -> pa.Table
    metrics(probabilities, targets, spec) -> dict[str, float]     fast, for validation
"""
