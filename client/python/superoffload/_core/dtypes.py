"""The element types of the wire contract, by the names that torch and NumPy give them."""

from superoffload.v1 import optimizer_pb2

_TYPES = {
    "bfloat16": (optimizer_pb2.DATA_TYPE_BFLOAT16, 2),
    "float16": (optimizer_pb2.DATA_TYPE_FLOAT16, 2),
    "float32": (optimizer_pb2.DATA_TYPE_FLOAT32, 4),
    "uint8": (optimizer_pb2.DATA_TYPE_UINT8, 1),
}
NAMES = {number: name for name, (number, _) in _TYPES.items()}
BYTES = dict(_TYPES.values())

# Of gradients and parameters; codes are for arrays of a state only.
FLOATS = {name: number for name, (number, _) in _TYPES.items() if name != "uint8"}
