#!/usr/bin/env python3
"""Counts the instructions of the inner loops that hold a square root: the stages of Adam's arithmetic.

Usage: count_instructions.py OBJECT...   prints, per loop, its function, instructions, and square roots (one per vector)
OBJDUMP names the disassembler; default: aarch64-linux-gnu-objdump.
"""

import os
import re
import subprocess
import sys

OBJDUMP = os.environ.get("OBJDUMP", "aarch64-linux-gnu-objdump")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")


def loops(instructions):
    """Innermost loops, each from the target of a backward branch to the branch."""
    by_address = {address: index for index, (address, _, _) in enumerate(instructions)}
    spans = []
    for index, (_, name, operands) in enumerate(instructions):
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if not name.startswith(("b.", "cb", "tb", "j")) or not target:
            continue
        begin = by_address.get(int(target[1], 16))
        if begin is not None and begin < index:
            spans.append((begin, index))
    return [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]


def main():
    for path in sys.argv[1:]:
        text = subprocess.run(
            [OBJDUMP, "-d", "--no-show-raw-insn", "-C", path], capture_output=True, text=True, check=True
        )
        functions, name = {}, None
        for line in text.stdout.splitlines():
            if match := FUNCTION.match(line):
                name = match[1]
            elif name and (match := INSTRUCTION.match(line)):
                functions.setdefault(name, []).append((int(match[1], 16), match[2], match[3].split("//")[0].strip()))
        for function, instructions in functions.items():
            for begin, end in loops(instructions):
                body = instructions[begin : end + 1]
                roots = sum("sqrt" in name for _, name, _ in body)
                if roots:
                    print(f"{function}\t{len(body)} instructions\t{roots} vectors\t{len(body) / roots:.1f} per vector")


if __name__ == "__main__":
    main()
