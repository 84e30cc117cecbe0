"""The element types of the wire contract, by the names that torch and NumPy give them."""

from superoffload.v1 import optimizer_pb2

# Of gradients and parameters.
FLOATS = {
    "bfloat16": optimizer_pb2.DATA_TYPE_BFLOAT16,
    "float16": optimizer_pb2.DATA_TYPE_FLOAT16,
    "float32": optimizer_pb2.DATA_TYPE_FLOAT32,
}

# The arrays of a state may also be of codes.
NAMES = {number: name for name, number in {**FLOATS, "uint8": optimizer_pb2.DATA_TYPE_UINT8}.items()}
BYTES = {
    optimizer_pb2.DATA_TYPE_BFLOAT16: 2,
    optimizer_pb2.DATA_TYPE_FLOAT16: 2,
    optimizer_pb2.DATA_TYPE_FLOAT32: 4,
    optimizer_pb2.DATA_TYPE_UINT8: 1,
}
