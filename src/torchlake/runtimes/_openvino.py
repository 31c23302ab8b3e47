"""OpenVINO on CPUs: convert an ONNX graph to OpenVINO's two files, and run it.

It reads the ONNX graphs of the ONNX Runtime runtimes, in fp32 or 8 bits. Quantizing with nncf instead agrees less with
the model (see `_calibration.py`) and is not faster.

Kernels are compiled for each new shape and cached: about 10 ms per shape for any number of layers, so a process reaches
full speed after a few hundred batches of rows sorted by length.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from torchlake import atomic_io
from torchlake.models.load import is_mapped
from torchlake.processes import hardware
from torchlake.runtimes import Forward

GRAPH = "model.xml"
WEIGHTS = "model.bin"
TELEMETRY = "openvino_telemetry"
KEYS_ORDER = [0, 2, 3, 1]
"Axis order that transposes keys from (B, L, heads, D) to (B, heads, D, L)."
SHORT = {"bf16": 250, "f32": 40}
"Row length up to which unfused attention is faster, by precision (measured; docs/explanation/decisions/int8.md)."


def library() -> ModuleType:
    """Import openvino without its telemetry library, which would report the import; it is optional."""
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


def write(onnx_graph: Path, folder: Path, *, attention_in_parts: bool = False) -> None:
    """Write an ONNX graph as `model.xml` and `model.bin`; `attention_in_parts` for rows up to `SHORT` tokens."""
    openvino = library()
    model = openvino.Core().read_model(str(onnx_graph))
    if attention_in_parts:
        _take_attention_apart(model)
    # A .bin alone would look like a pickle to a concurrent reader of the model folder.
    (folder / GRAPH).touch()
    # The default stores weights in 16 bits.
    try:
        openvino.save_model(model, str(folder / GRAPH), compress_to_fp16=False)
    except RuntimeError as error:
        if "basic_ios" not in str(error):  # what C++ says when a file cannot be written
            raise
        raise atomic_io.storage_error(error, folder / GRAPH) from error


def _take_attention_apart(model: Any) -> None:
    """Add a fifth dimension of size 1 to the products over (B, heads), and let them transpose the keys.

    Otherwise OpenVINO fuses product, softmax and product into one kernel, after a pass that transposes the keys. For
    rows of 28 tokens in bf16 that takes 1.8 times as long as the separate steps. It fuses products of three and four
    dimensions only.
    """
    ops = importlib.import_module("openvino.opset1")
    first, by_head = ops.constant([0], dtype=np.int64), ops.constant([0, 2, 1, 3], dtype=np.int64)
    for product in model.get_ordered_ops():
        if product.get_type_name() != "MatMul" or product.get_output_partial_shape(0).rank != 4:
            continue
        left, right = product.input_values()
        transpose_right = product.get_attributes()["transpose_b"]
        before = right.get_node()
        if before.get_type_name() == "Transpose" and before.input_value(1).get_node().get_data().tolist() == KEYS_ORDER:
            right, transpose_right = ops.transpose(before.input_value(0), by_head), True
        wider = ops.matmul(ops.unsqueeze(left, first), ops.unsqueeze(right, first), False, transpose_right)
        result = ops.squeeze(wider, first).output(0)
        for user in product.output(0).get_target_inputs():
            user.replace_source_output(result)
    model.validate_nodes_and_infer_types()


class _SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2) on Linux."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _own_signal_stack() -> Iterator[None]:
    """Restore the thread's signal stack on exit.

    Compiling a model installs one of OpenVINO's that does not live as long as the process: the next signal that Python
    handles, such as Ctrl-C or SIGTERM, would then cause a segmentation fault.
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
    """Return the model written by `write` as a Forward; everything not in 8 bits is in `precision` (f32 or bf16)."""
    openvino = library()
    settings = {
        # The default depends on the CPU.
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": hardware.threads(),
        # Otherwise every process pins itself to the same first core.
        "ENABLE_CPU_PINNING": False,
        "ENABLE_MMAP": is_mapped(),
    }
    with _own_signal_stack():
        compiled = openvino.Core().compile_model(str(folder / GRAPH), "CPU", settings)
    request = compiled.create_infer_request()

    def run(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": np.ascontiguousarray(input_ids), "attention_mask": np.ascontiguousarray(attention_mask)}
        outputs: np.ndarray = request.infer(inputs, share_inputs=True)[0]
        return outputs

    return run
