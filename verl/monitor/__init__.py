"""The monitor of runs: what they did and what they do now, from the files that they write."""
