"""DeepSpeed's interface, with a DeepSpeed configuration as it is, and superoffload's optimizers.

One changed line::

    from superoffload import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints")

DeepSpeed need not be installed. README.md beside this file says what becomes of each field.
"""

from superoffload._core import extras

extras.need("torch", "torch")

# ruff: noqa: E402
from torch import distributed as comm

from superoffload.deepspeed.engine import Engine
from superoffload.deepspeed.initializing import add_config_arguments, init_distributed, initialize

__all__ = ["Engine", "add_config_arguments", "comm", "init_distributed", "initialize"]
