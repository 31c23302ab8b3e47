"""Image classification and regression: an image in; one class, several classes or a number out.

Training stores the files as they are (`_images.py`), after decoding each once, so that a bad one is found before the
first step. Every epoch decodes them again, in threads beside the model. Scoring reads files by their paths in these
threads, too, so a chunk takes only the memory of its paths.

The image processor of the model folder resizes and crops. Its last two steps, pixels to numbers around 0, are one
multiplication here: the numbers differ from the processor's by rounding.

BatchNorm (ResNet and other convolutional models) would make a row's output depend on the rows beside it, and so on the
number of ranks. `_batch_norm.py` describes how this is prevented.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.known_keys import check_keys
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import Array, Features
from torchlake.errors import ConfigError, DataError, RowErrors
from torchlake.models import load
from torchlake.models.config import in_words
from torchlake.models.folders import IMAGE_FILES
from torchlake.models.write import quiet
from torchlake.tasks import ANY, Inputs, Ragged, Task, _images

if TYPE_CHECKING:
    from torch import nn

PATCH = 16 * 16
"Pixels that cost about as much as a token of text."
CONFIG, NESTED = "preprocessor_config.json", "processor_config.json"
"Files of image processors; the second has one with that of texts, and comes first in transformers."
TRIED = ((40, 60), (60, 40), (7, 150))
"Heights and widths of images that a processor has to make equally large."


@dataclass(frozen=True, slots=True)
class Processor:
    """An image processor of transformers that has been tried."""

    steps: Any
    channels: int
    pixels: int
    "Those of an image as the model gets it."

    def save_pretrained(self, folder: Path) -> None:
        """Write its file."""
        self.steps.save_pretrained(folder)


class ImageClassification(Task):
    """A model of transformers for images, such as ViT or ResNet."""

    inputs = {"image": ANY}
    auto_class = "AutoModelForImageClassification"
    hub_task = "image-classification"
    options = {"random_crop": 1.0, "random_flip": False, "batch_norm": "frozen"}
    collates_ahead = True
    chunk_rows = 1024

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if random_crop is not a share above 0 and up to 1, or batch_norm is unknown."""
        if not 0 < options["random_crop"] <= 1:
            raise ValueError("random_crop must be the smallest share of an image's area, above 0 and up to 1 (no crop)")
        if options["batch_norm"] not in ("frozen", "batch"):
            raise ValueError(f"batch_norm must be frozen or batch, not {options['batch_norm']!r}")

    def max_length(self, base: Path | None, requested: int | None) -> int:
        """Return 0: the task reads no text."""
        if requested is not None:
            raise ConfigError(f"model.max_length: {self.name} reads no text; remove the setting")
        return 0

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Processor:
        """Return the folder's image processor of transformers, the one without torchvision.

        Raises DataError for one that returns more than pixels, or images of different sizes.
        """
        from transformers import AutoImageProcessor

        assert folder is not None, "it needs a base"
        load.check_folder(folder, weights=False)
        _check_config(folder)
        file = _file_of(folder)
        _images._pillow()
        try:
            with quiet():
                processor = AutoImageProcessor.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False, backend="pil"
                )
        except Exception as error:
            raise DataError(f"{file}: cannot be loaded: {in_words(error)}") from error
        return _tried(processor, _channels(folder), file)

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of the files, and of the flags that mark paths."""
        return {"image": pa.large_binary(), "by_path": pa.uint8()}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the contents or paths of the images; no file is read."""
        files, by_path, errors = _images.files_of(inputs["image"])
        return _features(files, by_path, errors, processor)

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the contents of the images, each decoded once to find invalid ones, and the targets."""
        files, by_path, errors = _images.files_of(inputs["image"])
        contents, unread = _images.contents_of(files, by_path, np.arange(len(files)))
        errors = {**unread, **errors}
        for row in (row for row in range(len(files)) if row not in errors):
            try:
                _images.decode(contents[row], processor.channels)
            except _images.BadImage as error:
                errors[row] = str(error)
        made = _features(_images.stored(contents), np.zeros_like(by_path), errors, processor)
        return made, None if labels is None else self.encode_labels(labels, spec)

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the pixels (B, 3 or 1, H, W) float32. Raises RowErrors for images that cannot be decoded."""
        files, by_path = arrays["image"], arrays["by_path"]
        assert isinstance(files, Ragged), "files have any length"
        assert isinstance(by_path, np.ndarray), "one number for each row"
        contents, errors = _images.contents_of(files, by_path, rows)
        images = []
        for place, (row, content) in enumerate(zip(rows.tolist(), contents, strict=True)):
            if place in errors:
                continue
            try:
                image = _images.decode(content, processor.channels)
            except _images.BadImage as error:
                errors[place] = str(error)
                continue
            images.append(image if seed is None else _augmented(image, seed, row, spec.options))
        if errors:
            raise RowErrors(errors)
        return {"pixel_values": _processed(images, processor.steps)}

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return a trained model, in the memory format in which convolutions are faster (ResNet-50 by a sixth)."""
        import torch

        model: nn.Module = super().load_model(folder, spec, **options).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not options.get("placement"):
            self._try(model, folder, spec)
        return model

    def base_model(self, base: Path | None, spec: TaskSpec, *, empty: bool = False) -> "nn.Module":
        """Return the model that training starts from, with the BatchNorm layers that `batch_norm` names."""
        from torchlake.tasks import _batch_norm

        model = super().base_model(base, spec, empty=empty)
        assert base is not None, "it needs a base"
        _batch_norm.set_up(model, spec.options["batch_norm"], base, check=not empty)
        if not empty:
            self._try(model, base, spec)
        return model

    def example(self, folder: Path, spec: TaskSpec) -> np.ndarray:
        """Return a black image (1, 3 or 1, H, W) as the processor of a folder makes it."""
        processor = self.load_processor(folder, spec, scoring=True)
        size = dict(getattr(processor.steps, "size", None) or {})
        height, width = size.get("height") or PATCH, size.get("width") or PATCH
        image = b"P6 %d %d 255\n" % (width, height) + bytes(3 * height * width)
        made = self.features({"image": pa.array([image])}, processor, spec)
        return self.checked_batch(made.arrays, np.zeros(1, dtype=np.int64), processor, spec)["pixel_values"]

    def _try(self, model: Any, folder: Path, spec: TaskSpec) -> None:
        """Raise DataError if the model cannot compute an image as the processor of its folder makes them."""
        import torch

        from torchlake.models import probes

        pixels = self.example(folder, spec)
        try:
            with torch.inference_mode(), probes.evaluating(model):
                answer = model(pixel_values=torch.from_numpy(pixels).to(next(model.parameters()).dtype))
        except Exception as error:
            wanted = getattr(model.config, "image_size", None)
            raise DataError(
                f"{folder}: a model of type {model.config.model_type!r} cannot compute images of {pixels.shape[-2]} x "
                f"{pixels.shape[-1]} pixels alone, as {CONFIG} makes them ({in_words(error)})"
                + ("" if wanted is None else f". The model's image_size is {wanted}.")
            ) from error
        if getattr(answer, "logits", None) is None:
            raise DataError(f"{folder}: {type(model).__name__} of the installed transformers returns no logits")

    def before_forward(self, rows: int) -> None:
        """Leave the row that stands for no rows out of the statistics of batches."""
        from torchlake.tasks import _batch_norm

        _batch_norm.counts = rows > 0


def _check_config(folder: Path) -> None:
    """Refuse an unknown key of the image processor; that in processor_config.json comes first in transformers."""
    for name, keys in zip(IMAGE_FILES, (known_keys.PROCESSOR, known_keys.IMAGES), strict=True):
        if (folder / name).is_file():
            values = atomic_io.read_json(folder / name)
            check_keys(folder / name, values, keys)
            if name != CONFIG and (own := values.get("image_processor")) is not None:
                check_keys(folder / name, own, known_keys.IMAGES, "image_processor")
                return


def _features(files: Ragged, by_path: np.ndarray, errors: dict[int, str], processor: Processor) -> Features:
    costs = np.full(len(files), max(1, processor.pixels // PATCH), dtype=np.int64)
    arrays: dict[str, Array] = {"image": files, "by_path": by_path}
    return Features(arrays=arrays, lengths=costs, cut=np.zeros_like(costs), errors=errors)


def _file_of(folder: Path) -> Path:
    """Return the file with the image processor. Raises DataError if there is none."""
    nested = folder / NESTED
    if nested.is_file() and "image_processor" in atomic_io.read_json(nested):
        return nested
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder}: has no image processor ({CONFIG}). Save the model's there too.")
    return folder / CONFIG


def _channels(folder: Path) -> int:
    """Return the channels of the model's images: 3 for RGB, 1 for gray. Raises DataError for another number."""
    config = atomic_io.read_json(folder / "config.json")
    found = config.get("num_channels", (config.get("vision_config") or {}).get("num_channels", 3))
    if found not in (1, 3):
        raise DataError(f"{folder / 'config.json'}: num_channels is {found}; images are read in 3 channels or in 1")
    return int(found)


def _tried(steps: Any, channels: int, file: Path) -> Processor:
    """Return the processor after it has processed images of different sizes. Raises DataError.

    One that does not resize gets images of its own size.
    """
    name, size = type(steps).__name__, dict(getattr(steps, "size", None) or {})
    fits = getattr(steps, "do_resize", True) or getattr(steps, "do_center_crop", False)
    sizes = TRIED if fits else [(size.get("height") or TRIED[0][0], size.get("width") or TRIED[0][1])]
    try:
        made = [steps(np.zeros((*each, channels), np.uint8), input_data_format="channels_last") for each in sizes]
    except Exception as error:
        raise DataError(f"{file}: {name} cannot process images of {channels} channels: {in_words(error)}") from error
    others = sorted({key for each in made for key in each} ^ {"pixel_values"})
    if others:
        raise DataError(f"{file}: {name} returns {', '.join(others)}; torchlake computes models of pixel_values alone")
    shapes = sorted({np.shape(each["pixel_values"][0]) for each in made})
    if len(shapes) > 1:
        raise DataError(
            f"{file}: {name} returns images of different sizes ({size}), which do not fit into a batch. Set "
            "height and width."
        )
    if shapes[0][0] != channels:
        raise DataError(f"{file}: {name} returns {shapes[0][0]} channels, but the model has num_channels {channels}")
    return Processor(steps, channels, math.prod(shapes[0][1:]))


def _augmented(image: np.ndarray, seed: int, row: int, options: Mapping[str, Any]) -> np.ndarray:
    """Return an image cropped and flipped at random, by the epoch's seed and the row alone."""
    if options["random_crop"] == 1.0 and not options["random_flip"]:
        return image
    random = np.random.default_rng([seed, row])
    if options["random_crop"] < 1.0:
        image = _images.random_crop(image, random, options["random_crop"])
    return image[:, ::-1] if options["random_flip"] and random.random() < 0.5 else image


def _processed(images: Sequence[np.ndarray], processor: Any) -> np.ndarray:
    """Return images as the model's numbers (B, 3 or 1, H, W) float32."""
    from transformers.image_processing_backends import PilBackend

    own = {name: getattr(type(processor), name) for name in ("_preprocess", "rescale", "normalize")}
    plain = all(each is getattr(PilBackend, name, None) for name, each in own.items())
    # Padding comes after both, so it has to stay there.
    fused = plain and processor.do_rescale and processor.do_normalize and not getattr(processor, "do_pad", False)
    skip = {"do_rescale": False, "do_normalize": False} if fused else {}
    made = np.stack(processor(list(images), input_data_format="channels_last", **skip)["pixel_values"])
    if not fused:
        return np.asarray(made, dtype=np.float32)
    mean, deviation = (np.atleast_1d(np.float32(each)) for each in (processor.image_mean, processor.image_std))
    factor, shift = processor.rescale_factor / deviation, -mean / deviation
    numbers: np.ndarray = np.multiply(made, factor.astype(np.float32)[:, None, None], dtype=np.float32)
    numbers += shift[:, None, None]
    return numbers


task = ImageClassification()
