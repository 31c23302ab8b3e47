"""OpenVINO on CPUs: an ONNX graph kept as OpenVINO's own two files, and executed.

It reads the ONNX graph that the runtimes of ONNX Runtime make, in fp32 or with layers in 8 bits. nncf, which would put
them in 8 bits otherwise, agrees less with the model (see `_calibration.py`) and is no faster.

Kernels are made for each shape when it first comes, and kept: some 10 ms per shape, whatever the number of layers, so a
process is at its full speed after a few hundred batches of rows sorted by length.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

from torchlake.runtimes import Forward, _exported

GRAPH = "model.xml"
WEIGHTS = "model.bin"
TELEMETRY = "openvino_telemetry"


def library() -> ModuleType:
    """openvino, without the library that would report its import to its makers: it is used where that is missing too.

    What a table and a model are is nobody's business but their owner's, and many machines that score have no network.
    """
    if "openvino" in sys.modules:
        return sys.modules["openvino"]
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == TELEMETRY}
    for name in hidden:
        del sys.modules[name]
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[TELEMETRY]
        sys.modules.update(hidden)


def write(onnx_graph: Path, folder: Path) -> None:
    """Write an ONNX graph as `model.xml` and `model.bin`."""
    openvino = library()
    # A .bin alone would be taken for a pickle by whoever reads the model folder in this moment.
    (folder / GRAPH).touch()
    # Weights would be stored in 16 bits by default.
    openvino.save_model(openvino.Core().read_model(str(onnx_graph)), str(folder / GRAPH), compress_to_fp16=False)


class _SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2) on Linux."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _own_signal_stack() -> Iterator[None]:
    """Give the thread its stack for signals back when the block is left.

    Compiling a model puts one of OpenVINO's there, which does not live as long as the process: the next signal that
    Python handles, a Ctrl-C or a SIGTERM, would then end the process with a segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return
    library, before = ctypes.CDLL(None), _SignalStack()
    library.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        library.sigaltstack(ctypes.byref(before), None)


def forward(folder: Path, *, precision: str) -> Forward:
    """What `write` wrote, as a Forward. `precision`, f32 or bf16, is that of whatever is not in 8 bits."""
    openvino = library()
    settings = {
        # Unasked, OpenVINO would choose by the CPU.
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": _exported.threads(),
        # Every process would pin itself to the same first core.
        "ENABLE_CPU_PINNING": False,
    }
    with _own_signal_stack():
        compiled = openvino.Core().compile_model(str(folder / GRAPH), "CPU", settings)
    request = compiled.create_infer_request()

    def run(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": np.ascontiguousarray(input_ids), "attention_mask": np.ascontiguousarray(attention_mask)}
        logits: np.ndarray = request.infer(inputs, share_inputs=True)[0]
        return logits

    return run
