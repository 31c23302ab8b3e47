"""Virtual environments for peers that cannot share torchlake's, made once under .bench/envs with Python's own venv.

Versions are pinned to what was tried together. An environment is whole when its stamp says so; one that cannot be made
costs its rows, not the benchmark.
"""

import os
import subprocess
import sys
from pathlib import Path

from _common import SCRATCH

SHARED = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0")
SCIKIT = (*SHARED, "scipy==1.17.1", "scikit-learn==1.9.1")
SENTENCE = (*SCIKIT, "sentence-transformers==5.2.0")
OPENVINO = (
    "transformers==5.5.4",
    "huggingface-hub<1.22",
    "datasets<5",
    "optimum==2.3.0",
    "openvino==2026.4.1",
    "openvino-tokenizers==2026.4.1.0",
    "nncf==3.4.0",
    "requests>=2.33,<3",
    "setuptools",
)
"What optimum-intel 2.2 runs with."
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    # Optimum's BetterTransformer ended with 1.27, which wants a transformers before 4.49.
    "bettertransformer": (
        (
            *SHARED,
            "transformers==4.48.3",
            "optimum==1.27.0",
            "huggingface-hub==0.36.2",
            "tokenizers==0.21.4",
        ),
    ),
    # optimum-onnx wants a transformers before 4.58, optimum-intel 2.2 one before 5.6. The latter lists torchvision,
    # which text does not need and whose wheel is built for another torch: so without its dependencies.
    "sentence-onnx": (
        (
            *SENTENCE,
            "transformers==4.57.6",
            "huggingface-hub==0.36.2",
            "tokenizers==0.22.1",
            "onnx==1.23.2",
            "onnxruntime==1.31.1",
            "optimum==2.1.0",
        ),
        ("--no-deps", "optimum-onnx==0.1.0"),
    ),
    "sentence-openvino": (
        (*SENTENCE, *OPENVINO),
        ("--no-deps", "optimum-intel==2.2.0"),
    ),
    # As above, with the sentence-transformers of today; its extra `onnx` cannot be installed: it wants transformers 5,
    # optimum-onnx one before 4.58.
    "embeddings-openvino": (
        (*SCIKIT, "sentence-transformers==6.2.0", *OPENVINO),
        ("--no-deps", "optimum-intel==2.2.0"),
    ),
    "fastembed": (("fastembed==0.9.1", "numpy==2.4.6"),),
    "candle": (("candding==0.1.0", "embed_anything==0.7.1", "numpy==2.4.6"),),
    "zentorch": (
        (*SHARED, "zentorch==2.13.0.2", "sentence-transformers==6.2.0", "transformers==5.23.0", "setuptools"),
    ),
    "daft-embeddings": (
        (
            *SHARED,
            "sentence-transformers==6.2.0",
            "transformers==5.23.0",
            "pyarrow==25.0.1",
            "daft==0.7.26",
            "pillow",
        ),
    ),
    "daft": (("numpy==2.4.6", "pyarrow==25.0.1", "daft==0.7.26"),),
    "daft-prompt": (("numpy==2.4.6", "pyarrow==25.0.1", "daft==0.7.26", "openai==2.38.0"),),
    "trl": (
        (
            *SHARED,
            "transformers==5.23.0",
            "trl==1.16.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "peft==0.21.2",
            "pyarrow==25.0.1",
        ),
    ),
    "litserve": ((*SHARED, "litserve==0.2.19", "sentence-transformers==6.2.0", "transformers==5.23.0", "setuptools"),),
    # It wants NumPy 1 and the sentence-transformers of 2025; BetterTransformer, its way on CPUs, wants optimum 1.
    "infinity": (
        (
            *("torch==2.13.0", "numpy==1.26.4", "safetensors==0.8.0", "scipy==1.17.1", "scikit-learn==1.9.1"),
            *("sentence-transformers==3.4.1", "transformers==4.48.3", "huggingface-hub==0.36.2"),
            *("fastapi==0.165.0", "orjson==3.13.0", "posthog==7.91.1", "prometheus-fastapi-instrumentator==8.1.0"),
            *("pydantic==2.14.4", "rich==13.9.4", "typer==0.12.5", "click==8.1.8", "uvicorn[standard]==0.32.1"),
        ),
        ("--no-deps", "infinity-emb==0.0.78", "optimum==1.27.0"),
    ),
    "deepspeed": (
        (*SHARED, "transformers==5.23.0", "huggingface-hub==2.4.0", "setuptools", "wheel", "ninja"),
        ("--no-build-isolation", "deepspeed==0.19.8"),
    ),
}
LIMIT_S = 900


def python_of(name: str) -> Path | str:
    """The interpreter of an environment (this one's for "main"), made when it is not there; or why it cannot be."""
    if name == "main":
        return Path(sys.executable)
    folder = SCRATCH / "envs" / name
    python, stamp = folder / "bin" / "python", folder / "stamp"
    wanted = repr(ENVIRONMENTS[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {folder}", file=sys.stderr)
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder)])
        for packages in ENVIRONMENTS[name]:
            _run([str(python), "-m", "pip", "install", "--quiet", *packages])
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stderr", None) or str(error)
        lines = [line for line in output.strip().splitlines() if line.strip() and "WARNING" not in line]
        return f"its environment cannot be made: {(lines or ['unknown'])[-1][:200]}"
    stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
