"""`python -m umbra`: the same as the command `umbra`."""

from umbra.cli import main

if __name__ == "__main__":
    main()
