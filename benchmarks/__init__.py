"""Speed against named peers, as ratios within one run: `python -m benchmarks`. `make bench` calls it."""
