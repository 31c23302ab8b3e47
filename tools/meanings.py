"""The words of the reference pages that are not in the code; `reference.py` checks that none is missing or unused."""

from typing import Any

TYPES = {
    "Fraction": "`{fraction: number > 0, < 1}`",
}
KINDS = {
    "train.betas": "two numbers ≥ 0, < 1",
    "train.checkpoint_every": "interval",
    "train.validate_every": "interval",
    "engine.name": "plug-ins engines",
    "engine.processes": "integer ≥ 1, or [fewest, most]",
    "model.task": "plug-ins tasks",
    "train.strategy": "plug-ins strategies",
    "train.collective_timeout": "time",
}
INTERVALS = """\
An interval is a time (`"30s"`, `"10min"`, `"1h"`), a number of steps (`"200steps"`) or `"epoch"`. A time may
also be a number of seconds."""

OUTPUT = """\
What `torchlake predict` writes, and what `tl.predict` adds to a frame. Every input row is one output row.
`--prefix` is put in front of the names of the prediction columns, but not of `truncated` and `error`."""
ALWAYS = {"row_id": "string", "truncated": "bool", "error": "string"}
OUTPUTS: list[tuple[str, Any, tuple[str, ...], bool]] = [
    ("text_classification", "single_label", ("a", "b"), True),
    ("text_classification", "multi_label", ("a", "b"), True),
    ("text_classification", "regression", (), False),
    ("text_generation", "next_token", (), False),
    ("feature_extraction", "feature_extraction", (), False),
    ("token_classification", "spans", (), True),
    ("question_answering", "answer", (), False),
    ("text2text_generation", "text", (), False),
]
"Task, problem, classes, and whether all probabilities are asked for."
COLUMNS = {
    "row_id": "`file:row` of the input. Replaced by the column of `--key`, in its own type. Not added to frames.",
    "truncated": "Whether the text was longer than the model's limit and was cut.",
    "error": "Null, or the reason why the row has no prediction.",
    "label": "The predicted class, in the type of the training labels; with several labels, those of at least 0.5.",
    "score": "Probability of the most probable class, or of the answer.",
    "prob_CLASS": "Probability of each class; with `--all-probabilities` only. "
    "Of classes that differ in case or blanks only, the second ends with `_2`.",
    "prediction": "The predicted number, in the units of the training labels.",
    "embedding": "The vector of the text; all of a model have the same size.",
    "words": "The words of the text, and the probabilities of all tags, in order; with `--all-probabilities` only.",
    "spans": "The labeled spans of the text, in characters, or in words of a list of words; `end` is exclusive.",
    "answer": "The part of the text that answers the question; null if the model finds no answer.",
    "start": "The answer's first character.",
    "end": "One past the answer's last character.",
    "generated_text": "The generated text; with `--n` a list, as are the other columns of the answer.",
    "reasoning": "Reasoning between the marks of the chat template, if it has such; then it is not in the text.",
    "prompt_tokens": "Number of tokens of the prompt.",
    "logprob": "Mean log-probability of the answer's tokens; with `--logprobs` only.",
    "token_logprobs": "Log-probability of each token; with `--logprobs tokens` only.",
    "generated_tokens": "Number of generated tokens.",
    "finish_reason": "`stop` (end token or stop text) or `length` (`--max-new-tokens` reached).",
}
ERRORS = """\
A row with an error has null in its prediction columns. The text before the first colon is the reason, by
which `predict` and `evaluate` count failed rows. Any other reason is the name of an exception that the row
raised, such as `ValueError`."""
REASONS = {
    "null_input": "has no text. `--null score` scores it as an empty string.",
    "bad_number": "has a value that is not a finite number in a column of numbers; only for tasks with such columns.",
    "too_long": "has more tokens than the model reads; only of a server with `--no-truncate`.",
    "bad_utf8": "has bytes that are not UTF-8.",
    "bad_csv": "is a malformed line of a CSV file.",
    "bad_json": "is a malformed line of a JSON lines file, or has a value whose type is not that of its column.",
    "bad_chat": "is not a conversation, or the chat template refused it.",
    "bad_options": "has an invalid value in its column of options.",
    "bad_label": "has a label that the model does not know; in `evaluate` only.",
    "chat_limit": "exceeded the time, memory or length that rendering a chat template may take.",
    "prompt_too_long": "has a prompt that leaves no room for `--max-new-tokens`.",
    "corrupt_image": "is an image that is empty, truncated or in an unknown format.",
    "image_too_large": "is an image with more than 89,478,485 pixels, or a file of more than 256 MiB.",
    "unknown_range": "is an image of numbers whose range its file does not state, such as 32-bit integers.",
    "missing_image": "names an image that does not exist or cannot be read.",
    "no_tokens": "has a context of which the tokenizer makes no tokens, to find an answer in.",
    "question_too_long": "has a question of more than half of the model's tokens.",
    "unknown_token": "has a token for which the model has no embedding.",
    "non_finite": "gave NaN or infinity.",
    "length": "has an answer that `--max-new-tokens` cut before it fits its structure; `generated_text` has it.",
    "engine_refused": "is refused by an engine in an interpreter of its own, with the reason that it gives.",
    "no_token": "has an answer that no token of the model continues as its structure wants; `generated_text` has it.",
    "bad_value": "has JSON with a value that its column cannot hold; `generated_text` has it.",
    "out_of_memory": "did not fit into memory, alone in its batch.",
    "no_preference": "has two answers that are equal, or have the same tokens; in training and `evaluate` only.",
    "killed_process": "killed its process twice.",
    "timeout": "took longer than `--row-timeout`, twice.",
}

EXIT_CODES = """\
The exit code of `torchlake`, and `error.exit_code` of the exception in Python. All exceptions are in
`torchlake.errors` and subclasses of `TorchlakeError`, which is a `ValueError`. With `--json` an error is
printed as `{"error": {...}}`. A scheduler may retry 70, 74 and 75; after 130 and 143 the same command
continues. 141: standard output or error is a pipe, and its reader is gone; the same command continues.
1: `compare --fail-if-worse` found a model that is worse."""

ENVIRONMENT = """\
Settings of a job are not read from the environment. These variables are read by torchlake itself; PyTorch,
Spark, Ray and the storages have their own (for example `AWS_ENDPOINT_URL`)."""
_RANK = "Set for each rank by an engine or `torchrun`."
_TEST = "Makes a process fail at a given point, for tests ([faults](../explanation/faults.md))."
_INTERNAL = "Set by torchlake for its own child processes; do not set it."
VARIABLES = {
    "TORCHLAKE_PROGRESS": "`0`: no progress bar. `notebook`: one bar that "
    "is drawn over; set by a notebook for its child processes.",
    "HF_HUB_OFFLINE": "`1`: no request to the Hugging Face Hub; models are folders or already in its cache.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that may be used.",
    "OMP_NUM_THREADS": "Threads of each child process (also `MKL_NUM_THREADS`, `RAYON_NUM_THREADS`, "
    "`TOKENIZERS_PARALLELISM`). Default: the cores divided by the processes.",
    "OMP_WAIT_POLICY": "How threads of child processes wait. Default: `PASSIVE`, with `GOMP_SPINCOUNT` 2000.",
    "VLLM_BATCH_INVARIANT": "`1`: vLLM's texts do not depend on their neighbors, on GPUs that have it; part of a job's "
    "fingerprint.",
    "WANDB_MODE": "`offline`: Weights & Biases keeps a run in the run folder; `wandb sync` sends it.",
    "RAY_ADDRESS": "The Ray cluster to join if `engine.ray.address` is not set.",
    "AWS_ENDPOINT_URL": "The address of a server that speaks S3 and is not AWS; also for Delta and Iceberg tables.",
    "AWS_ENDPOINT_URL_S3": "The same, before it.",
    "PYSPARK_GATEWAY_PORT": "Set by `spark-submit`: the session takes its master from there.",
    "TERM": "`dumb` or `unknown`: progress as lines, not as a bar.",
    "TORCHLAKE_API_KEY": "The token that requests to `torchlake serve` have to bring.",
    "AIP_HTTP_PORT": "The port of `torchlake serve`, set by Vertex AI.",
    "AIP_HEALTH_ROUTE": "A further route for `/health`.",
    "AIP_PREDICT_ROUTE": "A further route for `/invocations`.",
    "PROMETHEUS_MULTIPROC_DIR": "Where several processes of a server keep their metrics; set by `--processes`.",
    "RANK": _RANK,
    "WORLD_SIZE": _RANK,
    "LOCAL_RANK": _RANK,
    "LOCAL_WORLD_SIZE": _RANK,
    "MASTER_ADDR": _RANK,
    "MASTER_PORT": _RANK,
    "TORCHELASTIC_RESTART_COUNT": _RANK,
    "TORCHELASTIC_USE_AGENT_STORE": _RANK,
    "TORCHLAKE_FAILPOINT": _TEST,
    "TORCHLAKE_FAILPOINT_LOG": _TEST,
    "TORCHLAKE_FAILPOINT_ONCE": _TEST,
    "TORCHLAKE_RUNTIME_PYTHON_VLLM": "The interpreter of the runtime `vllm` on this machine.",
    "TORCHLAKE_TEST_CPU": "Limits torchlake to the features of a class of CPUs, for tests: `avx2`, `avx2_vnni`, "
    "`avx512_core`, `avx512_core_vnni` or `avx512_core_bf16`. It never adds a feature.",
    "TORCHLAKE_LANE": _INTERNAL,
    "TORCHLAKE_LOG": _INTERNAL,
    "TORCHLAKE_MASTER_FD": _INTERNAL,
}

ROUTES = """\
What `torchlake serve` answers. Errors have the form of the route's protocol: `{"error", "error_type"}` as in Text
Embeddings Inference, `{"error": {"message", "type", "param", "code"}}` on `/v1/`, and `{"error_code", "message"}` on
`/invocations`. A field that is not listed is refused by name.
How to use them: [serve a model](../how-to/serving.md)."""

PYTHON = """\
```python
import torchlake as tl
```

Names are imported on first use. `Runtime` is a module-level function like a runtime's `load`. What the
functions return: [Python results](python-results.md). What they raise: [exit codes](exit-codes.md). Functions that
use a finished model, or read and check tables: [Python API: models and tables](python-models.md). Models in other
tools: [Python API: other tools](python-tools.md)."""

OPTIONS = """\
The keywords of `predict` and `rank` besides columns, runtime and engine; the text of `predict` in
[models and tables](python-models.md) explains them. Other functions have some of them."""

PYTHON_MODELS = """\
The functions of the [Python API](python.md) that use a finished model, or read and check tables.
`**options: PredictOptions` are the keywords [in this table](python-classes.md#predictoptions)."""

PYTHON_TOOLS = """\
The functions of the [Python API](python.md) that give a finished model to a program, to clients, or to other tools:
MLflow, Ray Data, Spark SQL, ONNX Runtime, OpenVINO, sentence-transformers."""

OF_TOOLS = {"export", "load", "log_model", "ray_stages", "serve", "spark_udf", "try"}

OF_MODELS = {
    "evaluate",
    "export",
    "load",
    "log_model",
    "map",
    "optimize",
    "predict",
    "rank",
    "ray_stages",
    "serve",
    "spark_udf",
    "try",
}
"Commands and functions on the pages about models."


def results() -> list[Any]:
    """The classes of what the functions return."""
    from torchlake.evaluation.compare import Comparison, Difference
    from torchlake.evaluation.evaluate import Evaluation
    from torchlake.jobs.map import Mapped
    from torchlake.optimization.optimize import Optimized
    from torchlake.preparation.findings import Finding
    from torchlake.scoring.predict import Scored
    from torchlake.tables.verification.verify import Verification
    from torchlake.training.folds import Folds
    from torchlake.training.train import Run
    from torchlake.tuning.tune import Tuning

    return [Run, Finding, Folds, Scored, Mapped, Evaluation, Comparison, Difference, Optimized, Tuning, Verification]
