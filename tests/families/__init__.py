"""The table of families x scenarios: every family that Umbra knows has one row, and every scenario runs on all rows.

To add a family, add `tests/families/NAME.py` with a `ROW` (see `row.py`; `glm4_moe.py` is a good example). A family of
`umbra.models.registry` without a row fails at import. With `sizes` alone, a row is run through these scenarios:

scenario | test | what a row may add
logits equal transformers', prompt and decode, captured, in chunks, small pages | models/test_families.py | `variants`
the same in Q8 and Q4; missing and unknown tensors are named | models/test_families.py | `last`
known bugs change the logits by more than the tests allow | models/test_families.py | `mistakes`
impossible configs are refused in one line | models/test_families.py | `refused`
official config.json files give models of their true size | models/test_families.py | `official`
ranks that divide a model (TP, DP, EP, copies, SP) equal one rank | executor/test_parallel.py | `splits`
experts on the host change no bit | executor/engine/.../test_offload.py | `offload`
a GGUF file means the same, kept blocks to the last bit | executor/checkpoint/test_gguf.py | `gguf`, `kept`
`umbra quantize` writes what Umbra and transformers read | umbra/commands/quantize/test_quantize.py | `quantise`
the Ascend ops compute the same, also split; GE graphs; captures | ascend/test_{numerics,ge,capture}.py | `ascend`

What only some families have is listed where it is tested: layers that predict further tokens (`tests/mtp.py`), states
(models/test_hybrid.py), layouts of published files (`tests/m2_layouts.py`), the text of answers (`tests/text`).
"""

import importlib

from tests.families.row import Row
from umbra.models.registry import FAMILIES

ROWS: dict[str, Row] = {name: importlib.import_module(f"tests.families.{name}").ROW for name in FAMILIES}
