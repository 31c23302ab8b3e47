"""Images: decoding, what a bad one costs, crops and flips, BatchNorm, and digits that a small ViT reads."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, TiffImagePlugin
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from golden_losses import BETWEEN_STRATEGIES
from sweeps import sweep
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import ConfigError, DataError, TableError, UsageError
from torchlake.tables.sources import files, streams
from torchlake.tables.table import open_table
from torchlake.tasks import _batch_norm, _images
from torchlake.tasks.image_classification import _augmented, _processed, task

SPEC = TaskSpec(
    task="image_classification",
    problem="single_label",
    labels=tuple(range(10)),
    text="",
    label="label",
    max_length=0,
    inputs={"image": "image"},
    options=dict(task.options),
)


def photo(width: int = 90, height: int = 60) -> Image.Image:
    """A smooth image, as a photograph is."""
    values = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def digit() -> bytes:
    content: bytes = tiny.digits(1)["image"][0].as_py()["bytes"]
    return content


@pytest.mark.parametrize("options", [{}, {"quality": 60}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_jpeg_has_the_same_pixels_with_and_without_simplejpeg(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(photo(), "JPEG", **options)
    fast = _images.decode(content)
    monkeypatch.setattr(_images, "_fast", lambda content: None)
    np.testing.assert_array_equal(fast, _images.decode(content))
    gray = saved(photo().convert("L"), "JPEG")
    assert _images.decode(gray).shape == (60, 90, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_other_formats_become_rgb(kind: str, mode: str) -> None:
    if (kind, mode) in {("WEBP", "P"), ("PPM", "P"), ("PPM", "RGBA")}:
        pytest.skip("Pillow does not write it")
    pixels = _images.decode(saved(photo().convert(mode), kind))
    assert (pixels.shape, pixels.dtype) == ((60, 90, 3), np.uint8)


RAMP = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
BYTES = (RAMP // 257).astype(np.uint8)


def tiff(values: np.ndarray, **tags: Any) -> bytes:
    """A TIFF with tags by their number, such as t262."""
    info = TiffImagePlugin.ImageFileDirectory_v2()
    for name, value in tags.items():
        info[int(name[1:])] = value
    return saved(Image.fromarray(values), "TIFF", tiffinfo=info)


MODES = {
    name: case
    for name, *case in [
        ("I;16 PNG", saved(Image.fromarray(RAMP), "PNG"), BYTES),
        ("I PPM", saved(Image.fromarray(RAMP), "PPM"), BYTES),
        ("I;16 TIFF", tiff(RAMP), BYTES),
        ("I;16B TIFF", tiff(RAMP.astype(">u2")), BYTES),
        ("white is zero", tiff(RAMP, t262=0), 255 - BYTES),
        ("F TIFF", tiff(BYTES.astype(np.float32) / np.float32(255)), BYTES),
        ("F PPM", saved(Image.fromarray(BYTES.astype(np.float32) / np.float32(255)), "PPM"), BYTES),
        ("I TIFF", tiff(RAMP.astype(np.int32)), "its numbers are signed or have 32 bits"),
        ("F beyond 1", tiff(RAMP.astype(np.float32)), "its numbers are 0 to 65472; they must be from 0 to 1"),
        ("F not a number", tiff(np.full((2, 2), np.nan, np.float32)), "its numbers are nan to nan"),
        ("1", saved(Image.fromarray(BYTES).convert("1"), "PNG"), np.asarray(Image.fromarray(BYTES).convert("1")) * 255),
        ("LA", saved(Image.fromarray(BYTES).convert("LA"), "PNG"), BYTES),
        ("P", saved(Image.fromarray(BYTES).convert("P"), "GIF"), BYTES),
        ("PA", saved(Image.fromarray(BYTES).convert("PA"), "TIFF"), BYTES),
        ("CMYK", saved(Image.fromarray(255 - BYTES).convert("CMYK"), "TIFF"), 255 - BYTES),
        ("YCbCr", saved(Image.fromarray(BYTES).convert("RGB").convert("YCbCr"), "TIFF"), BYTES),
        ("LAB", saved(Image.fromarray(BYTES).convert("RGB").convert("LAB"), "TIFF"), BYTES),
    ]
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_keeps_its_range_or_is_a_named_error(name: str, channels: int) -> None:
    content, right = MODES[name]
    if isinstance(right, str):
        with pytest.raises(_images.BadImage, match=f"^unknown_range: {right}"):
            _images.decode(content, channels)
        return
    pixels = _images.decode(content, channels)
    assert (pixels.shape, pixels.dtype) == ((32, 32, channels), np.uint8)
    assert np.abs(pixels.astype(int) - right[..., None]).max() <= 2  # rounding of color spaces


def test_an_image_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[_images.ORIENTATION] = 6
    assert _images.decode(saved(photo(), "JPEG", exif=exif)).shape == (90, 60, 3)
    deep = saved(Image.fromarray(RAMP[:20]), "PNG", exif=exif)
    np.testing.assert_array_equal(_images.decode(deep, 1)[..., 0], np.rot90(BYTES[:20], -1))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "corrupt_image: it is empty"),
        (b"GIF89a", "corrupt_image: it has none of the formats"),
        (b"%PDF-1.7 no image", "corrupt_image: it has none of the formats"),
        (saved(photo(), "JPEG")[:-300], "corrupt_image: image file is truncated"),
        (saved(photo(), "PNG")[:200], "corrupt_image: "),
        (saved(photo(), "ICO"), "corrupt_image: it has none of the formats"),
        (tiny.huge_png(), "image_too_large: "),
    ],
)
def test_a_bad_image_has_a_reason_without_an_address(content: bytes, reason: str) -> None:
    with pytest.raises(_images.BadImage) as refused:
        _images.decode(content)
    assert str(refused.value).startswith(reason)
    assert "0x" not in str(refused.value)


def test_an_image_above_the_limit_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_images, "MAX_PIXELS", 90 * 60 - 1)
    with pytest.raises(_images.BadImage, match="image_too_large: 90 x 60 pixels; the limit is 5,399"):
        _images.decode(saved(photo(), "JPEG"))


def test_files_are_read_by_path_and_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(digit())
    with fsspec.filesystem("memory").open("/images/a.png", "wb") as file:
        file.write(digit())
    for name in (str(path), f"file://{path}", "memory://images/a.png"):
        assert _images.read_file(name) == digit()
    for name in ("a b.png", str(tmp_path), "/nowhere/a.png", "memory://images/b.png", "http://host/a.png", "\0.png"):
        with pytest.raises(_images.BadImage, match="missing_image"):
            _images.read_file(name)
    monkeypatch.setattr(_images, "MAX_FILE_BYTES", 10)
    with pytest.raises(_images.BadImage, match="image_too_large: the file"):
        _images.read_file(str(path))


def test_every_form_of_a_column_is_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(digit())
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = [
        pa.array([digit()], pa.binary()),
        pa.array([digit()], pa.large_binary()),
        pa.array([str(path)]),
        pa.array([{"bytes": digit(), "path": "elsewhere.png"}], struct),
        pa.array([{"bytes": None, "path": str(path)}], struct),
    ]
    for column in columns:
        files, by_path, errors = _images.files_of(column)
        assert not errors
        assert _images.contents_of(files, by_path, np.array([0])) == ([digit()], {})
    with pytest.raises(TableError, match="the column of images holds int64"):
        _images.files_of(pa.array([1]))


def test_numbers_are_those_of_the_processor(tmp_path: Path) -> None:
    processor = ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=[0.4, 0.5, 0.6])
    images = [np.asarray(photo()), np.asarray(photo(30, 40))]
    expected = np.stack(processor(images)["pixel_values"])
    np.testing.assert_allclose(_processed(images, processor), expected, atol=1e-6)


FAMILIES = {
    family: (IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}) for family in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
}
PROCESSORS = {kinds.get("pil", kinds.get("torchvision", "")): family for family, kinds in FAMILIES.items() if kinds}
SMALL = {"DonutImageProcessorPil": {"size": {"height": 64, "width": 48}}}
REFUSED = {
    "ImageGPTImageProcessorPil": "Clusters must be provided",
    "Siglip2ImageProcessorPil": "returns pixel_attention_mask, spatial_shapes; torchlake computes ",
    "Gemma3ImageProcessorPil": "returns num_crops; ",
    "TextNetImageProcessorPil": "returns images of different sizes",
    "TimmWrapperImageProcessor": "TimmWrapperImageProcessor. None of these classes could be imported",
    "PPLCNetImageProcessor": "torchvision",
}
"What transformers' processors of image classifiers return that is not computed, or need."


@pytest.mark.parametrize("name", sweep(PROCESSORS, quick=set(PROCESSORS) - {"TextNetImageProcessorPil"}))
def test_every_processor_of_transformers_is_computed_or_refused(name: str, tmp_path: Path) -> None:
    made = get_image_processor_class_from_name(name)
    if name in ("TimmWrapperImageProcessor", "PPLCNetImageProcessor"):
        settings = {"image_processor_type": name, "do_resize": True}
    else:
        settings = made(**SMALL.get(name, {})).to_dict()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings, default=dict))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": PROCESSORS[name], "num_channels": 3}))
    if name in REFUSED:
        with pytest.raises(DataError, match=REFUSED[name]):
            task.load_processor(tmp_path, SPEC, scoring=True)
        return
    images = [photo(), photo(30, 40), photo(300, 200)]
    processor = task.load_processor(tmp_path, SPEC, scoring=True)
    column = pa.array([saved(image, "PNG") for image in images])
    found = task.collate(task.features({"image": column}, processor, SPEC).arrays, np.arange(3), processor, SPEC)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    np.testing.assert_allclose(found["pixel_values"], np.stack(theirs(images)["pixel_values"]), atol=4e-6)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mean", [0.5, [0.4]])
def test_a_model_of_one_channel_reads_gray(mean: Any, nested: bool, tmp_path: Path) -> None:
    config = ViTConfig(image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.update({"num_channels": 1, "num_labels": 3, "intermediate_size": 32})
    torch.manual_seed(0)
    model = ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    theirs = ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=mean, image_std=mean)
    if nested:
        values = {"image_processor": theirs.to_dict(), "processor_class": "SomeProcessor"}
        (tmp_path / "processor_config.json").write_text(json.dumps(values, default=dict))
    else:
        theirs.save_pretrained(tmp_path)
    images = [photo(), photo().convert("L"), photo().convert("RGBA")]
    scored = tl.predict(tmp_path, pa.table({"image": [saved(one, "PNG") for one in images]}), all_probabilities=True)
    with torch.inference_mode():
        gray = [np.asarray(image.convert("L"))[..., None] for image in images]
        pixels = theirs(gray, return_tensors="pt", input_data_format="channels_last")
        right = model(**pixels).logits.softmax(-1)
    found = np.stack([scored[f"prob_LABEL_{index}"] for index in range(3)], axis=1)
    np.testing.assert_allclose(found, right, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_channels": 4}, "num_channels is 4; images are read in 3 channels or in 1"),
        ({"num_channels": 1, "do_convert_rgb": True}, "returns 3 channels, but the model has num_channels 1"),
        ({"image_mean": [0.5, 0.5]}, "cannot process images of 3 channels"),
        ({"size": {"shortest_edge": 16}}, "returns images of different sizes"),
    ],
    ids=str,
)
def test_a_processor_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.build_vision(tmp_path)
    for name in ("config.json", "preprocessor_config.json"):
        values = json.loads((tmp_path / name).read_text())
        own = {key: value for key, value in change.items() if (key == "num_channels") == (name == "config.json")}
        (tmp_path / name).write_text(json.dumps({**values, **own}))
    with pytest.raises(DataError, match=message):
        task.load_processor(tmp_path, SPEC, scoring=True)


def test_crops_and_flips_depend_on_seed_and_row_alone() -> None:
    image = np.asarray(photo())
    options = {"random_crop": 0.3, "random_flip": True}
    once = [_augmented(image, 5, row, options) for row in range(30)]
    for row in (29, 0, 13):
        np.testing.assert_array_equal(once[row], _augmented(image, 5, row, options))
    assert len({one.shape for one in once}) > 20
    shares = [one.shape[0] * one.shape[1] / (60 * 90) for one in once]
    assert 0.25 < min(shares) < max(shares) <= 1
    assert any(_augmented(image, 6, row, options).shape != one.shape for row, one in enumerate(once))
    flips = [_augmented(image, 1, row, {"random_crop": 1.0, "random_flip": True}) for row in range(40)]
    assert 8 < sum(np.array_equal(one, image[:, ::-1]) for one in flips) < 32
    assert _augmented(image, 1, 0, task.options) is image


def test_options_that_cannot_be_are_refused() -> None:
    for given, message in (
        ({"random_crop": 0}, "random_crop must be the smallest share"),
        ({"batch_norm": "sync"}, "batch_norm must be frozen or batch"),
        ({"flip": True}, "has no option 'flip'; it has: random_crop, random_flip, batch_norm"),
        ({"random_flip": 1}, "random_flip is 1, but a value like False is expected"),
    ):
        with pytest.raises(UsageError, match=message):
            task.checked_options(given, UsageError)


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    tiny.build_vision(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="has no image processor"):
        task.load_processor(tmp_path, SPEC, scoring=True)


def test_a_network_without_statistics_is_not_frozen(tmp_path: Path) -> None:
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic"))
    with pytest.raises(ConfigError, match="batch_norm=batch"):
        _batch_norm.set_up(model, "frozen", tmp_path, check=True)


def test_shared_statistics_are_those_of_batch_norm() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.BatchNorm2d(3)
    ours = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    _batch_norm.set_up(ours, "batch", Path(), check=False)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 6, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        torch.testing.assert_close(ours(x), theirs(y))
        (ours(x) ** 3).sum().backward()
        (theirs(y) ** 3).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(ours[0].running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("affine", [True, False])
def test_the_formula_over_ranks_is_that_of_batch_norm(mean: float, affine: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, 6, generator=random) + mean
    weights = [torch.rand(3, generator=random) if affine else None for _ in range(2)]
    made, gradients = [], []
    for batch_norm in (_batch_norm._Shared.apply, torch.nn.functional.batch_norm):
        given = [None if each is None else each.clone().requires_grad_() for each in (x, *weights)]
        if batch_norm is torch.nn.functional.batch_norm:
            y = batch_norm(given[0], None, None, *given[1:], training=True, eps=1e-5)
        else:
            y, center, spread, count = batch_norm(*given, 1e-5)
        made.append(y)
        (y**3).sum().backward()
        gradients.append([each.grad for each in given if each is not None])
    close = {"rtol": 1e-3, "atol": 1e-3} if mean else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(*made, **close)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    variance, center_expected = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(center.double(), center_expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(spread.double(), variance, rtol=1e-5, atol=1e-5)
    assert int(count) == 120


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (1, 3, 1, 1)])
def test_local_statistics_are_those_of_batch_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.BatchNorm2d(3)
    ours = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    _batch_norm.set_up(ours, "batch", Path(), check=False)
    ours[0].local = True
    for _ in range(2):
        x = torch.randn(4, 3, 5, 6)
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours[0].running_mean, theirs.running_mean)
        torch.testing.assert_close(ours[0].running_var, theirs.running_var)
    ours(torch.randn(shape)).sum().backward()  # torch refuses one number per channel
    assert ours[0].running_var.isfinite().all()


@pytest.mark.slow
def test_statistics_of_ranks_that_normalize_alone_are_stored_for_all_rows(tmp_path: Path) -> None:
    """The first layer's of the first step; the loss, and so all that follows, differs."""
    case = task_cases.CASES["image_batch_norm"]
    sections = case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=1, batch_size=8)
    stored = []
    for ranks, train in ((1, {}), (2, {"batch_norm": "local"})):
        run = tmp_path / str(ranks)
        runs.succeed(run, {**sections, "train": {**sections["train"], **train}}, ranks=ranks)
        weights = load_file(run / "model" / "model.safetensors")
        stored.append([weights[f"resnet.embedder.embedder.normalization.running_{each}"] for each in ("mean", "var")])
    torch.testing.assert_close(*stored)


def test_statistics_of_batches_are_only_local_where_there_are_some(tmp_path: Path) -> None:
    case = task_cases.CASES["image_classification"]
    sections = case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=1, batch_norm="local")
    refused = runs.attempt(tmp_path / "run", sections)
    assert "train.batch_norm: image_classification has no statistics of batches here" in refused.error


@pytest.mark.slow
def test_a_rank_without_rows_changes_no_statistics(tmp_path: Path) -> None:
    """Each batch has one row, so the second rank has none."""
    case = task_cases.CASES["image_batch_norm"]
    sections = case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=6, batch_size=1)
    for ranks in (1, 2):
        runs.succeed(tmp_path / str(ranks), sections, ranks=ranks)
    assert runs.losses(tmp_path / "2") == pytest.approx(runs.losses(tmp_path / "1"), abs=BETWEEN_STRATEGIES)


def test_bad_images_stop_a_training_or_are_dropped(tmp_path: Path) -> None:
    case = task_cases.CASES["image_classification"]
    sections = case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=2)
    table, expected = task_cases.with_bad_rows(case, 24)
    pq.write_table(table, tmp_path / "reviews.parquet")
    refused = runs.attempt(tmp_path / "refused", sections)
    assert refused.exit_code == DataError.exit_code
    assert "null_input" in refused.error
    sections["data"]["bad_rows"] = "drop"
    runs.succeed(tmp_path / "run", sections)
    left_out = json.loads((tmp_path / "run" / "data.json").read_text())["left_out"]
    assert left_out == dict(Counter(expected.values()))


def test_a_loaded_model_takes_contents_and_paths(tmp_path: Path) -> None:
    case = task_cases.CASES["image_classification"]
    runs.succeed(tmp_path / "run", case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=2))
    path = tmp_path / "a.png"
    path.write_bytes(digit())
    with tl.load(tmp_path / "run" / "model") as classify:
        by_content, by_path = classify([digit()])[0], classify([str(path)])[0]
        assert by_content == by_path
        assert classify([b"none"])[0]["error"].startswith("corrupt_image")


@pytest.mark.slow
def test_a_small_vit_reads_digits(tmp_path: Path) -> None:
    """397 digits are held out; a plain loop of transformers' classes reached 0.932 in 12 epochs."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    ViTModel(ViTConfig(image_size=16, patch_size=4, **shape)).save_pretrained(tmp_path / "base")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "base")
    table = tiny.digits(1797).take(pa.array(np.random.default_rng(0).permutation(1797)))
    pq.write_table(table.slice(0, 1400), tmp_path / "train.parquet")
    pq.write_table(table.slice(1400), tmp_path / "test.parquet")
    sections = {
        "data": {"train": str(tmp_path / "train.parquet"), "validation": None, "problem": "single_label"},
        "model": {"base": str(tmp_path / "base"), "task": "image_classification"},
        "train": {"epochs": 20, "batch_size": 64, "learning_rate": 2e-3, "weight_decay": 0.05, "precision": "fp32"},
    }
    runs.succeed(tmp_path / "run", sections)
    measured = tl.evaluate(tmp_path / "run" / "model", tmp_path / "test.parquet")
    assert measured.metrics["accuracy"].value >= 0.93


def test_a_folder_of_images_is_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    names = ["blue/2.jpg", "blue/new/1.png", "red/3.PNG", "top.png"]
    for number, name in enumerate([*names, "_hidden/4.png", "red/.5.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photo(20 + number, 20).save(folder / name)
    (folder / "red" / "6.png").write_bytes((folder / "red" / "3.PNG").read_bytes())
    (folder / "notes.md").write_text("not an image")
    streams.store(folder, tmp_path / "in.parquet")
    names.insert(3, "red/6.png")
    table = pq.read_table(tmp_path / "in.parquet")
    assert table["image"].to_pylist() == [str(folder / name) for name in names]
    assert table["label"].to_pylist() == ["blue", "blue", "red", "red", None]

    job = {"data": {"train": str(folder), "validation": None, "bad_rows": "drop"}, "train": {"epochs": 1}}
    job["model"] = {"base": str(tiny.build_vision(tmp_path / "base")), "task": "image_classification"}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = tl.train(tmp_path / "job.yaml", run=tmp_path / "run")
    assert [(finding.check, finding.rows) for finding in done.findings] == [("copies", 1)]
    assert tl.train(tmp_path / "job.yaml", run=tmp_path / "run").complete
    scored = tl.predict(done.model, folder, tmp_path / "scored")
    rows = pq.read_table(scored.path)
    assert rows["image"].to_pylist() == table["image"].to_pylist()
    assert tl.evaluate(done.model, folder).errors == {"null_label": 1}

    pq.write_table(table, folder / "images.parquet")
    assert not files.is_image_folder(folder)
    (folder / "images.parquet").unlink()
    with pytest.raises(TableError, match="It has images: a local folder of them is a table of train"):
        open_table(folder)
