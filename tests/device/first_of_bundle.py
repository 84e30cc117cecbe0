"""Is `tests/__init__.py` in a bundle, so that it runs first in every process.

`google` belongs to many packages. Some of them claim it at Python's start, through a .pth file, for their own folder
alone; the bundle's protobuf would not be found then.
"""

import sys

sys.modules.pop("google", None)
