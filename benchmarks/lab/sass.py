"""Faults of loops with products in SASS, the machine code of NVIDIA's GPUs as `cuobjdump -sass` prints it."""

from __future__ import annotations

import re

Loop = list[tuple[int, str]]  # address and text of its instructions

MULTIPLIED = re.compile(r"MMA\b|FFMA")  # with tensor cores or without
SPILLED = re.compile(r"\b(STL|LDL)\b")
EXP2 = "MUFU.EX2"
WAIT = "WARPGROUP.DEPBAR"  # until at most so many groups of products are in flight
# What names a register first without writing it.
READERS = re.compile(r"ST|RED|BAR|BRA|SYNCS|UTMA|LDGSTS|WARPGROUP|DEPBAR|R2UR|R2P|VOTEU|[UIFH]*SETP|PLOP3|NANOSLEEP")


def loops(code: str) -> list[Loop]:
    """From the target of each backward jump to the jump, where products are computed in between."""
    lines = [(int(address, 16), instruction) for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)]
    jumps = ((address, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)) for address, instruction in lines)
    ranges = [(int(target[1], 16), address) for address, target in jumps if target is not None and int(target[1], 16) < address]
    ranges_of_lines = ([line for line in lines if low <= line[0] <= high] for low, high in ranges)
    return [loop for loop in ranges_of_lines if any(MULTIPLIED.search(instruction) for _, instruction in loop)]


def spilled(code: str) -> int:
    """Spilled stores and loads in loops."""
    return len({address for loop in loops(code) for address, instruction in loop if SPILLED.search(instruction)})


def faults(code: str) -> tuple[int, int]:
    """Inner loops whose wgmma instructions run one at a time, and those that overwrite an operand of one in flight."""
    inner = _inner(code)
    return sum(map(_is_serialised, inner)), sum(map(_is_overwritten, inner))


def hidden(code: str) -> list[tuple[int, int]]:
    """Of each inner loop: the `exp2` that are issued while a wgmma is in flight, and all."""
    return [(_hidden(loop), sum(EXP2 in what for what in loop)) for loop in _inner(code)]


def _hidden(loop: list[str]) -> int:
    found, flying = 0, False
    for turn in range(2):  # a product may be in flight when the loop turns
        for what in loop:
            if WAIT in what:
                flying = flying and int(what.rpartition(",")[2], 16) > 0
            flying = flying or "HGMMA" in what
            found += turn == 1 and flying and EXP2 in what
    return found


def _inner(code: str) -> list[list[str]]:
    """The instructions of each loop that contains no other."""
    found = loops(code)
    return [
        [what for _, what in loop]
        for loop in found
        if not any(other is not loop and loop[0][0] <= other[0][0] and other[-1][0] <= loop[-1][0] for other in found)
    ]


def _is_serialised(loop: list[str]) -> bool:
    """Whether ptxas waits after every product, as its warnings C7510 to C7515 say."""
    products = sum("HGMMA" in instruction for instruction in loop)
    return 0 < products <= sum(WAIT in instruction for instruction in loop)


def _is_overwritten(loop: list[str]) -> bool:
    """Whether the registers of a left operand are written before its product is waited for.

    ptxas before 13.3 may do so (https://github.com/triton-lang/triton/issues/9433).
    """
    flying: list[set[int]] = [set()]  # registers read by each group of products, the open group last
    for line in loop * 2:  # a product may be in flight when the loop turns
        instruction = re.sub(r"^@!?U?P\w+\s+", "", line)
        if instruction.startswith(WAIT):
            pending = int(instruction.rpartition(",")[2], 16)
            flying = flying[max(0, len(flying) - 1 - pending) :]
            continue
        if _registers_written(instruction) & set().union(*flying):
            return True
        operand = re.match(r"HGMMA\S* R\d+, R(\d+),", instruction)
        if operand is not None:
            flying[-1] |= set(range(int(operand[1]), int(operand[1]) + 4))
        if "gsb0" in instruction:
            flying.append(set())
    return False


def _registers_written(instruction: str) -> set[int]:
    """The registers that an instruction writes."""
    name, _, operands = instruction.partition(" ")
    first = re.match(r"\s*(?:U?P\w+, )?R(\d+)\b", operands)
    if first is None or READERS.match(name):
        return set()
    shape = re.match(r"HGMMA\.\d+x(\d+)x", name)
    if shape is not None:
        width = int(shape[1]) // 2  # of 64 rows in 128 threads, float32
    elif ".128" in name or ("LDSM" in name and ".4" in name):
        width = 4
    else:
        width = 2 if re.search(r"\.64|\.WIDE|CS2R|LDSM", name) else 1
    return set(range(int(first[1]), int(first[1]) + width))
