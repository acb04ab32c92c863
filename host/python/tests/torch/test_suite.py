"""torch's own tests of its backends do what suite.txt says: none that gloo passes fails on this backend."""

import os
import subprocess
import sys
from pathlib import Path


def test_tests_of_torch_do_what_the_list_says(adapter):
    suite = Path(__file__).with_name("suite.py")
    env = {**os.environ, "SUMAC_TORCH_ADAPTER": str(adapter)}
    ended = subprocess.run([sys.executable, "-P", "-B", suite], env=env, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout


def test_list_skips_for_this_backend_only_what_c10d_lacks():
    import suite

    skipped = {ours for theirs, ours in suite.listed().values() if theirs == "passed" and ours != "passed"}
    assert skipped == {"skipped: name"}
