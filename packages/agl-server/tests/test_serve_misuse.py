"""What careless hands give to ``agl serve``: one line that says what to do, not a traceback."""

import subprocess
import sys
from pathlib import Path


def test_a_home_that_is_a_file_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "agl", "serve", "--home", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "UsageError: --home" in line and "cannot be made: File exists" in line
