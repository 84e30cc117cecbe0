"""What every framework's adapter stands on: library, daemon, control calls, attachments. Imports no framework."""

import os
import sys

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" not in sys.modules and _FORK_SUPPORT not in os.environ:
    # A forked child leaves the parent's connections alone (owner.py). gRPC's own handlers, which do nothing beside its
    # threads, would print a line at every fork: a DataLoader's workers are forks.
    os.environ[_FORK_SUPPORT] = "0"
    import grpc  # noqa: F401  reads it

    del os.environ[_FORK_SUPPORT]
