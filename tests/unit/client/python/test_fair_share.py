"""What a private daemon takes of a machine that nobody has configured."""

from superoffload._core import fair_share


def test_memory_is_a_share_of_what_is_available_with_the_pool_of_huge_pages(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 300 kB\nHugePages_Free: 2\nHugepagesize: 100 kB\n")
    assert fair_share.memory_bytes(str(meminfo)) == 400 * 1024
    meminfo.write_text("MemTotal: 1000 kB\n")
    assert fair_share.memory_bytes(str(meminfo)) is None
