"""The routes of Text Embeddings Inference that classify, embed and rank, and `POST /`, which InferenceClient calls.

Texts are strings. For a model of pairs `["a", "b"]` is one pair and `[["a", "b"], ...]` a batch; for a model of single
texts a flat list is a batch. Text that cannot be scored refuses the request; `/invocations` answers row by row.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import Response

from torchlake import plugins
from torchlake.config.model_files.embedding import PROMPTS, read_embedding
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.errors import UsageError
from torchlake.scoring.in_process import CallOptions
from torchlake.scoring.rank import score_column
from torchlake.serving.exchange import Refused, ServedRequest, reply
from torchlake.serving.rows import as_texts

QUESTION_OPTIONS = {
    "doc_stride": "stride",
    "max_answer_len": "max_answer_tokens",
    "handle_impossible_answer": "no_answer",
}
"transformers' names of options of question answering."
AGGREGATIONS = ("simple", "first")
"""What spans are: words are never split, and a word's label is that of its first token. `simple` is the same unless the
tokens of a word have different labels."""


class Body(BaseModel):
    """The body of a request; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


Checked = TypeVar("Checked", bound=Body)


class TruncatingBody(Body):
    """The fields of routes that read texts."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


class PredictBody(TruncatingBody):
    """The body of /predict."""

    inputs: str | list[Any]
    raw_scores: bool = False


class EmbedBody(TruncatingBody):
    """The body of /embed."""

    inputs: str | list[Any]
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float"] | None = None


class RerankBody(TruncatingBody):
    """The body of /rerank."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class SimilarityBody(Body):
    """The body of /similarity."""

    inputs: dict[Literal["source_sentence", "sentences"], str | list[str]]
    parameters: dict[str, Any] | None = None


class TokenizeBody(Body):
    """The body of /tokenize."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class RootBody(TruncatingBody):
    """The body of POST /, for every task."""

    inputs: Any
    parameters: dict[str, Any] | None = None


def routes() -> list[tuple[str, str, Any, Any]]:
    """Return path, method, handler and schema of the body of each route."""
    posted: list[tuple[str, Any, type[Body]]] = [
        ("/predict", predict, PredictBody),
        ("/embed", embed, EmbedBody),
        ("/rerank", rerank, RerankBody),
        ("/similarity", similarity, SimilarityBody),
        ("/tokenize", tokenize, TokenizeBody),
        ("/", root, RootBody),
    ]
    return [("/info", "GET", info, None), *((path, "POST", handler, schema_of(body)) for path, handler, body in posted)]


def schema_of(body: type[Body]) -> dict[str, Any]:
    """Return the description of a JSON body."""
    return {"application/json": {"schema": body.model_json_schema()}}


def checked(kind: type[Checked], value: Any) -> Checked:
    """Return a body of this kind. Raises Refused with the field that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])[:50]
            raise Refused(422, f"{name!r} is not supported", field=name) from None
        # Positions and known names only: what a union tried, and keys of data, are of no use.
        place = [str(part) for part in problem["loc"] if isinstance(part, int) or part in kind.model_fields]
        words = f"{problem['msg'][:1].lower()}{problem['msg'][1:]}"
        raise Refused(422, f"{'.'.join(place) or 'the body'}: {words}", field=place[0] if place else None) from None


async def predict(request: Request) -> Response:
    """Return each class with its score, best first: of one text a list, of a batch a list of lists."""
    used: ServedRequest = request.scope["torchlake"]
    body = checked(PredictBody, used.json())
    rows, single = _rows(used.model.spec, body.inputs)
    answers = await _classes(used, rows, _view(used, body, raw=body.raw_scores))
    return reply(answers[0] if single else answers)


async def embed(request: Request) -> Response:
    """Return a vector for each text."""
    used: ServedRequest = request.scope["torchlake"]
    return await _embed(used, checked(EmbedBody, used.json()))


async def _embed(used: ServedRequest, body: EmbedBody) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    normalize, size = body.normalize is not False, body.dimensions
    name = body.prompt_name
    return reply(await embedded(used, texts, "inputs", body, normalize=normalize, dimensions=size, prompt_name=name))


async def rerank(request: Request) -> Response:
    """Return the texts' positions and scores for a query, best first."""
    used: ServedRequest = request.scope["torchlake"]
    body, spec = checked(RerankBody, used.json()), used.model.spec
    try:
        column = score_column(spec, None, used.service.name)
    except UsageError as error:
        raise Refused(424, f"the model is not a re-ranker: {error}") from None
    rows = [(body.query, text) for text in body.texts]
    # Outputs of a regression on no scale are logits: TEI gives their sigmoid.
    logits = spec.problem == "regression" and spec.activation is None and spec.mean is None
    table = await _scored(used, rows, "texts", _view(used, body, raw=body.raw_scores))
    scores = _matrix(table[column].combine_chunks()).astype(np.float64)
    if logits and not body.raw_scores:
        scores = 1 / (1 + np.exp(-scores))
    texts = [{"text": text} for text in body.texts] if body.return_text else [{}] * len(rows)
    order = np.argsort(-scores, kind="stable").tolist()
    return reply([{"index": at, "score": float(scores[at]), **texts[at]} for at in order])


async def similarity(request: Request) -> Response:
    """Return the cosine of each sentence with the source sentence."""
    used: ServedRequest = request.scope["torchlake"]
    return await _similar(used, checked(SimilarityBody, used.json()))


async def _similar(used: ServedRequest, body: SimilarityBody) -> Response:
    source, sentences = body.inputs.get("source_sentence"), body.inputs.get("sentences")
    if not isinstance(source, str) or not isinstance(sentences, list) or not sentences:
        raise Refused(
            422, "inputs: expected source_sentence, a string, and sentences, a list of strings", field="inputs"
        )
    options = checked(EmbedBody, {"inputs": "", **(body.parameters or {})})
    vectors = await embedded(used, [source, *sentences], "inputs", options, prompt_name=options.prompt_name)
    return reply((vectors[1:] @ vectors[0]).astype(np.float32))


async def tokenize(request: Request) -> Response:
    """Return the tokens of each text, with their places in it."""
    used: ServedRequest = request.scope["torchlake"]
    body = checked(TokenizeBody, used.json())
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if len(texts) > used.service.options.max_rows:
        raise Refused(422, f"inputs: {len(texts):,} texts; the limit is {used.service.options.max_rows:,} (--max-rows)")
    prompt = _prompt(used, body.prompt_name) or ""
    # Not in the event loop: it waits for what another request tokenizes.
    made = partial(used.model.tokens, [prompt + text for text in texts], special=body.add_special_tokens)
    return reply(await asyncio.to_thread(made))


async def root(request: Request) -> Response:
    """Answer as Hugging Face's InferenceClient expects it of the model's task."""
    used: ServedRequest = request.scope["torchlake"]
    given, task = used.json(), used.model.spec.task
    if task == "feature_extraction":
        if isinstance(given, dict) and isinstance(given.get("inputs"), dict):
            return await _similar(used, checked(SimilarityBody, given))
        return await _embed(used, checked(EmbedBody, given))
    body = checked(RootBody, given)
    options = {name: value for name, value in (body.parameters or {}).items() if value is not None}
    view = partial(_view, used, body)
    answer = {"token_classification": _spans, "question_answering": _answers, "zero_shot_classification": _named}
    return reply(await answer.get(task, _all_classes)(used, body.inputs, options, view))


async def _all_classes(used: ServedRequest, inputs: Any, options: dict[str, Any], view: Any) -> Any:
    top, function = options.pop("top_k", None), options.pop("function_to_apply", None)
    _refuse_rest(options)
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
        raise Refused(422, "parameters.top_k: expected a number from 1 on", field="top_k")
    if function not in (None, "softmax", "sigmoid", "none"):
        raise Refused(422, "parameters.function_to_apply: expected softmax, sigmoid or none", field="function_to_apply")
    rows, _ = _rows(used.model.spec, inputs)
    # The nested form also for one text: the client takes element 0 of the answer.
    answers = await _classes(used, rows, view(raw=function is not None), function)
    return [each[:top] for each in answers]


async def _named(used: ServedRequest, inputs: Any, options: dict[str, Any], view: Any) -> Any:
    names = ("candidate_labels", "hypothesis_template", "multi_label")
    given = {name: options.pop(name) for name in names if name in options}
    _refuse_rest(options)
    try:
        spec = used.model.with_options(given)
    except UsageError:
        words = "candidate_labels must be different names, at least two, and hypothesis_template must contain {} once"
        raise Refused(422, f"parameters: {words}; multi_label is true or false", field="parameters") from None
    rows, single = _rows(spec, inputs)
    pairs, most = len(rows) * len(spec.options["candidate_labels"]), used.service.options.max_rows
    if (pairs > most and len(rows) > 1) or len(spec.options["candidate_labels"]) > most:
        said = f"parameters.candidate_labels: {pairs:,} texts times labels; the limit is {most:,} (--max-rows)"
        raise Refused(422, said, field="candidate_labels")
    answers = await _classes(used, rows, view(task_options=given), spec=spec)
    return answers[0] if single else answers


async def _spans(used: ServedRequest, inputs: Any, options: dict[str, Any], view: Any) -> Any:
    if options.pop("aggregation_strategy", "first") not in AGGREGATIONS:
        known = " and ".join(AGGREGATIONS)
        raise Refused(422, f"parameters.aggregation_strategy: this server has {known}", field="aggregation_strategy")
    ignored = options.pop("ignore_labels", ["O"])
    if not isinstance(ignored, list) or "O" not in ignored:
        raise Refused(422, "parameters.ignore_labels: expected a list with O", field="ignore_labels")
    given = {"stride": options.pop("stride")} if "stride" in options else {}
    _refuse_rest(options)
    rows, single = _rows(used.model.spec, inputs)
    table = await _scored(used, rows, "inputs", view(task_options=given))
    names = {"label": "entity_group", "text": "word"}
    found = [
        [{names.get(name, name): value for name, value in span.items()} for span in row if span["label"] not in ignored]
        for row in table["spans"].to_pylist()
    ]
    return found[0] if single else found


async def _answers(used: ServedRequest, inputs: Any, options: dict[str, Any], view: Any) -> Any:
    if options.pop("top_k", 1) != 1:
        raise Refused(422, "parameters.top_k: a question has one answer", field="top_k")
    given = {QUESTION_OPTIONS[name]: options.pop(name) for name in list(options) if name in QUESTION_OPTIONS}
    _refuse_rest(options)
    asked = inputs if isinstance(inputs, list) else [inputs]
    if not all(isinstance(each, dict) and each.keys() == {"question", "context"} for each in asked):
        raise Refused(422, "inputs: expected an object with question and context", field="inputs")
    spec = used.model.spec
    order = [("question" if name == spec.inputs["question"] else "context") for name in spec.input_columns]
    table = await _scored(
        used, [tuple(each[name] for name in order) for each in asked], "inputs", view(task_options=given)
    )
    rows = table.select(["answer", "score", "start", "end"]).to_pylist()
    found = [{**row, "answer": row["answer"] or "", "start": row["start"] or 0, "end": row["end"] or 0} for row in rows]
    return found if isinstance(inputs, list) else found[0]


async def info(request: Request) -> Response:
    """Return what is served, under TEI's names; torchlake's own facts are under `torchlake`."""
    used: ServedRequest = request.scope["torchlake"]
    service, model = used.service, used.model
    options, spec = service.options, model.spec
    facts = {"task": spec.task, "problem": spec.problem, "columns": list(spec.input_columns), "runtime": model.runtime}
    return reply(
        {
            "model_id": service.name,
            "model_sha": model.sha,
            "model_dtype": "bfloat16" if model.runtime in ("bf16", "zentorch") else "float32",
            "served_model_name": service.name,
            "model_type": service.kind_of_model,
            "max_concurrent_requests": options.max_requests,
            "max_input_length": spec.max_length,
            "max_batch_tokens": model.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": options.max_rows,
            "auto_truncate": options.truncate,
            "tokenization_workers": 1,
            "version": version("torchlake"),
            "sha": None,
            "docker_label": None,
            "torchlake": {**facts, "weights_sha": model.sha, "task_sha": service.task_sha},
        }
    )


def kind_of(folder: Path, spec: TaskSpec) -> dict[str, Any]:
    """Return TEI's description of what a model is."""
    if spec.task == "feature_extraction":
        return {"embedding": {"pooling": "+".join(read_embedding(folder).poolings)}}
    names = _labels(spec) or ["LABEL_0"]
    classes = {
        "id2label": {str(at): name for at, name in enumerate(names)},
        "label2id": {name: at for at, name in enumerate(names)},
    }
    return {"reranker" if spec.text_pair is not None and spec.problem == "regression" else "classifier": classes}


def prompts_of(folder: Path) -> dict[str, str]:
    """Return the prompts of an embedding model by name."""
    try:
        found = json.loads((folder / PROMPTS).read_text(encoding="utf-8")).get("prompts") or {}
    except FileNotFoundError:
        return {}
    return {name: text or "" for name, text in found.items()}


async def embedded(
    used: ServedRequest,
    texts: Sequence[Any],
    field: str,
    body: TruncatingBody = TruncatingBody(),
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    prompt_name: str | None = None,
) -> np.ndarray:
    """Return the vectors (N, D) float32 of texts. Raises Refused."""
    spec = used.model.spec
    if spec.task != "feature_extraction":
        raise Refused(424, f"the model is not an embedding model; its task is {spec.task}")
    if dimensions is not None and not 1 <= dimensions <= (spec.dimensions or 0):
        raise Refused(422, f"dimensions: expected 1 to {spec.dimensions}", field="dimensions")
    if not all(isinstance(text, str) for text in texts):
        raise Refused(422, f"{field}: expected a string or a list of strings, no token ids", field=field)
    view = _view(used, body, all_probabilities=None, prompt=_prompt(used, prompt_name))
    table = await _scored(used, [(text,) for text in texts], field, view)
    vectors = _matrix(table["embedding"].combine_chunks().flatten()).reshape(len(table), -1)[:, :dimensions]
    if normalize:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        if np.abs(norms - 1).max(initial=0) > 1e-5:  # the model's own normalization is left as it is
            vectors = vectors / np.where(norms == 0, 1, norms)
    return np.ascontiguousarray(vectors)


def _prompt(used: ServedRequest, name: str | None) -> str | None:
    if name is None:
        return None
    prompts = used.service.prompts
    if name not in prompts:
        raise Refused(
            422, f"prompt_name: the model has the prompts {', '.join(prompts) or '(none)'}", field="prompt_name"
        )
    return prompts[name]


def _view(
    used: ServedRequest, body: TruncatingBody, *, raw: bool = False, all_probabilities: bool | None = True, **more: Any
) -> CallOptions:
    side = body.truncation_direction
    cut = used.service.options.truncate if body.truncate is None else body.truncate
    if all_probabilities and not hasattr(plugins.load("tasks", used.model.spec.task), "probability_names"):
        all_probabilities = None
    return CallOptions(
        raw=raw, all_probabilities=all_probabilities, truncate=cut, truncation_side=side and side.lower(), **more
    )


def _rows(spec: TaskSpec, inputs: Any) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the rows of a request, and whether it is a single one and no list. Raises Refused."""
    width = len(spec.input_columns)
    if width > 2 or (width == 2 and spec.text_pair is None):
        raise Refused(424, f"the model reads the columns {', '.join(spec.input_columns)}; use /invocations")
    if width == 1 and isinstance(inputs, str):
        return [(inputs,)], True
    if not isinstance(inputs, list):
        wanted = "a string or a list of strings" if width == 1 else "a pair of strings or a list of pairs"
        raise Refused(422, f"inputs: expected {wanted}", field="inputs")
    if width == 2 and len(inputs) == 2 and all(isinstance(text, str) for text in inputs):
        return [(inputs[0], inputs[1])], True
    rows = [(each,) if isinstance(each, str) else each for each in inputs]
    wrong = next((at for at, row in enumerate(rows) if not isinstance(row, list | tuple) or len(row) != width), None)
    if wrong is not None:
        wanted = "one text" if width == 1 else "a pair of texts"
        raise Refused(422, f"inputs[{wrong}]: this model reads {wanted} in each row", field="inputs")
    return [tuple(row) for row in rows], False


async def _scored(used: ServedRequest, rows: Sequence[tuple[Any, ...]], field: str, view: CallOptions) -> pa.Table:
    """Return the prediction columns of rows. Raises Refused if there are none, and for one that cannot be scored."""
    if not rows:
        raise Refused(400, f"{field}: is empty", field=field)
    errors: dict[int, str] = {}
    try:
        columns = {
            name: as_texts([row[at] for row in rows], errors, lambda row: f"{field}[{row}]")
            for at, name in enumerate(used.model.spec.input_columns)
        }
    except Refused as error:
        raise Refused(422, str(error), field=field) from None
    table = await used.score(pa.table(columns), errors, view)
    if table["error"].null_count < len(table):
        at, reason = next((at, why) for at, why in enumerate(table["error"].to_pylist()) if why is not None)
        kind = reason.partition(":")[0]
        status, name = {"null_input": (400, "Empty"), "too_long": (422, "Validation"), "timeout": (424, "Backend")}.get(
            kind,
            (422, "Tokenizer")
            if kind in ("bad_utf8", "unknown_token", "no_tokens", "question_too_long")
            else (424, "Backend"),
        )
        words = "it has no text" if kind == "null_input" else reason if status == 422 else kind
        raise Refused(status, f"{field}[{at}]: {words}", kind=name, field=field)
    return table


async def _classes(
    used: ServedRequest,
    rows: Sequence[tuple[Any, ...]],
    view: CallOptions,
    function: str | None = None,
    spec: TaskSpec | None = None,
) -> list[list[dict[str, Any]]]:
    """Return each row's classes with their scores, best first."""
    spec, task = spec or used.model.spec, plugins.load("tasks", used.model.spec.task)
    if view.all_probabilities is None or "embedding" in task.output_schema(spec).names:
        raise Refused(424, f"the model is not a classifier; its task is {spec.task}")
    table = await _scored(used, rows, "inputs", view)
    scores = np.column_stack([_matrix(table[name].combine_chunks()) for name in task.probability_names(spec)])
    scores = scores.astype(np.float64)
    if function == "softmax":
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    elif function == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    names = _labels(spec) or ["LABEL_0"]
    orders = np.argsort(-scores, axis=1, kind="stable")
    return [
        [{"label": names[at], "score": score} for at, score in zip(order.tolist(), row[order].tolist(), strict=True)]
        for order, row in zip(orders, scores, strict=True)
    ]


def _matrix(numbers: pa.Array) -> np.ndarray:
    """Return float32 numbers without nulls as NumPy's; `to_numpy` would import pandas."""
    return np.frombuffer(numbers.buffers()[1], np.float32, len(numbers), 4 * numbers.offset)


def _labels(spec: TaskSpec) -> list[str]:
    return [label_name(label) for label in spec.labels or spec.options.get("candidate_labels", ())]


def _refuse_rest(options: Mapping[str, Any]) -> None:
    for name in options:
        raise Refused(422, f"parameters: {name[:50]!r} is not supported", field=name[:50])
