"""What a model is asked; one file per task.

A task is a module with these names. B rows, C classes (1 for regression), L tokens of the longest row, V of the
vocabulary:

    AUTO_CLASS: str                     the class of transformers that loads such a model
    PACKED: bool                        whether rows are learned end to end in blocks, each token from those before it
    FORWARD: dict[str, bool]            what a forward pass is given beside tokens and mask
    DEFAULT_METRIC: dict[problem, str]  the validation metric that chooses the best model
    DIRECTIONS: dict[metric, "higher" | "lower"]    which values of each of its metrics, and of "loss", are better

    tokenize(tokenizer, texts, spec) -> (values (T,) int32, offsets (B+1,) int64, cut (B,) int64)
                                        rows as the model reads them when it is asked; `cut` tokens of each are left out
    output_schema(spec, all_probabilities) -> pa.Schema     the prediction columns, each nullable

A task whose rows have labels (not PACKED) has

    find_labels(arrays, problem, drop_bad=) -> LabelColumn      reads the label column once; problem None: guesses it
    target_type(spec) -> pa.DataType              of encoded labels
    encode_labels(array, spec) -> pa.Array        labels as targets, nulls kept
    bad_labels(array, spec) -> {row: reason}      the rows whose label it refuses
    loss_sum(logits (B, C), targets, spec, objective) -> Tensor ()  summed, not averaged; divide by the batch's divisor
    divisor(targets, spec, objective) -> float    of the rows of all ranks together
    probabilities(logits (B, C) float32, spec) -> (B, C) float32
    probability_names(spec) -> list[str]    its columns that together are `probabilities`, when all are asked for
    output_columns(probabilities, spec, all_probabilities) -> pa.Table
    metrics(probabilities, targets, spec) -> dict[str, float]     fast, for validation

A task that is PACKED answers with text, and has

    PROBLEMS: dict[str, problem]                  by what is learned of a row: "all", or "assistant"'s turns alone
    documents(tokenizer, texts, spec)             as `tokenize`: rows as they are learned, whole and closed
    targets(ids (B, L), mask (B, L)) -> (B, L) int64        the token after each, NO_TARGET where there is none
    loss_sum(logits (B, L, V), targets (B, L), spec) -> Tensor ()   summed, not averaged
    num_targets(lengths (B,), spec) -> int      what the summed loss of rows of so many tokens is divided by
    loss_metrics(loss) -> dict[str, float]        what the mean loss tells
    output_columns(answers (B, W) int32, tokenizer, stop) -> pa.Table     answers as models/generation.py has them
    is_chat(type) -> bool                         whether a column of this type holds conversations
    rendered(tokenizer, column, asking=) -> (pa.Array of strings, {row: reason})      conversations as texts
    marks_answers(tokenizer) -> bool              whether it can tell the assistant's turns from the rest
    answers(tokenizer, column) -> (rows, {row: reason})     conversations as token ids, ~id for what is not learned
    conversations(tokenizer, rows, spec)          as `tokenize`: such rows end to end, each cut to a block
    flat(rows) -> as `tokenize`                   rows of token ids end to end, whole
"""
