"""gpt-oss's texts. llama.cpp only approximates the split of letters with marks, and of capital ones beyond ASCII."""

from umbra.text.conventions import Conventions
from umbra.text.formats import HARMONY
from umbra.text.splits import O200K, Split

TEXT = Conventions(formats={"harmony": HARMONY}, splits={"gpt-4o": Split((O200K,))})
