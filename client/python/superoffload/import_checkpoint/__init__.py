"""Checkpoints of DeepSpeed become superoffload's. command.py has the program and its function."""
