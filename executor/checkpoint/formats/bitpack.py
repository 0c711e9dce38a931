"""Parts of packed or grouped dimensions."""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.scheme import Fetch
from umbra.ops.words import Words


def covering(part: slice, count: int) -> tuple[slice, slice]:
    """(the words of a packed dimension that hold the elements `part`, the place of those elements within the words)"""
    first, end = part.start // count, -(-part.stop // count)
    return slice(first, end), slice(part.start - first * count, part.stop - first * count)


def groups_of(inputs: slice, group: int, order: Tensor | None = None) -> tuple[slice, Callable[[Any], Any]]:
    """(the quantisation groups that hold the columns `inputs`, a function from the (m, groups) scales or zero points of
    them to those of `inputs`). Where `inputs` begins or ends inside a group, its groups are smaller ones with the same
    scales. With `order`, the group of each column, every column becomes a group of its own."""
    unit = gcd(group, inputs.start, inputs.stop)
    held, within = covering(slice(inputs.start // unit, inputs.stop // unit), group // unit)
    if order is not None:
        held = slice(0, len(order) // group)

    def cut(given: Any) -> Any:
        if unit == group and order is None:
            return given
        plain = given.unpacked() if isinstance(given, Words) else given
        return plain[:, order[inputs]] if order is not None else plain.repeat_interleave(group // unit, 1)[:, within]

    return held, cut


def order_in(fetch: Fetch, name: str, group: int, ordered: bool) -> Tensor | None:
    """The group of each column, which the tensor `name` has. None: they are in order, as they are unless the config
    says that they are `ordered` by activations. Where none was set, all are -1."""
    order = fetch(name, slice(None))
    if torch.equal(order, torch.arange(len(order), dtype=order.dtype) // group) or bool((order == -1).all()):
        return None
    if not ordered:
        rule = "inputs are not in the order of their groups, which config.json does not say (desc_act, static_groups)"
        raise UserError(f"{fetch.file_of[name]}: {name}: {rule}")
    count = len(order) // group
    if not (order.sort().values == torch.arange(len(order)) // group).all():
        raise UserError(f"{fetch.file_of[name]}: {name}: each group from 0 to {count - 1} must have {group} inputs")
    return order
