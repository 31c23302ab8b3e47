"""The options of jobs over tables, declared once: a name, a Python type, and how the command line shows it.

    where: Annotated[str | None, given("CONDITION", 'Read only such rows, as in "stars >= 3".')]

Functions take them as keywords (`**options: Unpack[PredictOptions]`), so type checkers and editors know them.
`config/arguments.py` checks values by the same types, and a command whose declaration names a class has an option for
each of its fields (`cli/options.py`): `--where CONDITION`, with that help. The prose of the Python functions is in
`predict`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from torchlake import plugins


@dataclass(frozen=True)
class Option:
    """How the command line shows an option."""

    group: str
    "The heading above it in the help."
    value: str | None
    "What is given, such as N; None: a switch."
    help: str
    flag: str | None = None
    "None: the name with hyphens."
    min: float | None = None
    max: float | None = None
    required: bool = False


LOGPROBS = ("mean", "tokens")
"The forms of log-probabilities."
_input = partial(Option, "Input")
_output = partial(Option, "Output")
_execution = partial(Option, "Execution")
_text = partial(Option, "Text generation")
_endpoint = partial(Option, "Endpoint")


class FilterArguments(TypedDict, total=False):
    """The arguments of a function that draws its own sample."""

    where: Annotated[str | None, _input("CONDITION", 'Read only such rows, as in "stars >= 3".')]
    limit: Annotated[int | None, _input("N", "Read at most N rows.", min=1)]
    csv: Annotated[
        Mapping[str, str] | None, _input("KEY=VALUE", "Delimiter, quote or encoding of CSV files; repeatable.")
    ]


class ReadArguments(FilterArguments, total=False):
    """The arguments of the other functions that read stored tables."""

    sample: Annotated[float | None, _input("SHARE", "Read this share of the rows.")]
    seed: Annotated[int | None, _input("N", "Random seed of --sample, and of the tokens of texts (default: 0).", min=0)]


class FolderArguments(ReadArguments, total=False):
    """The options of input and output of a job that writes a folder."""

    on_bad_file: Annotated[
        Literal["error", "quarantine"],
        _input("error|quarantine", "Unreadable files: stop, or list and skip (default: error)."),
    ]
    accept_new_input: Annotated[bool, _input(None, "Score only the files that are new or have changed.")]
    accept_removed_input: Annotated[bool, _input(None, "Drop the rows of files that are gone from the input.")]
    max_error_rate: Annotated[
        float, _output("SHARE", "Stop if more than this share of rows fails, 0 to 1 (default: 0.5).", min=0, max=1)
    ]
    overwrite: Annotated[bool, _output(None, "Replace the output of another job.")]
    target_file_size: Annotated[int | str | None, _output("SIZE", "Write files of about this size, such as 256MiB.")]
    chunk_rows: Annotated[int | None, _execution("N", "Rows of a chunk (default: depends on the table's size).", min=1)]
    row_timeout_s: Annotated[
        float,
        _execution(
            "SECONDS", "Time limit of a forward pass (default: 600).", "--row-timeout", min=0.001, max=1_000_000
        ),
    ]


class JobArguments(FolderArguments, total=False):
    """The options of input and output of a job that writes a folder or a table."""

    format: Annotated[
        Literal["parquet", "delta", "iceberg"] | None,
        _output("parquet|delta|iceberg", "Format of a new output (default: parquet)."),
    ]
    mode: Annotated[
        Literal["create", "append", "overwrite", "replace-where"],
        _output(
            "MODE",
            "Rows that a table has: create (there are none), append, overwrite, or replace-where (those with the same "
            "--key) (default: create).",
        ),
    ]
    incremental: Annotated[bool, _output(None, "Score what is new since the last call, and add it.")]
    commit_id: Annotated[
        str, _output("NAME", "Name this commit: a call with a name that was committed does nothing, whatever its rows.")
    ]
    partition_by: Annotated[str | Sequence[str], _output("A,B", "Partition columns of a new table.")]
    add_columns: Annotated[bool, _output(None, "Add columns that the table lacks.")]


class SamplingArguments(TypedDict, total=False):
    """How a model that writes chooses the tokens of an answer, besides the seed."""

    max_new_tokens: Annotated[int | None, _text("N", "Maximum tokens of each answer (default: 64).", min=1)]
    temperature: Annotated[float | None, _text("T", "Sampling temperature; 0 = greedy (default: 0).", min=0)]
    top_k: Annotated[int | None, _text("N", "Sample from the N most likely tokens.", min=1)]
    top_p: Annotated[
        float | None, _text("P", "Sample from the most likely tokens with total probability P.", min=0, max=1)
    ]
    min_p: Annotated[
        float | None,
        _text("P", "Sample from tokens with this share of the most likely one's probability.", min=0, max=1),
    ]
    min_new_tokens: Annotated[int | None, _text("N", "Minimum tokens of each answer (default: 0).", min=0)]
    repetition_penalty: Annotated[
        float | None, _text("X", "Divide the logits of tokens in prompt and answer (default: 1).", min=0)
    ]
    presence_penalty: Annotated[float | None, _text("X", "Lower the logits of tokens in the answer (default: 0).")]
    frequency_penalty: Annotated[
        float | None, _text("X", "Lower them as often as the answer has the token (default: 0).")
    ]
    stop_token_ids: Annotated[Sequence[int] | None, _text("A,B", "Tokens, by id, that end an answer; repeatable.")]
    num_beams: Annotated[int | None, _text("N", "Beams of a beam search, without sampling (default: 1).", min=1)]
    language: Annotated[str | None, _text("NAME", "Language that a multilingual translator writes, such as de_DE.")]
    stop: Annotated[str | Sequence[str] | None, _text("TEXT", "End an answer before this text; repeatable.")]


class StructureArguments(TypedDict, total=False):
    """The form of the texts that a model writes; one of them."""

    json_schema: Annotated[
        Mapping[str, Any] | str | Path | None, _text("FILE", "Write JSON that fits this JSON schema.")
    ]
    regex: Annotated[str | None, _text("PATTERN", "Write texts that match this expression as a whole.")]
    grammar: Annotated[str | Path | None, _text("FILE", "Write texts of this grammar, in Lark as llguidance reads it.")]


class ChoiceArguments(TypedDict, total=False):
    """Texts to choose from, the fourth form."""

    choices: Annotated[
        str | Sequence[str] | None, _text("A,B", "Write one of these texts, with the probability of each.")
    ]


class AnswerArguments(TypedDict, total=False):
    """How many answers a row has, and what is written of them."""

    n: Annotated[int | None, _text("N", "Answers of each row, as lists (default: 1).", min=1)]
    seed_by: Annotated[
        Literal["text", "key"] | None,
        _text("text|key", "Seed answers by the row's text, or by its --key, too (default: text)."),
    ]
    logprobs: Annotated[
        bool | Literal["mean", "tokens"] | None,
        _text("[tokens]", "Add the mean log-probability of each answer; tokens: of each token, too."),
    ]
    json_columns: Annotated[bool, _text(None, "Write the properties of the schema as typed columns.")]


class PromptArguments(TypedDict, total=False):
    """What the prompts of a model that writes are made of, besides the text column."""

    prompt: Annotated[
        str | None, _text("TEXT", 'Text of each row, in place of --text, with columns in braces: "Summarize: {title}".')
    ]
    system: Annotated[str | None, _text("TEXT", "System text before conversations and prompts.")]
    examples: Annotated[Any, _text("TABLE", "Prompts and answers (column completion) that every prompt begins with.")]
    tools: Annotated[Any, _text("FILE|COLUMN", "Tools of every conversation, a JSON file, or those of each row.")]
    chat_template: Annotated[str | None, _text("FILE", "Jinja chat template in place of the tokenizer's.")]
    template_options: Annotated[
        Mapping[str, Any] | None,
        _text(
            "NAME=VALUE",
            "Variable of the chat template, such as enable_thinking=false; repeatable.",
            "--template-option",
        ),
    ]
    continue_final_message: Annotated[
        bool, _text(None, "Continue the last message of conversations that end with the assistant's.", "--continue")
    ]


class GenerationArguments(
    SamplingArguments, StructureArguments, ChoiceArguments, AnswerArguments, PromptArguments, total=False
):
    """The options of text generation; `predict` documents them."""

    seed: int | None


class EndpointArguments(TypedDict, total=False):
    """The options of the runtime `http`, in place of a model folder."""

    endpoint: Annotated[str, _endpoint("URL", "OpenAI-compatible endpoint of --runtime http, such as https://host/v1.")]
    model_name: Annotated[str, _endpoint("NAME", "Name of the model at the endpoint.")]
    key_env: Annotated[
        str | None, _endpoint("VARIABLE", "Environment variable with the key, on each machine (default: no key).")
    ]
    api: Annotated[
        Literal["chat", "completions", "embeddings"],
        _endpoint("NAME", "Requests: chat, completions, embeddings (default: chat; embeddings of feature_extraction)."),
    ]
    request_options: Annotated[
        Mapping[str, Any],
        _endpoint("NAME=VALUE", "Further field of each request, as YAML or @FILE; repeatable.", "--request-option"),
    ]
    concurrency: Annotated[
        int | None, _endpoint("N", "Open requests of the whole job (default: grows while latency holds).", min=1)
    ]
    requests_per_minute: Annotated[float | None, _endpoint("N", "Requests per minute of the whole job.", min=0)]
    tokens_per_minute: Annotated[
        float | None, _endpoint("N", "Tokens of prompts and answers per minute of the whole job.", min=0)
    ]
    max_retries: Annotated[int, _endpoint("N", "Retries of a request (default: 8).", min=0)]
    price: Annotated[
        Any, _endpoint("FILE", "YAML file of prices per million tokens: NAME: {input: 0.25, cached: 0.02, output: 2}.")
    ]
    max_cost: Annotated[float | None, _endpoint("COST", "Stop before the job costs more; see --price.", min=0)]
    max_tokens_total: Annotated[int | None, _endpoint("N", "Stop before the job takes more tokens.", min=1)]
    batch_api: Annotated[
        bool, _endpoint(None, "Ask by files and batches, within a day, at half the price (not every endpoint has it).")
    ]
    insecure_endpoint: Annotated[bool, _endpoint(None, "Allow http:// to other machines.")]


class ModelArguments(TypedDict, total=False):
    """How a model reads a table's rows."""

    task: Annotated[
        Any,
        _execution(
            "NAME",
            f"Task of a folder without task.json: {', '.join(plugins.names('tasks'))} (default: that of its head).",
        ),
    ]
    task_options: Annotated[
        Mapping[str, Any],
        _execution(
            "NAME=VALUE",
            "Option of the task, such as candidate_labels=[good,bad], in place of the model's; repeatable.",
            "--task-option",
        ),
    ]
    null: Annotated[
        Literal["error", "score"],
        _input("error|score", "Rows without text: report an error, or score as empty (default: error)."),
    ]
    max_length: Annotated[
        int | None, _input("N", "Maximum tokens of a row; longer ones are truncated (default: the model's).", min=4)
    ]
    batch_tokens: Annotated[int | None, _execution("N", "Maximum tokens of a batch, with padding.", min=1)]
    gpus_per_process: Annotated[
        int,
        _execution("N", "GPUs that share one copy of the model, or ranks on CPUs without GPUs (default: 1).", min=1),
    ]


class ColumnArguments(TypedDict, total=False):
    """The columns of a model's inputs besides the text."""

    text_pair: Annotated[str | Sequence[str], _input("COLUMN", "Column of the second text of a pair; repeatable.")]
    inputs: Annotated[
        Mapping[str, str | Sequence[str]], _input("NAME=COLUMN", "Column of another input of the task; repeatable.")
    ]


class PredictOptions(
    JobArguments,
    ModelArguments,
    ColumnArguments,
    SamplingArguments,
    StructureArguments,
    ChoiceArguments,
    AnswerArguments,
    PromptArguments,
    EndpointArguments,
    total=False,
):
    """The options of `predict` besides columns, runtime and engine; its docstring describes them."""

    all_probabilities: Annotated[bool, _output(None, "Add the probabilities of all classes, or of all tags of words.")]
    token_counts: Annotated[bool, _output(None, "Add a column with the number of tokens of each row.")]
    embedding: Annotated[
        Literal["float32", "int8", "binary"],
        _output("float32|int8|binary", "Form of vectors: numbers, 8-bit numbers, or signs (default: float32)."),
    ]
    prefix: Annotated[str, _output("TEXT", "Prefix for the names of prediction columns.")]
    explode: Annotated[bool, _text(None, "With --n: a row for each answer, its number in the column sample.")]
    runtime_python: Annotated[
        str, _execution("PATH", "Python that has the runtime, if it needs one of its own, such as vllm.")
    ]
    chat: Annotated[bool, _text(None, "Texts are conversations: JSON lists of {role, content}.")]


class RankOptions(FolderArguments, ModelArguments, total=False):
    """The options of `rank` besides columns, runtime and engine: they are those of `predict`."""
