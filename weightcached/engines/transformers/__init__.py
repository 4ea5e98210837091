"""transformers models that run from cached memory.

model = from_cache("minilm", device="cuda:0")

cached.py      `from_cache`: which way a checkpoint goes
skeleton.py    the model without weight memory
filling.py     names that match: the service's own copy of the checkpoint, put into the skeleton
processed.py   names or bytes that transformers changes while it loads: loaded once, published, then installed
quantised.py   which quantisations go that way, and why the others do not
ranks.py       one tensor parallel rank over the service's own slices
"""

from ..policy import FALLS_BACK
from .cached import from_cache

__all__ = ["FALLS_BACK", "from_cache"]
