"""Runs stalempi-bench as python -m stalempi.bench, which is how its ranks are started."""

from stalempi.bench.main import main

if __name__ == "__main__":  # the processes of a data loader import this file too
    main()
