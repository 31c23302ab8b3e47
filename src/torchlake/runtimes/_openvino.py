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
from typing import Any

import numpy as np

from torchlake.runtimes import Forward, _exported

GRAPH = "model.xml"
WEIGHTS = "model.bin"
TELEMETRY = "openvino_telemetry"
KEYS_ORDER = [0, 2, 3, 1]
"Of axes, where keys are transposed from (B, L, heads, D) to (B, heads, D, L), to be multiplied by queries."
SHORT = {"bf16": 250, "f32": 40}
"Tokens of a row up to which attention in parts is the faster one, by precision (measured; docs/decisions.md)."


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


def write(onnx_graph: Path, folder: Path, *, attention_in_parts: bool = False) -> None:
    """Write an ONNX graph as `model.xml` and `model.bin`. Attention in parts is for rows that are `SHORT`."""
    openvino = library()
    model = openvino.Core().read_model(str(onnx_graph))
    if attention_in_parts:
        _take_attention_apart(model)
    # A .bin alone would be taken for a pickle by whoever reads the model folder in this moment.
    (folder / GRAPH).touch()
    # Weights would be stored in 16 bits by default.
    openvino.save_model(model, str(folder / GRAPH), compress_to_fp16=False)


def _take_attention_apart(model: Any) -> None:
    """Give the products over (B, heads) a fifth dimension, of size 1, and let them transpose the keys themselves.

    OpenVINO would make one kernel of a product, a softmax and a product, with the keys transposed in a pass before it.
    For rows of 28 tokens in bf16 that takes 1.8 times as long as its own parts do one by one. It merges products of
    three and of four dimensions.
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
