"""Faults in loops of SASS: planted ones are found, and what resembles them is not."""

import pytest

from benchmarks.lab import sass

pytestmark = pytest.mark.lab

# As ptxas 12.9 prints a loop of two products: scores from shared memory, then weights in R184 times values.
SCORES = "HGMMA.64x64x16.F32.BF16 R152, gdesc[UR12], RZ, !UPT, gsb0"
VALUES = "HGMMA.64x128x16.F32.BF16 R24, R184, gdesc[UR12].tnspB, R24"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
EXP2 = "MUFU.EX2 R3, R3"
WEIGHTS = "F2FP.BF16.F32.PACK_AB R187, R3, R2"


def loop(*instructions: str) -> str:
    lines = ("MOV R1, c[0x0][0x28]", "LDL R3, [R1]", *instructions, "@P2 BRA 0x20", "EXIT")
    return "\n".join(f"        /*{16 * i:04x}*/                   {what} ;  /* 0x000000000c */" for i, what in enumerate(lines))


def test_spills_are_counted_in_loops_with_products_of_any_kind() -> None:
    """Float32 is multiplied without tensor cores: there, too, a spill in the loop is one."""
    for product in ("HMMA.16816.F32.BF16 R4, R8, R10, R4", "FFMA R4, R8, R10, R4"):
        code = (
            f"/*0010*/ STL [R1], R2 ; /*0020*/ LDL R3, [R1] ; /*0030*/ {product} ; /*0040*/ @P0 BRA 0x20 ; /*0050*/ LDL R3, [R1] ;"
        )
        assert sass.spilled(code) == 1
    assert sass.spilled("/*0020*/ LDL R3, [R1] ; /*0030*/ IADD3 R4, R3, 1, RZ ; /*0040*/ @P0 BRA 0x20 ;") == 0


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        ((SCORES, WAIT, WEIGHTS, VALUES, f"{VALUES}, gsb0"), (0, 0)),  # the wait comes in the next turn
        ((SCORES, WAIT, WEIGHTS, VALUES, WAIT, f"{VALUES}, gsb0", WAIT), (1, 0)),
        ((VALUES, f"{VALUES}, gsb0", SCORES, WAIT_BUT_ONE, WEIGHTS, WAIT), (0, 0)),
        ((VALUES, f"{VALUES}, gsb0", SCORES, WEIGHTS, WAIT_BUT_ONE, WAIT), (0, 1)),
        ((SCORES, WAIT, WEIGHTS, f"{VALUES}, gsb0", WEIGHTS), (0, 1)),
        ((SCORES, WAIT, f"{VALUES}, gsb0", "@P1 LDS.128 R184, [R4]"), (0, 1)),
        ((SCORES, WAIT, f"{VALUES}, gsb0", "LDS.128 R180, [R4]", "STS [R184], R4", "ISETP.GE.AND P0, PT, R184, R4, PT"), (0, 0)),
        ((VALUES, f"{VALUES}, gsb0", SCORES.replace("R152", "R160")), (0, 1)),  # whose sums end in R191
        (("FFMA R4, R8, R10, R4", WAIT), (0, 0)),
    ],
)
def test_faults_of_products_in_flight(instructions: tuple[str, ...], found: tuple[int, int]) -> None:
    assert sass.faults(loop(*instructions)) == found


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        ((SCORES, WAIT, EXP2, EXP2, f"{VALUES}, gsb0"), (0, 2)),
        (
            (EXP2, SCORES, EXP2, WAIT, EXP2, f"{VALUES}, gsb0"),
            (2, 3),
        ),  # the first one while values of the turn before are in flight
        ((SCORES, WAIT_BUT_ONE, EXP2, WAIT, EXP2, VALUES), (1, 2)),
    ],
)
def test_exp2_is_counted_while_products_are_in_flight(instructions: tuple[str, ...], found: tuple[int, int]) -> None:
    assert sass.hidden(loop(*instructions)) == [found]


def test_only_inner_loops_are_judged() -> None:
    """A loop around a loop would have the waits of both."""
    inner = loop(SCORES, WAIT, VALUES, f"{VALUES}, gsb0").replace("EXIT", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    outer = inner + "\n".join(["", *(f"/*{at:04x}*/ {what} ;" for at, what in ((0x100, WAIT), (0x110, WAIT), (0x120, "BRA 0x10")))])
    assert sass.faults(inner) == sass.faults(outer) == (0, 0)
