"""The arguments and options of the commands, as types of the parameters in `app.py`.

An option that is not given is not passed on, so the defaults are those of the Python functions.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from torchlake import plugins


def _group(name: str) -> Callable[..., Any]:
    """Return a function that makes an option of this group: (flag, metavar, help, **limits)."""

    def option(flag: str, metavar: str | None, help: str, **limits: Any) -> Any:
        return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=name, **limits)

    return option


def _names(kind: plugins.Kind) -> str:
    return ", ".join(plugins.names(kind))


_general = _group("General")
_execution = _group("Execution")
_job = _group("Job")
_tracking = _group("Tracking")
_search = _group("Search")
_hardware = _group("Hardware")
_input = _group("Input")
_output = _group("Output")
_text = _group("Text generation")
_selection = _group("Selection")
_demo = _group("Demo")

# Declared for the parser and the help; `main.py` reads these flags before parsing, because usage errors are JSON too.
Json = Annotated[bool, _general("--json", None, "Print one JSON object to standard output.")]
Quiet = Annotated[bool, _general("--quiet", None, "Show errors and results only.")]
Verbose = Annotated[bool, _general("--verbose", None, "Show debug messages and tracebacks.")]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder written by train.")]
Job = Annotated[str, typer.Argument(metavar="JOB.yaml", help="Job file.")]
OptionalJob = Annotated[
    str | None, typer.Argument(metavar="JOB.yaml", help="Job file; optional if --set gives the required settings.")
]

InputOrLines = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="Table to score: a file, folder, glob or URL; -: lines of standard input."),
]
OptionalOutput = Annotated[
    str | None,
    typer.Argument(
        metavar="OUTPUT", help="Where the scored rows go: a folder, URL or table (default with -: printed)."
    ),
]

# init
InitText = Annotated[str | None, _input("--text", "COLUMN", "Text column (default: guessed).")]
InitPair = Annotated[
    str | None, _input("--text-pair", "COLUMN", "Second text of a pair (default: guessed by its name).")
]
InitLabel = Annotated[str | None, _input("--label", "COLUMN", "Label column (default: guessed).")]
InitModel = Annotated[
    str | None, _job("--model", "MODEL", "Model to fine-tune: a folder, or a name on the Hub (default: roberta-base).")
]
JobOutput = Annotated[str, _output("--output", "FILE", "Job file to write (default: job.yaml).")]
Force = Annotated[bool, _output("--force", None, "Replace an existing file.")]

# execution
EngineName = Annotated[
    str | None, _execution("--engine", "NAME", f"Where to run: {_names('engines')} (default: local).")
]
Processes = Annotated[
    int | None, _execution("--processes", "N", "Number of processes (default: chosen by the engine).", min=1)
]
Ranks = Annotated[int | None, _execution("--processes", "N", "Number of ranks (default: 1).", min=1)]
GpusPerProcess = Annotated[int, _execution("--gpus-per-process", "N", "GPUs of each rank (default: 0).", min=0)]
ModelGpus = Annotated[
    int | None,
    _execution(
        "--gpus-per-process",
        "N",
        "GPUs that share one copy of the model, or ranks on CPUs without GPUs (default: 1).",
        min=1,
    ),
]
EngineSettings = Annotated[
    list[str] | None,
    _execution("--set", "KEY=VALUE", "Set an engine option, such as engine.ray.address=auto; repeatable."),
]
TaskName = Annotated[
    str | None,
    _execution("--task", "NAME", f"Task of a folder without task.json: {_names('tasks')} (default: that of its head)."),
]
TaskOptions = Annotated[
    list[str] | None,
    _execution(
        "--task-option",
        "NAME=VALUE",
        "Option of the task, such as candidate_labels=[good,bad], in place of the model's; repeatable.",
    ),
]
RuntimeName = Annotated[
    str | None,
    _execution(
        "--runtime",
        "NAME",
        f"Inference runtime: {_names('runtimes')} (default: varlen or eager, or the choice of optimize).",
    ),
]
BatchTokens = Annotated[
    int | None, _execution("--batch-tokens", "N", "Maximum tokens of a batch, with padding.", min=1)
]
ChunkRows = Annotated[
    int | None, _execution("--chunk-rows", "N", "Rows of a chunk (default: depends on the table's size).", min=1)
]
RowTimeout = Annotated[
    float | None, _execution("--row-timeout", "SECONDS", "Time limit of a forward pass (default: 600).")
]

# job and run
JobText = Annotated[
    list[str] | None, _job("--text", "COLUMN", "Text column, in place of data.text; repeatable: texts are joined.")
]
JobPair = Annotated[
    list[str] | None, _job("--text-pair", "COLUMN", "Second text of a pair, in place of data.text_pair; repeatable.")
]
JobInputs = Annotated[
    list[str] | None, _job("--inputs", "NAME=COLUMN", "Column of another input, as in data.inputs; repeatable.")
]
Settings = Annotated[
    list[str] | None, _job("--set", "KEY=VALUE", "Override a job setting, such as train.epochs=5; repeatable.")
]
RunFolder = Annotated[
    str | None,
    _job(
        "--run",
        "FOLDER",
        "Run folder (default: runs/ and the name of the job file); auto: a new one for a changed job.",
    ),
]
FoldsNumber = Annotated[
    int | None,
    _job("--folds", "N", "Train N times, each time validating on another part of the rows; mean and deviation.", min=2),
]
TuningFolder = Annotated[
    str | None, _job("--run", "FOLDER", "Folder of the tuning (default: runs/, the name of the job file, _tuning).")
]
Mlflow = Annotated[str | None, _tracking("--mlflow", "STORE", "Also log to MLflow: sqlite:///FILE or a folder.")]
Wandb = Annotated[
    str | None, _tracking("--wandb", "PROJECT", "Also log to Weights & Biases; WANDB_MODE=offline: in the run folder.")
]
TensorBoard = Annotated[
    bool, _tracking("--tensorboard", None, "Also write event files to tensorboard/ in the run folder.")
]
Space = Annotated[str, _search("--space", "FILE", "Search space: a range or a list of choices per setting.")]
TuningSeed = Annotated[int, _search("--seed", "N", "Random seed of the suggested settings (default: 0).", min=0)]
NoPrune = Annotated[bool, _search("--no-prune", None, "Train every trial to its end, however it compares.")]
Trials = Annotated[int, _search("--trials", "N", "Total number of trials, with those of earlier calls.", min=1)]

# plan
GpuMemory = Annotated[
    str | None, _hardware("--gpu-memory", "SIZE", "Memory of each rank's GPU, such as 80GB or 80GiB.")
]
Flops = Annotated[
    str | None, _hardware("--flops", "RATE", "Operations per second of a rank in training, such as 120T.")
]
Bandwidth = Annotated[str | None, _hardware("--bandwidth", "RATE", "Bytes per second between ranks, such as 12.5GB.")]
Latency = Annotated[float | None, _hardware("--latency", "SECONDS", "Latency of a message between ranks.")]
SampleRows = Annotated[int | None, _input("--sample-rows", "N", "Rows of the table to sample (default: 2000).", min=1)]

# input
Text = Annotated[
    list[str] | None, _input("--text", "COLUMN", "Text column (default: as in training); repeatable: texts are joined.")
]
TextPair = Annotated[
    list[str] | None, _input("--text-pair", "COLUMN", "Column of the second text of a pair; repeatable.")
]
Inputs = Annotated[
    list[str] | None, _input("--inputs", "NAME=COLUMN", "Column of another input of the task; repeatable.")
]
Label = Annotated[str | None, _input("--label", "COLUMN", "Label column (default: as in training).")]
Null = Annotated[
    Literal["error", "score"] | None,
    _input("--null", "error|score", "Rows without text: report an error, or score as empty (default: error)."),
]
MoreInput = Annotated[
    list[str] | None,
    _input("--input", "TABLE", "Further table; repeatable."),
]
Where = Annotated[
    str | None,
    _input("--where", "CONDITION", 'Read only such rows, as in "stars >= 3".'),
]
SampleShare = Annotated[float | None, _input("--sample", "SHARE", "Read this share of the rows.")]
Limit = Annotated[int | None, _input("--limit", "N", "Read at most N rows.", min=1)]
SampleSeed = Annotated[int | None, _input("--seed", "N", "Random seed of --sample (default: 0).", min=0)]
Csv = Annotated[
    list[str] | None, _input("--csv", "KEY=VALUE", "Delimiter, quote or encoding of CSV files; repeatable.")
]
OnBadFile = Annotated[
    Literal["error", "quarantine"] | None,
    _input("--on-bad-file", "error|quarantine", "Unreadable files: stop, or list and skip (default: error)."),
]
AcceptNewInput = Annotated[
    bool, _input("--accept-new-input", None, "Score only the files that are new or have changed.")
]
AcceptRemovedInput = Annotated[
    bool, _input("--accept-removed-input", None, "Drop the rows of files that are gone from the input.")
]
Sample = Annotated[str, _input("--sample", "TABLE", "Table of typical rows; labels are optional.")]

# rank
Query = Annotated[str | None, _input("--query", "COLUMN", "Column of queries (default: the first text of a pair).")]
Document = Annotated[
    str | None, _input("--document", "COLUMN", "Column of documents (default: the second text of a pair).")
]
Relevant = Annotated[
    str | None, _input("--relevant", "CLASS", "Class whose probability is the score (default: the second of two).")
]

# output
Key = Annotated[str | None, _output("--key", "COLUMN", "Column of unique, non-null values that identify rows.")]
Columns = Annotated[
    list[str] | None, _output("--columns", "A,B", "Additional input columns to copy to the output; repeatable.")
]
AllProbabilities = Annotated[
    bool, _output("--all-probabilities", None, "Add a column with the probability of each class.")
]
Embedding = Annotated[
    str | None,
    _output(
        "--embedding", "float32|int8|binary", "Form of vectors: numbers, 8-bit numbers, or signs (default: float32)."
    ),
]
Prefix = Annotated[str | None, _output("--prefix", "TEXT", "Prefix for the names of prediction columns.")]
MaxErrorRate = Annotated[
    float | None,
    _output(
        "--max-error-rate", "SHARE", "Stop if more than this share of rows fails, 0 to 1 (default: 0.5).", min=0, max=1
    ),
]
Overwrite = Annotated[bool, _output("--overwrite", None, "Replace the output of another job.")]
Format = Annotated[
    Literal["parquet", "delta", "iceberg"] | None,
    _output("--format", "parquet|delta|iceberg", "Format of a new output (default: parquet)."),
]
WriteMode = Annotated[
    Literal["create", "append", "overwrite", "replace-where"] | None,
    _output(
        "--mode",
        "MODE",
        "Rows that a table has: create (there are none), append, overwrite, or replace-where (those with the same "
        "--key) (default: create).",
    ),
]
Incremental = Annotated[bool, _output("--incremental", None, "Score what is new since the last call, and add it.")]
PartitionBy = Annotated[list[str] | None, _output("--partition-by", "A,B", "Partition columns of a new table.")]
AddColumns = Annotated[bool, _output("--add-columns", None, "Add columns that the table lacks.")]
TargetFileSize = Annotated[
    str | None, _output("--target-file-size", "SIZE", "Write files of about this size, such as 256MiB.")
]

Profile = Annotated[bool, _execution("--profile", None, "Show the seconds of each step since the start.")]

# text generation
MaxNewTokens = Annotated[
    int | None, _text("--max-new-tokens", "N", "Maximum tokens of each answer (default: 64).", min=1)
]
Temperature = Annotated[
    float | None, _text("--temperature", "T", "Sampling temperature; 0 = greedy (default: 0).", min=0)
]
TopK = Annotated[int | None, _text("--top-k", "N", "Sample from the N most likely tokens.", min=1)]
TopP = Annotated[
    float | None, _text("--top-p", "P", "Sample from the most likely tokens with total probability P.", min=0, max=1)
]
Stop = Annotated[list[str] | None, _text("--stop", "TEXT", "End an answer before this text; repeatable.")]
Seed = Annotated[int | None, _text("--seed", "N", "Random seed for sampling, also of --sample (default: 0).", min=0)]
Chat = Annotated[bool, _text("--chat", None, "Texts are conversations: JSON lists of {role, content}.")]

# optimize
MaxDrop = Annotated[
    float | None, _selection("--max-drop", "SHARE", "Maximum loss of accuracy (default: 0.005).", min=0, max=1)
]
MinAgreement = Annotated[
    float | None,
    _selection(
        "--min-agreement", "SHARE", "Minimum share of rows with the same label as eager (default: 0.99).", min=0, max=1
    ),
]
Budget = Annotated[str | None, _selection("--budget", "TIME", "Time for all measurements (default: 5min).")]
Runtimes = Annotated[
    list[str] | None,
    _selection("--runtimes", "A,B", f"Runtimes to try: {_names('runtimes')} (default: all that can run); repeatable."),
]
SampleSize = Annotated[int | None, _selection("--rows", "N", "Rows of the table to measure on (default: 1000).", min=1)]

# export
ExportFormat = Annotated[
    Literal["onnx", "openvino", "sentence-transformers"],
    _output("--format", "FORMAT", "Layout: onnx, openvino or sentence-transformers."),
]
Pooling = Annotated[
    Literal["mean", "cls", "max", "lasttoken"] | None,
    _output(
        "--pooling", "MODE", "From token states to one vector: mean, cls, max or lasttoken (default: the model's own)."
    ),
]

# demo
Folder = Annotated[str, _demo("--folder", "FOLDER", "Folder for all files (default: demo).")]
Rows = Annotated[int, _demo("--rows", "N", "Rows of the generated table (default: 2400).", min=12, max=50_000)]
