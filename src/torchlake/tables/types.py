"""Arrow types: what is inside them, which one holds the values of others, and converting columns without a change."""

import pyarrow as pa


def children(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields inside a type: of a struct, the items of a list, the key and the value of a map."""
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [kind.value_field]
    return [kind.field(place) for place in range(kind.num_fields)] if pa.types.is_struct(kind) else []
