"""What torch.compile leaves as it is: optimizers and their hooks, which no graph could hold.

Traced, they would break a compiled step in a dozen places and be compiled piece by piece.
"""

import torch

# torch's own optimizers have the first, which imports torch._dynamo (half a second) when it is called, not before.
eager = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
