"""Generated from proto/superoffload/v1 when the package is built."""
