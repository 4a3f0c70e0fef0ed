"""Files that grow by whole lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero_ext.monitor.writers.append_file import LineFile


@pytest.mark.parametrize("rest", ["", '{"half', "x" * 200_000])
def test_what_a_crash_left_of_a_line_is_cut_off(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "deep" / "log"
    first = LineFile(path)
    assert first.first_line() == ""
    first.write("one, ö")
    first.close()
    first.close()
    with path.open("a") as file:
        file.write(rest)
    again = LineFile(path)
    assert again.first_line() == "one, ö"
    again.write("two")
    assert path.read_text() == "one, ö\ntwo\n"
    again.close()
    with pytest.raises(ValueError, match="log: the file is closed"):
        again.write("three")


def test_a_kill_leaves_at_most_one_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys\n"
        "from zero_ext.monitor.writers.append_file import LineFile\n"
        "file = LineFile(sys.argv[1])\n"
        "number = 0\n"
        "while True:\n"
        "    file.write(f'{number} ' + 'x' * 3000)\n"
        "    if number == 200: print('ready', flush=True)\n"
        "    number += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    *lines, rest = path.read_text().split("\n")
    assert len(lines) > 200
    expected = [f"{number} " + "x" * 3000 for number in range(len(lines) + 1)]
    assert lines == expected[:-1]
    assert expected[-1].startswith(rest)
    LineFile(path).close()
    assert path.read_text().split("\n") == [*lines, ""]
