"""What the routes of texts share: bodies that are checked, texts as rows, and classes and vectors as arrays.

For a model of pairs `["a", "b"]` is one pair and `[["a", "b"], ...]` a batch; for a model of single texts a flat list
is a batch. Text that cannot be scored refuses the request; `/invocations` answers row by row.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import Response

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.scoring.options.call import CallOptions
from torchlake.serving.exchange import Refused, Route, ServedRequest, reply
from torchlake.serving.protocols.rows import CLIENT_ERRORS, IMAGE, as_texts


class Body(BaseModel):
    """The body of a request; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


Checked = TypeVar("Checked", bound=Body)


class TruncatingBody(Body):
    """The fields of routes that read texts."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


def checked(kind: type[Checked], value: Any, within: str = "") -> Checked:
    """Return a body, or what is `within` one, of this kind. Raises Refused with the field that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        problem = problems[0]
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])[:50]
            raise Refused(422, f"{within}{': ' if within else ''}{name!r} is not supported", field=name) from None
        # Positions and known names only: what a union tried, and keys of data, are of no use.
        known = {field.alias or name for name, field in kind.model_fields.items()}
        places = [[str(part) for part in one["loc"] if isinstance(part, int) or part in known] for one in problems]
        place = places[0]
        wrong = [one for one, at in zip(problems, places, strict=True) if at == place]
        messages = ["Input should be an object" if one["type"] == "model_type" else one["msg"] for one in wrong]
        first, *others = dict.fromkeys(messages)
        words = " or ".join(
            [first[:1].lower() + first[1:], *(each.removeprefix("Input should be ") for each in others)]
        )
        where = ".".join([within, *place] if within else place) or "the body"
        raise Refused(422, f"{where}: {words}", field=place[0] if place else None) from None


def route(path: str, kind: type[Body], answer: Callable[[ServedRequest, Any], Awaitable[Any]]) -> Route:
    """Return a POST route for bodies of a kind; `answer` returns what is replied."""

    async def handler(request: Request) -> Response:
        used: ServedRequest = request.scope["torchlake"]
        return reply(await answer(used, checked(kind, used.json())))

    handler.__name__, handler.__doc__ = answer.__name__, answer.__doc__
    return path, "POST", handler, {"application/json": {"schema": kind.model_json_schema()}}


async def embedded(
    used: ServedRequest,
    texts: Sequence[Any],
    field: str,
    body: TruncatingBody = TruncatingBody(),
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    place: Callable[[int], str] | None = None,
) -> np.ndarray:
    """Return the vectors (N, D) float32 of texts. Raises Refused."""
    spec = used.model.spec
    if spec.task != "feature_extraction":
        raise Refused(424, f"the model is not an embedding model; its task is {spec.task}")
    if dimensions is not None and not 1 <= dimensions <= (spec.dimensions or 0):
        raise Refused(422, f"dimensions: expected 1 to {spec.dimensions}", field="dimensions")
    if not all(isinstance(text, str) for text in texts):
        raise Refused(422, f"{field}: expected a string or a list of strings, no token ids", field=field)
    view = view_of(used, body, all_probabilities=None, prompt=prompt_of(used, prompt_name))
    table = await scored(used, [(text,) for text in texts], field, view, place)
    vectors = matrix_of(table["embedding"].combine_chunks().flatten()).reshape(len(table), -1)[:, :dimensions]
    if normalize:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        if np.abs(norms - 1).max(initial=0) > 1e-5:  # the model's own normalization is left as it is
            vectors = vectors / np.where(norms == 0, 1, norms)
    return np.ascontiguousarray(vectors)


def prompt_of(used: ServedRequest, name: str | None) -> str | None:
    if name is None:
        return None
    prompts = used.service.prompts
    if name not in prompts:
        raise Refused(
            422, f"prompt_name: the model has the prompts {', '.join(prompts) or '(none)'}", field="prompt_name"
        )
    return prompts[name]


def view_of(
    used: ServedRequest, body: TruncatingBody, *, raw: bool = False, all_probabilities: bool | None = True, **more: Any
) -> CallOptions:
    side = body.truncation_direction
    cut = used.service.options.truncate if body.truncate is None else body.truncate
    if all_probabilities and not hasattr(plugins.load("tasks", used.model.spec.task), "probability_names"):
        all_probabilities = None
    return CallOptions(
        raw=raw, all_probabilities=all_probabilities, truncate=cut, truncation_side=side and side.lower(), **more
    )


def rows_of(spec: TaskSpec, inputs: Any) -> tuple[list[tuple[Any, ...]], bool]:
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


async def scored(
    used: ServedRequest,
    rows: Sequence[tuple[Any, ...]],
    field: str,
    view: CallOptions,
    place: Callable[[int], str] | None = None,
) -> pa.Table:
    """Return the prediction columns of rows. Raises Refused if there are none, and for one that cannot be scored.

    `place` returns where in the request a row stands; None: at its number in `field`.
    """
    place = place or (lambda row: f"{field}[{row}]")
    if not rows:
        raise Refused(400, f"{field}: is empty", kind="Empty", field=field)
    if IMAGE in plugins.load("tasks", used.model.spec.task).inputs:  # a string would be the path of a file
        raise Refused(424, "the model reads images; use /invocations")
    errors: dict[int, str] = {}
    try:
        columns = {
            name: as_texts([row[at] for row in rows], errors, place)
            for at, name in enumerate(used.model.spec.input_columns)
        }
    except Refused as error:
        raise Refused(422, str(error), field=field) from None
    table = await used.score(pa.table(columns), errors, view)
    if table["error"].null_count < len(table):
        at, reason = next((at, why) for at, why in enumerate(table["error"].to_pylist()) if why is not None)
        kind = reason.partition(":")[0]
        status, name = CLIENT_ERRORS.get(kind, (424, "Backend"))
        words = "it has no text" if kind == "null_input" else reason if status == 422 else kind
        raise Refused(status, f"{place(at)}: {words}", kind=name, field=field)
    return table


async def classes_of(
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
    if view.raw and "candidate_labels" in spec.options:
        raise Refused(422, "raw_scores: this model has no single one of a class", field="raw_scores")
    table = await scored(used, rows, "inputs", view)
    scores = np.column_stack([matrix_of(table[name].combine_chunks()) for name in task.probability_names(spec)])
    scores = scores.astype(np.float64)
    if function == "softmax":
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    elif function == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    names = labels_of(spec) or ["LABEL_0"]
    orders = np.argsort(-scores, axis=1, kind="stable")
    return [
        [{"label": names[at], "score": score} for at, score in zip(order.tolist(), row[order].tolist(), strict=True)]
        for order, row in zip(orders, scores, strict=True)
    ]


def matrix_of(numbers: pa.Array) -> np.ndarray:
    """Return float32 numbers without nulls as NumPy's; `to_numpy` would import pandas."""
    return np.frombuffer(numbers.buffers()[1], np.float32, len(numbers), 4 * numbers.offset)


def labels_of(spec: TaskSpec) -> list[str]:
    return [label_name(label) for label in spec.labels or spec.options.get("candidate_labels", ())]
