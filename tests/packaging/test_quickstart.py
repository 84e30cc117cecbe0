"""The quick start without a wheel. test_wheel.py runs it with one, to its end."""

from tests.support import quickstart


def test_without_a_wheel_it_builds_and_says_where_it_stops(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "cmake").write_text("#!/bin/sh\necho this cmake does not work\nexit 3\n")
    (programs / "cmake").chmod(0o755)
    tree = quickstart.tree(tmp_path)
    stopped = quickstart.run(tree, path=str(programs))
    assert stopped.returncode == 1
    assert stopped.stdout.splitlines()[-1].startswith("== building a release"), stopped.stdout
    said = stopped.stderr.splitlines()
    assert said[-2:] == [
        "this cmake does not work",
        f"the quick start stops here; all of it: {tree}/build/quickstart.log",
    ]
