"""What is linked into which program. test_layering.py holds the includes."""

from tests.support.build_directory import BUILD


def test_no_code_of_planner_or_simulator_is_in_the_daemon():
    """Looks for their mangled names, which the build's programs have."""
    names = [f"12superoffload{len(part)}{part}".encode() for part in ("engine", "plan", "simulator")]
    daemon, planner = ((BUILD / "server" / name).read_bytes() for name in ("superoffloadd", "superoffload-plan"))
    assert [name in planner for name in names] == [True, True, True]
    assert [name in daemon for name in names] == [True, False, False]
