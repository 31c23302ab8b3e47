"""Keys and values of the rows that are written, in tensors that are allocated once: a slot for each row.

    slots x positions, a row's first token at position 0; if it shares a beginning, the first token after that
    share: the beginning, which all layers keep once, beside the slots
    fill: some tokens of rows in slots next to each other; decode: a token of every row, each at its own position

Rows that end give their slots to the last ones, so those in use are always the first. What is beyond a row's length is
never read, but must be finite: zero times NaN is NaN.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from torchlake.runtimes._writing.attention import reading
from torchlake.runtimes._writing.prefix import BLOCK


@dataclass
class Place:
    """Where the tokens of the current forward pass go; the same for all layers."""

    first: int = 0
    count: int = 0
    "Slots `first` to `first + count` are read and written; none: the shared beginning is."
    offset: int = 0
    "How many tokens all of them have already, when they are filled,"
    shared: int = 0
    "and how many of the shared beginning come before."
    mask: torch.Tensor | None = None
    "(count, P + width) bool, what each row reads when they are decoded: of the shared beginning, and of its slot."
    ends: torch.Tensor | None = None
    "(count,) int64, the position of each row's only token, when they are decoded; None: they are filled."
    width: int = 0
    "The positions that are read."
    slots: int = 0
    positions: int = 0
    "The size of the tensors."


class SlotLayer(DynamicLayer):
    """The slots of one layer: keys and values, (S, H, P, D) each; `beginning`: those that rows share, (H, P, D)."""

    def __init__(self, place: Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place
        self.beginning: tuple[torch.Tensor, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate tensors like those of the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._zeros(one) for one in (key_states, value_states))
        self.is_initialized = True

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.place.slots, like.shape[1], self.place.positions, like.shape[3])

    def resize(self, used: int, width: int) -> None:
        """Allocate the tensors again with the size of `place`; the first `used` slots keep `width` positions."""
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                setattr(self, name, new := self._zeros(old))
                new[:used, :, :width] = old[:used, :, :width]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in the states of new tokens, (B, H, T, D), and return those of all positions that are read; without the
        shared beginning when rows are decoded, because the attention reads it by itself."""
        place = self.place
        if not place.count:
            self.beginning = key_states[0].clone(), value_states[0].clone()
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        some = slice(place.first, place.first + place.count)
        read: list[torch.Tensor] = []
        pairs: list[tuple[Any, torch.Tensor]] = [(self.keys, key_states), (self.values, value_states)]
        for whole, new in pairs:
            if place.ends is None:
                whole[some, :, place.offset : place.width] = new
            else:
                at = place.ends.to(whole.device)[:, None, None, None].expand(-1, whole.shape[1], 1, whole.shape[3])
                whole[some].scatter_(2, at, new)
            read.append(whole[some, :, : place.width])
        if place.ends is None and place.shared:
            heads = (each[:, : place.shared].expand(place.count, -1, -1, -1) for each in self.beginning)
            read = [torch.cat(pair, dim=2) for pair in zip(heads, read, strict=True)]
        elif place.mask is not None:
            reading.set((*self.beginning, place.mask))
        return read[0], read[1]

    def get_seq_length(self) -> int:
        """Return the position of the first new token, for the mask; which rows have fewer, the mask says itself."""
        place = self.place
        return place.shared + place.offset if place.ends is None else place.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions are read, and the first of them."""
        return self.place.shared + self.place.width, 0


class Slots:
    """The cache of a model: `cache` is what its forward pass gets; `beginning` (P,) the tokens that rows share."""

    def __init__(self, layers: int) -> None:
        self._place, self.beginning = Place(), np.zeros(0, np.int64)
        self.cache = Cache(layers=[SlotLayer(self._place) for _ in range(layers)])

    @property
    def _layers(self) -> list[Any]:
        return self.cache.layers

    def reserve(self, slots: int, positions: int, used: int, width: int) -> None:
        """Make space for `slots` rows of `positions` tokens; the first `used` slots keep `width` positions.

        The tensors grow when they must, and change their shape when that is enough.
        """
        place = self._place
        if slots <= place.slots and positions <= place.positions:
            return
        most = max(place.slots * place.positions, slots * positions)
        place.positions, place.slots = positions, max(slots, most // positions)
        for layer in self._layers:
            layer.resize(used, width)

    def share(self, beginning: np.ndarray) -> None:
        """Say that the next pass has the beginning (P,) that rows will share."""
        self.beginning = beginning
        self.fill(0, 0, 0, len(beginning))

    def keep_finite(self) -> None:
        """Forget a shared beginning that is not finite: rows that do not share it would get its NaN, too."""
        if not all(each.isfinite().all() for layer in self._layers for each in layer.beginning):
            self.beginning = self.beginning[:0]

    def shared(self, ids: np.ndarray) -> int:
        """Return how many first tokens of `ids` (L,) are the shared beginning's, in whole blocks; not its last one."""
        most = min(len(ids) - 1, len(self.beginning))
        differ = np.flatnonzero(ids[:most] != self.beginning[:most])
        return int(differ[0] if len(differ) else most) // BLOCK * BLOCK

    def fill(self, first: int, count: int, offset: int, tokens: int, shared: int = 0) -> None:
        """Say that the next pass has `tokens` of the rows in the slots from `first`, after `offset` that they have
        there, and `shared` ones of the shared beginning."""
        place = self._place
        place.first, place.count, place.offset, place.width = first, count, offset, offset + tokens
        place.shared, place.ends, place.mask = shared, None, None

    def decode(self, ends: np.ndarray, shared: np.ndarray, device: torch.device) -> torch.Tensor:
        """Say that the next pass has a token of each row, at the positions `ends` (B,) of its slot, after `shared` (B,)
        tokens of the shared beginning. Returns the mask (B, W) of what they read of their slots."""
        place = self._place
        place.first, place.count, place.shared, place.width = 0, len(ends), 0, int(ends.max()) + 1
        place.ends, place.mask = torch.from_numpy(ends).to(device), None
        own = torch.arange(place.width, device=device) <= place.ends[:, None]
        if shared.any():
            before = np.arange(len(self.beginning)) < shared[:, None]
            place.mask = torch.cat([torch.from_numpy(before).to(device), own], dim=1)
        return own.long()

    def copy(self, sources: list[int], first: int, tokens: int) -> None:
        """Copy the first tokens of some slots to those from `first`."""
        for layer in self._layers:
            for whole in (layer.keys, layer.values):
                whole[first : first + len(sources), :, :tokens] = whole[sources, :, :tokens]

    def clean(self, slot: int) -> None:
        """Remove what is not finite from a slot."""
        for layer in self._layers:
            layer.keys[slot].zero_()
            layer.values[slot].zero_()


def ordinary_window(model: Any) -> tuple[int, int | None]:
    """Return the number of layers, and how many tokens back all of them look (None: to the beginning).

    No layers if the model keeps anything else than keys and values of tokens, or if they depend on the longest row.
    """
    layers = DynamicCache(config=model.config).layers
    turned = str(getattr(model.config, "rope_parameters", None))
    if {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer} or any(
        kind in turned for kind in ("dynamic", "longrope")
    ):
        return 0, None
    windows = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    windows += [size for size in [getattr(model.config, "window_size", None)] if isinstance(size, int)]  # of GPT-Neo
    return len(layers), min(windows, default=None)
