"""Is `google/__init__.py` in a bundle: its protobuf comes ahead of the machine's, beside what else is google's."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)  # noqa: F821
