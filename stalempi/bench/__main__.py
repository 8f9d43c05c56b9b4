"""Runs stalempi-bench as python -m stalempi.bench, which is how its ranks are started."""

from stalempi.bench.main import main

main()
