"""What a model predicts from which columns; one file per task.

A task is a module with these names. B rows, C classes (1: regression), L tokens of the longest row, V vocabulary size:

    AUTO_CLASS: str                     transformers' Auto class for such a model
    PACKED: bool                        whether training concatenates rows into blocks for a causal language model
    FORWARD: dict[str, bool]            keyword arguments of a forward pass besides tokens and mask
    DEFAULT_METRIC: dict[problem, str]  the validation metric that chooses the best model
    DIRECTIONS: dict[metric, "higher" | "lower"]    which direction is better, for its metrics and for "loss"

    tokenize(tokenizer, texts, spec) -> (values (T,) int32, offsets (B+1,) int64, cut (B,) int64)
                                        model inputs for scoring; `cut`: tokens removed from each row
    output_schema(spec, all_probabilities) -> pa.Schema     the prediction columns, each nullable

A task with labels (not PACKED) also has

    find_labels(arrays, problem, drop_bad=) -> LabelColumn      reads the label column; infers the problem if None
    count_labels(arrays, problem, drop_bad=)                    reads a part of it; the result can be pickled
    decide_labels(parts, problem) -> LabelColumn                the label column of which these are the parts
    target_type(spec) -> pa.DataType              type of encoded labels
    encode_labels(array, spec) -> pa.Array        labels as targets, nulls kept
    bad_labels(array, spec) -> {row: reason}      rows with an invalid label
    loss_sum(logits (B, C), targets, spec, objective) -> Tensor ()  summed; divide by the divisor of the whole batch
    divisor(targets, spec, objective) -> float    over the rows of all ranks
    probabilities(logits (B, C) float32, spec) -> (B, C) float32
    probability_names(spec) -> list[str]          the output columns that hold `probabilities`
    output_columns(probabilities, spec, all_probabilities) -> pa.Table
    metrics(probabilities, targets, spec) -> dict[str, float]     fast, for validation

A PACKED task generates text and also has

    PROBLEMS: dict[str, problem]                  by `data.learn`: "all" tokens, or the "assistant"'s turns only
    documents(tokenizer, texts, spec)             like `tokenize`: training rows, each with an end token
    targets(ids (B, L), mask (B, L)) -> (B, L) int64        the next token, or NO_TARGET
    loss_sum(logits (B, L, V), targets (B, L), spec) -> Tensor ()   summed
    find_chunks(model, row (L,), tokens=) -> dict | None        how the model can compute its loss in chunks, as JSON
    chunk_loss(model, found, compiled=)           lets model(targets=...) return the loss
    num_targets(lengths (B,), spec) -> int        the divisor of the summed loss
    loss_metrics(loss) -> dict[str, float]        metrics of the mean loss
    output_columns(answers (B, W) int32, tokenizer, stop) -> pa.Table     answers as in models/generation.py
    is_chat(type) -> bool                         whether a column of this type holds conversations
    render_chats(tokenizer, column, add_generation_prompt=) -> (pa.Array of strings, {row: reason})
    marks_answers(tokenizer) -> bool              whether its template marks the assistant's turns
    tokenize_chats(tokenizer, column) -> (rows, {row: reason})     token ids; ~id outside the assistant's turns
    conversations(tokenizer, rows, spec)          like `tokenize`: concatenates such rows, each truncated to a block
    flat(rows)                                    like `tokenize`: concatenates rows of token ids
"""
