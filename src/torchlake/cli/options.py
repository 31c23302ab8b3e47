"""The arguments and options of the commands, as types of the parameters in `app.py`.

An option that is not given is not passed on, so the defaults are those of the Python functions.
"""

from typing import Annotated, Any, Literal

import typer

from torchlake import plugins


def _option(flag: str, metavar: str | None, help: str, group: str, **limits: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=group, **limits)


def _names(kind: plugins.Kind) -> str:
    return ", ".join(plugins.names(kind))


# Declared for the parser and the help; `main.py` reads these flags before parsing, because usage errors are JSON too.
Json = Annotated[bool, _option("--json", None, "Print one JSON object to standard output.", "General")]
Quiet = Annotated[bool, _option("--quiet", None, "Show errors and results only.", "General")]
Verbose = Annotated[bool, _option("--verbose", None, "Show debug messages and tracebacks.", "General")]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder written by train.")]
Job = Annotated[str, typer.Argument(metavar="JOB.yaml", help="Job file.")]
OptionalJob = Annotated[
    str | None, typer.Argument(metavar="JOB.yaml", help="Job file; optional if --set gives the required settings.")
]

# execution
EngineName = Annotated[
    str | None, _option("--engine", "NAME", f"Where to run: {_names('engines')} (default: local).", "Execution")
]
Processes = Annotated[
    int | None, _option("--processes", "N", "Number of processes (default: chosen by the engine).", "Execution", min=1)
]
Ranks = Annotated[int | None, _option("--processes", "N", "Number of ranks (default: 1).", "Execution", min=1)]
GpusPerProcess = Annotated[
    int, _option("--gpus-per-process", "N", "GPUs of each rank (default: 0).", "Execution", min=0)
]
EngineSettings = Annotated[
    list[str] | None,
    _option("--set", "KEY=VALUE", "Set an engine option, such as engine.ray.address=auto; repeatable.", "Execution"),
]
RuntimeName = Annotated[
    str | None,
    _option(
        "--runtime",
        "NAME",
        f"Inference runtime: {_names('runtimes')} (default: chosen by optimize, else eager).",
        "Execution",
    ),
]
BatchTokens = Annotated[
    int | None, _option("--batch-tokens", "N", "Maximum tokens of a batch, with padding.", "Execution", min=1)
]
ChunkRows = Annotated[
    int | None,
    _option("--chunk-rows", "N", "Rows of a chunk (default: depends on the table's size).", "Execution", min=1),
]
RowTimeout = Annotated[
    float | None,
    _option("--row-timeout", "SECONDS", "Time limit of a forward pass (default: 600).", "Execution"),
]

# job and run
Settings = Annotated[
    list[str] | None,
    _option("--set", "KEY=VALUE", "Override a job setting, such as train.epochs=5; repeatable.", "Job"),
]
RunFolder = Annotated[
    str | None, _option("--run", "FOLDER", "Run folder (default: runs/ and the name of the job file).", "Job")
]
TuningFolder = Annotated[
    str | None,
    _option("--run", "FOLDER", "Folder of the tuning (default: runs/, the name of the job file, _tuning).", "Job"),
]
Mlflow = Annotated[
    str | None, _option("--mlflow", "STORE", "Also log to MLflow: sqlite:///FILE or a folder.", "Tracking")
]
TensorBoard = Annotated[
    bool, _option("--tensorboard", None, "Also write event files to tensorboard/ in the run folder.", "Tracking")
]
Space = Annotated[str, _option("--space", "FILE", "Search space: a range or a list of choices per setting.", "Search")]
Trials = Annotated[
    int, _option("--trials", "N", "Total number of trials, with those of earlier calls.", "Search", min=1)
]

# plan
GpuMemory = Annotated[
    str | None, _option("--gpu-memory", "SIZE", "Memory of each rank's GPU, such as 80GB or 80GiB.", "Hardware")
]
Flops = Annotated[
    str | None, _option("--flops", "RATE", "Operations per second of a rank in training, such as 120T.", "Hardware")
]
Bandwidth = Annotated[
    str | None, _option("--bandwidth", "RATE", "Bytes per second between ranks, such as 12.5GB.", "Hardware")
]
Latency = Annotated[float | None, _option("--latency", "SECONDS", "Latency of a message between ranks.", "Hardware")]
SampleRows = Annotated[
    int | None, _option("--sample-rows", "N", "Rows of the table to sample (default: 2000).", "Input", min=1)
]

# input
Text = Annotated[str | None, _option("--text", "COLUMN", "Text column (default: as in training).", "Input")]
Label = Annotated[str | None, _option("--label", "COLUMN", "Label column (default: as in training).", "Input")]
Null = Annotated[
    Literal["error", "score"] | None,
    _option(
        "--null", "error|score", "Rows without text: report an error, or score as empty (default: error).", "Input"
    ),
]
OnBadFile = Annotated[
    Literal["error", "quarantine"] | None,
    _option("--on-bad-file", "error|quarantine", "Unreadable files: stop, or list and skip (default: error).", "Input"),
]
AcceptNewInput = Annotated[
    bool, _option("--accept-new-input", None, "Score only the files that are new or have changed.", "Input")
]
AcceptRemovedInput = Annotated[
    bool, _option("--accept-removed-input", None, "Drop the rows of files that are gone from the input.", "Input")
]
Sample = Annotated[str, _option("--sample", "TABLE", "Table of typical rows; labels are optional.", "Input")]

# output
Key = Annotated[
    str | None, _option("--key", "COLUMN", "Column of unique, non-null values that identify rows.", "Output")
]
Columns = Annotated[
    str | None, _option("--columns", "A,B", "Additional input columns to copy to the output.", "Output")
]
AllProbabilities = Annotated[
    bool, _option("--all-probabilities", None, "Add a column with the probability of each class.", "Output")
]
Prefix = Annotated[str | None, _option("--prefix", "TEXT", "Prefix for the names of prediction columns.", "Output")]
MaxErrorRate = Annotated[
    float | None,
    _option(
        "--max-error-rate",
        "SHARE",
        "Stop if more than this share of rows fails, 0 to 1 (default: 0.5).",
        "Output",
        min=0,
        max=1,
    ),
]
Overwrite = Annotated[bool, _option("--overwrite", None, "Replace the output of another job.", "Output")]

# text generation
MaxNewTokens = Annotated[
    int | None,
    _option("--max-new-tokens", "N", "Maximum tokens of each answer (default: 64).", "Text generation", min=1),
]
Temperature = Annotated[
    float | None,
    _option("--temperature", "T", "Sampling temperature; 0 = greedy (default: 0).", "Text generation", min=0),
]
TopK = Annotated[int | None, _option("--top-k", "N", "Sample from the N most likely tokens.", "Text generation", min=1)]
TopP = Annotated[
    float | None,
    _option(
        "--top-p", "P", "Sample from the most likely tokens with total probability P.", "Text generation", min=0, max=1
    ),
]
Stop = Annotated[
    list[str] | None, _option("--stop", "TEXT", "End an answer before this text; repeatable.", "Text generation")
]
Seed = Annotated[int | None, _option("--seed", "N", "Random seed for sampling (default: 0).", "Text generation", min=0)]
Chat = Annotated[
    bool,
    _option("--chat", None, "Texts are conversations: JSON lists of {role, content}.", "Text generation"),
]

# optimize
MaxDrop = Annotated[
    float | None,
    _option("--max-drop", "SHARE", "Maximum loss of accuracy (default: 0.005).", "Selection", min=0, max=1),
]
MinAgreement = Annotated[
    float | None,
    _option(
        "--min-agreement",
        "SHARE",
        "Minimum share of rows with the same label as eager (default: 0.99).",
        "Selection",
        min=0,
        max=1,
    ),
]
Budget = Annotated[str | None, _option("--budget", "TIME", "Time for all measurements (default: 5min).", "Selection")]
Runtimes = Annotated[
    str | None,
    _option("--runtimes", "A,B", f"Runtimes to try: {_names('runtimes')} (default: all that can run).", "Selection"),
]

# demo
Folder = Annotated[str, _option("--folder", "FOLDER", "Folder for all files (default: demo).", "Demo")]
Rows = Annotated[
    int, _option("--rows", "N", "Rows of the generated table (default: 2400).", "Demo", min=12, max=50_000)
]
