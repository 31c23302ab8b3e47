"""Answer requests with a trained model: many callers share one model and its batches.

    HTTP -> limits, token -> rows or texts -> one thread that computes what has arrived -> answers by orjson

In: a model folder; requests as MLflow, Text Embeddings Inference or OpenAI define them. Out: the columns of `predict`,
or what those clients expect. Read `batching.py` first, then `asgi.py`; `admission.py` has
the token and the limits, `service.py` the model that answers and its reload, `process.py` the processes and their
restarts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlake.serving.asgi import app as app
    from torchlake.serving.options import ServeOptions as ServeOptions
    from torchlake.serving.process import serve as serve

_MODULES = {"ServeOptions": "options", "app": "asgi", "serve": "process"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `batching` is used without a server's libraries."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
