"""Tests of mean.py, on emulated devices. `sumac_cluster` is a fixture of the installed package."""

import sys

import pytest


@pytest.mark.parametrize("shape", [{"levels": 2}, {"devices": 0}])  # A tree of two levels; host collectives.
def test_mean_is_that_of_all_files(sumac_cluster, tmp_path, shape):
    columns = ["1\n2\n", "3\n", "4\n5\n6\n", "7\n"]
    files = [tmp_path / f"{number}.txt" for number in range(len(columns))]
    for file, column in zip(files, columns):
        file.write_text(column)
    cluster = sumac_cluster(ranks=4, **shape)
    ranks = cluster.run([sys.executable, "mean.py", *map(str, files)])
    assert [rank.returncode for rank in ranks] == [0, 0, 0, 0], ranks
    assert ranks[0].stdout == "4.0\n"
