"""The storage formats of matrices, one file a format. A file in this folder registers every `FormatSpec` at its top:
a new format needs no line elsewhere."""

from importlib import import_module
from pkgutil import iter_modules

from umbra.ops.formats.spec import GROUP_SIZES, LARGEST_GROUP, SPECS, Format, FormatSpec

__all__ = ["FORMATS", "GROUP_SIZES", "INTEGERS", "LARGEST_GROUP", "SPECS", "Format", "FormatSpec"]

for _file in iter_modules(__path__):
    for _value in vars(import_module(f"{__name__}.{_file.name}")).values():
        if isinstance(_value, FormatSpec):
            SPECS[_value.name] = _value

FORMATS = {name: Format(name, spec.group) for name, spec in SPECS.items()}
INTEGERS = {spec.bits: spec for spec in SPECS.values() if spec.zero_points}  # whose levels are numbers, by their bits
