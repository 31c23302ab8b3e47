"""The routes of Text Embeddings Inference that classify, embed, rank and tokenize, and what is served."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import Request
from starlette.responses import Response

from torchlake.config.model_files.embedding import read_embedding
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.scoring.rank import score_column
from torchlake.serving.exchange import Refused, Route, ServedRequest, reply
from torchlake.serving.protocols.rows import as_texts
from torchlake.serving.protocols.texts import (
    Body,
    TruncatingBody,
    checked,
    classes_of,
    embedded,
    labels_of,
    matrix_of,
    prompt_of,
    route,
    rows_of,
    scored,
    view_of,
)


class PredictBody(TruncatingBody):
    """The body of /predict."""

    inputs: str | list[Any]
    raw_scores: bool = False


class PromptedBody(TruncatingBody):
    """The fields of routes that embed texts; the parameters of /similarity."""

    prompt_name: str | None = None


class EmbedBody(PromptedBody):
    """The body of /embed."""

    inputs: str | list[Any]
    normalize: bool | None = None
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


def routes() -> list[Route]:
    """Return the routes."""
    return [
        ("/info", "GET", info, None),
        route("/predict", PredictBody, predict),
        route("/embed", EmbedBody, embed),
        route("/rerank", RerankBody, rerank),
        route("/similarity", SimilarityBody, similarity),
        route("/tokenize", TokenizeBody, tokenize),
    ]


async def predict(used: ServedRequest, body: PredictBody) -> Any:
    """Return each class with its score, best first: of one text a list, of a batch a list of lists."""
    rows, single = rows_of(used.model.spec, body.inputs)
    answers = await classes_of(used, rows, view_of(used, body, raw=body.raw_scores))
    return answers[0] if single else answers


async def embed(used: ServedRequest, body: EmbedBody) -> Any:
    """Return a vector for each text."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    normalize, size = body.normalize is not False, body.dimensions
    name = body.prompt_name
    return await embedded(used, texts, "inputs", body, normalize=normalize, dimensions=size, prompt_name=name)


async def rerank(used: ServedRequest, body: RerankBody) -> Any:
    """Return the texts' positions and scores for a query, best first."""
    spec = used.model.spec
    try:
        column = score_column(spec, None, used.service.name)
    except UsageError:  # its words are about options of `rank`
        several = f"which of its classes {', '.join(labels_of(spec))} relevant texts have is not known; use /predict"
        why = "it reads single texts" if spec.text_pair is None else several
        raise Refused(424, f"the model is not a re-ranker: {why}") from None
    if not body.query.strip() and used.model._settings.null == "error":
        raise Refused(400, "query: it has no text", kind="Empty", field="query")
    errors: dict[int, str] = {}
    as_texts([body.query], errors, str)
    if errors:
        raise Refused(422, "query: bad_utf8", kind="Tokenizer", field="query")
    rows = [(body.query, text) for text in body.texts]
    # Outputs of a regression on no scale are logits: TEI gives their sigmoid.
    logits = spec.problem == "regression" and spec.activation is None and spec.mean is None
    table = await scored(used, rows, "texts", view_of(used, body, raw=body.raw_scores))
    scores = matrix_of(table[column].combine_chunks()).astype(np.float64)
    if logits and not body.raw_scores:
        scores = 1 / (1 + np.exp(-scores))
    texts = [{"text": text} for text in body.texts] if body.return_text else [{}] * len(rows)
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"index": at, "score": float(scores[at]), **texts[at]} for at in order]


async def similarity(used: ServedRequest, body: SimilarityBody) -> Any:
    """Return the cosine of each sentence with the source sentence."""
    source, sentences = body.inputs.get("source_sentence"), body.inputs.get("sentences")
    if not isinstance(source, str) or not isinstance(sentences, list) or not sentences:
        raise Refused(
            422, "inputs: expected source_sentence, a string, and sentences, a list of strings", field="inputs"
        )
    options = checked(PromptedBody, body.parameters or {}, "parameters")
    texts, name = [source, *sentences], options.prompt_name
    vectors = await embedded(used, texts, "inputs", options, prompt_name=name, place=_place_of_sentence)
    return (vectors[1:] @ vectors[0]).astype(np.float32)


def _place_of_sentence(row: int) -> str:
    return f"inputs.sentences[{row - 1}]" if row else "inputs.source_sentence"


async def tokenize(used: ServedRequest, body: TokenizeBody) -> Any:
    """Return the tokens of each text, with their places in it."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise Refused(400, "inputs: is empty", kind="Empty", field="inputs")
    if len(texts) > used.service.options.max_rows:
        raise Refused(422, f"inputs: {len(texts):,} texts; the limit is {used.service.options.max_rows:,} (--max-rows)")
    prompt = prompt_of(used, body.prompt_name) or ""
    errors: dict[int, str] = {}
    as_texts(texts, errors, str)
    if errors:
        raise Refused(422, f"inputs[{min(errors)}]: bad_utf8", kind="Tokenizer", field="inputs")
    texts, patience = [prompt + text for text in texts], used.service.options.queue_timeout
    return await used.model.tokens(texts, special=body.add_special_tokens, patience=patience)


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
    names = labels_of(spec) or ["LABEL_0"]
    classes = {
        "id2label": {str(at): name for at, name in enumerate(names)},
        "label2id": {name: at for at, name in enumerate(names)},
    }
    return {"reranker" if spec.text_pair is not None and spec.problem == "regression" else "classifier": classes}
