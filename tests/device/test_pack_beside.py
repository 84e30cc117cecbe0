"""How long launches took beside others, of clocks that are made up."""

from tests.device import pack_beside
from tests.device.pack_beside import Launches


def test_only_launches_that_had_the_other_beside_them_all_the_time_count():
    product = Launches([10, 10, 10], [0, 12, 24, 36, 46])  # the last one runs when packing has ended
    pack = Launches([2, 2, 2], [5, 9, 13, 17, 40])
    assert product.beside(pack) == [12, 12]
    assert pack.beside(product) == [4, 4, 4, 23]
    assert pack_beside.line("float32", pack, product) == (
        "bfloat16 to float32  pack 2.000 ms alone, 2.00 times that beside the other (4 of 4); "
        "product 10.000 ms alone, 1.20 times that beside the other (2 of 4)"
    )


def test_launches_that_ran_one_after_the_other_say_nothing():
    early, late = Launches([1], [0, 1, 2]), Launches([1], [2, 3, 4])
    assert early.beside(late) == late.beside(early) == []
    assert "pack 1.000 ms alone, never wholly beside the other (0 of 2)" in pack_beside.line("bfloat16", early, late)


def test_both_are_issued_evenly_so_that_neither_waits_for_the_host():
    order = pack_beside.in_turn(3, 9)
    assert order.count(True) == 3 and order.count(False) == 9
    assert all(order[first : first + 4].count(True) == 1 for first in (0, 4, 8))
