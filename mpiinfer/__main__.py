"""`python -m mpiinfer`: the same as the console script."""

from mpiinfer.cli.main import main

if __name__ == "__main__":
    main()
