"""Quantize linear layers of an ONNX graph to 8 bits, calibrated on the user's rows (`_calibration.py`).

Softmax, norms, GELU, residuals, embeddings and the classifier stay in fp32. Dynamic quantization is not an option: ONNX
Runtime takes its ranges from the whole batch, so a row's result would depend on other rows. The runtimes `onnx_int8`
and `openvino_int8` share a graph if they were calibrated on the same rows.
"""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.runtimes import _calibration, _exports, _onnx_export
from torchlake.runtimes._calibration import ActivationStats, Batches

if TYPE_CHECKING:
    import onnx

ROWS = "rows.sha256"
ACTIVATIONS = ("Gelu", "Mul", "Relu")
"The last node of an activation. Rounding directly after it is fused into the product before it."


def write(folder: Path, spec: TaskSpec, batches: Batches, place: Path) -> None:
    """Export the model with 8-bit linear layers to the empty folder `place`, with a fingerprint of the rows.

    Raises UsageError without rows, for a model that cannot be exported, and for one without linear layers.
    """
    import onnx

    _calibration.check_rows(folder, batches)
    with TemporaryDirectory(dir=place) as scratch:
        model = onnx.load(str(_onnx_export.graph(folder, spec, Path(scratch))))
        # The shapes of the trace contradict the new nodes.
        del model.graph.value_info[:]
        layers = _linear_layers(model)
        if not layers:
            raise UsageError(f"{folder}: its graph has no linear layers to quantize to 8 bits. Use 'onnx'.")
        seen = _observe(model, list(layers), batches, Path(scratch) / "observed.onnx")
    _quantize(model, layers, seen)
    onnx.save(model, str(place / _onnx_export.GRAPH))
    (place / ROWS).write_text(_fingerprint(batches), encoding="ascii")


def graph(folder: Path, spec: TaskSpec, batches: Batches, scratch: Path) -> Path:
    """Return the 8-bit graph for these rows: the stored one of `onnx_int8`, or a new one in `scratch`."""
    kept = _exports.current(folder, "onnx_int8", spec.task)
    if kept is not None and (kept / ROWS).read_text(encoding="ascii") == _fingerprint(batches):
        return kept / _onnx_export.GRAPH
    write(folder, spec, batches, scratch)
    return scratch / _onnx_export.GRAPH


def _fingerprint(batches: Batches) -> str:
    digest = hashlib.sha256()
    for arrays in batches:
        for array in arrays:
            digest.update(repr(array.shape).encode() + array.tobytes())
    return digest.hexdigest()


def _linear_layers(model: "onnx.ModelProto") -> dict[str, list["onnx.NodeProto"]]:
    """Return the products with constant matrices by their input's name (queries, keys and values share it).

    A linear layer over tokens is traced as MatMul; one over a vector per row, as in the classifier, as Gemm, whose time
    is negligible.
    """
    matrices = {constant.name for constant in model.graph.initializer if len(constant.dims) == 2}
    layers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in matrices:
            layers.setdefault(node.input[0], []).append(node)
    return layers


def _biases(model: "onnx.ModelProto") -> dict[str, tuple["onnx.NodeProto", int, np.ndarray]]:
    """Return, by output name, the Add that is its only user: the node, the position of its constant vector, the
    vector."""
    from onnx import numpy_helper

    # Equal biases are one constant with several names.
    same = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    vectors = {constant.name: constant for constant in model.graph.initializer if len(constant.dims) == 1}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    found = {}
    for name, (user, *others) in users.items():
        if user.op_type == "Add" and not others:
            for place, other in enumerate(user.input):
                vector = vectors.get(same.get(other, other))
                if other != name and vector is not None:
                    found[name] = (user, place, numpy_helper.to_array(vector))
    return found


def _observe(model: "onnx.ModelProto", names: list[str], batches: Batches, path: Path) -> dict[str, ActivationStats]:
    """Run the calibration rows through the fp32 graph and collect stats of each linear layer's input."""
    import onnx

    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    onnx.save(watched, str(path))
    session = _onnx_export.session(path)
    total = sum(int(mask.sum()) for _, mask in batches)
    share = _calibration.SAMPLE_TOKENS / total
    generator = np.random.default_rng(0)
    seen: dict[str, ActivationStats] = {}
    for ids, mask in _calibration.split_batches(batches):
        tokens = np.flatnonzero(mask)
        taken = tokens[generator.random(len(tokens)) < share]
        values = session.run(names, {"input_ids": ids, "attention_mask": mask})
        for name, value in zip(names, values, strict=True):
            flat = value.reshape(-1, value.shape[-1])
            # Some models also multiply position tables, which have no padding.
            of_tokens = value.shape[:-1] == mask.shape
            known = seen.setdefault(name, _calibration.empty_stats(flat.shape[1]))
            known.add(flat[tokens] if of_tokens else flat, flat[taken] if of_tokens else flat)
    return {name: inputs.widened() for name, inputs in seen.items()}


def _quantize(
    model: "onnx.ModelProto", layers: dict[str, list["onnx.NodeProto"]], seen: dict[str, ActivationStats]
) -> None:
    """Quantize the layers in place: each MatMul stays, and new nodes round its inputs."""
    from onnx import helper, numpy_helper

    constants = {constant.name: constant for constant in model.graph.initializer}
    before: dict[str, list[onnx.NodeProto]] = {}
    after: dict[str, list[onnx.NodeProto]] = {}

    def constant(name: str, value: Any) -> str:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    biases = _biases(model)
    ends_of_activations = {node.output[0] for node in model.graph.node if node.op_type in ACTIVATIONS}
    for x, nodes in layers.items():
        matrices = [numpy_helper.to_array(constants[node.input[1]]).astype(np.float32) for node in nodes]
        activated = x in ends_of_activations
        smooth = _calibration.smoothing(seen[x], np.concatenate(matrices, axis=1), plain_is_faster=activated)
        loud = np.flatnonzero(np.isinf(smooth))
        scale, zero = _calibration.uint8_grid(seen[x].low / smooth, seen[x].high / smooth)
        # Folding the zero point into the bias saves a step after each product.
        in_bias = all(node.output[0] in biases for node in nodes)
        grid = [constant(f"{x}.scale", scale), constant(f"{x}.zero", zero)]
        back = [grid[0], constant(f"{x}.no_zero", np.uint8(0)) if in_bias else grid[1]]
        plain = activated and bool((smooth == 1).all())
        first = before[nodes[0].output[0]] = [
            helper.make_node("QuantizeLinear", [x if plain else f"{x}.smoothed", *grid], [f"{x}.int8"]),
            helper.make_node("DequantizeLinear", [f"{x}.int8", *back], [f"{x}.rounded"]),
        ]
        if not plain:
            first.insert(0, helper.make_node("Mul", [x, constant(f"{x}.smooth", 1 / smooth)], [f"{x}.smoothed"]))
        if len(loud):
            first.append(helper.make_node("Gather", [x, constant(f"{x}.channels", loud)], [f"{x}.loud"], axis=-1))
        for node, matrix in zip(nodes, matrices, strict=True):
            name = node.output[0]
            rounded, scales = _calibration.round_weights(_calibration.scaled(matrix, smooth))
            weight = [
                constant(f"{name}.weight", rounded),
                constant(f"{name}.weight.scale", scales),
                constant(f"{name}.weight.zero", np.zeros(len(scales), dtype=np.int8)),
            ]
            node.input[0], node.input[1] = f"{x}.rounded", f"{name}.weight.rounded"
            before.setdefault(name, []).append(helper.make_node("DequantizeLinear", weight, [node.input[1]], axis=1))
            if in_bias:
                add, place, bias = biases[name]
                moved = scale * np.float32(zero) * scales * rounded.sum(axis=0, dtype=np.int32)
                add.input[place] = constant(f"{name}.bias", (bias - moved).astype(np.float32))
            if len(loud):
                node.output[0] = f"{name}.quiet"
                after[node.output[0]] = [
                    helper.make_node(
                        "MatMul", [f"{x}.loud", constant(f"{name}.loud", matrix[loud])], [f"{name}.exact"]
                    ),
                    helper.make_node("Add", [node.output[0], f"{name}.exact"], [name]),
                ]
                before[node.output[0]] = before.pop(name)
    _put_in(model, before, after)


def _put_in(
    model: "onnx.ModelProto", before: dict[str, list["onnx.NodeProto"]], after: dict[str, list["onnx.NodeProto"]]
) -> None:
    """Insert nodes before and after the nodes with these outputs, and remove unused constants."""
    ordered = [
        new
        for node in model.graph.node
        for new in (*before.get(node.output[0], ()), node, *after.get(node.output[0], ()))
    ]
    used = {name for node in ordered for name in node.input}
    kept = [constant for constant in model.graph.initializer if constant.name in used]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(ordered)
    model.graph.initializer.extend(kept)
