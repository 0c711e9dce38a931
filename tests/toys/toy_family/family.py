"""The record of the toy family."""

from tests.toys.toy_family.gguf import TOY_MOE as ARCHITECTURE
from tests.toys.toy_family.text import TEXT
from umbra.models.family import Family

TOY_MOE = Family(
    name="toy_moe",
    config="tests.toys.toy_family.config:ToyMoeConfig",
    model="tests.toys.toy_family.model:ToyMoeForCausalLM",
    old_types=("toy",),
    aliases={"transformer": "model"},
    gguf=ARCHITECTURE,
    text=TEXT,
)
