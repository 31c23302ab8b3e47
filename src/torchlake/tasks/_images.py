"""Images of a column: their files, decoded to pixels, and random crops and flips.

A row has the content of a file, the path or URL of one, or Hugging Face's struct of both (`bytes`, `path`), of which
the content counts. JPEG is decoded by simplejpeg if it is installed, several times as fast as Pillow and with the same
pixels; everything else, and what simplejpeg refuses, by Pillow. Pixels are RGB or gray, turned upright by their EXIF
data. Transparency is left out. 16-bit integers and floats from 0 to 1 become 8 bits over their whole range.
A file is at most MAX_FILE_BYTES large, and an image has at most MAX_PIXELS: a small file may claim billions.
"""

import io
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.features import from_arrow
from torchlake.errors import MissingExtra, TableError, Unavailable, pip_install
from torchlake.redaction import redacted
from torchlake.storage.access import read_range
from torchlake.storage.urls import check_url, is_url
from torchlake.tables.arrays import is_text
from torchlake.tasks._null_rows import NULL_INPUT

MAX_FILE_BYTES = 256 << 20
MAX_PIXELS = 89_478_485
"Pillow's own limit, above which it warns of a decompression bomb: 268 MB of pixels."
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"The formats that Pillow may open; its other formats are rare, and their decoders rarely tested."
FETCHES = 16
"The number of objects that are fetched at the same time."
UPRIGHT = 1
ORIENTATION = 0x0112
BITS, WHITE = 0x0102, 0x0106
"Tags of TIFF: the bits of a number, and whether it is the share of white (1) or of black (0)."

Pixels = np.ndarray
"(height, width, 3 or 1) uint8"


class BadImage(ValueError):
    """An image cannot be used; the message is the reason of an error row."""


def files_of(images: pa.Array) -> tuple[Ragged, np.ndarray, dict[int, str]]:
    """Return each row's content, or its path in UTF-8; whether it is a path (N,) uint8; and errors of empty rows.

    Raises TableError for a column of another type.
    """
    kind, types = images.type, pa.types
    if types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}:
        content, path = (images.field(name) for name in ("bytes", "path"))
        content, path = content.cast(pa.large_binary()), path.cast(pa.large_string()).cast(pa.large_binary())
        by_path = np.asarray(content.is_null())
        found = pa.compute.if_else(content.is_null(), path, content)
    elif is_text(kind):
        found, by_path = images.cast(pa.large_string()).cast(pa.large_binary()), np.ones(len(images), dtype=bool)
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        found, by_path = images.cast(pa.large_binary()), np.zeros(len(images), dtype=bool)
    else:
        raise TableError(
            f"the column of images holds {kind}; it must hold paths or URLs (strings), contents of image files "
            "(binary), or structs with `bytes` and `path` as Hugging Face stores images"
        )
    errors = dict.fromkeys(np.flatnonzero(np.asarray(found.is_null())).tolist(), NULL_INPUT)
    files = from_arrow(found.fill_null(b""))
    assert isinstance(files, Ragged), "of any length"
    for row in np.flatnonzero(files.lengths == 0).tolist():
        errors.setdefault(row, "corrupt_image: it is empty")
    return files, by_path.astype(np.uint8), errors


def contents_of(files: Ragged, by_path: np.ndarray, rows: np.ndarray) -> tuple[list[bytes], dict[int, str]]:
    """Return the contents of the rows' files (B,), and {position: reason} for those that cannot be read.

    Raises Unavailable if a storage cannot be reached, or refuses these credentials.
    """
    given = [files.values[files.offsets[row] : files.offsets[row + 1]].tobytes() for row in rows]
    paths = {place: given[place].decode() for place in np.flatnonzero(by_path[rows]).tolist()}
    if not paths:
        return given, {}
    far = any(map(is_url, paths.values()))
    with ThreadPoolExecutor(FETCHES if far else 1, thread_name_prefix="fetch") as threads:
        found = dict(zip(paths, threads.map(_fetch, paths.values()), strict=True))
    errors = {place: str(each) for place, each in found.items() if isinstance(each, BadImage)}
    return [b"" if place in errors else found.get(place, each) for place, each in enumerate(given)], errors  # type: ignore[misc]


def _fetch(path: str) -> bytes | BadImage:
    """Return the content of a file, or the BadImage that explains why it cannot be read."""
    try:
        return read_file(path)
    except BadImage as error:
        return error


def read_file(path: str) -> bytes:
    """Return the content of a file by its path or URL. Raises BadImage, and Unavailable like `contents_of`."""
    path = path.removeprefix("file://")
    try:
        if is_url(path):
            check_url(path)
        elif not os.path.isabs(path):
            raise BadImage(f"missing_image: {path[:200]!r} is neither an absolute path nor a URL")
        elif not os.path.isfile(path):
            raise BadImage(f"missing_image: there is no file {path[:200]!r}")
        content = read_range(path, 0, MAX_FILE_BYTES + 1)
    except Unavailable as error:
        if isinstance(error.__cause__, FileNotFoundError | IsADirectoryError | PermissionError):
            raise BadImage(f"missing_image: {error}") from None
        raise
    except TableError as error:  # a protocol that is refused
        raise BadImage(f"missing_image: {error}") from None
    except ValueError as error:
        raise error if isinstance(error, BadImage) else BadImage(f"missing_image: {redacted(path)[:200]!r}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadImage(f"image_too_large: the file has more than {MAX_FILE_BYTES:,} bytes")
    return content


def decode(content: bytes, channels: int = 3) -> Pixels:
    """Return the pixels of an image file, in RGB or gray (1 channel). Raises BadImage."""
    image_of, transpose = _pillow()
    try:
        image = image_of(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise BadImage(f"image_too_large: {width:,} x {height:,} pixels; the limit is {MAX_PIXELS:,}")
        plain = image.format == "JPEG" and image.mode in ("RGB", "L") and channels == 3
        if plain and image.getexif().get(ORIENTATION, 1) == UPRIGHT:
            pixels = _fast(content)
            if pixels is not None:
                return pixels
        upright = transpose(image)
        if image.mode == "F" or image.mode.startswith("I"):
            return np.repeat(_deep(upright, image)[..., None], channels, axis=2)
        colors = upright.convert("RGB")
        return np.asarray(colors) if channels == 3 else np.asarray(colors.convert("L"))[..., None]
    except BadImage:
        raise
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, ...
        name = "image_too_large" if type(error).__name__.startswith("DecompressionBomb") else "corrupt_image"
        said = str(error).strip() or type(error).__name__
        if not content or type(error).__name__ == "UnidentifiedImageError":  # whose message has an address in memory
            said = "it has none of the formats " + ", ".join(FORMATS) if content else "it is empty"
        raise BadImage(f"{name}: {said[:200]}") from None


def _deep(image: Any, file: Any) -> np.ndarray:
    """Return (H, W) uint8 for one channel of integers of more than 8 bits, or of floats, which Pillow would cut at 255.

    Raises BadImage for numbers whose range the file does not state: signed or 32-bit integers, other floats.
    """
    tags = getattr(file, "tag_v2", {})
    top = 1.0 if image.mode == "F" else 2.0 ** tags.get(BITS, (16,))[0] - 1
    if image.mode == "I" and file.format == "TIFF":
        raise BadImage("unknown_range: its numbers are signed or have 32 bits; save it with 8 or 16 bits, or in color")
    values = np.asarray(image).astype(np.float32)
    if not ((values >= 0) & (values <= top)).all():
        found = f"{values.min():g} to {values.max():g}"
        raise BadImage(f"unknown_range: its numbers are {found}; they must be from 0 to {top:g}, for black and white")
    values = top - values if tags.get(WHITE, 1) == 0 else values
    # Cut off, as Pillow does in color, but for the rounding of floats: k / 255 is k.
    return np.asarray(values * (255 / top) + 1e-3, dtype=np.uint8)


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingExtra(f"images need the library 'pillow': {pip_install('torchlake[images]')}") from None
    return Image.open, ImageOps.exif_transpose


def _fast(content: bytes) -> Pixels | None:
    """Return the pixels of a JPEG file as simplejpeg decodes it; None without it, or for a file that it refuses."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(content, "RGB")
        return pixels
    except ValueError:
        return None


def random_crop(pixels: Pixels, random: np.random.Generator, smallest: float) -> Pixels:
    """Return a part of the image: a share of its area from `smallest` to 1, of a shape from 3:4 to 4:3.

    Like RandomResizedCrop of torchvision, without the resizing, which the processor does.
    """
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * random.uniform(smallest, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
            return pixels[top : top + down, left : left + across]
    return pixels


def stored(contents: Sequence[bytes]) -> Ragged:
    """Return the contents of files as one flat array."""
    return Ragged(
        np.frombuffer(b"".join(contents), np.uint8), offsets_of(np.array([len(one) for one in contents], int))
    )
